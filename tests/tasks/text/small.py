"""Small models and texts for the tests: two layers, a width of 32, 300 tokens or bytes."""

import collections
import copy
import functools
import itertools
import json
import pydoc_data.topics
import shutil
from typing import Any

import numpy as np
import torch

from tpukit import LanguageModel
from tpukit_tasks.text import conversations, data, hub, reading

LLAMA = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)
LLAMA |= dict(max_position_embeddings=64, vocab_size=300, head_dim=8)
LONGROPE = dict(rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=64)
LONGROPE |= dict(short_factor=[1.0, 1.2, 1.5, 2.0], long_factor=[3.0, 4.0, 5.0, 6.0])
CONFIGS = {
    "gpt2": dict(n_layer=2, n_head=4, n_embd=32, n_positions=64, vocab_size=300),
    "llama": LLAMA | dict(tie_word_embeddings=True),  # as SmolLM2
    "qwen2": LLAMA | dict(tie_word_embeddings=False),
    "qwen3": LLAMA | dict(tie_word_embeddings=True),
    "gemma3_text": LLAMA
    | dict(num_key_value_heads=1, query_pre_attn_scalar=8, sliding_window=5, pad_token_id=0)
    | dict(layer_types=["sliding_attention", "full_attention"]),
    "mistral": LLAMA | dict(sliding_window=5),
    "ministral": LLAMA | dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"]),
    "smollm3": LLAMA | dict(no_rope_layers=[1, 0], tie_word_embeddings=True, pad_token_id=0),
    "phi3": LLAMA | dict(pad_token_id=0, sliding_window=5),
    "phi3 longrope": LLAMA
    | dict(
        model_type="phi3", pad_token_id=0, max_position_embeddings=128, original_max_position_embeddings=64
    )
    | dict(rope_parameters=LONGROPE),
    "olmo2": LLAMA | dict(tie_word_embeddings=False),
    "granite": LLAMA
    | dict(embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.2, logits_scaling=1.0),
}
TINY = dict(pretrained="no", batch_size=4, log_every=2, num_workers=0, new_tokens=6)
TINY |= dict(sequence_length=24, samples=2)
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
CHAT += "{% if add_generation_prompt %}<assistant>{% endif %}"

TURNS = [("user", "Hello!"), ("assistant", "Good morning."), ("user", "And you?"), ("assistant", "Fine.")]
START, END, HEAD = "<|im_start|>", "<|im_end|>", "<|head|>"
CALLING = (
    "{% if m.tool_calls %}{% for c in m.tool_calls %}\n<tool_call>{{ c.function | tojson }}</tool_call>"
    "{% endfor %}{% endif %}"
)
TOOLING = "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if THINK %}<think>\n{{ m.reasoning_content }}\n"
    "</think>\n\n{% endif %}{{ m.content }}" + CALLING + "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\nPROMPT{% endif %}"
)
# As Qwen3's: the thoughts after the last question, and one in the last answer even if it has none.
LAST = (
    "{% set ns = namespace(asked=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
)
THINK = "m.role == 'assistant' and loop.index0 > ns.asked and (loop.last or m.reasoning_content)"
TEMPLATES = {
    "gpt2": None,
    "llama": "<|head|>{% for m in messages %}<|im_start|>{{ m.role }}\n\n{{ m.content | trim }}"
    + CALLING
    + "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}",
    "qwen2": TOOLING
    + "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    + CHATML.replace("THINK", "false").replace("PROMPT", ""),
    "qwen3": TOOLING + LAST + CHATML.replace("THINK", THINK).replace("PROMPT", ""),
    # As Qwen3.5's: the prompt begins the thought.
    "thinking": TOOLING
    + LAST
    + CHATML.replace("THINK", THINK.replace("loop.last or m.reasoning_content", "true")).replace(
        "PROMPT", "<think>\n"
    ),
    # As Gemma's: the roles alternate, and what the system says begins the first question.
    "gemma3_text": "<|head|>{% if messages[0].role == 'system' %}{% set first = messages[0].content ~ ' ' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first, rest = '', messages %}{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ first if loop.first }}"
    "{{ m.content | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>model\n{% endif %}",
    # As Phi 3's: the text ends after the last answer.
    "phi3": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{% endif %}",
    "sentencepiece": "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}",
}

_CALL = dict(type="function", function=dict(name="weather", arguments=dict(city="Rome")))
_TOOL = dict(name="weather", description="of a city", parameters=dict(type="object", properties={}))
KINDS: dict[str, Any] = {
    "single": dict(messages=TURNS[:2]),
    "system": dict(messages=[("system", "Be brief."), *TURNS[:2]]),
    "multi-turn": dict(messages=[*TURNS, ("user", "Bye"), ("assistant", "See you.")]),
    "tools": dict(
        messages=[
            ("user", "Warm?"),
            ("assistant", "", dict(tool_calls=[_CALL])),
            ("tool", "22"),
            ("assistant", "Yes."),
        ]
        + [("user", "Thanks"), ("assistant", "Bye.")],
        tools=[dict(type="function", function=_TOOL)],
    ),
    "reasoning": dict(
        messages=[("user", "1+1"), ("assistant", "2.", dict(reasoning_content="Add them."))]
        + [("user", "2+2"), ("assistant", "4.", dict(reasoning_content="Add again."))]
    ),
    "the same text twice": dict(messages=[("user", "Yes"), ("assistant", "Yes")] * 2),
}
for _kind in KINDS.values():
    _kind["messages"] = [
        dict(role=role, content=content, **(more[0] if more else {}))
        for role, content, *more in _kind["messages"]
    ]


