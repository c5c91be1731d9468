"""Texts, conversations and prompts in a user's files, tokenised once and packed into rows of one length.

Shapes: R rows, B batch, T positions of a row; a row has T + 1 tokens, the last one only to be predicted."""

from __future__ import annotations

import bisect
import functools
import glob
import itertools
import json
import math
import pydoc_data.topics
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tpukit.host import arrays
from tpukit.host.errors import TpukitError
from tpukit.host.json_types import has_type
from tpukit.host.tables import printable
from tpukit.tasks import arrow
from tpukit.tasks.text.hub import explained

SPLITS = {  # first words of folders and files, in lower case
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing", "val", "valid", "validation", "dev", "eval"), "test"),
}
TEXTS, LINES = (".txt", ".md", ".rst"), ".jsonl"
PIECE = 2**16  # characters of a text that are tokenised at once
MANY = 512  # documents that are tokenised at once, on all cores
VERSION = 2  # of what `_pack` makes of the same files, which is cached
TOKEN = np.dtype([("tokens", np.int32), ("documents", np.int32), ("learned", bool)])
# Of conversations, where the tokenizer has no template of its own: one text after another.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.content }}"
    "{{ eos_token if message.role == 'assistant' }}{% endfor %}"
)


class TextSet:
    """One split of packed rows.

    `batch(indices, numbers)` -> dict of (B, T + 1) each: tokens; documents, numbers that tell them apart, 0
    where nothing is; learned, bool; and share (B,), one over the tokens that a row predicts on average.
    `notes`: sentences for the log."""

    num_uniforms = 0

    def __init__(self, packed: dict[str, np.ndarray], split: str, length: int, signature: str) -> None:
        # The last token of a row is the first one of the next.
        self.rows = np.lib.stride_tricks.sliding_window_view(packed[split], length + 1)[::length]
        self.targets, self.signature = float(packed[f"{split}_targets"]) / len(self.rows), signature
        self.notes = printable(str(packed["notes"])) if split == "train" else ""

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Any, numbers: Any = None) -> dict[str, np.ndarray]:
        rows = self.rows[indices]
        share = np.full(len(rows), 1 / self.targets, np.float32)
        return {name: np.ascontiguousarray(rows[name]) for name in TOKEN.names or ()} | dict(share=share)


class Document(NamedTuple):
    """A conversation, or a piece of a text. parts: (text, whether it is to be learned)"""

    split: str
    parts: list[tuple[str, bool]]
    is_conversation: bool
    begins: bool = True


def open_sets(
    place: Path, tokenizer: Any, length: int, too_long: str, test_share: float
) -> tuple[TextSet, TextSet]:
    """(training set, test set) of a file or a folder, made anew or from the cache. length: T. too_long,
    test_share: see `LanguageModel`. Raises TpukitError, with the file and the line, for what cannot be
    trained on."""
    folder = place if place.is_dir() else place.parent
    names = [glob.escape(str(path.relative_to(folder))) for path, _ in find_files(place)]
    key = [VERSION, names, arrays.content_key(folder, like=names), length, too_long, test_share]
    key += [tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id, tokenizer.chat_template]
    packed = arrays.mapped("text", key, lambda: _pack(place, tokenizer, length, too_long, test_share))
    train, test = (TextSet(packed, split, length, arrays.digest(key)) for split in ("train", "test"))
    return train, test


# Packing


