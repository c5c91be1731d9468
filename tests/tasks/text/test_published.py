"""The chat templates of published models, as TRL 1.16 brings them: what is learned, and the losses of 15
steps."""

import collections
import copy
import functools
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import checkpoint
from tests.tasks.text.small import (
    KINDS,
    check_answers,
    plain_model,
    said,
    task_of,
    write_config,
    write_lines,
)
from tests.tasks.text.trainers import make_trainer
from tests.tpukit.training.conftest import train_in
from tpukit import LanguageModel
from tpukit.training.data import training_index_batches
from tpukit_tasks.text import conversations, hub, reading

pytestmark = pytest.mark.nightly
trl = pytest.importorskip("trl", reason="whose templates these are (pip install trl==1.16.0)")
FOLDER = Path(trl.__file__).parent / "chat_templates"
ALL = sorted(path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training"))
# Of texts and images: their messages are lists of parts.
OF_IMAGES = ("idefics3", "llava_next", "smolvlm")
FAMILIES = {  # the model of each
    "qwen2_5": "qwen2",
    "qwen3": "qwen3",
    "qwen3_instruct_2507": "qwen3",
    "llama3": "llama",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
}
SPECIAL = re.compile(r"<\|\w+\|>|<(?:start|end)_of_turn>|<\|(?:END|START)\w+\|>|<turn\|>|<｜[\w▁]+｜>")


def tokenizer_of(name):
    """The tokenizer of bytes with a published template, and the special tokens that it writes."""
    tokenizer = hub.load_tokenizer("tiny")
    template = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer.chat_template = re.sub(r"strftime_now\([^)]*\)", "'26 July 2024'", template)
    specials = {"<bos>", *SPECIAL.findall(tokenizer.chat_template)} - {tokenizer.eos_token}
    tokenizer.add_special_tokens(dict(bos_token="<bos>", additional_special_tokens=sorted(specials)))
    return tokenizer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ALL)
def test_each_answer_is_learned_where_the_model_writes_it_with_every_published_template(name, kind):
    if name in OF_IMAGES:
        pytest.skip("its messages are lists of parts")
    try:
        check_answers(KINDS[kind], tokenizer_of(name))
    except reading.NothingToLearn as error:
        pytest.skip(str(error))


def runs_of(ids, is_learned):
    """[ids of each part that is learned]"""
    runs, run = [], []
    for one, learned in zip([*ids, -1], [*is_learned, False]):
        if learned:
            run.append(one)
        elif run:
            runs.append(run)
            run = []
    return runs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_ids_and_masks_are_those_of_trl(name, kind):
    """But for the line breaks before an answer (Qwen2.5), which the prompt ends with, and after the end of
    its turn, which TRL learns; and for the history before an answer, which TRL writes with thoughts that the
    model never sees (Qwen3)."""
    tokenizer, row = tokenizer_of(name), copy.deepcopy(KINDS[kind])
    counts = collections.Counter()
    try:
        messages, tools = reading.read_row(copy.deepcopy(row), counts)
        tokens, _ = conversations.tokens_of(copy.deepcopy(row), tokenizer, counts)
    except reading.NothingToLearn as error:
        pytest.skip(str(error))
    training = (FOLDER / f"{name}_training.jinja").read_text(encoding="utf-8")
    options: Any = dict(chat_template=training, return_assistant_tokens_mask=True, return_dict=True)
    theirs = tokenizer.apply_chat_template(messages, tools=tools, **options)
    _, end = conversations.turn_end(tokenizer, tokenizer.chat_template)
    wanted = runs_of(theirs["input_ids"], theirs["assistant_masks"])
    line_break = tokenizer("\n", add_special_tokens=False)["input_ids"]
    wanted = [run[run[:1] == line_break : 1 + run.index(end)] for run in wanted]
    found = []
    for number in range(1 + tokens["documents"].max(initial=0)):
        here = tokens[tokens["documents"] == number]
        found += runs_of(here["labels"].tolist(), here["labels"] >= 0)
    if counts[conversations.UNLEARNED]:  # a call of a tool that the template has no place for
        wanted = [run for run in wanted if len(run) > 1]
    assert found == wanted
    if not counts[conversations.ALONE]:
        assert tokens["tokens"].tolist() == theirs["input_ids"][:-1]
    else:
        assert name == "qwen3"


