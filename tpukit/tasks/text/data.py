"""Texts and conversations, tokenised once and packed into rows of one length, in memory-mapped files.

Shapes: R rows, B batch, T positions of a row; a row has T + 1 tokens, the last one only to be predicted."""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import itertools
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tpukit.host import arrays
from tpukit.host.errors import TpukitError, first_line
from tpukit.host.tables import printable

VERSION = 1  # of what `_packed` makes of the same files, which is cached
SPLITS = {  # names of folders and beginnings of files, in lower case
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing", "val", "valid", "validation", "dev", "eval"), "test"),
}
TEXTS, LINES, TABLES = (".txt", ".md", ".rst"), (".jsonl",), (".parquet", ".arrow")
PIECE = 2**16  # characters of a text that are tokenised at once
PIECES = 512
# Of conversations, where the tokenizer has no template of its own.
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclasses.dataclass
class Document:
    """A text, or a conversation, which is kept in one row where that is possible."""

    split: str | None
    parts: Iterator[tuple[str, bool]]
    """(text, whether it is to be learned)"""
    is_whole: bool = False
    key: bytes = b""
    """of a document from a list, which decides its split"""
    ends: bool = True
    """whether the token for the end of a text follows"""
    start: int = -1
    end: int = -1


# Reading


def read_documents(place: Path, tokenizer: Any) -> Iterator[Document]:
    """Yield the documents of a file, or of all files below a folder. Raises TpukitError, with the file and the
    line, for what cannot be trained on."""
    for path, split in find_files(place):
        if path.suffix in TEXTS:
            yield Document(split, _pieces(path))
            continue
        rows = _lines(path) if path.suffix in LINES else _table(path)
        for where, row in rows:
            key = hashlib.sha256(json.dumps(row, sort_keys=True, default=str).encode()).digest()
            yield document_of(row, tokenizer, where, split, key)


def find_files(place: Path) -> list[tuple[Path, str | None]]:
    """(file, its split or None) of each file of texts, sorted. Where some are in splits, the others are left
    out."""
    if not place.exists():
        raise TpukitError(f"dataset {place} does not exist")
    paths, found = [place] if place.is_file() else sorted(place.rglob("*")), []
    for path in paths:
        hidden = path.name.startswith((".", "cache-"))  # the second: the Hugging Face library's own
        if path.suffix.lower() in (*TEXTS, *LINES, *TABLES) and path.is_file() and not hidden:
            words = (re.split("[-_.]", part.lower())[0] for part in path.relative_to(place.parent).parts[1:])
            found.append((path, next((SPLITS[word] for word in words if word in SPLITS), None)))
    if any(split for _, split in found):
        found = [(path, split) for path, split in found if split]
    if not found:
        raise TpukitError(
            f"{place} has no texts: it should hold text files ({', '.join(TEXTS)}), .jsonl files with text,"
            " prompt and completion, or messages in each line, or a Hugging Face dataset saved on disk"
        )
    return found


def _pieces(path: Path) -> Iterator[tuple[str, bool]]:
    try:
        with open(path, encoding="utf-8-sig") as file:
            while lines := file.readlines(PIECE):
                yield "".join(lines), True
    except (UnicodeDecodeError, OSError) as error:
        raise TpukitError(f"{path} is not a text in UTF-8 ({first_line(error)}): save it as one") from error


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number}"
            if line.strip():
                try:
                    yield where, json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise TpukitError(
                        f"{where} is not JSON ({first_line(error)}): mend or delete it"
                    ) from error


def _table(path: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a file of a Hugging Face dataset."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise TpukitError(f"{path}: reading it needs pyarrow: pip install pyarrow") from error
    if tuple(map(int, re.findall(r"\d+", pyarrow.__version__)[:3])) < (14, 0, 1):
        raise TpukitError(
            f"{path}: an older pyarrow than 14.0.1 can run code from a table: pip install -U pyarrow"
        )
    try:
        if path.suffix == ".parquet":
            batches = pyarrow.parquet.ParquetFile(path).iter_batches(1000)
        else:
            batches = iter(pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))))
        number = 0
        for batch in batches:
            for row in batch.to_pylist():
                number += 1
                yield (
                    f"{path}, row {number}",
                    {name: value for name, value in row.items() if value is not None},
                )
    except (pyarrow.ArrowException, OSError) as error:
        raise TpukitError(f"{path} is damaged ({first_line(error)}): copy or download it again") from error


