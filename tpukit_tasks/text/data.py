"""Texts and conversations, tokenised once and packed into rows of one length.

Shapes: R rows, B batch, T tokens of a row."""

import bisect
import itertools
import json
import math
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tpukit.data import arrays
from tpukit.data.arrays import Arrays
from tpukit.data.splits import some
from tpukit.host.errors import TpukitError
from tpukit_tasks.text import conversations, reading
from tpukit_tasks.text.conversations import TOKEN

BATCH, LENGTH = 16, 1024  # rows of a batch, and tokens of a row, unless the data or the model need fewer
SHORTEST = 128  # tokens of a row by default, at least
FEWEST_STEPS = 50  # optimizer steps; with fewer a training run hardly learns
MOST_NOTES = 8  # about texts
MANY = 256  # conversations to choose from for what is left of a row
VERSION = 9  # raise it if `_pack` makes something else of the same files, because that is cached
NOTHING = np.array([(0, -1, 0)], TOKEN)
COPIES = "test texts are training texts, too: the scores say nothing about new texts"


class TextSet:
    """One split of packed rows.

    `batch(indices, numbers)` -> dict of (B, T) each: tokens; labels, the next ones, or -1 if nothing is to be
    learned there; documents, numbers that tell them apart, 0 at the end of a row that is not full; and share
    (B,), see `shares`, of a step of these rows alone. `notes`: sentences for the log."""

    num_uniforms = 0

    def __init__(self, packed: Arrays, is_here: np.ndarray, signature: str, notes: str) -> None:
        self.rows, self.signature, self.notes = packed["rows"], signature, notes
        self.kept = np.flatnonzero(is_here & (packed["targets"] > 0))
        self.targets = packed["targets"][self.kept]  # labels of each row
        self.sizes = packed["sizes"][self.kept]  # tokens of each row

    def __len__(self) -> int:
        return len(self.kept)

    def batch(self, indices: Any, numbers: Any = None) -> Arrays:
        rows = self.rows[self.kept[indices]]
        found = {name: rows[name].astype(np.int32) for name in TOKEN.names or ()}
        return dict(found, share=self.shares(indices))

    def shares(self, indices: Any) -> np.ndarray:
        """Return (B,) for the rows of a step: B over the labels of all, since the loss is their mean."""
        return np.full(len(indices), len(indices) / self.targets[indices].sum(), np.float32)


def open_sets(place: Path, tokenizer: Any, length: int, test_share: float) -> tuple[TextSet, TextSet]:
    """Return (training set, test set) of a file or a folder, made anew or from the cache. length: T.
    test_share: see `LanguageModel`. Raises TpukitError, with the file and the line, for what cannot be
    trained on."""
    folder, files = place if place.is_dir() else place.parent, reading.find_texts(place)
    others = [path.name for path in files.pop("others")]
    paths = list(itertools.chain(*files.values()))
    names = [str(path.relative_to(folder)) for path in paths]
    key = [VERSION, names, arrays.content_key(paths), length, test_share]
    key += [tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id, tokenizer.chat_template]
    packed = arrays.mapped("text", key, lambda: _pack(files, tokenizer, length, test_share))
    is_test, signature = packed["is_test"], arrays.digest(key)
    notes = [str(packed["notes"])]
    if others:
        notes.append(f"{len(others)} files are not used: {some(others)}")
    train = TextSet(packed, ~is_test, signature, "\n".join(notes))
    test = TextSet(packed, is_test, signature, "")
    if not len(train) or not len(test):
        raise TpukitError(
            f"{place}: nothing is left to train on or to test with, so add texts ({'; '.join(notes)})"
        )
    return train, test


