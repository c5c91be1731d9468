"""Texts, conversations and prompts in a user's files, in the formats that such files usually have."""

import codecs
import collections
import json
import pydoc_data.topics
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from tpukit.host.errors import TpukitError, explained, reading
from tpukit_tasks.splits import SPLITS, files_below, split_of

TEXTS, LINES, LIST = (".txt", ".md", ".rst"), ".jsonl", ".json"
DOCUMENT = 2**19  # characters of a text file that are one document, and are tokenised at once
ROLES = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "model", "bot", "ai"), "assistant"),
    **dict.fromkeys(("observation", "function", "ipython", "tool_response"), "tool"),
    "developer": "system",
}
CALLERS = ("function_call", "tool_call", "tool_calls")  # roles of messages that are calls of tools, as JSON
CALL = re.compile(r"(\s*<think>.*</think>)?\s*([\[{].*[\]}])\s*", re.DOTALL)
ANSWERS = ("completion", "response", "answer", "output", "chosen")  # chosen: of pairs, whose other is unused
QUESTIONS = ("prompt", "question", "instruction", "query")
ADDED, SYSTEM = ("input", "context"), ("system", "system_prompt")  # to a question; above a conversation
ABOUT = ("readme", "license", "licence")  # files about the data, if there are others
UNUSED = "texts have columns that are not used: {}"
NULLS = "texts have fields of tools or of their calls without a value (null), which are left out"
Counts = collections.Counter[str]  # how often something was left out, by what it was
Message = dict[str, Any]  # with its role and content


class NothingToLearn(TpukitError):
    """A row that is left out; the others are learned."""


def write_demo(folder: Path, size: int, rng: np.random.Generator) -> None:
    """Write up to `size` topics of `help()` as train/TOPIC.txt and, a tenth of them, test/TOPIC.txt: parts of
    the Python Language Reference, which come with every Python."""
    for number, (topic, text) in enumerate(sorted(pydoc_data.topics.topics.items())[:size]):
        place = folder / ("test" if number % 10 == 9 else "train") / f"{topic}.txt"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")


def find_texts(place: Path) -> dict[str, list[Path]]:
    """Return the files of train and of test, and the others. If some are in train, those in no split are
    others. Raises TpukitError if there is none to train on."""
    below = files_below(place) if place.is_dir() else [place]
    by_split: dict[str | None, list[Path]] = collections.defaultdict(list)
    for path in _files_of_texts(below):
        by_split[_split_of(path.relative_to(place))].append(path)
    train = by_split["train"] or by_split[None]
    test = sorted(by_split["val"] + by_split["test"])  # as `files_below` has them
    used = {*train, *test}
    others = [path for path in below if path not in used and path != place]
    if not train:
        raise _no_texts(place, others)
    return dict(train=train, test=test, others=others)


def _files_of_texts(paths: list[Path]) -> list[Path]:
    """Return the files that may have texts or rows, in their order: those about the data and those of
    settings only if there is nothing else."""
    files = [path for path in paths if path.suffix in (*TEXTS, LINES, LIST) and path.is_file()]
    not_about = [path for path in files if path.stem.lower() not in ABOUT]
    if not_about:
        files = not_about
    not_settings = [path for path in files if path.suffix != LIST or _is_list_file(path)]
    if not_settings:
        files = not_settings
    return files


def _no_texts(place: Path, others: list[Path]) -> TpukitError:
    """Return the error for a place without texts to train on. others: the files that it has."""
    here = ""
    if others:
        endings = collections.Counter(path.suffix or path.name for path in others).most_common(8)
        here = f"; it has {', '.join(f'{count} {ending}' for ending, count in endings)}"
    return TpukitError(
        f"{place} does not exist or has no texts to train on: it should be text files"
        f" ({', '.join(TEXTS)}), or .jsonl files with text, prompt and completion, or messages in each"
        f" line, or .json files with a list of such (docs/TEXT.md converts Hugging Face datasets){here}"
    )


