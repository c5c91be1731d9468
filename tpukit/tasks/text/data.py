"""Texts, conversations and prompts in a user's files, tokenised once and packed into rows of one length.

Shapes: R rows, B batch, T tokens of a row."""

from __future__ import annotations

import bisect
import glob
import itertools
import json
import pydoc_data.topics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tpukit.host.errors import TpukitError, explained
from tpukit.runs.json_types import has_type
from tpukit.tasks import arrays
from tpukit.tasks.splits import about_tables, find_files

TEXTS, LINES = (".txt", ".md", ".rst"), ".jsonl"
PAGE = "TEXT"  # of the docs
PIECE, PIECES = 2**16, 8  # characters that are tokenised at once; how many of them are one document
MANY = 256  # documents, or fewer conversations, from which rows are filled
VERSION = 4  # of what `_pack` makes of the same files, which is cached
TOKEN = np.dtype([("tokens", np.int32), ("labels", np.int32), ("documents", np.uint16)])
# Of conversations, where the tokenizer has no template of its own: one text after another.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.content }}"
    "{{ eos_token if message.role == 'assistant' }}{% endfor %}"
)


class TextSet:
    """One split of packed rows.

    `batch(indices, numbers)` -> dict of (B, T) each: tokens; labels, the next ones, or -1 where nothing is to
    be learned; documents, numbers that tell them apart, 0 where nothing is; and share (B,), one over the
    labels of a row on average. `notes`: sentences for the log."""

    num_uniforms = 0

    def __init__(
        self, packed: dict[str, np.ndarray], is_here: np.ndarray, signature: str, notes: str
    ) -> None:
        self.rows, self.signature, self.notes = packed["rows"], signature, notes
        self.kept = np.flatnonzero(is_here & (packed["targets"] > 0))
        self.targets = packed["targets"][self.kept].sum() / max(1, len(self.kept))

    def __len__(self) -> int:
        return len(self.kept)

    def batch(self, indices: Any, numbers: Any = None) -> dict[str, np.ndarray]:
        rows = self.rows[self.kept[indices]]
        found = {name: rows[name].astype(np.int32) for name in TOKEN.names or ()}
        return dict(found, share=np.full(len(rows), 1 / self.targets, np.float32))


def open_sets(place: Path, tokenizer: Any, length: int, test_share: float) -> tuple[TextSet, TextSet]:
    """(training set, test set) of a file or a folder, made anew or from the cache. length: T. test_share: see
    `LanguageModel`. Raises TpukitError, with the file and the line, for what cannot be trained on."""
    folder, files = place if place.is_dir() else place.parent, find_texts(place)
    names = [glob.escape(str(path.relative_to(folder))) for path in itertools.chain(*files.values())]
    key = [VERSION, names, arrays.content_key(folder, like=names), length, test_share]
    key += [tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id, tokenizer.chat_template]
    packed = arrays.mapped("text", key, lambda: _pack(files, tokenizer, length, test_share))
    is_test, signature = packed["is_test"], arrays.digest(key)
    notes = [str(packed["notes"]), about_tables(place, PAGE)]
    train = TextSet(packed, ~is_test, signature, "\n".join(filter(None, notes)))
    test = TextSet(packed, is_test, signature, "")
    if not len(train) or not len(test):
        raise TpukitError(f"{place}: nothing is left to train on or to test with, so add texts")
    return train, test


