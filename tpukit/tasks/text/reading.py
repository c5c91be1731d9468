"""Texts, conversations and prompts in a user's files, in the formats that such files usually have."""

from __future__ import annotations

import codecs
import collections
import json
import pydoc_data.topics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from tpukit.host.errors import TpukitError, explained
from tpukit.tasks.splits import about_tables, find_files

TEXTS, LINES, LIST = (".txt", ".md", ".rst"), ".jsonl", ".json"
PAGE = "TEXT"  # of the docs
DOCUMENT = 2**19  # characters of a text file that are one document, and are tokenised at once
ROLES = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "model", "bot", "ai", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "function", "ipython"), "tool"),
    "developer": "system",
}
ANSWERS = ("completion", "response", "answer", "output")
QUESTIONS = ("prompt", "question", "instruction", "query")
ADDED, SYSTEM = ("input", "context"), ("system", "system_prompt")  # to a question; above a conversation
ABOUT = ("readme", "license", "licence")  # files about the data, where there are others
UNUSED = "texts have columns that are not used: {}"


class NothingToLearn(TpukitError):
    """A row that is left out of the training; the others are learned."""


def write_demo(folder: Path, size: int, rng: np.random.Generator) -> None:
    """train/TOPIC.txt and test/TOPIC.txt, a tenth of them to test, of up to `size` topics of `help()`: parts
    of the Python Language Reference, which come with every Python."""
    for number, (topic, text) in enumerate(sorted(pydoc_data.topics.topics.items())[:size]):
        place = folder / ("test" if number % 10 == 9 else "train") / f"{topic}.txt"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")


def find_texts(place: Path) -> dict[str, list[Path]]:
    """Return the files of train and of test, and the others. Where some are in train, those in no split are
    others. Raises TpukitError where there is none to train on."""
    files = find_files(place, (*TEXTS, LINES, LIST))
    files = [each for each in files if each[0].stem.lower() not in ABOUT] or files
    files = [each for each in files if each[0].suffix != LIST or is_list_file(each[0])] or files
    train, test = (
        [path for path, split in files if split in names] for names in (["train"], ["val", "test"])
    )
    train = train or [path for path, split in files if split is None]
    if not train and (tables := about_tables(place, PAGE)):
        raise TpukitError(f"{place}: {tables}")
    below = sorted(path for path in place.rglob("*") if path.is_file()) if place.is_dir() else []
    others = [path for path in below if path.name[0] != "." and path not in (*train, *test)]
    if not train:
        here = f"; it has {', '.join(path.name for path in others[:8])}" if others else ""
        raise TpukitError(
            f"{place} does not exist or has no texts to train on: it should be text files"
            f" ({', '.join(TEXTS)}), or .jsonl files with text, prompt and completion, or messages in each"
            f" line, or .json files with a list of such{here}"
        )
    return dict(train=train, test=test, others=others)