def _split_of(path):
    """Return train, val, test or None of a file, by its path in a set: the first word of a folder or of the
    file, as in data/test-00.jsonl, or any word of a file of rows, as in chats_train.jsonl."""
    words = [re.split("[-_.]", part.lower())[0] for part in path.parts]
    first = next((SPLITS[word] for word in words if word in SPLITS), None)
    return first if first or path.suffix in TEXTS else split_of(path.stem)  # a text has any title


def _is_list_file(path):
    """Return whether a JSON file is a list of rows, rather than settings or one row in each line."""
    with reading(path, f"{path} has no rows", TpukitError), open(path, "rb") as file:
        return file.read(1024).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def read_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (where it is, row) of the lines of a file, of the entries of a list in .json, or of the pieces of
    a text, each as {text: TEXT}."""
    if path.suffix in TEXTS:
        wrong = f"{path} is not a text in UTF-8"
        with reading(path, wrong, TpukitError), open(path, encoding="utf-8-sig") as file:
            while text := file.read(DOCUMENT):
                yield str(path), dict(text=text)
        return
    if _is_list_file(path):
        with reading(path, f"{path} is not JSON in UTF-8, so fix it", TpukitError):
            rows = json.loads(path.read_bytes())
        yield from ((f"{path}, entry {number}", row) for number, row in enumerate(rows, 1))
        return
    with reading(path, f"{path} has no rows", TpukitError), open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number}"
            if line.strip():
                with explained(f"{where} is not JSON in UTF-8 (a file has a row in each line, or one list)"):
                    row = json.loads(line)
                yield where, row


def read_row(row: Any, counts: Counts, *, is_prompt: bool = False) -> tuple[list[Message] | str, Any]:
    """Return (the messages of a row, or its text; its tools or None).

    A row has `messages` or `conversations`, each message with role and content, or from and value; or one of
    the `QUESTIONS` and one of the `ANSWERS`, as texts or as messages; or `text`. Nothing is learned of
    messages in a question.

    counts: gets the columns that are not used. is_prompt: the row needs no answer. Raises NothingToLearn for
    an answer that its label rejects, TpukitError for any other row."""
    row = row if isinstance(row, dict) else {}
    # Each step takes the columns that it reads out of these; those that are left are counted in the end.
    unused = {name: value for name, value in row.items() if value is not None}
    has_answer = is_prompt or any(name in row for name in ANSWERS)  # even if it is empty
    content = _take_content(unused, has_answer, counts)
    if content is None:
        columns = ", ".join(f"{name} ({type(value).__name__})" for name, value in row.items())
        raise TpukitError(
            "it needs a text, or a prompt and a completion, or messages, a list of {role: TEXT, content:"
            f" TEXT}}, all as texts, and has {columns or 'none of them'}"
        )
    tools = None
    if isinstance(content, list):
        if content[0]["role"] != "system":
            system = _take(unused, *SYSTEM, kind=str)
            if system:
                content.insert(0, dict(role="system", content=system))
        tools = _parsed(_filled(_take(unused, "tools"), counts))
    # A text that was cut inside an emoji has half of a character.
    with explained("half of a character, which no tokenizer reads, so fix or delete the line"):
        json.dumps([content, tools], ensure_ascii=False).encode()
    if unused:
        counts[UNUSED.format(", ".join(list(unused)[:5]))] += 1
    return content, tools


def _take_content(columns: dict[str, Any], has_answer: bool, counts: Counts) -> list[Message] | str | None:
    """Remove the messages of a row, or else its question and answer, or else its text. Return them as
    messages or as a text; None if there is nothing, or a message without a role or a text."""
    listed = _parsed(_take(columns, "messages", "conversations"))
    if listed is None and has_answer and any(name in columns for name in QUESTIONS):
        listed = _take_answered_question(columns)
    if listed is None:
        listed = _take(columns, "chosen", kind=list)  # a whole conversation
    if listed is None:
        return _take(columns, "text", kind=str)
    if not _is_list(listed) or not listed:
        return None
    messages: list[Message] = []
    for one in listed:
        message = _message(one, counts)
        if message is None:
            return None
        is_call = "tool_calls" in message and _role_of(one) in CALLERS
        if is_call and messages and messages[-1]["role"] == "assistant":  # of the same turn
            messages[-1]["content"] += message["content"]
            messages[-1]["tool_calls"] = [*messages[-1].get("tool_calls", ()), *message["tool_calls"]]
        else:
            messages.append(message)
    return messages


def _take_answered_question(columns: dict[str, Any]) -> list[Any]:
    """Remove a question and its answer. Return them as messages. Raises NothingToLearn for a rejected one."""
    question, answer = _take(columns, *QUESTIONS), _take(columns, *ANSWERS)
    if _is_list(question):
        messages = [dict(one, weight=0) for one in question]
    else:
        added = _take(columns, *ADDED, kind=str)
        if added and isinstance(question, str):
            question = f"{question}\n\n{added}" if question else added
        messages = [dict(role="user", content=question)]
    if _is_list(answer):
        # A whole conversation, as `chosen` often is, has the question in it.
        asked = [number for number, one in enumerate(answer) if [_said(one)] == [*map(_said, messages[-1:])]]
        if asked:
            messages = [dict(one, weight=0) for one in answer[: asked[0] + 1]]
            answer = answer[asked[0] + 1 :]
        messages += answer
    elif answer is not None:
        messages.append(dict(role="assistant", content=answer))
    if _take(columns, "label") is False:  # as in KTO
        raise NothingToLearn("its label marks the answer as unwanted")
    return messages


def _take(columns: dict[str, Any], *names: str, kind: type = object) -> Any:
    """Remove the first of some columns that has a value of a type. Return that, or None if there is none."""
    for name in names:
        if name in columns and isinstance(columns[name], kind):
            return columns.pop(name)
    return None


def _message(one: Message, counts: Counts) -> Message | None:
    """Return a message as chat templates read it; None if it has no role or no text."""
    role = _role_of(one)
    one = {name: _filled(value, counts) for name, value in one.items() if value is not None}
    content = one.pop("content", one.pop("value", None))
    one = {name: value for name, value in one.items() if name not in ("role", "from")}
    if isinstance(content, list):
        parts: list[Any] = [part.get("text") if isinstance(part, dict) else None for part in content]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
    if call := one.pop("function_call", None):  # as OpenAI had it before
        one["tool_calls"] = [dict(type="function", function=call)]
    if role in CALLERS:
        role, found = "assistant", CALL.fullmatch(content) if isinstance(content, str) else None
        calls = _parsed(found[2]) if found else None
        calls = [calls] if isinstance(calls, dict) else calls
        if found and _is_list(calls) and all("name" in call for call in calls):
            one["tool_calls"] = [dict(type="function", function=call) for call in calls]
            content = found[1] or ""
    calls = one.get("tool_calls")
    if content is None and calls:
        content = ""
    if role is None or not isinstance(content, str):
        return None
    for call in calls if _is_list(calls) else []:
        function = call.get("function", call)
        if isinstance(function, dict) and "arguments" in function:  # OpenAI writes them as JSON in a text
            function["arguments"] = _parsed(function["arguments"])
    return dict(one, role=ROLES.get(role, role), content=content)


def _role_of(one: Message) -> str | None:
    """Return the role of a message as it stands there, in small letters; None if it has none."""
    role = one.get("role") or one.get("from")
    return role.lower() if isinstance(role, str) else None


def _said(one: Message) -> tuple[str | None, Any]:
    """Return (role, content) of a message as it stands in a row."""
    role = _role_of(one)
    return ROLES.get(role, role) if role else None, one.get("content", one.get("value"))


def _filled(value: Any, counts: Counts) -> Any:
    """Return a value without the nulls in it, at any depth: an Arrow table gives each call of a tool the
    arguments of all others."""
    filled = _without_nulls(value)
    counts[NULLS] += filled != value
    return filled


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _is_list(value: Any) -> TypeGuard[list[Message]]:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def _parsed(value: Any) -> Any:
    """Return the value that a text holds as JSON, or else the value itself."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value