def check_answers(row, tokenizer):
    """Check that each answer of a conversation is learned once, in a document that begins as the model is
    prompted with the messages before it, and up to the first special token after it. A template has no place
    for some answers: these are counted, all others are learned."""
    row, counts = copy.deepcopy(row), collections.Counter()
    messages, tools = reading.read_row(row, counts)
    documents = conversations.documents_of(messages, tools, tokenizer, counts)
    options = dict(
        chat_template=tokenizer.chat_template or conversations.TEMPLATE, tools=tools, tokenize=False
    )
    learned = []  # (what comes before, what is learned)
    for parts in documents:
        at = ""
        for text, is_learned in parts:
            learned += [(at, text)] * is_learned
            at += text
    _, end = conversations.turn_end(tokenizer, tokenizer.chat_template)
    answers = [number for number, one in enumerate(messages) if one["role"] == "assistant"]
    told = sum(count for what, count in counts.items() if what.startswith("answers are not learned"))
    assert len(learned) + told == len(answers)
    left = list(learned)
    for number in answers:
        prompt = tokenizer.apply_chat_template(messages[:number], add_generation_prompt=True, **options)
        whole = tokenizer.apply_chat_template(messages[: number + 1], **options)
        found = [text for before, text in left if before == prompt]
        if not found:
            assert told, f"{prompt!r} is nowhere"
            continue
        assert len(found) == 1
        left.remove((prompt, found[0]))
        assert whole.startswith(prompt + found[0]), "as the template writes it"
        shown = [
            messages[number]["content"],
            *(call["function"]["name"] for call in messages[number].get("tool_calls", ())),
        ]
        if conversations.UNSEEN.format("assistant") not in counts:
            shown.append(messages[number].get("reasoning_content", ""))
        assert all(text in found[0] for text in shown)
        ids = tokenizer(found[0], add_special_tokens=False)["input_ids"]
        assert ids[-1] == end or end is None, "it ends with what ends a turn"
    assert not left


def write_config(folder, family="gpt2", **changes):
    """A folder with the config of a small model, and the tokenizer of bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(hub.SHAPES / "tiny" / name, folder)
    settings = dict(model_type=family) | CONFIGS[family] | changes
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


def write_sentencepiece(folder, template):
    """Write a tokenizer as Llama 2 has it, of 500 pieces: every part of a text begins with a space, letters
    that it does not know are bytes, and a text begins with <s>."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, processors, trainers

    specials = ["<unk>", "<s>", "</s>", *(f"<0x{number:02X}>" for number in range(256))]
    fast = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=specials, show_progress=False)
    fast.train_from_iterator(pydoc_data.topics.topics["calls"].split(" "), trainer)
    parts = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    fast.decoder = decoders.Sequence(list(parts))
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    options = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template)
    kind = hub.imported("transformers").PreTrainedTokenizerFast
    kind(tokenizer_object=fast, **options).save_pretrained(folder)


def write_family(folder, family):
    """A small model with the family's chat template. Return its tokenizer."""
    long = dict(n_positions=256) if family == "gpt2" else dict(max_position_embeddings=256)
    kind = "qwen3" if family == "thinking" else family
    if family == "sentencepiece":
        write_model(folder, "llama", vocab_size=500, **long)
        write_sentencepiece(folder, TEMPLATES[family])
        return hub.load_tokenizer(str(folder))
    write_model(folder, kind, chat=TEMPLATES[family], **long)
    tokenizer = hub.load_tokenizer(str(folder))
    tokenizer.add_special_tokens(dict(additional_special_tokens=[START, END, HEAD]))
    tokenizer.bos_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    return tokenizer


class Single(LanguageModel):
    """Also what LoRA freezes is in fp32."""

    model = functools.partialmethod(LanguageModel.model, torch.float32)


def task_of(folder, data=None, **settings):
    return LanguageModel(model_name=str(folder), dataset_dir=data, **TINY | settings)


# Files of texts, and what becomes of them

TEXT_END = "<|endoftext|>"  # of the tokenizer of bytes


def write_lines(path, *rows):
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def said(user, assistant):
    return dict(messages=[dict(role="user", content=user), dict(role="assistant", content=assistant)])


def turns(*texts, first="user"):
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [dict(role=roles[number % 2], content=text) for number, text in enumerate(texts)]


def parts_and_counts(row, tokenizer):
    """The parts of a conversation's documents, and what was counted."""
    counts = collections.Counter()
    messages, tools = reading.read_row(row, counts)
    documents = conversations.documents_of(messages, tools, tokenizer, counts)
    return list(itertools.chain(*documents)), +counts


def tokens_of(row, tokenizer):
    """What `LanguageModel` makes of a row: (ids, labels with -100 where nothing is learned)"""
    tokens, _ = conversations.tokens_of(row, tokenizer, collections.Counter())
    return tokens["tokens"].tolist(), np.where(tokens["labels"] < 0, -100, tokens["labels"]).tolist()


def opened(place, tokenizer, length=16, test_share=0.2):
    return data.open_sets(place, tokenizer, length, test_share)


def everything(rows):
    return rows.batch(np.arange(len(rows)))


def parts_of(rows, tokenizer):
    """[(text of a document in a row, text of what is to be learned of it)], in order."""
    batch, found = everything(rows), []
    for row, numbers, labels in zip(batch["tokens"], batch["documents"], batch["labels"]):
        for number in sorted({*numbers.tolist()} - {0}):
            here = numbers == number
            told = labels[here & (labels >= 0)]
            whole = [*row[here], *(labels[here][-1:] if labels[here][-1] >= 0 else [])]
            found.append((tokenizer.decode(whole), tokenizer.decode(told)))
    return found
