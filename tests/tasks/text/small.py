"""Small models and texts for the tests: two layers, a width of 32, 300 tokens or bytes."""

import json

import torch

from tpukit import LanguageModel
from tpukit.tasks.text import hub

LLAMA = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)
LLAMA |= dict(max_position_embeddings=64, vocab_size=300, head_dim=8)
CONFIGS = {
    "gpt2": dict(n_layer=2, n_head=4, n_embd=32, n_positions=64, vocab_size=300),
    "llama": LLAMA | dict(tie_word_embeddings=True),  # as SmolLM2
    "qwen2": LLAMA | dict(tie_word_embeddings=False),
    "qwen3": LLAMA | dict(tie_word_embeddings=True),
    "gemma3_text": LLAMA
    | dict(num_key_value_heads=1, query_pre_attn_scalar=8, sliding_window=5, pad_token_id=0)
    | dict(layer_types=["sliding_attention", "full_attention"]),
}
TINY = dict(pretrained="no", tokenizer="bytes", batch_size=4, log_every=2, num_workers=0, new_tokens=6)
TINY |= dict(sequence_length=24, samples=2)
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
CHAT += "{% if add_generation_prompt %}<assistant>{% endif %}"


def write_config(folder, family="gpt2", **changes):
    """A folder with the config of a small model alone."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = dict(CONFIGS[family], model_type=family) | changes
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def write_model(folder, family="gpt2", chat=None, **changes):
    """A folder as save_pretrained writes it, with random weights and the tokenizer of bytes."""
    plain = plain_model(family, folder, **changes)
    plain.save_pretrained(folder)
    tokenizer = hub.load_tokenizer("tiny")
    tokenizer.chat_template = chat
    tokenizer.save_pretrained(folder)
    return folder


def plain_model(family, folder, **changes):
    """A model of transformers, with its own attention."""
    import transformers

    config = hub.read_config(write_config(folder, family, **changes))
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # biases, too, and clearly different tokens
    return model


def task_of(folder, data=None, **settings):
    return LanguageModel(model_name=str(folder), dataset_dir=data, **TINY | settings)
