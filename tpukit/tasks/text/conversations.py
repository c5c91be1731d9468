"""The tokens of a text or a conversation, and which of them are to be learned."""

from __future__ import annotations

import collections
import datetime
import functools
import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from tpukit.host.errors import TpukitError, explained
from tpukit.tasks.text import reading
from tpukit.tasks.text.reading import NothingToLearn

TOKEN = np.dtype([("tokens", np.int32), ("labels", np.int32), ("documents", np.uint16)])
SPECIAL = re.compile(r"</s>|<\|(?:im_end|eot_id|endoftext|end)\|>|<end_of_turn>|\[/INST\]")  # of some models
MARK = "\ue000\ue001"  # stands for an answer, to see where the chat template writes it
DAY = datetime.datetime(2024, 7, 26)  # that chat templates which write today's date write
NOW = r"""strftime_now\(\s*(["'])(.*?)\1\s*\)"""
REASONING = ("reasoning_content", "reasoning", "thinking")  # keys of a message
TOOLLESS = "conversations have tools that the chat template leaves out"
UNLEARNED = "answers are not learned, because the chat template leaves them out"
SHORTENED = (
    "answers are learned without a part that the chat template leaves out, as reasoning of earlier turns"
)
UNSEEN = "messages of the role {} are left out by the chat template"
WEIGHTED = "answers have another weight than 0 or 1, and count as 1"
FOREIGN = "texts have {}, which is no token of this model: it is learned letter by letter"
# Of conversations, where the tokenizer has no template of its own: one text after another.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.content }}"
    "{{ eos_token if message.role == 'assistant' }}{% endfor %}"
)


def tokens_of(
    row: Any, tokenizer: Any, where: str, counts: collections.Counter[str] | None = None
) -> tuple[np.ndarray, bool]:
    """(array of `TOKEN`, whether it is a conversation) of a dict, see `reading.read_row`. where: for
    errors. counts: gets how often something was left out, by what it was."""
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
    said, tools = reading.read_row(row, where, counts)
    if isinstance(said, str):
        return _parts_of_text(said, tokenizer, where, counts), False
    return _parts_of_conversation(said, tools, tokenizer, where, counts), True


def _parts_of_text(text, tokenizer, where, counts):
    if not text.strip():
        raise NothingToLearn(f"{where}: the text is empty")
    _count_foreign(text, tokenizer, counts)
    start = tokenizer.decode(tokenizer("")["input_ids"][:1])  # what the model expects first, if anything
    start = "" if start and text.startswith(start) else start
    end = "" if text.rstrip().endswith(tokenizer.eos_token) else tokenizer.eos_token
    return [(part, True) for part in (start, text, end)]


def _parts_of_conversation(said, tools, tokenizer, where, counts):
    answers = _answers_of(said, where)
    for number in answers:  # some data end a completion with what the template writes, too
        said[number]["content"] = said[number]["content"].removesuffix(tokenizer.eos_token)
    render = functools.partial(_render, tools=tools, tokenizer=tokenizer, where=where)
    try:
        whole = render(said)
    except TpukitError as error:
        raise NothingToLearn(str(error)) from error
    _count_foreign(whole, tokenizer, counts)
    _count_unseen(said, whole, counts)
    counts[TOOLLESS] += bool(tools) and whole == _render(said, None, tokenizer, where)
    parts, at = [], 0
    for number in answers:
        message = said[number]
        counts[WEIGHTED] += message.get("weight", 1) not in (0, 1)
        if message.get("weight", 1) == 0 or message.get("train") is False:
            continue
        span = _span_of(number, said, whole, at, render, tokenizer)
        if span is None:
            counts[UNLEARNED] += 1
            continue
        start, end = span
        parts += [(whole[at:start], False), (whole[start:end], True)]
        counts[SHORTENED] += message["content"].strip() not in whole[start:end]
        at = end
    return [*parts, (whole[at:], False)]


def _answers_of(said, where):
    """Return the numbers of the assistant's messages. Raises NothingToLearn if none has anything."""
    answers = [number for number, message in enumerate(said) if message["role"] == "assistant"]
    if not answers:
        roles = ", ".join(dict.fromkeys(message["role"] for message in said))
        raise NothingToLearn(f"{where}: no message is of the assistant, only of {roles}")
    if not any(said[number]["content"].strip() or said[number].get("tool_calls") for number in answers):
        raise NothingToLearn(f"{where}: the completion is empty: there is nothing to learn")
    return answers


def _span_of(number, said, whole, at, render, tokenizer):
    """Return where a conversation, as it is written, has the answer of a number: (start, end), or None if the
    template does not write it there. at: the end of the answer before."""
    marked = render([*said[:number], dict(role="assistant", content=MARK), *said[number + 1 :]])
    first, mark, rest = marked.partition(MARK)
    before = render(said[:number], prompt=True) if number else ""
    if not before or not whole.startswith(before):  # as this template writes earlier turns in another way
        before = first if whole.startswith(first) else ""
    start, end = len(before), len(whole) - len(rest)
    if not (before and mark and whole.endswith(rest) and at <= start <= end):
        return None
    if said[number].get("tool_calls") and not whole[start:end].strip():
        return None
    closing, _ = turn_end(tokenizer, tokenizer.chat_template)
    return start, end + (len(closing) if rest.startswith(closing) else 0)


def _count_unseen(said, whole, counts):
    """Count the messages and the reasoning that a conversation, as it is written, lacks."""
    for message in said:
        reasons = [message[name] for name in REASONING if isinstance(message.get(name), str)]
        counts[SHORTENED] += any(reason.strip() not in whole for reason in reasons)
        content = message["content"].strip()
        as_json = json.dumps(content, ensure_ascii=False)[1:-1]
        is_there = content in whole or as_json in whole
        counts[UNSEEN.format(message["role"])] += message["role"] != "assistant" and not is_there


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
    for where, row in reading.read_rows(path):
        row = dict(prompt=row["text"].rstrip("\n")) if path.suffix in reading.TEXTS else row
        name = f"{path.name}{where.removeprefix(str(path))}"
        said, tools = reading.read_row(row, name)
        if not isinstance(said, str):
            is_answered = len(said) > 1 and said[-1]["role"] == "assistant"
            said = _render(said[: len(said) - is_answered], tools, tokenizer, name, prompt=True)
        prompts.append((name, tokenizer(said, add_special_tokens=False)["input_ids"]))
    return prompts