def _pack(place, tokenizer, length, too_long, test_share) -> dict[str, np.ndarray]:
    """What `TextSet` takes: of each split the tokens of all rows, and how many of them are predicted."""
    from tqdm.auto import tqdm

    splits, longer = dict(train=_Stream(length), test=_Stream(length)), 0
    documents = tqdm(read_documents(place, tokenizer, test_share), disable=None, leave=False, unit=" texts")
    waiting = iter(documents)
    while some := list(itertools.islice(waiting, MANY)):
        texts = [text for document in some for text, _ in document.parts]
        encoded = iter(tokenizer(texts, add_special_tokens=False)["input_ids"])
        for document in some:
            pairs = [(id, 0, learned) for (_, learned), ids in zip(document.parts, encoded) for id in ids]
            tokens, stream = np.array(pairs, TOKEN), splits[document.split]
            is_whole = document.is_conversation
            if is_whole and len(tokens) > length + 1:
                longer += 1
                is_whole = too_long != "split"
                tokens = tokens[: dict(cut=length + 1, split=len(tokens)).get(too_long, 0)]
            if is_whole:
                stream.waiting.append(tokens)
            else:
                stream.append(tokens, document.begins)
        for stream in splits.values():
            stream.append_waiting()
    packed = {}
    for split, stream in splits.items():
        if not stream.targets:
            raise TpukitError(f"{place}: nothing to learn is left for the {split} split: add texts")
        packed[split], packed[f"{split}_targets"] = stream.finish(), np.array(stream.targets)
    note = f"{splits['train'].number} texts and conversations to train, {splits['test'].number} to test"
    note += f"; {longer} conversations longer than {length} tokens: {too_long}" if longer else ""
    return packed | dict(notes=np.array(note))


class _Stream:
    """The tokens of a split's rows, one after another in a file without a name."""

    def __init__(self, length: int) -> None:
        self.length, self.file, self.waiting = length, tempfile.TemporaryFile(), []
        self.at = self.number = self.targets = 0

    def append(self, tokens: np.ndarray, begins: bool = True) -> None:
        self.number += begins
        tokens["documents"] = self.number
        self.targets += int(tokens["learned"][int(begins) :].sum())
        self._write(tokens)

    def append_waiting(self) -> None:
        """Conversations, each in one row: always the longest that fits into what is left of it."""
        self.waiting.sort(key=len)
        while self.waiting:
            left = self.length - self.at % self.length
            if index := bisect.bisect_right(self.waiting, left + 1, key=len):
                self.append(self.waiting.pop(index - 1))
            else:
                self._write(np.zeros(left, TOKEN))

    def finish(self) -> np.ndarray:
        self._write(np.zeros((1 - self.at) % self.length, TOKEN))
        self.file.flush()
        return np.memmap(self.file, TOKEN, "r")

    def _write(self, tokens):
        self.file.write(tokens.tobytes())
        self.at += len(tokens)


# Reading


def write_demo(folder: Path, size: int, rng: np.random.Generator) -> None:
    """train/TOPIC.txt and test/TOPIC.txt, a tenth of them to test, of up to `size` topics of `help()`: parts
    of the Python Language Reference, which come with every Python."""
    for number, (topic, text) in enumerate(sorted(pydoc_data.topics.topics.items())[:size]):
        place = folder / ("test" if number % 10 == 9 else "train") / f"{topic}.txt"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")


def find_files(place: Path) -> list[tuple[Path, str | None]]:
    """(file, its split), texts first. Where some are in splits, the others are left out; without one for
    tests all splits are None. Raises TpukitError where there is no file."""
    found, folder = [], place if place.is_dir() else place.parent
    for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
        is_hidden = path.name.startswith((".", "cache-"))  # the second: the Hugging Face library's own
        if path.suffix in (*TEXTS, LINES, *arrow.ENDINGS) and path.is_file() and not is_hidden:
            words = (re.split("[-_.]", part.lower())[0] for part in path.relative_to(folder).parts)
            found.append((path, next((SPLITS[word] for word in words if word in SPLITS), None)))
    if not found:
        raise TpukitError(
            f"{place} does not exist or has no texts: it should be text files ({', '.join(TEXTS)}), .jsonl"
            " files with text, prompt and completion, or messages in each line, or a Hugging Face dataset"
            " saved on disk"
        )
    splits = {split for _, split in found}
    found = [(path, split) for path, split in found if split or splits == {None}]
    found.sort(key=lambda pair: pair[0].suffix not in TEXTS)  # or a conversation would come between pieces
    return [(path, split if "test" in splits else None) for path, split in found]


def read_documents(place: Path, tokenizer: Any, test_share: float) -> Iterator[Document]:
    """Yield the documents of a file, or of all files below a folder. Where no file says what is for tests, it
    is the end of each text, and of lists every so many documents, the first among them."""
    number = 0
    for path, split in find_files(place):
        if path.suffix in TEXTS:
            yield from _read_text(path, split, tokenizer, test_share)
            continue
        for where, row in _read_rows(path):
            is_test = math.ceil((number + 1) * test_share) > math.ceil(number * test_share)
            number += 1
            yield Document(split or ("test" if is_test else "train"), *parts_of(row, tokenizer, where))


