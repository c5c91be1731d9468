"""Texts, conversations and prompts in a user's files, tokenised once and packed into rows of one length.

Shapes: R rows, B batch, T tokens of a row."""

from __future__ import annotations

import bisect
import codecs
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
from tpukit.tasks.splits import about_tables, find_files, some

TEXTS, LINES, LIST = (".txt", ".md", ".rst"), ".jsonl", ".json"
PAGE = "TEXT"  # of the docs
DOCUMENT = 2**19  # characters of a text file that are one document, and are tokenised at once
SHORTEST = 128  # tokens of a row by default, at least
MOST_NOTES = 8  # about texts
MANY = 256  # documents, or fewer conversations, from which rows are filled
VERSION = 6  # of what `_pack` makes of the same files, which is cached
TOKEN = np.dtype([("tokens", np.int32), ("labels", np.int32), ("documents", np.uint16)])
SPECIAL = re.compile(r"</s>|<\|(?:im_end|eot_id|endoftext|end)\|>|<end_of_turn>|\[/INST\]")  # of some models
MARK = "\ue000\ue001"  # stands for an answer, to see where the chat template writes it
DAY = datetime.datetime(2024, 7, 26)  # that chat templates which write today's date write
NOW = r"""strftime_now\(\s*(["'])(.*?)\1\s*\)"""
ROLES = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "model", "bot", "ai", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "function", "ipython"), "tool"),
    "developer": "system",
}
ANSWERS = ("completion", "response", "answer", "output")
QUESTIONS = ("prompt", "question", "instruction", "query")
ADDED, SYSTEM = ("input", "context"), ("system", "system_prompt")  # to a question; above a conversation
REASONING = ("reasoning_content", "reasoning", "thinking")  # keys of a message
ABOUT = ("readme", "license", "licence")  # files about the data, where there are others
TOOLLESS = "conversations have tools that the chat template leaves out"
UNLEARNED = "answers are not learned, because the chat template leaves them out"
SHORTENED = (
    "answers are learned without a part that the chat template leaves out, as reasoning of earlier turns"
)
UNSEEN = "messages of the role {} are left out by the chat template"
WEIGHTED = "answers have another weight than 0 or 1, and count as 1"
FOREIGN = "texts have {}, which is no token of this model: it is learned letter by letter"
UNUSED = "texts have columns that are not used: {}"
COPIES = "test texts are training texts, too: the scores say nothing of new texts"
# Of conversations, where the tokenizer has no template of its own: one text after another.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.content }}"
    "{{ eos_token if message.role == 'assistant' }}{% endfor %}"
)


class NothingToLearn(TpukitError):
    """A row that is left out of the training; the others are learned."""


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
    others = [path.name for path in files.pop("others")]
    names = [glob.escape(str(path.relative_to(folder))) for path in itertools.chain(*files.values())]
    key = [VERSION, names, arrays.content_key(folder, like=names), length, test_share]
    key += [tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id, tokenizer.chat_template]
    packed = arrays.mapped("text", key, lambda: _pack(files, tokenizer, length, test_share))
    is_test, signature = packed["is_test"], arrays.digest(key)
    notes = [str(packed["notes"]), about_tables(place, PAGE)]
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


def _pack(files, tokenizer, length, test_share) -> dict[str, np.ndarray]:
    """rows (R, T) of `TOKEN`; of each (R,) targets, how many labels it has, sizes, how many tokens, and
    is_test; and notes."""
    file, at, longer, border = tempfile.TemporaryFile(), 0, 0, 0
    nothing, counts = np.array([(0, -1, 0)], TOKEN), collections.Counter()
    left_out, learned, held_out = [], set(), []
    # Without a test split: every tenth document, or row where texts are long.
    shares_rows = not files["test"] and any(path.suffix in TEXTS for path in files["train"])

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
        while some := list(itertools.islice(documents, MANY)):
            whole = []  # conversations, each of which stays in one row
            for number, document in some:
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
    if re.search(NOW, tokenizer.chat_template or ""):
        notes += [f"the chat template writes the date, in this training always {DAY:%d %B %Y}"]
    return dict(rows=rows, targets=targets, sizes=sizes, is_test=is_test, notes=np.array("; ".join(notes)))