def document_of(row: Any, tokenizer: Any, where: str, split: str | None = None, key: bytes = b"") -> Document:
    """The document of a line: dict with `text`, with `prompt` and `completion`, or with `messages`. where: for
    errors."""
    row = row if isinstance(row, dict) else {}
    text, prompt, completion = (row.get(name) for name in ("text", "prompt", "completion"))
    if "messages" in row or (isinstance(prompt, str) and isinstance(completion, str)):
        messages = row.get("messages") or [
            dict(role="user", content=prompt),
            dict(role="assistant", content=completion),
        ]
        check_messages(messages, where)
        if not [m for m in messages if m["role"] == "assistant" and m["content"].strip()]:
            raise TpukitError(f"{where}: the completion is empty, so that there is nothing to learn")
        if "messages" in row or tokenizer.chat_template:
            parts = list(_turns(messages, tokenizer, where))
            return Document(split, iter(parts), True, key, ends=False)
        return Document(split, iter([(prompt, False), (completion, True)]), True, key)
    if isinstance(text, str) and text:
        return Document(split, iter([(text, True)]), key=key)
    raise TpukitError(
        f"{where}: it needs a text, or a prompt and a completion, or messages, and has"
        f" {', '.join(map(str, row)) or 'none of them'}"
    )


def read_prompts(path: Path, tokenizer: Any) -> list[tuple[str, list[int]]]:
    """[(name, tokens)] of the prompts of a text file, which is one, or of the lines of a .jsonl file."""
    if path.suffix not in LINES:
        text = "".join(piece for piece, _ in _pieces(path))
        rows: Any = [(path.name, dict(prompt=text.rstrip("\n")))]
    else:
        rows = [(f"{path.name}, line {number}", row) for number, (_, row) in enumerate(_lines(path), 1)]
    prompts = []
    for where, row in rows:
        row = row if isinstance(row, dict) else {}
        messages = row.get("messages")
        if messages is None and isinstance(prompt := row.get("prompt"), str):
            if not tokenizer.chat_template:
                prompts.append(
                    (where, _begins(tokenizer) + tokenizer(prompt, add_special_tokens=False)["input_ids"])
                )
                continue
            messages = [dict(role="user", content=prompt)]
        check_messages(messages, where)
        if messages[-1]["role"] == "assistant":  # its answer is what is asked for
            messages = messages[:-1]
        text = render(messages, tokenizer, where, prompt=True)
        prompts.append((where, tokenizer(text, add_special_tokens=False)["input_ids"]))
    return prompts


def _begins(tokenizer: Any) -> list[int]:
    """The token that the model expects at the beginning of a text, if it does."""
    first = tokenizer("")["input_ids"][:1]
    return first if first == [tokenizer.bos_token_id] else []


def check_messages(messages: Any, where: str) -> None:
    """Raise TpukitError unless this is a list of dict(role, content), of texts."""
    is_list = isinstance(messages, list) and messages
    if not is_list or not all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)
        for one in messages
    ):
        raise TpukitError(f"{where}: messages must be a list of {{role: TEXT, content: TEXT}}, and not empty")


def render(messages: list[dict], tokenizer: Any, where: str, *, prompt: bool) -> str:
    """A conversation as the model reads it. prompt: ends where the assistant begins."""
    template = tokenizer.chat_template or TEMPLATE
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt, chat_template=template
        )
    except Exception as error:  # jinja raises many types
        raise TpukitError(f"{where}: the model's chat template refuses it ({first_line(error)})") from error


def _turns(messages: list[dict], tokenizer: Any, where: str) -> Iterator[tuple[str, bool]]:
    """The rendered conversation in parts, of which those that the assistant says are to be learned: all, or
    only the last one if the template writes earlier ones in another way than it did at their time."""
    whole = render(messages, tokenizer, where, prompt=False)
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    at, learned = 0, False
    for number in turns:
        before = render(messages[:number], tokenizer, where, prompt=True)
        after = render(messages[: number + 1], tokenizer, where, prompt=False)
        if whole.startswith(after) and after.startswith(before) and len(before) >= at:
            yield whole[at : len(before)], False
            yield whole[len(before) : len(after)], True
            at, learned = len(after), True
    if not learned:
        raise TpukitError(f"{where}: the model's chat template does not show where the assistant begins")
    yield whole[at:], False