def _read_text(path, split, tokenizer, test_share) -> Iterator[Document]:
    with (
        explained(f"{path} is not a text in UTF-8: save it as one"),
        open(path, encoding="utf-8-sig") as file,
    ):
        count = sum(map(len, iter(functools.partial(file.read, PIECE), "")))
        cut = {None: count - round(test_share * count), "train": count, "test": 0}[split]
        file.seek(0)
        for name, first, last in (("train", 0, cut), ("test", cut, count)):
            for at in range(first, last, PIECE):
                start, text, end = parts_of(dict(text=file.read(min(PIECE, last - at))), tokenizer, "")[0]
                parts = [start] * (at == first) + [text] + [end] * (at + PIECE >= last)
                yield Document(name, parts, False, begins=at == first)


def _read_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(where it is, content) of the lines of a .jsonl file, or the rows of a file of a dataset."""
    if path.suffix == LINES:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    with explained(f"{path}, line {number}: not JSON in UTF-8, so mend or delete it"):
                        row = json.loads(line)
                    yield f"{path}, line {number}", row
        return
    with arrow.reading(path) as pyarrow:
        if path.suffix == ".parquet":
            batches = pyarrow.parquet.ParquetFile(path).iter_batches(1000)
        else:
            batches = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path)))
        for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), 1):
            yield f"{path}, row {number}", row


def parts_of(row: Any, tokenizer: Any, where: str) -> tuple[list[tuple[str, bool]], bool]:
    """([(text, whether it is to be learned)], whether it is a conversation) of a dict with `messages`, with
    `prompt` and `completion`, or with `text`. where: for errors.

    What the assistant says is to be learned, but for turns that the chat template writes in another way once
    others follow."""
    messages = _messages(row, where)
    if isinstance(messages, str):
        start = tokenizer.decode(tokenizer("")["input_ids"][:1])  # what the model expects first, if anything
        return [(start, False), (messages, True), (tokenizer.eos_token, True)], False
    if not any(one["role"] == "assistant" and one["content"].strip() for one in messages):
        raise TpukitError(f"{where}: the completion is empty: there is nothing to learn")
    whole, parts, at = _render(messages, tokenizer, where), [], 0
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            before = _render(messages[:number], tokenizer, where, prompt=True)
            after = _render(messages[: number + 1], tokenizer, where)
            if len(before) >= at and after.startswith(before) and whole.startswith(after):
                parts += [(whole[at : len(before)], False), (whole[len(before) : len(after)], True)]
                at = len(after)
    if not parts:
        raise TpukitError(f"{where}: the model's chat template does not show where the assistant begins")
    return [*parts, (whole[at:], False)], True


def _messages(row: Any, where: str) -> list[dict[str, str]] | str:
    """The messages of a row, or its text."""
    row = row if isinstance(row, dict) else {}
    messages, text, roles = row.get("messages"), row.get("text"), dict(prompt="user", completion="assistant")
    if messages is None and row.get("prompt") is not None:
        given = {name: row[name] for name in roles if row.get(name) is not None}
        messages = [dict(role=roles[name], content=content) for name, content in given.items()]
    if messages is None and isinstance(text, str):
        return text
    is_list = isinstance(messages, list) and messages
    if not is_list or not all(has_type(one, dict(role=str, content=str)) for one in messages):
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
    with `prompt` or `messages`."""
    rows: Any = _read_rows(path)
    if path.suffix != LINES:
        with explained(f"{path} is not a text in UTF-8: save it as one"):
            rows = [(str(path), dict(prompt=path.read_text("utf-8-sig").rstrip("\n")))]
    prompts = []
    for where, row in rows:
        said, name = _messages(row, where), f"{path.name}{where.removeprefix(str(path))}"
        if not isinstance(said, str):
            is_answered = len(said) > 1 and said[-1]["role"] == "assistant"
            said = _render(said[: len(said) - is_answered], tokenizer, name, prompt=True)
        prompts.append((name, tokenizer(said, add_special_tokens=False)["input_ids"]))
    return prompts