def _documents(paths, tokenizer, counts, left_out):
    """Yield (tokens, whether it is a conversation, a hash) of what there is to learn in files. counts: see
    `tokens_of`. left_out: gets a sentence about each row without anything to learn."""
    from tpukit.host.bars import tqdm

    rows = itertools.chain.from_iterable(map(_read_rows, paths))
    for where, row in tqdm(rows, disable=None, leave=False, unit=" texts"):
        try:
            tokens, is_conversation = tokens_of(row, tokenizer, where, counts)
        except NothingToLearn as error:
            left_out.append(str(error))
        else:
            yield tokens, is_conversation, hash(json.dumps(row, sort_keys=True))


# Reading


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
    files = [each for each in files if each[0].suffix != LIST or _is_list_file(each[0])] or files
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


def _is_list_file(path):
    """Whether a file in JSON is a list of rows, rather than settings or rows in lines."""
    with open(path, "rb") as file:
        return file.read(1024).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def fitting_rows(place: Path, most: int, rows: int, bytes_per_token: int) -> tuple[int, int]:
    """(T, about how many such rows the training set fills), by the sizes of the files: `most` and `rows`, or,
    of a small set, a shorter T that still holds each conversation, and the rows that there are."""
    if not find_files(place, (*TEXTS, LINES, LIST)):
        return most, rows
    files = find_texts(place)
    size, longest = sum(path.stat().st_size for path in files["train"] + files["test"]), 0
    if size < most * rows * bytes_per_token:
        for path in files["train"]:
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
            while text := file.read(DOCUMENT):
                yield str(path), dict(text=text)
        return
    if _is_list_file(path):
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
    counts = collections.Counter() if counts is None else counts
    said, tools = read_row(row, where, counts)
    if isinstance(said, str):
        if not said.strip():
            raise NothingToLearn(f"{where}: the text is empty")
        _count_foreign(said, tokenizer, counts)
        start = tokenizer.decode(tokenizer("")["input_ids"][:1])  # what the model expects first, if anything
        start = "" if start and said.startswith(start) else start
        end = "" if said.rstrip().endswith(tokenizer.eos_token) else tokenizer.eos_token
        return [(text, True) for text in (start, said, end)], False
    answers = [number for number, one in enumerate(said) if one["role"] == "assistant"]
    if not answers:
        roles = ", ".join(dict.fromkeys(one["role"] for one in said))
        raise NothingToLearn(f"{where}: no message is of the assistant, only of {roles}")
    if not any(said[number]["content"].strip() or said[number].get("tool_calls") for number in answers):
        raise NothingToLearn(f"{where}: the completion is empty: there is nothing to learn")
    render = functools.partial(_render, tools=tools, tokenizer=tokenizer, where=where)
    for number in answers:  # some data end a completion with what the template writes, too
        said[number]["content"] = said[number]["content"].removesuffix(tokenizer.eos_token)
    try:
        whole, parts, at = render(said), [], 0
    except TpukitError as error:
        raise NothingToLearn(str(error)) from error
    _count_foreign(whole, tokenizer, counts)
    for one in said:
        reasons = [one[name] for name in REASONING if isinstance(one.get(name), str)]
        counts[SHORTENED] += any(each.strip() not in whole for each in reasons)
        written = (one["content"].strip(), json.dumps(one["content"].strip(), ensure_ascii=False)[1:-1])
        counts[UNSEEN.format(one["role"])] += one["role"] != "assistant" and not any(
            each in whole for each in written
        )
    if tools and whole == _render(said, None, tokenizer, where):
        counts[TOOLLESS] += 1
    for number in answers:
        counts[WEIGHTED] += said[number].get("weight", 1) not in (0, 1)
        if said[number].get("weight", 1) == 0 or said[number].get("train") is False:
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
        counts[SHORTENED] += said[number]["content"].strip() not in parts[-1][0]
        at = end
    return [*parts, (whole[at:], False)], True


def _count_foreign(text, tokenizer, counts):
    vocabulary = tokenizer.added_tokens_encoder
    for token in {*SPECIAL.findall(text)}:
        counts[FOREIGN.format(token)] += token not in vocabulary


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


def read_row(
    row: Any, where: str, counts: collections.Counter[str] | None = None
) -> tuple[list[dict[str, Any]] | str, Any]:
    """(the messages of a row, or its text; its tools or None).

    Of a row with messages or conversations, of role and content or of from and value; with one of the
    `QUESTIONS` and, but for a prompt to be answered, one of the `ANSWERS`, texts or messages; or with text.
    Of messages in a prompt nothing is learned. counts: see `tokens_of`. Raises NothingToLearn for an answer
    that is not wanted."""
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
