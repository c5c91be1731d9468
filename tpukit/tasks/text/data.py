"""Documents, tokenised once and packed into rows of one length, in memory-mapped files.

Shapes: R rows, B batch, T positions of a row; a row has T + 1 tokens, the last one only to be predicted."""

from __future__ import annotations

import bisect
import glob
import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tpukit.host import arrays
from tpukit.host.errors import TpukitError
from tpukit.host.tables import printable
from tpukit.tasks.text import documents
from tpukit.tasks.text.documents import Document

VERSION = 1  # of what `_pack` makes of the same files, which is cached
PIECES = 512  # that are tokenised at once, on all cores
MADE = ("tokens", "documents", "learned")


class TextSet:
    """One split of packed rows.

    `batch(indices, numbers)` -> dict of (B, T + 1) each: tokens; documents, their numbers in the row from 1,
    0 where nothing is; learned, bool; and share (B,), one over the tokens that a row predicts on average.
    `notes`: sentences for the log."""

    num_uniforms = 0

    def __init__(self, packed: dict[str, np.ndarray], split: str, signature: str) -> None:
        self.tokens, self.documents, self.learned = (packed[f"{split}_{name}"] for name in MADE)
        self.targets, self.signature = float(packed[f"{split}_targets"]), signature
        self.notes = printable(str(packed["notes"])) if split == "train" else ""

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, indices: Any, numbers: Any = None) -> dict[str, np.ndarray]:
        tokens, documents = (rows[indices].astype(np.int32) for rows in (self.tokens, self.documents))
        share = np.full(len(tokens), 1 / max(self.targets, 1.0), np.float32)
        return dict(tokens=tokens, documents=documents, learned=self.learned[indices], share=share)

    # The same from arrays on the device

    def device_nbytes(self) -> int:
        return 9 * self.tokens.size + 4 * len(self)

    def device_arrays(self) -> dict[str, np.ndarray]:
        return self.batch(slice(None))

    def sample_parameters(self, indices: Any, numbers: Any = None) -> dict[str, np.ndarray]:
        return {}

    def compose(self, rows: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
        return rows | parameters


def open_sets(
    place: Path, tokenizer: Any, length: int, too_long: str, test_share: float
) -> tuple[TextSet, TextSet]:
    """(training set, test set) of a file or a folder, made anew or from the cache. length: T. too_long,
    test_share: see `LanguageModel`."""
    folder = place if place.is_dir() else place.parent
    names = [glob.escape(str(path.relative_to(folder))) for path, _ in documents.find_files(place)]
    template = tokenizer.chat_template or documents.TEMPLATE
    of_tokenizer = [tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id, template]
    key = [VERSION, names, arrays.content_key(folder, like=names), arrays.digest(of_tokenizer)]
    key += [length, too_long, test_share]
    packed = arrays.mapped("text", key, lambda: _pack(place, tokenizer, length, too_long, test_share))
    train, test = (TextSet(packed, split, arrays.digest(key)) for split in ("train", "test"))
    return train, test


def _pack(place, tokenizer, length, too_long, test_share) -> dict[str, np.ndarray]:
    """The arrays of `TextSet` for each split, (R, T + 1); targets, tokens that a row predicts; notes."""
    dtype, packed = np.uint16 if len(tokenizer) <= 2**16 else np.int32, {}
    with tempfile.TemporaryFile() as ids, tempfile.TemporaryFile() as flags:
        found = _tokenise(place, tokenizer, ids, flags, dtype)
        count = flags.tell()
        if not count:
            raise TpukitError(f"{place} holds nothing but empty texts")
        tokens = np.memmap(ids, dtype, "r", shape=(count,))
        learned = np.memmap(flags, bool, "r", shape=(count,))
        notes = [f"{len(found)} documents, {count} tokens"]
        for split, segments in _split(found, test_share).items():
            rows, note = _lay_out(segments, learned, length + 1, too_long)
            if not rows:
                raise TpukitError(f"{place}: nothing is left for the {split} split: add texts")
            made = [
                np.memmap(tempfile.TemporaryFile(), kind, "w+", shape=(len(rows), length + 1))
                for kind in (dtype, np.uint16, bool)
            ]
            targets = used = 0
            for row, segments_of_row in enumerate(rows):
                at = 0
                for number, (start, end) in enumerate(segments_of_row, 1):
                    here = slice(at, at + end - start)
                    for array, values in zip(made, (tokens[start:end], number, learned[start:end])):
                        array[row, here] = values
                    at = here.stop
                    targets += int(learned[start + 1 : end].sum())
                used += at
            packed |= {f"{split}_{name}": array for name, array in zip(MADE, made)}
            packed[f"{split}_targets"] = np.array(targets / len(rows))
            empty = 1 - used / made[0].size
            notes.append(f"{split}: {len(rows)} rows of {length} tokens, {empty:.1%} of them empty{note}")
    return packed | dict(notes=np.array("\n".join(notes)))


def _tokenise(place, tokenizer, ids, flags, dtype) -> list[Document]:
    """Write the tokens of all documents to one file, and whether they are to be learned to another. Returns
    the documents, with their places in there."""
    from tqdm.auto import tqdm

    begins, found = documents.beginning(tokenizer), []

    def pieces():
        for document in documents.read_documents(place, tokenizer):
            found.append(document)
            yield from ((document, text, learned) for text, learned in document.parts if text)
            yield document, "", True  # its end

    def write(values, learned):
        ids.write(np.array(values, dtype).tobytes())
        flags.write(bytes([learned]) * len(values))

    waiting = iter(tqdm(pieces(), desc="tokenising", unit=" pieces", disable=None, leave=False))
    while batch := list(itertools.islice(waiting, PIECES)):
        encoded = tokenizer([text for _, text, _ in batch], add_special_tokens=False)["input_ids"]
        for (document, text, learned), tokens in zip(batch, encoded):
            if document.start < 0:
                document.start = flags.tell()
                write([] if document.is_complete else begins, False)
            if not text and not document.is_complete:
                tokens = [tokenizer.eos_token_id]
            write(tokens, learned)
            document.end = flags.tell()
    ids.flush()
    flags.flush()
    return found


def _split(found, test_share):
    """{train, test: [(start, end, is_whole)]}. Where nothing says what is for tests: the end of each text,
    and of lists the documents whose hashes come first, at least one of two."""
    splits = dict(train=[], test=[])
    has_tests = any(one.split == "test" for one in found)
    keys = sorted({one.key for one in found if one.key})
    tests = set(keys[: min(max(1, round(test_share * len(keys))), len(keys) - 1)]) if keys else set()
    for one in found:
        cut = one.end
        if has_tests:
            cut = one.start if one.split == "test" else one.end
        elif one.key:
            cut = one.start if one.key in tests else one.end
        else:
            cut -= round(test_share * (one.end - one.start))
        for split, start, end in (("train", one.start, cut), ("test", cut, one.end)):
            if start < end:
                splits[split].append((start, end, one.is_whole))
    return splits


def _lay_out(segments, learned, size, too_long):
    """([[(start, end)] of each row], note): texts one after another, cut where a row of `size` tokens ends,
    conversations whole, each in the row with the least room that is enough."""
    rows, texts, longer, empty = [], [], 0, 0
    rooms: list[tuple[int, int]] = []  # (free tokens, row), sorted
    room = 0
    # The longest conversations first: into what they leave, shorter ones fit.
    for start, end, is_whole in sorted(segments, key=lambda one: one[2] and one[0] - one[1]):
        if not is_whole:
            while start < end:
                if not room:
                    texts.append([])
                    room = size
                taken = min(room, end - start)
                texts[-1].append((start, start + taken))
                start, room = start + taken, room - taken
                start -= not room and start < end  # the last token was only to be predicted
            continue
        longer += end - start > size
        last = (
            start + 1 if too_long == "cut" else 0 if too_long == "leave-out" and end - start > size else end
        )
        for first in range(start, last, size - 1):
            piece = first, min(first + size, end)
            needed = piece[1] - piece[0]
            if needed < 2:  # the token that the piece before has predicted
                continue
            if not learned[piece[0] + 1 : piece[1]].any():
                empty += 1
                continue
            index = bisect.bisect_left(rooms, (needed, -1))
            free, row = rooms.pop(index) if index < len(rooms) else (size, len(rows))
            if row == len(rows):
                rows.append([])
            rows[row].append(piece)
            bisect.insort(rooms, (free - needed, row))
    words = {"split": "split over rows", "cut": "cut", "leave-out": "left out"}[too_long]
    note = f"; {longer} conversations longer than that, {words}" if longer else ""
    note += f"; {empty} pieces left out, in which nothing is to be learned" if empty else ""
    return rows + [row for row in texts if any(end - start > 1 for start, end in row)], note
