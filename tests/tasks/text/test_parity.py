"""Ids, labels and loss of conversations beside a reference that is written by hand, for each family."""

import json

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.tasks.text.small import CONFIGS, END, HEAD, START, TURNS, task_of, tokens_of, write_family

transformers = pytest.importorskip("transformers")


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


@pytest.mark.parametrize("family", CONFIGS)
def test_ids_labels_loss_and_gradients_are_those_of_the_conversation_written_by_hand(family, tmp_path):
    folder = tmp_path / "model"
    tokenizer = write_family(folder, family)
    parts = reference(family, tokenizer.eos_token)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text, _ in parts]
    labels = [one if is_learned else [-100] * len(one) for one, (_, is_learned) in zip(ids, parts)]
    ids, labels = torch.tensor(sum(ids, []))[None], torch.tensor(sum(labels, []))[None]

    row = dict(messages=[dict(role=role, content=content) for role, content in TURNS])
    assert tokens_of(row, tokenizer) == (ids[0, :-1].tolist(), labels[0, 1:].tolist())

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
    model = task.model()
    loss = task.loss(model, batch, 0)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    loss.backward()
    expected.backward()
    ours = dict(model.causal.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(ours[name].grad, parameter.grad, rtol=1e-3, atol=1e-5)
