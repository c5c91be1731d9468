"""Texts and conversations, tokenised once and packed into rows of one length.

Shapes: R rows, B batch, T tokens of a row."""

import bisect
import itertools
import math
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tpukit.data import arrays
from tpukit.data.arrays import Arrays
from tpukit.host.errors import TpukitError
from tpukit_tasks.splits import some
from tpukit_tasks.text import conversations, reading
from tpukit_tasks.text.conversations import TOKEN

BATCH, LENGTH = 16, 1024  # rows of a batch, and tokens of a row, unless the data or the model need fewer
SHORTEST, TEXT_SHORTEST, STEP = 64, 128, 16  # tokens of a row by default: at least, if there are texts, steps
WASTE = 0.1  # so much more of the rows may be empty than with others, which are longer
FEWEST_STEPS = 50  # optimizer steps; with fewer a training run hardly learns
MOST_NOTES = 8  # about texts
MANY = 256  # conversations to choose from for what is left of a row
VERSION = 11  # raise it if `_pack` makes something else of the same files, because that is cached
NOTHING = np.array([(0, -1, 0)], TOKEN)
COPIES = "test texts are training texts, too: the scores say nothing about new texts"


class TextSet:
    """One split of packed rows.

    `batch(indices, numbers)` -> dict of (B, T) each: tokens; labels, the next ones, or -1 if nothing is to be
    learned there; documents, numbers that tell them apart, 0 at the end of a row that is not full; and share
    (B,), see `shares`, of a step of these rows alone. is_chat: whether a conversation trains. `notes`:
    sentences for the log."""

    num_uniforms = 0

    def __init__(self, packed: Arrays, is_here: np.ndarray, signature: str, notes: str) -> None:
        self.rows, self.signature, self.notes = packed["rows"], signature, notes
        self.is_chat = bool(packed["is_chat"])
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


def open_sets(
    place: Path, tokenizer: Any, length: int, test_share: float, *, learns_all: bool = False
) -> tuple[TextSet, TextSet]:
    """Return (training set, test set) of a file or a folder, made anew or from the cache. length: T.
    test_share: see `LanguageModel`. learns_all: its `learn_questions`. Raises TpukitError, with the file and
    the line, for what cannot be trained on."""
    files = reading.find_texts(place)
    others = [path.name for path in files.pop("others")]
    key = [*_key(place, files, tokenizer), length, test_share, learns_all]
    packed = arrays.mapped("text", key, lambda: _pack(files, tokenizer, length, test_share, learns_all))
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


def _key(place, files, tokenizer):
    """Return what decides on the tokens of files."""
    paths = list(itertools.chain(*files.values()))
    names = [str(path.relative_to(place if place.is_dir() else place.parent)) for path in paths]
    backend = tokenizer.backend_tokenizer.to_str()
    contents = arrays.content_key(paths)
    return [VERSION, names, contents, backend, tokenizer.eos_token_id, tokenizer.chat_template]