@pytest.mark.parametrize("adapter, parts", [("none", 2), ("lora", 1)])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_losses_of_15_steps_are_those_of_trl(name, adapter, parts, tmp_path, cpu, monkeypatch):
    """Of rows with one conversation each, and batches whose labels are 20 to 100. parts: micro-batches, or
    batches that TRL accumulates.

    The weights after that are equal to 2e-6 (measured: 5e-7), but where an element's first gradient g is as
    small as Adam's epsilon, e: its first update, rate * g / (|g| + e), has the slope rate * e / (|g| + e)**2,
    up to rate / e = 1e5, and g is rounded by 1e-10 there (measured). With an e of 1e-5 on both sides, all are
    equal to 5e-7."""
    folder, lora = tmp_path / "model", adapter == "lora"
    tokenizer = tokenizer_of(name)
    sizes: Any = dict(max_position_embeddings=256, vocab_size=320, eos_token_id=None, pad_token_id=0)
    plain_model(FAMILIES[name], folder, **sizes).save_pretrained(folder)
    write_config(folder, FAMILIES[name], **sizes)
    tokenizer.save_pretrained(folder)
    rows = [said("q" * (75 - 2 * (n % 25)), f"{n % 10}" * (2 + n % 25)) for n in range(60)]
    for split in ("train", "test"):
        write_lines(tmp_path / f"{split}.jsonl", *rows)
    counts = collections.Counter()
    length = max(len(conversations.tokens_of(row, tokenizer, counts)[0]) for row in copy.deepcopy(rows))
    settings: Any = dict(pretrained="yes", adapter=adapter, lora_rank=4, sequence_length=length, samples=0)
    settings |= dict(batch_size=4, micro_batches=parts, lr=1e-3, warmup_epochs=0.0, epochs=1, log_every=1)
    task = task_of(folder, tmp_path, **settings)
    model = functools.partialmethod(LanguageModel.model, torch.float32)  # also what LoRA freezes
    monkeypatch.setattr(LanguageModel, "model", lambda self, dtype=None: model.__get__(self)())
    train_set, _ = task.datasets()
    order = [spec.indices for spec in training_index_batches(len(train_set), 4, seed=task.seed, epoch=0)]
    batch = train_set.batch(np.concatenate(order))
    assert len(order) == 15
    prepared = []
    for tokens, labels, documents in zip(batch["tokens"], batch["labels"], batch["documents"]):
        count = int((documents > 0).sum())
        assert len({*documents[:count]}) == 1, "one conversation in a row"
        last = max(int(labels[count - 1]), 0)
        masked = np.where(labels[:count] < 0, -100, labels[:count])
        prepared.append(dict(input_ids=[*tokens[:count].tolist(), last], labels=[-100, *masked.tolist()]))

    options: Any = dict(per_device_train_batch_size=4 // parts, gradient_accumulation_steps=parts)
    options |= dict(learning_rate=1e-3, lr_scheduler_type="cosine", warmup_steps=0, weight_decay=0.1)
    options |= dict(adam_beta1=0.9, adam_beta2=0.95, max_grad_norm=1.0, num_train_epochs=1, logging_steps=1)
    options |= dict(save_strategy="no", disable_tqdm=True)
    torch.manual_seed(task.seed)
    ours = task.model()
    trainer = make_trainer(monkeypatch, folder, prepared, lora=4 if lora else None, **options)
    trainer.model.load_state_dict(ours.net.state_dict())
    sampler = torch.utils.data.SequentialSampler
    monkeypatch.setattr(trainer, "_get_train_sampler", lambda *_: sampler(trainer.train_dataset))
    first = {}
    adam_step = torch.optim.AdamW.step

    def keep_first(optimizer, *arguments):
        for parameter in itertools.chain(*(group["params"] for group in optimizer.param_groups)):
            known = first.get(parameter, torch.zeros_like(parameter))
            first[parameter] = parameter.grad.where(known == 0, known).clone()
        return adam_step(optimizer, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", keep_first)
        trainer.train()
    slopes = {
        name: (first[parameter] != 0) * 1e-3 * 1e-8 / (first[parameter].abs() + 1e-8) ** 2
        for name, parameter in trainer.model.named_parameters()
        if parameter in first
    }
    wanted = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    run = train_in(tmp_path / "run", task, cpu)
    found = [record["loss"] for record in run.records("train")]
    assert len(found) == 15
    np.testing.assert_allclose(found, wanted, rtol=0, atol=5e-6)
    before, after, theirs = ours.state_dict(), checkpoint(run)["model"], trainer.model.state_dict()
    assert all((after[one] - before[one]).abs().max() > 1e-3 for one in after)
    for one, value in after.items():
        name = one.removeprefix("net.")
        assert ((value - theirs[name]).abs() <= 2e-6 + 1e-9 * slopes[name]).all(), one
    assert sum(int((slope > 1e3).sum()) for slope in slopes.values()) < 50, "for nearly all it is 2e-6"
