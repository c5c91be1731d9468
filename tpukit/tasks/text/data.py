"""Texts, conversations and prompts in a user's files, tokenised once and packed into rows of one length.

Shapes: R rows, B batch, T tokens of a row."""

from __future__ import annotations

import bisect
import collections
import datetime
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
from typing import Any, TypeGuard

import numpy as np

from tpukit.host.errors import TpukitError, explained
from tpukit.tasks import arrays
from tpukit.tasks.splits import about_tables, find_files

TEXTS, LINES, LIST = (".txt", ".md", ".rst"), ".jsonl", ".json"
PAGE = "TEXT"  # of the docs
PIECE, PIECES = 2**16, 8  # characters that are tokenised at once; how many of them are one document
SHORTEST = 128  # tokens of a row by default, at least
MANY = 256  # documents, or fewer conversations, from which rows are filled
VERSION = 5  # of what `_pack` makes of the same files, which is cached
TOKEN = np.dtype([("tokens", np.int32), ("labels", np.int32), ("documents", np.uint16)])
MARK = "\ue000\ue001"  # stands for an answer, to see where the chat template writes it
DAY = datetime.datetime(2024, 7, 26)  # that chat templates which write today's date write
NOW = r"""strftime_now\(\s*(["'])(.*?)\1\s*\)"""
ROLES = dict(human="user", gpt="assistant", model="assistant", function_call="assistant", observation="tool")
PAIRS = dict(prompt=("completion", "response"), question=("answer",), instruction=("output",))
TOOLLESS = "conversations have tools that the chat template leaves out"
UNLEARNED = "answers are not learned, because the chat template leaves them out"
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
    """rows (R, T) of `TOKEN`; of each (R,) targets, how many labels it has, sizes, how many tokens, and
    is_test; and notes."""
    from tqdm.auto import tqdm

    file, at, longer, border = tempfile.TemporaryFile(), 0, 0, 0
    nothing, counts = np.array([(0, -1, 0)], TOKEN), collections.Counter()
    # Without a test split: every tenth document, or row where texts are long.
    shares_rows = not files["test"] and any(path.suffix in TEXTS for path in files["train"])
    shares_documents = not files["test"] and not shares_rows

    def write(tokens):
        nonlocal at
        file.write(tokens.tobytes())
        at += len(tokens)

    def is_for(split, number):
        is_test = math.ceil((number + 1) * test_share) > math.ceil(number * test_share)
        return not shares_documents or is_test == (split == "test")

    for split in ("train", "test"):
        border = at // length
        paths = files["train" if shares_documents else split]
        rows = ((row, where) for path in paths for where, row in _read_rows(path))
        documents = enumerate(tqdm(rows, disable=None, leave=False, unit=" texts"))
        documents = ((number, row) for number, row in documents if is_for(split, number))
        while some := list(itertools.islice(documents, MANY)):
            whole = []  # conversations, each of which stays in one row
            for number, (row, where) in some:
                tokens, is_conversation = tokens_of(row, tokenizer, where, counts)
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
    sizes = np.array([(row["documents"] > 0).sum() for row in rows])
    is_test = np.arange(len(rows)) >= border
    if shares_rows:
        is_test = np.diff(np.ceil(np.arange(len(rows) + 1) * test_share)) > 0
    notes = [f"{targets.sum()} tokens to predict, in rows of {length}"]
    notes += [f"{longer} conversations longer than that go on in the next row"] if longer else []
    notes += [f"{count} {what}" for what, count in counts.items()]
    if re.search(NOW, tokenizer.chat_template or ""):
        notes += [f"the chat template writes the date, in this training always {DAY:%d %B %Y}"]
    return dict(rows=rows, targets=targets, sizes=sizes, is_test=is_test, notes=np.array("; ".join(notes)))


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
    files = find_files(place, (*TEXTS, LINES)) or find_files(place, (LIST,))
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
            " line, or .json files with a list of such"
        )
    return dict(train=train, test=test)


