"""The tokens of a text or a conversation, and which of them are to be learned."""

import datetime
import functools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from tpukit.host.errors import TpukitError, explained
from tpukit_tasks.text import reading
from tpukit_tasks.text.reading import Counts, Message, NothingToLearn

TOKEN = np.dtype([("tokens", np.int32), ("labels", np.int32), ("documents", np.uint16)])
SPECIAL = re.compile(r"</s>|<\|(?:im_end|eot_id|endoftext|end)\|>|<end_of_turn>|\[/INST\]")  # in some models
MARK = "\ue000\ue001"  # stands for an answer, to see where the chat template writes it
MOST = 40  # characters of a prompt that are shown
DAY = datetime.datetime(2024, 7, 26)  # for chat templates that write today's date
NOW = r"""strftime_now\(\s*(["'])(.*?)\1\s*\)"""
REASONING = ("reasoning_content", "reasoning", "thinking")  # keys of a message
# What is counted.
TOOLLESS = "conversations have tools that the chat template leaves out"
UNLEARNED = "answers are not learned: they are empty, or the chat template leaves them out"
UNPROMPTED = (
    "answers are not learned: the prompt ends with {!r}, but the chat template does not begin them so"
)
UNSEEN = "messages of the role {} are left out by the chat template, whole or in part"
ALONE = (
    "answers are learned in a copy of the conversation that ends with them, as the model has to write them"
)
CONTROL = "messages of the role {} have {} in their text, which the model reads as its own control token"
WEIGHTED = "answers have a weight other than 0 or 1, and count as 1"
FOREIGN = "texts have {}, which is no token of this model: it is learned letter by letter"
# For conversations, if the tokenizer has no template of its own: one text after another.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.content }}"
    "{{ eos_token if message.role == 'assistant' }}{% endfor %}"
)


def tokens_of(
    row: Any, tokenizer: Any, counts: Counts, *, learns_all: bool = False
) -> tuple[np.ndarray, bool]:
    """Return (array of `TOKEN`, whether it is a conversation) of a row, see `reading.read_row`. The array may
    have several documents, one after another, whose numbers count from 0.

    counts: gets how often something was left out, by what it was. learns_all: learn all of a conversation,
    rather than answers. Raises NothingToLearn for a row that is to be left out, TpukitError for one that has
    to be mended."""
    content, tools = reading.read_row(row, counts)
    if isinstance(content, str):
        ids = _ids_of_text(content, tokenizer, counts)
        return _with_labels(ids, np.ones(len(ids), bool)), False
    documents = documents_of(content, tools, tokenizer, counts)
    if learns_all:
        documents = [[("".join(text for text, _ in parts), True)] for parts in documents]
    arrays = [_tokens_of_parts(parts, tokenizer) for parts in documents]
    for number, tokens in enumerate(arrays):
        tokens["documents"] = number
    return np.concatenate([np.zeros(0, TOKEN), *arrays]), True


def _tokens_of_parts(parts, tokenizer):
    # Tokenised as a whole, since a token may reach over the border of two parts.
    whole = "".join(text for text, _ in parts)
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    is_learned = np.repeat([learned for _, learned in parts], [len(text) for text, _ in parts])
    learned_before = np.append(0, is_learned.cumsum())  # each character
    starts, ends = np.array(encoded["offset_mapping"]).reshape(-1, 2).T
    # Some tokenizers count spaces to no token, so that those of an indentation have no place of their own.
    starts = np.minimum(starts, np.append(0, ends)[:-1])
    return _with_labels(encoded["input_ids"], learned_before[ends] > learned_before[starts])


def _with_labels(ids, is_learned):
    """Return an array of `TOKEN`: all but the last of some ids, each with the next one as its label."""
    tokens = np.zeros(max(len(ids) - 1, 0), TOKEN)
    tokens["tokens"], tokens["labels"] = ids[:-1], np.where(is_learned, ids, -1)[1:]
    return tokens


def _ids_of_text(text, tokenizer, counts):
    """Return the ids of a text from the token that the model expects first, if any, to that for its end: one
    of each, even if they are in the text, too."""
    if not text.strip():
        raise NothingToLearn("the text is empty")
    _count_foreign(text, tokenizer, counts)
    ids = _ids_of_beginning(text, tokenizer)
    has_end = ids[-1] == tokenizer.eos_token_id or text.rstrip().endswith(tokenizer.eos_token)
    return ids if has_end else [*ids, tokenizer.eos_token_id]


