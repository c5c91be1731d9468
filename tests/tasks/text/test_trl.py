"""Fine-tuning gives the ids, labels, losses and gradients of TRL 1.16, predicting the text of `generate`."""

import functools
import itertools
import json

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.tasks.text.small import END, TEMPLATES, TURNS, task_of, tokens_of, write_family
from tests.tasks.text.trainers import make_trainer
from tpukit.training.step import add_gradients
from tpukit_tasks.text import conversations, hub

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.nightly
CHATS = [
    TURNS[:2],
    [*TURNS[:3], ("assistant", "Fine,  thanks.\n\nAnd you? 你好 😀")],
    [("user", "1 + 2"), ("assistant", "It is 3.")],
    [("user", "Bye"), ("assistant", "Good night.")],
]
CHATS = [[dict(role=role, content=content) for role, content in turns] for turns in CHATS]
CHATS = [dict(prompt=said[:-1], completion=said[-1:]) for said in CHATS]
NEW = 16  # tokens that are written
WORDS = [dict(text="Once upon a time  there was\n\na compiler."), dict(text=" It said nothing.\n")]


@pytest.fixture(params=TEMPLATES)
def family(request):
    return request.param


@pytest.fixture
def folder(family, tmp_path):
    """Of a small model of the family, with its tokenizer."""
    write_family(tmp_path / "model", family)
    return tmp_path / "model"


@pytest.fixture
def sft(folder, monkeypatch):
    """A function of rows that returns a trainer of TRL, which has prepared them as its `train_dataset`."""
    return functools.partial(make_trainer, monkeypatch, folder)


def rows_of_trl(trainer):
    """[dict(input_ids, labels)] as TRL prepares them, but that nothing is learned after the end of an answer:
    the model stops there, and TRL learns the line break that some templates write after it."""
    rows = []
    for row in trainer.train_dataset:
        ids, labels = np.array(row["input_ids"]), np.array(row.get("labels", row["input_ids"]))
        tokenizer = trainer.processing_class
        ends = [tokenizer.convert_tokens_to_ids(END), tokenizer.eos_token_id]
        end = 1 + np.flatnonzero(ids == ends[ends[0] not in ids])[-1]
        assert tokenizer.decode(ids[end:]).strip() in ("", tokenizer.eos_token)
        labels[end:] = -100
        rows.append(dict(input_ids=ids.tolist(), labels=labels.tolist()))
    return rows


def for_trl(family, row, tokenizer):
    """The row for TRL: for GPT-2, which has no template, texts after the token that tpukit begins with."""
    if family != "gpt2" or "text" in row:
        return row
    said = [one["content"] + tokenizer.eos_token * (one["role"] == "assistant") for one in row["prompt"]]
    return dict(prompt=tokenizer.bos_token + "".join(said), completion=row["completion"][0]["content"])


@pytest.mark.parametrize("rows", [CHATS, WORDS], ids=["chats", "texts"])
def test_ids_and_labels_are_those_of_trl(family, rows, folder, sft):
    """But for what comes after the end of an answer, see `rows_of_trl`, and the token at the beginning of a
    conversation with GPT-2, see `for_trl`."""
    tokenizer = hub.load_tokenizer(str(folder))
    trainer = sft([for_trl(family, row, tokenizer) for row in rows])
    for row, wanted in zip(rows, rows_of_trl(trainer), strict=True):
        assert tokens_of(row, tokenizer) == (wanted["input_ids"][:-1], wanted["labels"][1:])