# Tokenising and packing


def open_sets(
    place: Path, tokenizer: Any, length: int, too_long: str, test_share: float
) -> tuple[TextSet, TextSet]:
    """(training set, test set): tokenised and packed, or from the cache. too_long: see `LanguageModel`."""
    found = find_files(place)
    folder = place if place.is_dir() else place.parent
    names = sorted(glob_escape(str(path.relative_to(folder))) for path, _ in found)
    content = arrays.content_key(folder, like=names)
    backend = tokenizer.backend_tokenizer.to_str() + str(tokenizer.chat_template or TEMPLATE)
    key = [
        VERSION,
        content,
        names,
        arrays.digest(backend),
        tokenizer.eos_token_id,
        length,
        too_long,
        test_share,
    ]
    made = arrays.mapped("text", key, lambda: _packed(place, tokenizer, length, too_long, test_share))
    return TextSet(made, "train", arrays.digest(key)), TextSet(made, "test", arrays.digest(key))


def glob_escape(name: str) -> str:
    import glob

    return glob.escape(name)


def _packed(place, tokenizer, length, too_long, test_share) -> dict[str, np.ndarray]:
    """For each split: tokens (R, T + 1), documents (R, T + 1) from 1, 0 where nothing is, learned (R, T + 1)
    bool, targets, how many tokens of a row are predicted on average; and notes."""
    small = len(tokenizer) <= 2**16
    with tempfile.TemporaryFile() as ids, tempfile.TemporaryFile() as flags:
        documents = _tokenise(place, tokenizer, ids, flags, np.uint16 if small else np.int32)
        count = flags.tell()
        tokens = np.memmap(ids, np.uint16 if small else np.int32, "r", shape=count)
        learned = np.memmap(flags, bool, "r", shape=count)
        splits, made = _split(documents, test_share), {}
        notes = [f"{len(documents)} documents of {count} tokens"]
        for split, segments in splits.items():
            rows, note = _lay_out(segments, learned, length + 1, too_long)
            notes += [f"{split}: {note}"] if note else []
            if not rows:
                raise TpukitError(
                    f"{place}: nothing is left for the {split} split: add texts, or a file {split}.txt"
                )
            shape = (len(rows), length + 1)
            made[f"{split}_tokens"] = t = _scratch(tokens.dtype, shape)
            made[f"{split}_documents"] = d = _scratch(np.uint16, shape)
            made[f"{split}_learned"] = w = _scratch(bool, shape)
            for row, parts in enumerate(rows):
                at = 0
                for number, (start, end) in enumerate(parts, 1):
                    place_in_row = slice(at, at + end - start)
                    t[row, place_in_row], d[row, place_in_row] = tokens[start:end], number
                    w[row, place_in_row] = learned[start:end]
                    at += end - start
            targets = sum(int(learned[start + 1 : end].sum()) for parts in rows for start, end in parts)
            made[f"{split}_targets"] = np.array(targets / len(rows))
            used = sum(end - start for parts in rows for start, end in parts)
            notes.append(
                f"{split}: {len(rows)} rows of {length} tokens, {1 - used / t.size:.1%} of them empty"
            )
        return made | dict(notes=np.array("\n".join(notes)))


def _scratch(dtype, shape):
    """An array of zeros that is not in memory."""
    return np.memmap(tempfile.TemporaryFile(), dtype, "w+", shape=shape)


def _tokenise(place, tokenizer, ids, flags, dtype):
    """Write the tokens of all documents to one file, and whether they are to be learned to another. Returns
    the documents, with their place in there."""
    from tqdm.auto import tqdm

    begins = _begins(tokenizer)
    documents: list[Document] = []

    def pieces():
        for document in read_documents(place, tokenizer):
            documents.append(document)
            yield from ((document, text, learned) for text, learned in document.parts if text)
            yield document, None, True

    def write(values, learned):
        ids.write(np.array(values, dtype).tobytes())
        flags.write(bytes([learned]) * len(values))

    waiting = pieces()
    with tqdm(desc="tokenising", unit=" pieces", disable=None, leave=False) as bar:
        while batch := list(itertools.islice(waiting, PIECES)):
            texts = [text for _, text, _ in batch if text is not None]
            encoded = iter(tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else [])
            for document, text, learned in batch:
                if document.start < 0:
                    document.start = flags.tell()
                    write(begins if document.ends else [], False)
                if text is not None:
                    write(next(encoded), learned)
                elif document.ends:
                    write([tokenizer.eos_token_id], True)
                document.end = flags.tell()
            bar.update(len(batch))
    ids.flush()
    flags.flush()
    return documents