def _ids_of_beginning(text, tokenizer):
    """Return the ids of a text from the token that the model expects first, if any."""
    ids = tokenizer(text)["input_ids"]
    is_doubled = ids[:1] == ids[1:2] and ids[:1] and ids[0] in tokenizer.all_special_ids
    return ids[1:] if is_doubled else ids


def documents_of(
    messages: list[Message], tools: Any, tokenizer: Any, counts: Counts
) -> list[list[tuple[str, bool]]]:
    """Return the documents of a conversation, each [(text, whether it is to be learned)], as the chat
    template writes them.

    The assistant's answers are to be learned, each up to what ends its turn, but not those of weight 0. One
    document has them all, unless the template writes an answer in another way once more messages follow: the
    model never has to write it so, and it gets a document that ends with it. counts and errors: see
    `tokens_of`."""
    answers = _find_answers(messages)
    closing, _ = turn_end(tokenizer, tokenizer.chat_template)
    for number in answers:
        content = messages[number]["content"]
        messages[number]["content"] = _without_ends(content, (tokenizer.eos_token, closing.strip()))
    render = functools.partial(_render, tools=tools, tokenizer=tokenizer)
    whole = render(messages)
    _count_foreign(whole, tokenizer, counts)
    _count_control(messages, tokenizer, counts)
    counts[TOOLLESS] += bool(tools) and whole == render(messages, tools=None)
    found: list[tuple[str, list[tuple[int, int]]]] = []  # (a document, where its answers are), the last first
    for number in reversed(answers):
        message = messages[number]
        counts[WEIGHTED] += message.get("weight", 1) not in (0, 1)
        if message.get("weight", 1) == 0 or message.get("train") is False:
            continue
        document = render(messages[: number + 1])  # as it is once the model has written the answer
        span = _span_of(number, messages, document, render)
        if isinstance(span, str):
            counts[span] += 1
            continue
        start, end = span
        if document.startswith(closing, end):
            end += len(closing)
        if found and found[-1][0].startswith(document[:end]):
            found[-1][1].append((start, end))
        else:
            counts[ALONE] += bool(found)
            found.append((document, [(start, end)]))
    _count_unseen(messages, "\n".join([whole, *(document for document, _ in found)]), counts)
    return [_parts_of(document, spans[::-1]) for document, spans in reversed(found)]


def _parts_of(document, spans):
    """Return [(text, whether it is to be learned)] of a document, by (start, end) of what is."""
    parts, at = [], 0
    for start, end in spans:
        parts += [(document[at:start], False), (document[start:end], True)]
        at = end
    return [*parts, (document[at:], False)]


def _without_ends(text, ends):
    """Return an answer without what ends its turn: some data end a completion with what the template writes
    after it, too."""
    while end := next((end for end in ends if end and text.rstrip().endswith(end)), None):
        text = text.rstrip().removesuffix(end)
    return text


def _find_answers(messages):
    """Return the numbers of the assistant's messages. Raises NothingToLearn if there are none."""
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise NothingToLearn(f"no message is from the assistant, only from {', '.join(dict.fromkeys(roles))}")
    return [number for number, role in enumerate(roles) if role == "assistant"]


def _span_of(number, messages, document, render):
    """Return (start, end) of the answer of a number among the messages in `document`, which ends with it, as
    the template writes it; or, if it cannot be learned, what is to be counted."""
    if not (messages[number]["content"].strip() or messages[number].get("tool_calls")):
        return UNLEARNED  # some templates write an empty thought before an empty answer, too
    before, mark, after = render([*messages[:number], dict(role="assistant", content=MARK)]).partition(MARK)
    # An answer begins where the model begins to write when it is prompted with the messages before. If there
    # are none, it begins where its text does.
    prompt = render(messages[:number], prompt=True) if number else ""
    if prompt and not document.startswith(prompt):
        return UNPROMPTED.format(prompt.removeprefix(render(messages[:number]))[-MOST:])
    start, end = len(prompt or before), len(document) - len(after)
    is_there = mark and document.startswith(prompt or before) and document.endswith(after)
    return (start, end) if is_there and document[start:end].strip() else UNLEARNED