def test_loss_and_gradients_packed_and_accumulated_are_those_of_trl_unpacked(family, folder, sft, cpu):
    """TRL packs, too, and the loss of each token stays what it is. See `rows_of_trl` for what is learned."""
    tokenizer = hub.load_tokenizer(str(folder))
    alone = sft([for_trl(family, row, tokenizer) for row in CHATS])
    rows = rows_of_trl(alone)
    lengths = [len(row["input_ids"]) for row in rows]
    length = max(lengths) + min(lengths)  # of two rows with two documents each
    together = sft(rows, packing=True, max_length=length)
    assert len(together.train_dataset) == 2
    losses, each = [], []
    for trainer, batch in ((alone, rows), (together, list(together.train_dataset))):
        batch = trainer.data_collator(batch)
        losses.append(trainer.compute_loss(trainer.model, dict(batch)))
        found = trainer.model(**batch, use_cache=False, fused_lm_head=True)
        each.append(-found.log_probs[found.label_mask].detach())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
    losses[0].backward()
    wanted = {name: parameter.grad for name, parameter in alone.model.named_parameters()}

    lines = "".join(f"{json.dumps(row)}\n" for row in CHATS)
    for split in ("train", "test"):
        (folder.parent / f"{split}.jsonl").write_text(lines)
    for parts in (1, 2):
        options = dict(pretrained="yes", adapter="none", sequence_length=length)
        task = task_of(folder, folder.parent, **options, micro_batches=parts, batch_size=2)
        train_set, _ = task.datasets()
        batch = {name: torch.from_numpy(values) for name, values in train_set.batch(np.arange(2)).items()}
        assert len(train_set) == 2 and batch["documents"].unique().numel() > 2
        counts = (batch["labels"] >= 0).sum(1)
        assert counts[0] != counts[1]
        model = task.model()
        loss = add_gradients(task, task.loss, model, task.optimizer(model), cpu, batch, 0)
        torch.testing.assert_close(loss, losses[0].detach(), rtol=1e-5, atol=0)
        for name, parameter in model.causal.named_parameters():
            atol = 1e-5 * float(wanted[name].abs().max())
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-5, atol=atol)
    with torch.no_grad():
        logits = model(batch["tokens"], batch["documents"]) @ model.head.t()
    ours = cross_entropy(logits.mT, batch["labels"].long(), ignore_index=-1, reduction="none")
    ours = ours[batch["labels"] >= 0].sort().values
    for theirs in each:
        torch.testing.assert_close(theirs.sort().values, ours, rtol=1e-5, atol=1e-5)


def test_the_text_of_greedy_predictions_is_that_of_generate(family, folder, cpu):
    """Up to the ends in the model's generation config, among them a token that the model writes late, and all
    special tokens, at each of which tpukit stops."""
    tokenizer = hub.load_tokenizer(str(folder))
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in plain.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.3)
        plain.get_input_embeddings().weight.mul_(0.1)  # less, so that all tokens before one decide on it
    template = tokenizer.chat_template or conversations.TEMPLATE
    options = dict(chat_template=template, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    prompts = [tokenizer.apply_chat_template(row["prompt"], **options) for row in CHATS]

    def generate(ends):
        options = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=ends, pad_token_id=0)
        found = [plain.generate(**one, **options)[0, one["input_ids"].shape[1] :].tolist() for one in prompts]
        return [list(itertools.takewhile(lambda token: token not in ends, one)) for one in found]

    ends = tokenizer.all_special_ids
    whole = generate(ends)
    longest = max(whole, key=len)
    ends.append(max(longest, key=longest.index))  # that comes late
    expected = generate(ends)
    assert expected != whole and max(map(len, expected)) > NEW // 2
    plain.generation_config = transformers.GenerationConfig(eos_token_id=ends)
    plain.save_pretrained(folder)

    path = folder.parent / "prompts.jsonl"
    path.write_text("".join(json.dumps(dict(messages=row["prompt"])) + "\n" for row in CHATS))
    options = dict(pretrained="yes", adapter="none", sequence_length=128, new_tokens=NEW)
    task = task_of(folder, weights=str(folder), **options)
    batch, _ = task.read_files([path], folder)
    found = task.predictor(task.model().eval(), cpu)(cpu.put(batch))
    rows = zip(found["written"].tolist(), found["prompt"].tolist(), expected)
    assert [row[start : start + len(one)] for row, start, one in rows] == expected
    texts = tokenizer.batch_decode(expected, skip_special_tokens=True)
    assert [one["written"] for one in task.results(batch, found)] == texts