def _split(documents, test_share):
    """{train, test: [(start, end, is_whole)]}. Where nothing says what is for tests: the end of each text, and
    of conversations and texts in lists those whose hashes come first, one at least of two."""
    splits = dict(train=[], test=[])
    listed = sorted({one.key for one in documents if one.key})
    tests = set(listed[: min(max(1, round(test_share * len(listed))), len(listed) - 1)]) if listed else set()
    has_tests = any(one.split == "test" for one in documents)
    for one in documents:
        whole = (one.start, one.end, one.is_whole)
        if has_tests or one.key:
            split = one.split or "train" if has_tests else "test" if one.key in tests else "train"
            splits[split].append(whole)
        else:
            cut = one.end - round(test_share * (one.end - one.start))
            splits["train"].append((one.start, cut, False))
            splits["test"].append((cut, one.end, False))
    return splits


def _lay_out(segments, learned, size, too_long):
    """(rows of [(start, end)], note): texts one after another, cut where a row ends; conversations whole,
    each in the row with the least space that is enough."""
    rows, row, room = [], [], size
    spaces: list[tuple[int, int]] = []  # (tokens that are free, row), sorted
    longer = dropped = 0
    for start, end, is_whole in segments:
        if not is_whole:
            while start < end:
                taken = min(room, end - start)
                row.append((start, start + taken))
                start, room = start + taken, room - taken
                if not room:
                    rows.append(row)
                    row, room = [], size
                    start -= start < end  # what the last token was to predict
            continue
        longer += end - start > size
        if end - start > size and too_long == "leave-out":
            continue
        pieces = [(start, min(start + size, end))]
        while pieces[-1][1] < end and too_long == "split":
            pieces.append((pieces[-1][1] - 1, min(pieces[-1][1] - 1 + size, end)))
        for piece in pieces:
            if not learned[piece[0] + 1 : piece[1]].any():
                dropped += 1
                continue
            needed = piece[1] - piece[0]
            index = bisect.bisect_left(spaces, (needed, -1))
            if index == len(spaces):
                rows.append([])
                index, free = len(spaces), (size, len(rows) - 1)
            else:
                free = spaces.pop(index)
            rows[free[1]].append(piece)
            if free[0] > needed:
                bisect.insort(spaces, (free[0] - needed, free[1]))
    words = {
        "split": "go on in another row, which does not see their beginning",
        "cut": "cut",
        "leave-out": "left out",
    }
    note = f"{longer} conversations are longer than {size - 1} tokens: {words[too_long]}" if longer else ""
    if dropped:
        note += f"{'; ' if note else ''}{dropped} parts without anything to learn are left out"
    return rows + ([row] if len(row) and row[-1][1] - row[0][0] > 1 else []), note


class TextSet:
    """One split of packed rows, memory-mapped.

    `batch(indices, numbers)` -> dict of tokens, documents and learned (B, T + 1), see `_packed`, and share
    (B,), one over the tokens that a row predicts on average. `notes`: sentences for the log."""

    num_uniforms = 0

    def __init__(self, made: dict[str, np.ndarray], split: str, signature: str) -> None:
        self.tokens, self.documents, self.learned = (
            made[f"{split}_{name}"] for name in ("tokens", "documents", "learned")
        )
        self.targets, self.signature = float(made[f"{split}_targets"]), signature
        self.notes = printable(str(made["notes"])) if split == "train" else ""

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, indices: Any, numbers: Any = None) -> dict[str, np.ndarray]:
        tokens, documents = (part[indices].astype(np.int32) for part in (self.tokens, self.documents))
        share = np.full(len(tokens), 1 / max(self.targets, 1e-9), np.float32)
        return dict(tokens=tokens, documents=documents, learned=self.learned[indices], share=share)

    # The same from arrays on the device

    def device_nbytes(self) -> int:
        return self.tokens.size * 9 + 4 * len(self)

    def device_arrays(self) -> dict[str, np.ndarray]:
        return self.batch(slice(None))

    def sample_parameters(self, indices: Any, numbers: Any = None) -> dict[str, np.ndarray]:
        return {}

    def compose(self, rows: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
        return rows | parameters