def fitting_sizes(
    place: Path | None, tokenizer: Any, most: int, bytes_per_token: int, length: int | None = None
) -> tuple[int, int]:
    """Return (rows of a batch, T): `BATCH` and `LENGTH`, or, for a small training set, a shorter T that holds
    each conversation and leaves little of the rows empty, and fewer rows, for `FEWEST_STEPS` in an epoch.

    most: the largest T. bytes_per_token: about. length: T if it is given. Raises TpukitError as
    `open_sets`."""
    limit = length or min(LENGTH, most)
    if place is None:
        return BATCH, limit
    files = reading.find_texts(place)
    del files["others"]
    size = sum(path.stat().st_size for path in itertools.chain(*files.values()))
    if size >= bytes_per_token * limit * BATCH * FEWEST_STEPS:
        return BATCH, limit
    key = ["sizes", *_key(place, files, tokenizer)]
    found = arrays.mapped("text", key, lambda: _sizes_of(files["train"], tokenizer))
    sizes, in_texts = found["conversations"].clip(max=limit).tolist(), int(found["texts"])
    shortest = limit if length else max(*sizes, TEXT_SHORTEST if in_texts else SHORTEST)
    lengths = [*(T for T in range(0, limit, STEP) if T >= shortest), limit]
    counts = {T: _count_rows(sizes, T) + in_texts // T for T in lengths}
    enough = [T for T, count in counts.items() if count >= FEWEST_STEPS] or lengths[:1]
    if in_texts:  # each row begins without what came before, so the longer the better
        length = max((T for T in enough if counts[T] >= BATCH * FEWEST_STEPS), default=lengths[0])
    else:
        empty = {T: 1 - sum(sizes) / (T * max(1, counts[T])) for T in enough}
        length = next(T for T in enough if empty[T] <= min(empty.values()) + WASTE)
    batch = min(BATCH, max(1, counts[length] // FEWEST_STEPS))
    return 2 ** int(math.log2(batch)), length


def _sizes_of(paths, tokenizer) -> Arrays:
    """Return the tokens of each document of the conversations in files, and those of their texts together."""
    sizes, in_texts = [], 0
    for documents, is_conversation in _documents(paths, tokenizer, reading.Counts(), []):
        if is_conversation:
            sizes += map(len, documents)
        else:
            in_texts += len(documents[0])
    # One more, since no file may be empty
    return dict(conversations=np.array([*sizes, 0]), texts=np.array(in_texts))


def _count_rows(sizes, length):
    """Return how many rows of a length `_Rows` makes of documents of these sizes."""
    rows, room, waiting = 0, 0, sorted(sizes)
    while waiting:
        if index := bisect.bisect_right(waiting, room):
            room -= waiting.pop(index - 1)
        else:
            rows, room = rows + 1, length
    return rows


def _pack(files, tokenizer, length, test_share, learns_all) -> Arrays:
    """Return rows (R, T) of `TOKEN`; for each (R,) targets, how many labels it has, sizes, how many tokens,
    and is_test; is_chat, whether a conversation trains; and notes."""
    rows, counts, left_out = _Rows(length), reading.Counts(), []
    held_out, learned, kinds = [], set(), set()
    # Without a test split, documents are held out of it, or rows if there are texts, which may be long.
    has_test, has_texts = bool(files["test"]), any(path.suffix in reading.TEXTS for path in files["train"])
    for number, row in enumerate(_documents(files["train"], tokenizer, counts, left_out, learns_all)):
        if not has_test and not has_texts and _is_held_out(number, test_share):
            held_out.append(row)
            continue
        documents, is_conversation = row
        learned.add(_hash(documents))
        kinds.add(is_conversation)
        rows.add(documents, is_conversation)
    rows.finish()
    border = rows.at // length
    others = _documents(files["test"], tokenizer, counts, left_out, learns_all)
    testing = itertools.chain(others, held_out)
    for documents, is_conversation in testing:
        counts[COPIES] += _hash(documents) in learned
        rows.add(documents, is_conversation)
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
        notes.append(
            f"{rows.longer} conversations are longer than a row, up to {rows.longest} tokens: they lose their"
            f" ends, {rows.lost} tokens, {rows.unlearned} of them to learn; {rows.dropped} lose all answers"
            " (a larger sequence_length keeps more)"
        )
    if left_out:
        notes.append(f"{len(left_out)} texts are left out ({left_out[0]})")
    notes += [f"{count} {what}" for what, count in counts.most_common(MOST_NOTES) if count]
    if re.search(conversations.NOW, tokenizer.chat_template or ""):
        notes.append(f"the chat template writes the date, here always {conversations.DAY:%d %B %Y}")
    found = dict(rows=packed, targets=targets, sizes=sizes, is_test=is_test)
    return dict(found, is_chat=np.array(True in kinds), notes=np.array("; ".join(notes)))


def _documents(
    paths, tokenizer, counts, left_out, learns_all=False
) -> Iterator[tuple[list[np.ndarray], bool]]:
    """Yield ([tokens of each of its documents], whether it is a conversation) of each row of files. counts:
    see `conversations.tokens_of`. left_out: gets a sentence about each row without anything to learn."""
    from tpukit.host.bars import tqdm

    rows = itertools.chain.from_iterable(map(reading.read_rows, paths))
    for where, row in tqdm(rows, disable=None, leave=False, unit=" texts"):
        try:
            read = conversations.tokens_of
            tokens, is_conversation = read(row, tokenizer, counts, learns_all=learns_all)
        except reading.NothingToLearn as error:
            left_out.append(f"{where}: {error}")
        except TpukitError as error:
            raise TpukitError(f"{where}: {error}") from error
        else:
            borders = np.flatnonzero(np.diff(tokens["documents"].astype(int))) + 1
            yield np.split(tokens, borders), is_conversation


def _hash(documents):
    return hash(b"".join(tokens.tobytes() for tokens in documents))


def _is_held_out(number, share):
    """Return whether the document or row of a number is held out, evenly spaced. number: int or array."""
    return np.ceil((number + 1) * share) > np.ceil(number * share)


class _Rows:
    """Rows of one length in a temporary file, filled one after another by documents. `at`: tokens so far.
    `longer`: conversations that are longer than a row, which lose their ends; `longest`: tokens of such a
    one; `lost`, `unlearned`: tokens and labels that they lose; `dropped`: those that have no label left."""

    def __init__(self, length: int) -> None:
        self.length, self.file = length, tempfile.TemporaryFile()
        self.at, self.documents = 0, 0
        self.longer, self.longest, self.lost, self.unlearned, self.dropped = 0, 0, 0, 0, 0
        self.waiting = []  # conversations

    def add(self, documents: list[np.ndarray], is_conversation: bool) -> None:
        """Write a text where the one before ended. A conversation has to stay in one row, so it waits until
        there are some to choose from."""
        for tokens in documents:
            if not is_conversation:
                self._write(tokens)
                continue
            tokens = self._beginning(tokens)
            if (tokens["labels"] >= 0).any():
                self.waiting.append(tokens)
            if len(self.waiting) == MANY:
                self._write_waiting()

    def _beginning(self, tokens):
        """Return what a row holds of a conversation. Its end is lost rather than its beginning, without which
        an answer makes no sense."""
        kept, end = tokens[: self.length], tokens[self.length :]
        if len(end):
            self.longer += 1
            self.longest = max(self.longest, len(tokens))
            self.lost += len(end)
            self.unlearned += int((end["labels"] >= 0).sum())
            self.dropped += not (kept["labels"] >= 0).any()
        return kept

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
