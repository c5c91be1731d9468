"""Texts and conversations, tokenised once and packed into rows of one length.

Shapes: R rows, B batch, T tokens of a row."""

from __future__ import annotations

import bisect
import collections
import glob
import itertools
import json
import math
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tpukit.host.errors import TpukitError
from tpukit.tasks import arrays
from tpukit.tasks.splits import about_tables, find_files, some
from tpukit.tasks.text import conversations, reading
from tpukit.tasks.text.conversations import TOKEN

SHORTEST = 128  # tokens of a row by default, at least
MOST_NOTES = 8  # about texts
MANY = 256  # documents, or fewer conversations, from which rows are filled
VERSION = 6  # of what `_pack` makes of the same files, which is cached
COPIES = "test texts are training texts, too: the scores say nothing of new texts"


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
        self.sizes = packed["sizes"][self.kept].sum() / max(1, len(self.kept))  # tokens of a row on average

    def __len__(self) -> int:
        return len(self.kept)

    def batch(self, indices: Any, numbers: Any = None) -> dict[str, np.ndarray]:
        rows = self.rows[self.kept[indices]]
        found = {name: rows[name].astype(np.int32) for name in TOKEN.names or ()}
        return dict(found, share=np.full(len(rows), 1 / self.targets, np.float32))


def open_sets(place: Path, tokenizer: Any, length: int, test_share: float) -> tuple[TextSet, TextSet]:
    """(training set, test set) of a file or a folder, made anew or from the cache. length: T. test_share: see
    `LanguageModel`. Raises TpukitError, with the file and the line, for what cannot be trained on."""
    folder, files = place if place.is_dir() else place.parent, reading.find_texts(place)
    others = [path.name for path in files.pop("others")]
    names = [glob.escape(str(path.relative_to(folder))) for path in itertools.chain(*files.values())]
    key = [VERSION, names, arrays.content_key(folder, like=names), length, test_share]
    key += [tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id, tokenizer.chat_template]
    packed = arrays.mapped("text", key, lambda: _pack(files, tokenizer, length, test_share))
    is_test, signature = packed["is_test"], arrays.digest(key)
    notes = [str(packed["notes"]), about_tables(place, reading.PAGE)]
    if others:
        notes.append(f"{len(others)} files are not used: {some(others)}")
    train = TextSet(packed, ~is_test, signature, "\n".join(filter(None, notes)))
    test = TextSet(packed, is_test, signature, "")
    if not len(train) or not len(test):
        raise TpukitError(
            f"{place}: nothing is left to train on or to test with, so add texts"
            f" ({'; '.join(filter(None, notes))})"
        )
    return train, test


def fitting_rows(place: Path, most: int, rows: int, bytes_per_token: int) -> tuple[int, int]:
    """(T, about how many such rows the training set fills), by the sizes of the files: `most` and `rows`, or,
    of a small set, a shorter T that still holds each conversation, and the rows that there are."""
    if not find_files(place, (*reading.TEXTS, reading.LINES, reading.LIST)):
        return most, rows
    files = reading.find_texts(place)
    size, longest = sum(path.stat().st_size for path in files["train"] + files["test"]), 0
    if size < most * rows * bytes_per_token:
        for path in files["train"]:
            if path.suffix not in reading.TEXTS:
                lengths = (len(json.dumps(row, ensure_ascii=False)) for _, row in reading.read_rows(path))
                longest = max(longest, *lengths, 0)
    # A token has at least half as many letters as one of English.
    longest = math.ceil(longest / max(1, bytes_per_token / 2))
    length, shortest = most, max(SHORTEST, longest)
    while length // 2 >= shortest and size // bytes_per_token // length < rows:
        length //= 2
    return length, min(rows, size // bytes_per_token // length)


def _pack(files, tokenizer, length, test_share) -> dict[str, np.ndarray]:
    """rows (R, T) of `TOKEN`; of each (R,) targets, how many labels it has, sizes, how many tokens, and
    is_test; and notes."""
    file, at, longer, border = tempfile.TemporaryFile(), 0, 0, 0
    nothing, counts = np.array([(0, -1, 0)], TOKEN), collections.Counter()
    left_out, learned, held_out = [], set(), []
    # Without a test split: every tenth document, or row where texts are long.
    shares_rows = not files["test"] and any(path.suffix in reading.TEXTS for path in files["train"])

    def write(tokens):
        nonlocal at
        file.write(tokens.tobytes())
        at += len(tokens)

    def is_held_out(number):
        return math.ceil((number + 1) * test_share) > math.ceil(number * test_share)

    for split in ("train", "test"):
        border = at // length
        found = _documents(files[split], tokenizer, counts, left_out)
        documents = enumerate(found if split == "train" else itertools.chain(found, held_out))
        while group := list(itertools.islice(documents, MANY)):
            whole = []  # conversations, each of which stays in one row
            for number, document in group:
                if split == "train" and not files["test"] and not shares_rows and is_held_out(number):
                    held_out.append(document)
                    continue
                tokens, is_conversation, content = document
                counts[COPIES] += split == "test" and content in learned
                learned.update([content] if split == "train" else [])
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
    if left_out and not at:
        raise TpukitError(left_out[0])
    write(nothing.repeat(length))  # no file is empty
    file.flush()
    rows = np.memmap(file, TOKEN, "r", shape=(at // length, length))
    targets = np.array([(row["labels"] >= 0).sum() for row in rows])
    sizes = np.array([(row["documents"] > 0).sum() for row in rows])
    is_test = np.arange(len(rows)) >= border
    if shares_rows:
        is_test = np.diff(np.ceil(np.arange(len(rows) + 1) * test_share)) > 0
    notes = [f"{targets.sum()} tokens to predict, in rows of {length}"]
    notes += [f"{longer} conversations longer than that go on in the next row"] if longer else []
    notes += [f"{len(left_out)} texts are left out ({left_out[0]})"] if left_out else []
    notes += [f"{count} {what}" for what, count in counts.most_common(MOST_NOTES) if count]
    if re.search(conversations.NOW, tokenizer.chat_template or ""):
        notes += [
            f"the chat template writes the date, in this training run always {conversations.DAY:%d %B %Y}"
        ]
    return dict(rows=rows, targets=targets, sizes=sizes, is_test=is_test, notes=np.array("; ".join(notes)))


def _documents(paths, tokenizer, counts, left_out):
    """Yield (tokens, whether it is a conversation, a hash) of what there is to learn in files. counts: see
    `conversations.tokens_of`. left_out: gets a sentence about each row without anything to learn."""
    from tpukit.host.bars import tqdm

    rows = itertools.chain.from_iterable(map(reading.read_rows, paths))
    for where, row in tqdm(rows, disable=None, leave=False, unit=" texts"):
        try:
            tokens, is_conversation = conversations.tokens_of(row, tokenizer, where, counts)
        except reading.NothingToLearn as error:
            left_out.append(str(error))
        else:
            yield tokens, is_conversation, hash(json.dumps(row, sort_keys=True))
