"""Texts, conversations and prompts, read from a user's files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tpukit.host.errors import TpukitError, first_line

SPLITS = {  # names of folders and beginnings of files, in lower case
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing", "val", "valid", "validation", "dev", "eval"), "test"),
}
TEXTS, LINES, TABLES = (".txt", ".md", ".rst"), (".jsonl",), (".parquet", ".arrow")
PIECE = 2**16  # characters of a text that are read, and tokenised, at once
# Of conversations, where the tokenizer has no template of its own.
TEMPLATE = (
    "{% for message in messages %}{{ message.role + ': ' + message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@dataclasses.dataclass
class Document:
    """A text, or a conversation."""

    parts: Iterable[tuple[str, bool]]
    """(text, whether it is to be learned)"""
    is_whole: bool = False
    """whether it should stay in one row"""
    is_complete: bool = False
    """whether `parts` say where it begins and ends, as chat templates do"""
    split: str | None = None
    key: bytes = b""
    """of a document from a list: a hash, which decides its split"""
    start: int = -1
    """place of the first token among those of all documents"""
    end: int = -1


def find_files(place: Path) -> list[tuple[Path, str | None]]:
    """(file, its split or None) of each file of texts, sorted. Where some are in splits, the others are left
    out. Raises TpukitError where there is none."""
    if not place.exists():
        raise TpukitError(f"dataset {place} does not exist")
    found, folder = [], place if place.is_dir() else place.parent
    for path in [place] if place.is_file() else sorted(place.rglob("*")):
        is_hidden = path.name.startswith((".", "cache-"))  # the second: the Hugging Face library's own
        if path.suffix in (*TEXTS, *LINES, *TABLES) and path.is_file() and not is_hidden:
            words = (re.split("[-_.]", part.lower())[0] for part in path.relative_to(folder).parts)
            found.append((path, next((SPLITS[word] for word in words if word in SPLITS), None)))
    if any(split for _, split in found) and place.is_dir():
        found = [(path, split) for path, split in found if split]
    if not found:
        raise TpukitError(
            f"{place} has no texts: it should hold text files ({', '.join(TEXTS)}), .jsonl files with text,"
            " prompt and completion, or messages in each line, or a Hugging Face dataset saved on disk"
        )
    return found


def read_documents(place: Path, tokenizer: Any) -> Iterator[Document]:
    """Yield the documents of a file, or of all files below a folder. Raises TpukitError, with the file and
    the line, for what cannot be trained on."""
    for path, split in find_files(place):
        if path.suffix in TEXTS:
            yield Document(((piece, True) for piece in _pieces(path)), split=split)
            continue
        for where, row in _lines(path) if path.suffix in LINES else _table(path):
            document = document_of(row, tokenizer, where)
            document.split, text = split, json.dumps(row, sort_keys=True, default=str)
            document.key = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
            yield document


def _pieces(path: Path) -> Iterator[str]:
    try:
        with open(path, encoding="utf-8-sig") as file:
            while lines := file.readlines(PIECE):
                yield "".join(lines)
    except (UnicodeDecodeError, OSError) as error:
        raise TpukitError(f"{path} is not a text in UTF-8 ({first_line(error)}): save it as one") from error


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    """(where it is, content) of the lines of a .jsonl file."""
    number = 0
    try:
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}, line {number}", json.loads(line)
    except (OSError, ValueError, RecursionError) as error:
        what = first_line(error)
        raise TpukitError(f"{path}, line {number}: not JSON in UTF-8 ({what}): mend or delete it") from error


def _table(path: Path) -> Iterator[tuple[str, Any]]:
    """(where it is, content) of the rows of a file of a Hugging Face dataset."""
    try:
        import pyarrow.parquet

        version = pyarrow.__version__
    except ImportError:
        version = "0 (none)"
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < (14, 0, 1):  # which can run code from a table
        raise TpukitError(f"{path} needs pyarrow 14.0.1, not {version}: pip install -U pyarrow")
    try:
        if path.suffix == ".parquet":
            batches = pyarrow.parquet.ParquetFile(path).iter_batches(1000)
        else:
            batches = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path)))
        rows = (row for batch in batches for row in batch.to_pylist())
        for number, row in enumerate(rows, 1):
            yield f"{path}, row {number}", {name: value for name, value in row.items() if value is not None}
    except (pyarrow.ArrowException, OSError) as error:
        raise TpukitError(f"{path} is damaged ({first_line(error)}): copy or download it again") from error


def document_of(row: Any, tokenizer: Any, where: str) -> Document:
    """The document of dict with `text`, with `prompt` and `completion`, or with `messages`. where: for
    errors."""
    row = row if isinstance(row, dict) else {}
    text, prompt, completion = (row.get(name) for name in ("text", "prompt", "completion"))
    messages = row.get("messages")
    if isinstance(prompt, str) and isinstance(completion, str):
        messages = [dict(role="user", content=prompt), dict(role="assistant", content=completion)]
    if messages is not None:
        _check_messages(messages, where)
        if not [one for one in messages if one["role"] == "assistant" and one["content"].strip()]:
            raise TpukitError(f"{where}: the completion is empty: there is nothing to learn")
        if "messages" not in row and not tokenizer.chat_template:
            return Document([(prompt, False), (completion, True)], is_whole=True)
        return Document(_turns(messages, tokenizer, where), is_whole=True, is_complete=True)
    if isinstance(text, str) and text:
        return Document([(text, True)])
    raise TpukitError(
        f"{where}: it needs a text, or a prompt and a completion, or messages, and has"
        f" {', '.join(map(str, row)) or 'none of them'}"
    )


def _check_messages(messages: Any, where: str) -> None:
    for one in messages if isinstance(messages, list) and messages else [None]:
        one = one if isinstance(one, dict) else {}
        if not isinstance(one.get("role"), str) or not isinstance(one.get("content"), str):
            raise TpukitError(f"{where}: messages must be a list of {{role: TEXT, content: TEXT}}")


def _turns(messages: list[dict], tokenizer: Any, where: str) -> list[tuple[str, bool]]:
    """The rendered conversation in parts. What the assistant says is to be learned: all of it, but for turns
    that the template writes in another way once others follow."""
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
    return [*parts, (whole[at:], False)]


def _render(messages: list[dict], tokenizer: Any, where: str, *, prompt: bool = False) -> str:
    """A conversation as the model reads it. prompt: with the beginning of an answer."""
    template = tokenizer.chat_template or TEMPLATE
    options = dict(tokenize=False, add_generation_prompt=prompt, chat_template=template)
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except Exception as error:  # jinja raises many types
        raise TpukitError(f"{where}: the model's chat template refuses it ({first_line(error)})") from error


def read_prompts(path: Path, tokenizer: Any) -> list[tuple[str, list[int]]]:
    """[(name, tokens)] of the prompts in a text file, which is one, or in the lines of a .jsonl file, each
    with `prompt` or `messages`."""
    rows: list[tuple[str, Any]] = []
    if path.suffix in LINES:
        rows = [(f"{path.name}{where.removeprefix(str(path))}", row) for where, row in _lines(path)]
    else:
        rows = [(path.name, dict(prompt="".join(_pieces(path)).rstrip("\n")))]
    prompts = []
    for name, row in rows:
        row = row if isinstance(row, dict) else {}
        text, messages, begins = row.get("prompt"), row.get("messages"), []
        if isinstance(text, str) and not tokenizer.chat_template:
            begins = beginning(tokenizer)
        else:
            said = [dict(role="user", content=text)] if isinstance(text, str) else messages or []
            _check_messages(said, name)
            is_answered = said[-1]["role"] == "assistant" and len(said) > 1
            text = _render(said[: len(said) - is_answered], tokenizer, name, prompt=True)
        prompts.append((name, begins + tokenizer(text, add_special_tokens=False)["input_ids"]))
    return prompts


def beginning(tokenizer: Any) -> list[int]:
    """The token that the model expects at the beginning of a text, if it does."""
    first = tokenizer("")["input_ids"][:1]
    return first if first == [tokenizer.bos_token_id] else []