def is_list_file(path):
    """Whether a file in JSON is a list of rows, rather than settings or rows in lines."""
    with open(path, "rb") as file:
        return file.read(1024).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def read_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (where it is, content) of pieces of a text, of lines, or of the entries of a list in .json."""
    if path.suffix in TEXTS:
        with explained(f"{path} is not a text in UTF-8"), open(path, encoding="utf-8-sig") as file:
            while text := file.read(DOCUMENT):
                yield str(path), dict(text=text)
        return
    if is_list_file(path):
        with explained(f"{path} is not JSON in UTF-8, so fix it"):
            rows = json.loads(path.read_bytes())
        yield from ((f"{path}, entry {number}", row) for number, row in enumerate(rows, 1))
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                wrong = (
                    f"{path}, line {number} is no JSON in UTF-8 (a file has a row in each line, or one list)"
                )
                with explained(wrong):
                    row = json.loads(line)
                yield f"{path}, line {number}", row


def read_row(
    row: Any, where: str, counts: collections.Counter[str] | None = None
) -> tuple[list[dict[str, Any]] | str, Any]:
    """(the messages of a row, or its text; its tools or None).

    Of a row with messages or conversations, of role and content or of from and value; with one of the
    `QUESTIONS` and, but for a prompt to be answered, one of the `ANSWERS`, texts or messages; or with text.
    Of messages in a prompt nothing is learned. counts: see `conversations.tokens_of`. Raises NothingToLearn
    for an answer that is not wanted."""
    row = row if isinstance(row, dict) else {}
    columns, row = list(row), {name: value for name, value in row.items() if value is not None}

    def first(*names):
        return next((name for name in names if name in row), "")

    question, answer = first(*QUESTIONS), first(*ANSWERS)
    used, said = [first("messages", "conversations"), "tools"], None
    if used[0]:
        said = _parsed(row[used[0]])
    elif question and (answer or counts is None or {*ANSWERS} & {*columns}):
        added = first(*ADDED) if isinstance(row[question], str) else ""
        used = [question, answer, added, "tools", "label"]
        said = _asked(row[question], row.get(added)) + _answered(row.get(answer))
        if row.get("label") is False:  # as KTO has it
            raise NothingToLearn(f"{where}: its label says that the answer is not a wanted one")
    elif isinstance(row.get("text"), str):
        used, said = ["text"], row["text"]
    if isinstance(said, list) and (system := first(*SYSTEM)) and isinstance(row[system], str):
        used.append(system)
        if said and isinstance(said[0], dict) and said[0].get("role", said[0].get("from")) != "system":
            said = [dict(role="system", content=row[system]), *said]
    found: Any = said
    if not isinstance(said, str):
        found = [_message(one) for one in said] if _is_list(said) else []
        if not found or None in found:
            raise TpukitError(_explain_row(where, row))
    _check_characters(json.dumps(found, ensure_ascii=False), where)
    if unused := [name for name in row if name not in used]:
        (counts if counts is not None else {}).update({UNUSED.format(", ".join(unused[:5])): 1})
    return found, _parsed(row.get("tools"))


def _asked(value, added):
    """The messages of a question."""
    if _is_list(value):
        return [dict(one, weight=0) for one in value]
    return [dict(role="user", content=f"{value}\n\n{added}" if added else value)]


def _answered(value):
    """The messages of an answer; none for None, which is a prompt alone."""
    if value is None or _is_list(value):
        return value or []
    return [dict(role="assistant", content=value)]


def _explain_row(where, row):
    shown = ", ".join(f"{name} ({type(value).__name__})" for name, value in row.items()) or "none of them"
    return (
        f"{where}: it needs a text, or a prompt and a completion, or messages, a list of {{role: TEXT,"
        f" content: TEXT}}, all as texts, and has {shown}"
    )


def _message(one: dict[str, Any]) -> dict[str, Any] | None:
    """A message as chat templates read it; None if it has no role or no text."""
    one = {name: value for name, value in one.items() if value is not None}
    role, content = (
        one.pop(name, one.pop(other, None)) for name, other in (("role", "from"), ("content", "value"))
    )
    calls = one.get("tool_calls")
    if isinstance(content, list):
        texts = [
            part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)
        ]
        content = "".join(texts) if len(texts) == len(content) else None
    if content is None and calls:
        content = ""
    if not isinstance(role, str) or not isinstance(content, str):
        return None
    for call in calls if calls and _is_list(calls) else []:
        function = call.get("function", call)
        if isinstance(function, dict) and "arguments" in function:  # which OpenAI writes as JSON in a text
            function["arguments"] = _parsed(function["arguments"])
    return dict(one, role=ROLES.get(role.lower(), role.lower()), content=content)


def _is_list(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def _parsed(value: Any) -> Any:
    """Return what a text says in JSON, or else the value itself."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _check_characters(text: str, where: str) -> None:
    """Raise TpukitError for half of a character, as a text has that was cut inside an emoji."""
    with explained(f"{where}: half of a character, which no tokenizer reads, so fix or delete the line"):
        text.encode()