def _pack(files, tokenizer, length, test_share) -> dict[str, np.ndarray]:
    """rows (R, T) of `TOKEN`; of each (R,) targets, how many labels it has, and is_test; and notes."""
    from tqdm.auto import tqdm

    file, at, longer, border = tempfile.TemporaryFile(), 0, 0, 0
    nothing = np.array([(0, -1, 0)], TOKEN)

    def write(tokens):
        nonlocal at
        file.write(tokens.tobytes())
        at += len(tokens)

    for split in ("train", "test"):
        border = at // length
        rows = ((row, where) for path in files[split] for where, row in _read_rows(path))
        documents = enumerate(tqdm(rows, disable=None, leave=False, unit=" texts"))
        while some := list(itertools.islice(documents, MANY)):
            whole = []  # conversations, each of which stays in one row
            for number, (row, where) in some:
                tokens, is_conversation = tokens_of(row, tokenizer, where)
                tokens["documents"] = 1 + number % (2**16 - 1)  # a row has fewer
                is_longer = is_conversation and len(tokens) > length
                longer += is_longer
                if is_conversation and not is_longer:
                    whole.append(tokens)
                else:
                    write(tokens)
            whole.sort(key=len)
            while whole:  # always the longest that fits into what is left of a row
                index = bisect.bisect_right(whole, length - at % length, key=len)
                write(whole.pop(index - 1) if index else nothing.repeat(-at % length))
        write(nothing.repeat(-at % length))
    write(nothing.repeat(length))  # no file is empty
    file.flush()
    rows = np.memmap(file, TOKEN, "r", shape=(at // length, length))
    targets = np.array([(row["labels"] >= 0).sum() for row in rows])
    is_test = np.arange(len(rows)) >= border
    if not files["test"]:
        is_test = np.diff(np.ceil(np.arange(len(rows) + 1) * test_share)) > 0
    notes = f"{targets.sum()} tokens to predict, in rows of {length}"
    notes += f"; {longer} conversations longer than that go on in the next row" if longer else ""
    return dict(rows=rows, targets=targets, is_test=is_test, notes=np.array(notes))


# Reading


def write_demo(folder: Path, size: int, rng: np.random.Generator) -> None:
    """train/TOPIC.txt and test/TOPIC.txt, a tenth of them to test, of up to `size` topics of `help()`: parts
    of the Python Language Reference, which come with every Python."""
    for number, (topic, text) in enumerate(sorted(pydoc_data.topics.topics.items())[:size]):
        place = folder / ("test" if number % 10 == 9 else "train") / f"{topic}.txt"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")


def find_texts(place: Path) -> dict[str, list[Path]]:
    """Return the files of train and of test. Where some are in train, those in no split are left out. Raises
    TpukitError where there is none to train on."""
    files = find_files(place, (*TEXTS, LINES))
    train, test = (
        [path for path, split in files if split in names] for names in (["train"], ["val", "test"])
    )
    train = train or [path for path, split in files if split is None]
    if not train and (tables := about_tables(place, PAGE)):
        raise TpukitError(f"{place}: {tables}")
    if not train:
        raise TpukitError(
            f"{place} does not exist or has no texts to train on: it should be text files"
            f" ({', '.join(TEXTS)}), or .jsonl files with text, prompt and completion, or messages in each"
            " line"
        )
    return dict(train=train, test=test)


def _read_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (where it is, content) of pieces of a text, or of lines of a .jsonl file."""
    if path.suffix in TEXTS:
        with explained(f"{path} is not a text in UTF-8"), open(path, encoding="utf-8-sig") as file:
            while text := file.read(PIECES * PIECE):
                yield str(path), dict(text=text)
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                with explained(f"{path}, line {number} is not JSON in UTF-8, so mend or delete it"):
                    row = json.loads(line)
                yield f"{path}, line {number}", row


def tokens_of(row: Any, tokenizer: Any, where: str) -> tuple[np.ndarray, bool]:
    """(array of `TOKEN`, whether it is a conversation) of a dict with `messages`, with `prompt` and
    `completion`, or with `text`. where: for errors."""
    parts, is_conversation = parts_of(row, tokenizer, where)
    encoded = tokenizer([text for text, _ in parts], add_special_tokens=False)["input_ids"]
    ids = np.array(list(itertools.chain(*encoded)), np.int32)
    learned = np.repeat([learned for _, learned in parts], list(map(len, encoded)))
    tokens = np.zeros(max(len(ids) - 1, 0), TOKEN)
    tokens["tokens"], tokens["labels"] = ids[:-1], np.where(learned, ids, -1)[1:]
    return tokens, is_conversation


def parts_of(row: Any, tokenizer: Any, where: str) -> tuple[list[tuple[str, bool]], bool]:
    """([(text, whether it is to be learned)], whether it is a conversation), see `tokens_of`.

    What the assistant says is to be learned, but for turns that the chat template writes in another way once
    others follow."""
    said = _said(row, where)
    if isinstance(said, str):
        start = tokenizer.decode(tokenizer("")["input_ids"][:1])  # what the model expects first, if anything
        pieces = [said[first : first + PIECE] for first in range(0, len(said), PIECE)]
        return [(text, True) for text in (start, *pieces, tokenizer.eos_token)], False
    if not any(one["role"] == "assistant" and one["content"].strip() for one in said):
        raise TpukitError(f"{where}: the completion is empty: there is nothing to learn")
    whole, parts, at = _render(said, tokenizer, where), [], 0
    for number in [number for number, one in enumerate(said) if one["role"] == "assistant"]:
        before = _render(said[:number], tokenizer, where, prompt=True)
        after = _render(said[: number + 1], tokenizer, where)
        if len(before) >= at and after.startswith(before) and whole.startswith(after):
            parts += [(whole[at : len(before)], False), (whole[len(before) : len(after)], True)]
            at = len(after)
    if not parts:
        raise TpukitError(f"{where}: the model's chat template does not show where the assistant begins")
    return [*parts, (whole[at:], False)], True


def _said(row: Any, where: str) -> list[dict[str, str]] | str:
    """The messages of a row, or its text."""
    row = row if isinstance(row, dict) else {}
    messages: Any = row.get("messages")
    roles = dict(prompt="user", completion="assistant")
    if messages is None and row.get("prompt") is not None:
        messages = [dict(role=roles[name], content=row[name]) for name in roles if row.get(name) is not None]
    if messages is None and isinstance(row.get("text"), str):
        return row["text"]
    message = dict(role=str, content=str)
    if not isinstance(messages, list) or not messages or not all(has_type(one, message) for one in messages):
        raise TpukitError(
            f"{where}: it needs a text, or a prompt and a completion, or messages, a list of {{role: TEXT,"
            f" content: TEXT}}, and has {', '.join(map(str, row)) or 'none of them'}"
        )
    return messages


def _render(messages: list[dict], tokenizer: Any, where: str, *, prompt: bool = False) -> str:
    """A conversation as the model reads it. prompt: with the beginning of an answer."""
    options = dict(tokenize=False, chat_template=tokenizer.chat_template or TEMPLATE)
    with explained(f"{where}: the model's chat template refuses it"):
        return tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, **options)


def read_prompts(path: Path, tokenizer: Any) -> list[tuple[str, list[int]]]:
    """[(name, tokens)] of the prompts in a text file, which is one, or in the lines of a .jsonl file, each
    with `prompt` or `messages`, or with `text` that has no template."""
    prompts = []
    for where, row in _read_rows(path):
        row = dict(prompt=row["text"].rstrip("\n")) if path.suffix in TEXTS else row
        said, name = _said(row, where), f"{path.name}{where.removeprefix(str(path))}"
        if not isinstance(said, str):
            is_answered = len(said) > 1 and said[-1]["role"] == "assistant"
            said = _render(said[: len(said) - is_answered], tokenizer, name, prompt=True)
        prompts.append((name, tokenizer(said, add_special_tokens=False)["input_ids"]))
    return prompts
