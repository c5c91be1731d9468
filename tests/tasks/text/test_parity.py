"""Ids, labels and loss of conversations beside a reference that is written by hand, for each family."""

import json

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.tasks.text.small import task_of, write_model
from tpukit.tasks.text import data, hub

transformers = pytest.importorskip("transformers")
TURNS = [("user", "Hello!"), ("assistant", "Good morning."), ("user", "And you?"), ("assistant", "Fine.")]
START, END, HEAD = "<|im_start|>", "<|im_end|>", "<|head|>"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if THINK %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "gpt2": None,
    "llama": "<|head|>{% for m in messages %}<|im_start|>{{ m.role }}\n\n{{ m.content | trim }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}",
    "qwen2": "<|im_start|>system\nBe kind.<|im_end|>\n" + CHATML.replace("THINK", "false"),
    "qwen3": CHATML.replace("THINK", "loop.last and m.role == 'assistant'"),
    "gemma3_text": "<|head|>{% for m in messages %}"
    "<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>model\n{% endif %}",
}


def reference(family, eos):
    """[(text, whether it is learned)] of `TURNS`, as the family writes them."""
    head = dict(gpt2=eos, llama=HEAD, gemma3_text=HEAD, qwen2=f"{START}system\nBe kind.{END}\n", qwen3="")
    parts = [(head[family], False)]
    for number, (role, content) in enumerate(TURNS):
        role = "model" if (family, role) == ("gemma3_text", "assistant") else role
        think = "<think>\n\n</think>\n\n" if (family, number) == ("qwen3", 3) else ""
        is_learned = number % 2 == 1
        if family == "gpt2":
            parts += [(content, is_learned), (eos if is_learned else "", is_learned)]
            continue
        parts += [(f"{START}{role}\n\n" if family == "llama" else f"{START}{role}\n", False)]
        parts += [(f"{think}{content}{END}", is_learned), ("" if family == "llama" else "\n", False)]
    return parts


@pytest.mark.parametrize("family", TEMPLATES)
def test_ids_labels_and_loss_are_those_of_the_conversation_written_by_hand(family, tmp_path):
    long = dict(n_positions=256) if family == "gpt2" else dict(max_position_embeddings=256)
    folder = write_model(tmp_path / "model", family, chat=TEMPLATES[family], **long)
    tokenizer = hub.load_tokenizer(str(folder))
    tokenizer.add_special_tokens(dict(additional_special_tokens=[START, END, HEAD]))
    tokenizer.bos_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    parts = reference(family, tokenizer.eos_token)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text, _ in parts]
    labels = [one if is_learned else [-100] * len(one) for one, (_, is_learned) in zip(ids, parts)]
    ids, labels = torch.tensor(sum(ids, []))[None], torch.tensor(sum(labels, []))[None]

    row = dict(messages=[dict(role=role, content=content) for role, content in TURNS])
    tokens, _ = data.tokens_of(row, tokenizer, "x")
    assert tokens["tokens"].tolist() == ids[0, :-1].tolist()
    assert np.where(tokens["labels"] < 0, -100, tokens["labels"]).tolist() == labels[0, 1:].tolist()

    path = tmp_path / "chats.jsonl"
    path.write_text(f"{json.dumps(row)}\n" * 3)  # the first is held out, two lie in one row or two
    options = dict(pretrained="yes", tokenizer="auto", adapter="none", sequence_length=256)
    task = task_of(folder, path, **options)
    train_set, _ = task.datasets()
    batch = train_set.batch(np.arange(len(train_set)))
    batch = {name: torch.from_numpy(values) for name, values in batch.items()}
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    logits = plain(ids).logits
    expected = cross_entropy(logits[0, :-1], labels[0, 1:])
    torch.testing.assert_close(task.loss(task.model(), batch, 0), expected, rtol=1e-4, atol=1e-5)