def fitting_rows(place: Path, most: int, rows: int, bytes_per_token: int) -> tuple[int, int]:
    """(T, about how many such rows the training set fills), by the sizes of the files: `most` and `rows`, or,
    of a small set, a shorter T that still holds each conversation, and the rows that there are."""
    if not (files := find_files(place, (*TEXTS, LINES, LIST))):
        return most, rows
    size, longest = sum(path.stat().st_size for path, _ in files), 0
    if size < most * rows * bytes_per_token:
        for path in find_texts(place)["train"]:
            if path.suffix not in TEXTS:
                lengths = (len(json.dumps(row, ensure_ascii=False)) for _, row in _read_rows(path))
                longest = max(longest, *lengths, 0)
    # A token has at least half as many letters as one of English.
    longest = math.ceil(longest / max(1, bytes_per_token / 2))
    length, shortest = most, max(SHORTEST, longest)
    while length // 2 >= shortest and size // bytes_per_token // length < rows:
        length //= 2
    return length, min(rows, size // bytes_per_token // length)


def _read_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (where it is, content) of pieces of a text, of lines, or of the entries of a list in .json."""
    if path.suffix in TEXTS:
        with explained(f"{path} is not a text in UTF-8"), open(path, encoding="utf-8-sig") as file:
            while text := file.read(PIECES * PIECE):
                yield str(path), dict(text=text)
        return
    with open(path, "rb") as file:
        if path.suffix == LIST and file.read(1024).lstrip().startswith(b"["):
            with explained(f"{path} is not JSON in UTF-8, so mend it"):
                rows = json.loads(path.read_bytes())
            yield from ((f"{path}, entry {number}", row) for number, row in enumerate(rows, 1))
            return
        file.seek(0)
        for number, line in enumerate(file, 1):
            if line.strip():
                with explained(f"{path}, line {number} is not JSON in UTF-8, so mend or delete it"):
                    row = json.loads(line)
                yield f"{path}, line {number}", row


def tokens_of(
    row: Any, tokenizer: Any, where: str, counts: collections.Counter[str] | None = None
) -> tuple[np.ndarray, bool]:
    """(array of `TOKEN`, whether it is a conversation) of a dict, see `read_row`. where: for errors. counts:
    gets how often something was left out, by what it was."""
    parts, is_conversation = parts_of(row, tokenizer, where, counts)
    texts, learned = [text for text, _ in parts], [learned for _, learned in parts]
    if is_conversation:  # whole, since tokens may reach over the border of a part
        found = tokenizer("".join(texts), add_special_tokens=False, return_offsets_mapping=True)
        ids, spans = np.array(found["input_ids"], np.int32), np.array(found["offset_mapping"]).reshape(-1, 2)
        before = np.append(0, np.repeat(learned, list(map(len, texts))).cumsum())  # learned characters
        learned = before[spans[:, 1]] > before[spans[:, 0]]
    else:
        encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
        ids = np.array(list(itertools.chain(*encoded)), np.int32)
        learned = np.repeat(learned, list(map(len, encoded)))
    tokens = np.zeros(max(len(ids) - 1, 0), TOKEN)
    tokens["tokens"], tokens["labels"] = ids[:-1], np.where(learned, ids, -1)[1:]
    return tokens, is_conversation


def parts_of(
    row: Any, tokenizer: Any, where: str, counts: collections.Counter[str] | None = None
) -> tuple[list[tuple[str, bool]], bool]:
    """([(text, whether it is to be learned)], whether it is a conversation), see `tokens_of`.

    What the assistant says is to be learned, up to what ends its turn, unless the message has weight 0."""
    said, tools = read_row(row, where)
    if isinstance(said, str):
        start = tokenizer.decode(tokenizer("")["input_ids"][:1])  # what the model expects first, if anything
        start = "" if start and said.startswith(start) else start
        end = "" if said.rstrip().endswith(tokenizer.eos_token) else tokenizer.eos_token
        pieces = [said[first : first + PIECE] for first in range(0, len(said), PIECE)]
        return [(text, True) for text in (start, *pieces, end)], False
    answers = [number for number, one in enumerate(said) if one["role"] == "assistant"]
    if not any(said[number]["content"].strip() or said[number].get("tool_calls") for number in answers):
        raise TpukitError(f"{where}: the completion is empty: there is nothing to learn")
    render = functools.partial(_render, tools=tools, tokenizer=tokenizer, where=where)
    for number in answers:  # some data end a completion with what the template writes, too
        said[number]["content"] = said[number]["content"].removesuffix(tokenizer.eos_token)
    whole, parts, at = render(said), [], 0
    counts = collections.Counter() if counts is None else counts
    if tools and whole == _render(said, None, tokenizer, where):
        counts[TOOLLESS] += 1
    for number in answers:
        if said[number].get("weight", 1) == 0:
            continue
        marked = render([*said[:number], dict(role="assistant", content=MARK), *said[number + 1 :]])
        first, mark, rest = marked.partition(MARK)
        before = render(said[:number], prompt=True) if number else ""
        if not before or not whole.startswith(before):  # as this template writes earlier turns in another way
            before = first if whole.startswith(first) else ""
        end = len(whole) - len(rest)
        is_there = before and mark and whole.endswith(rest) and at <= len(before) <= end
        if not is_there or (said[number].get("tool_calls") and not whole[len(before) : end].strip()):
            counts[UNLEARNED] += 1
            continue
        closing, _ = turn_end(tokenizer, tokenizer.chat_template)
        end += len(closing) if rest.startswith(closing) else 0
        parts += [(whole[at : len(before)], False), (whole[len(before) : end], True)]
        at = end
    return [*parts, (whole[at:], False)], True


@functools.lru_cache(maxsize=8)
def turn_end(tokenizer: Any, template: str | None) -> tuple[str, int | None]:
    """(what the chat template writes after an answer, up to the first special token; that token's id, or None
    if it writes none). template: the tokenizer's."""
    said = [dict(role="user", content="a"), dict(role="assistant", content=MARK)]
    rest = _render(said, None, tokenizer, "a question and an answer").partition(MARK)[2]
    encoded = tokenizer(rest, add_special_tokens=False, return_offsets_mapping=True)
    for token, (_, end) in zip(encoded["input_ids"], encoded["offset_mapping"]):
        if token in tokenizer.added_tokens_decoder:
            return rest[:end], token
    return rest, None


def read_row(row: Any, where: str) -> tuple[list[dict[str, Any]] | str, Any]:
    """(the messages of a row, or its text; its tools or None).

    Of a row with messages or conversations, of role and content or of from and value; with one of the
    `PAIRS`, texts or messages; or with text. Of messages in a prompt nothing is learned."""
    row = {name: value for name, value in row.items() if value is not None} if isinstance(row, dict) else {}
    messages: Any = _parsed(row.get("messages", row.get("conversations")))
    question = next((name for name in PAIRS if name in row), "")
    if messages is None and question:
        answers = [row[name] for name in PAIRS[question] if name in row][:1]
        asked: Any = row[question]
        if question == "instruction" and row.get("input"):
            asked = f"{asked}\n\n{row['input']}"
        asked = (
            [dict(one, weight=0) for one in asked] if _is_list(asked) else [dict(role="user", content=asked)]
        )
        said = [one if _is_list(one) else [dict(role="assistant", content=one)] for one in answers]
        messages = list(itertools.chain(asked, *said))
    if messages is None and isinstance(row.get("text"), str):
        _check_characters(row["text"], where)
        return row["text"], None
    found: list[Any] = [_message(one) for one in messages] if _is_list(messages) else []
    if not found or None in found:
        raise TpukitError(
            f"{where}: it needs a text, or a prompt and a completion, or messages, a list of {{role: TEXT,"
            f" content: TEXT}}, and has {', '.join(map(str, row)) or 'none of them'}"
        )
    if isinstance(row.get("system"), str) and found[0]["role"] != "system":
        found = [dict(role="system", content=row["system"]), *found]
    _check_characters(json.dumps(found, ensure_ascii=False), where)
    return found, _parsed(row.get("tools"))


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
    with explained(f"{where}: half of a character, which no tokenizer reads, so mend or delete the line"):
        text.encode()


@functools.lru_cache(maxsize=8)
def _on_one_day(template: str) -> str:
    """A chat template that writes `DAY` where it wrote today's date, so that a run that is resumed on another
    day goes on with the same tokens."""
    return re.sub(NOW, lambda call: repr(DAY.strftime(call[2])), template)


def _render(messages: list[dict], tools: Any, tokenizer: Any, where: str, *, prompt: bool = False) -> str:
    """A conversation as the model reads it. prompt: with the beginning of an answer."""
    template = _on_one_day(tokenizer.chat_template or TEMPLATE)
    options: dict[str, Any] = dict(chat_template=template, tools=tools, add_generation_prompt=prompt)
    with explained(f"{where}: the model's chat template refuses it"):
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def read_prompts(path: Path, tokenizer: Any) -> list[tuple[str, list[int]]]:
    """[(name, tokens)] of the prompts in a text file, which is one, or in the lines of a .jsonl file, each
    with `prompt` or `messages`, or with `text` that has no template."""
    prompts = []
    for where, row in _read_rows(path):
        row = dict(prompt=row["text"].rstrip("\n")) if path.suffix in TEXTS else row
        name = f"{path.name}{where.removeprefix(str(path))}"
        said, tools = read_row(row, name)
        if not isinstance(said, str):
            is_answered = len(said) > 1 and said[-1]["role"] == "assistant"
            said = _render(said[: len(said) - is_answered], tools, tokenizer, name, prompt=True)
        prompts.append((name, tokenizer(said, add_special_tokens=False)["input_ids"]))
    return prompts