def _count_unseen(messages, whole, counts):
    """Count the messages of which a conversation, as it is written, lacks the content or the reasoning."""
    for message in messages:
        reasons = [message[name] for name in REASONING if isinstance(message.get(name), str)]
        texts = [text.strip() for text in (message["content"], *reasons)]
        as_json = [json.dumps(text, ensure_ascii=False)[1:-1] for text in texts]
        is_there = all(text in whole or quoted in whole for text, quoted in zip(texts, as_json))
        counts[UNSEEN.format(message["role"])] += not is_there


def _count_control(messages, tokenizer, counts):
    """Count the messages whose text has special tokens of this model."""
    for message in messages:
        for token in {*_control_tokens(tokenizer).findall(message["content"])}:
            counts[CONTROL.format(message["role"], token)] += 1


@functools.lru_cache(maxsize=8)
def _control_tokens(tokenizer):
    tokens = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")


def _count_foreign(text, tokenizer, counts):
    """Count the special tokens of other models."""
    for token in {*SPECIAL.findall(text)}:
        counts[FOREIGN.format(token)] += token not in tokenizer.added_tokens_encoder


@functools.lru_cache(maxsize=8)
def turn_end(tokenizer: Any, template: str | None) -> tuple[str, int | None]:
    """Return (the text that the chat template writes after an answer, up to the first special token; that
    token's id, or None if it writes none). template: the tokenizer's, which may change."""
    messages = [dict(role="user", content="a"), dict(role="assistant", content=MARK)]
    rest = _render(messages, None, tokenizer).partition(MARK)[2]
    encoded = tokenizer(rest, add_special_tokens=False, return_offsets_mapping=True)
    for token, (_, end) in zip(encoded["input_ids"], encoded["offset_mapping"]):
        if token in tokenizer.added_tokens_decoder:
            return rest[:end], token
    return rest, None


def _render(messages: list[Message], tools: Any, tokenizer: Any, *, prompt: bool = False) -> str:
    """Return a conversation as the model reads it. prompt: with the beginning of an answer."""
    # Always of one day, so that a run that is resumed on another day goes on with the same tokens.
    template = re.sub(NOW, lambda call: repr(DAY.strftime(call[2])), tokenizer.chat_template or TEMPLATE)
    options: dict[str, Any] = dict(chat_template=template, tools=tools, add_generation_prompt=prompt)
    with explained("the model's chat template refuses it", NothingToLearn):
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def read_prompts(path: Path, tokenizer: Any, *, is_chat: bool = True) -> list[tuple[str, list[int]]]:
    """Return [(name, tokens)] of the prompts in a text file, which is one, or in the lines of a .jsonl file,
    each with `prompt` or `messages`, or with `text`, which is no chat. is_chat: whether text files and
    `prompt` are what a user says in a chat; else they are texts to be continued."""
    prompts = []
    for where, row in reading.read_rows(path):
        if path.suffix in reading.TEXTS:
            row = dict(prompt=row["text"].rstrip("\n"))
        if not is_chat and isinstance(row, dict) and isinstance(row.get("prompt"), str):
            row = dict(text=row["prompt"])
        name = f"{path.name}{where.removeprefix(str(path))}"
        try:
            prompts.append((name, _ids_of_prompt(row, tokenizer)))
        except TpukitError as error:
            raise TpukitError(f"{name}: {error}") from error
    return prompts


def _ids_of_prompt(row, tokenizer):
    content, tools = reading.read_row(row, Counts(), is_prompt=True)
    if isinstance(content, str):  # it begins as a text that was learned
        ids = _ids_of_beginning(content, tokenizer)
        has_end = ids[1:] and ids[-1] == tokenizer.eos_token_id and not content.endswith(tokenizer.eos_token)
        return ids[:-1] if has_end else ids  # some tokenizers end each text
    is_answered = len(content) > 1 and content[-1]["role"] == "assistant"
    content = _render(content[: len(content) - is_answered], tools, tokenizer, prompt=True)
    return tokenizer(content, add_special_tokens=False)["input_ids"]