def fitting_sizes(place: Path | None, bytes_per_token: int) -> tuple[int, int]:
    """Return (rows of a batch, T) by the sizes of the files: `BATCH` and `LENGTH`, or, for a small training
    set, a shorter T that still holds each conversation, and fewer rows, for `FEWEST_STEPS` in an epoch.

    Raises TpukitError as `open_sets`."""
    if place is None:
        return BATCH, LENGTH
    files = reading.find_texts(place)
    rows = BATCH * FEWEST_STEPS
    tokens = sum(path.stat().st_size for path in files["train"] + files["test"]) // bytes_per_token
    if tokens >= LENGTH * rows:
        return BATCH, LENGTH
    longest = 0  # conversation, in bytes
    for path in files["train"]:
        if path.suffix not in reading.TEXTS:
            for _, row in reading.read_rows(path):
                longest = max(longest, len(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace")))
    # A token has at least half as many bytes as one of English.
    shortest = max(SHORTEST, math.ceil(longest / max(1, bytes_per_token / 2)))
    length = LENGTH
    while length // 2 >= shortest and tokens // length < rows:
        length //= 2
    batch = min(BATCH, max(1, tokens // length // FEWEST_STEPS))
    return 2 ** int(math.log2(batch)), length


def _pack(files, tokenizer, length, test_share) -> Arrays:
    """Return rows (R, T) of `TOKEN`; for each (R,) targets, how many labels it has, sizes, how many tokens,
    and is_test; and notes."""
    rows, counts, left_out = _Rows(length), reading.Counts(), []
    held_out, learned = [], set()
    # Without a test split, documents are held out of it, or rows if there are texts, which may be long.
    has_test, has_texts = bool(files["test"]), any(path.suffix in reading.TEXTS for path in files["train"])
    for number, document in enumerate(_documents(files["train"], tokenizer, counts, left_out)):
        if not has_test and not has_texts and _is_held_out(number, test_share):
            held_out.append(document)
            continue
        tokens, is_conversation, content = document
        learned.add(content)
        rows.add(tokens, is_conversation)
    rows.finish()
    border = rows.at // length
    testing = itertools.chain(_documents(files["test"], tokenizer, counts, left_out), held_out)
    for tokens, is_conversation, content in testing:
        counts[COPIES] += content in learned
        rows.add(tokens, is_conversation)
    rows.finish()
    if left_out and not rows.at:
        raise TpukitError(left_out[0])
    packed = rows.mapped()
    targets = np.array([(row["labels"] >= 0).sum() for row in packed])
    sizes = np.array([(row["documents"] > 0).sum() for row in packed])
    numbers = np.arange(len(packed))
    is_test = _is_held_out(numbers, test_share) if has_texts and not has_test else numbers >= border
    notes = [f"{targets.sum()} tokens to predict, in rows of {length}"]
    if rows.longer:
        notes.append(f"{rows.longer} conversations longer than that continue in the next row")
    if left_out:
        notes.append(f"{len(left_out)} texts are left out ({left_out[0]})")
    notes += [f"{count} {what}" for what, count in counts.most_common(MOST_NOTES) if count]
    if re.search(conversations.NOW, tokenizer.chat_template or ""):
        notes.append(f"the chat template writes the date, here always {conversations.DAY:%d %B %Y}")
    return dict(rows=packed, targets=targets, sizes=sizes, is_test=is_test, notes=np.array("; ".join(notes)))


def _documents(paths, tokenizer, counts, left_out) -> Iterator[tuple[np.ndarray, bool, int]]:
    """Yield (tokens, whether it is a conversation, a hash) of what there is to learn in files. counts: see
    `conversations.tokens_of`. left_out: gets a sentence about each row without anything to learn."""
    from tpukit.host.bars import tqdm

    rows = itertools.chain.from_iterable(map(reading.read_rows, paths))
    for where, row in tqdm(rows, disable=None, leave=False, unit=" texts"):
        try:
            tokens, is_conversation = conversations.tokens_of(row, tokenizer, counts)
        except reading.NothingToLearn as error:
            left_out.append(f"{where}: {error}")
        except TpukitError as error:
            raise TpukitError(f"{where}: {error}") from error
        else:
            yield tokens, is_conversation, hash(tokens.tobytes())


def _is_held_out(number, share):
    """Return whether the document or row of a number is held out, evenly spaced. number: int or array."""
    return np.ceil((number + 1) * share) > np.ceil(number * share)


class _Rows:
    """Rows of one length in a temporary file, filled one after another by documents. `at`: tokens so far.
    `longer`: conversations that are longer than a row."""

    def __init__(self, length: int) -> None:
        self.length, self.file = length, tempfile.TemporaryFile()
        self.at, self.documents, self.longer = 0, 0, 0
        self.waiting = []  # conversations

    def add(self, tokens: np.ndarray, is_conversation: bool) -> None:
        """Write a text where the one before ended. A conversation that fits in a row has to stay in one, so
        it waits until there are some to choose from."""
        if is_conversation and len(tokens) <= self.length:
            self.waiting.append(tokens)
        else:
            self.longer += is_conversation
            self._write(tokens)
        if len(self.waiting) == MANY:
            self._write_waiting()

    def finish(self) -> None:
        """Write what waits, and begin a new row."""
        self._write_waiting()
        self._leave_empty(-self.at % self.length)

    def mapped(self) -> np.ndarray:
        """Return all rows (R, T) as a memory map, and one that is empty, since no file may be."""
        self._leave_empty(self.length)
        self.file.flush()
        return np.memmap(self.file, TOKEN, "r", shape=(self.at // self.length, self.length))

    def _write_waiting(self):
        self.waiting.sort(key=len)
        while self.waiting:  # always the longest that fits in what is left of a row
            room = self.length - self.at % self.length
            if index := bisect.bisect_right(self.waiting, room, key=len):
                self._write(self.waiting.pop(index - 1))
            else:
                self._leave_empty(room)

    def _write(self, tokens):
        tokens["documents"] = 1 + self.documents % (2**16 - 1)  # a row has fewer
        self.documents += 1
        self.file.write(tokens.tobytes())
        self.at += len(tokens)

    def _leave_empty(self, count):
        self.file.write(NOTHING.repeat(count).tobytes())
        self.at += count
