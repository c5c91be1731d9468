"""The tokens of texts and conversations, and what is learned of them."""

import json
from typing import Any

import pytest

from tests.conftest import refuses
from tests.tasks.text.small import (
    CHAT,
    END,
    HEAD,
    KINDS,
    START,
    TEMPLATES,
    TEXT_END,
    check_answers,
    opened,
    parts_and_counts,
    parts_of,
    said,
    tokens_of,
    turns,
    write_lines,
)
from tpukit_tasks.text import conversations, reading

tokenizers = pytest.importorskip("tokenizers")


def test_an_indentation_is_learned_though_a_tokenizer_counts_spaces_to_no_token(chats):
    code = "if x:\n        return  1"
    chats.backend_tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    _, labels = tokens_of(said("a", code), chats)
    assert chats.decode([label for label in labels if label >= 0]) == f"{code}</s>"


def learned(messages, tokenizer):
    """[text of each part that is learned], and what was counted"""
    parts, counts = parts_and_counts(dict(messages=messages), tokenizer)
    return [text for text, is_learned in parts if is_learned], counts


def test_every_answer_is_learned_though_the_template_writes_the_last_one_in_another_way(chats):
    messages = turns("a", "b", "c", "d")
    assert learned(messages, chats) == (["b</s>", "d</s>"], {})
    chats.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}THOUGHT{% endif %}"
        "{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    parts, counts = parts_and_counts(dict(messages=messages), chats)
    assert parts == [
        *(("<user>a</s><assistant>", False), ("THOUGHTb</s>", True), ("", False)),
        ("<user>a</s><assistant>b</s><user>c</s><assistant>", False),
        *(("THOUGHTd</s>", True), ("", False)),
    ]
    assert counts == {conversations.ALONE: 1}
    assert learned(turns("a", "b", "c"), chats) == (["THOUGHTb</s>"], {}), "it ends with the user"
    assert learned(turns("a", " "), chats) == ([], {conversations.UNLEARNED: 1}), "nothing but the thought"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", TEMPLATES)
def test_each_answer_is_learned_where_the_model_writes_it_and_up_to_the_end_of_its_turn(
    family, kind, tokenizer
):
    tokenizer.chat_template = TEMPLATES[family]
    tokenizer.add_special_tokens(dict(additional_special_tokens=[START, END, HEAD, "</s>"]))
    if (family, kind) == ("gemma3_text", "tools"):
        with refuses("roles must alternate"):
            check_answers(KINDS[kind], tokenizer)
    else:
        check_answers(KINDS[kind], tokenizer)


def test_an_answer_that_does_not_begin_as_the_model_is_prompted_is_not_learned_and_told(chats):
    """As with DeepSeek-R1-Distill, whose template drops all thoughts."""
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}</s>{% endfor %}"
    chats.chat_template = template + "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
    told = conversations.UNPROMPTED.format("<assistant><think>\n")
    assert learned(turns("a", "b", "c", "d"), chats) == ([], {told: 2})
    _, counts = learned(turns("a", "<think>\nwhy\n</think>b"), chats)
    assert counts[told] == 1 and conversations.UNSEEN.format("assistant") in counts


@pytest.mark.parametrize("end", ["</s>", "</s>\n", TEXT_END, f"</s>{TEXT_END}", "</s></s>"])
def test_an_answer_that_already_ends_as_a_turn_does_has_one_end(end, chats):
    messages = turns("a", f"b{end}", "c", f"d{end}")
    assert learned(messages, chats) == (["b</s>", "d</s>"], {})


def test_control_tokens_in_what_a_user_says_are_counted(chats):
    _, counts = learned(turns(f"What is {TEXT_END}?", "An end."), chats)
    assert counts == {conversations.CONTROL.format("user", TEXT_END): 1}


def test_a_greeting_before_any_question_is_learned_and_an_empty_answer_is_not(chats, tokenizer):
    messages = turns("a", "b", "c", first="assistant")
    assert learned(messages, chats) == (["a</s>", "c</s>"], {})
    assert learned(messages, tokenizer) == ([f"a{TEXT_END}", f"c{TEXT_END}"], {})
    assert learned(turns("a", " ", "b", "c"), chats) == (["c</s>"], {conversations.UNLEARNED: 1})


CALL = dict(type="function", function=dict(name="weather", arguments='{"city": "Rome"}'))
TOOLS = [dict(type="function", function=dict(name="weather", parameters=dict(type="object")))]
WITH_TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function.name }}({{ call.function.arguments.city }}){% endfor %}"
    "</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_tool_calls_are_learned_and_tools_are_read(chats):
    call = dict(role="assistant", content=None, tool_calls=[CALL])
    row = dict(messages=[*turns("a"), call], tools=json.dumps(TOOLS))
    _, counts = parts_and_counts(row, chats)
    assert counts == {conversations.UNLEARNED: 1, conversations.TOOLLESS: 1}, "of a template without tools"
    chats.chat_template = WITH_TOOLS
    parts, counts = parts_and_counts(row, chats)
    assert parts[1] == ("weather(Rome)</s>", True) and '"name": "weather"' in parts[0][0] and not counts
    older = dict(role="assistant", content="Wait: ", function_call=CALL["function"])
    parts, _ = parts_and_counts(dict(row, messages=[*turns("a"), older]), chats)
    assert parts[1] == ("Wait: weather(Rome)</s>", True)
    as_text = json.dumps(dict(name="weather", arguments=dict(city="Rome")))
    for role in ("function_call", "tool_call"):
        said = [{"from": "human", "value": "a"}, {"from": role, "value": as_text}]
        parts, counts = parts_and_counts(dict(conversations=said, tools=TOOLS), chats)
        assert parts[1] == ("weather(Rome)</s>", True) and not counts
        said += [said[-1], {"from": "observation", "value": "22"}, {"from": "gpt", "value": "Warm."}]
        parts, _ = parts_and_counts(dict(conversations=said, tools=TOOLS), chats)
        assert [text for text, is_learned in parts if is_learned] == [
            "weather(Rome)" * 2 + "</s>",
            "Warm.</s>",
        ]
        said[1:3] = [
            {"from": "gpt", "value": "Wait: "},
            dict(role=role, content=f"<think>so</think>\n[{as_text}]"),
        ]
        parts, _ = parts_and_counts(dict(conversations=said, tools=TOOLS), chats)
        assert parts[1] == ("Wait: <think>so</think>weather(Rome)</s>", True)
        said[2] = dict(role=role, content="no JSON")
        parts, _ = parts_and_counts(dict(conversations=said), chats)
        assert ("no JSON</s>", True) in parts


def test_of_pairs_the_chosen_answer_is_learned(chats):
    pairs = (
        dict(prompt="a", chosen="b", rejected="c"),
        dict(prompt=turns("a"), chosen=turns("b", first="assistant"), rejected=turns("c", first="assistant")),
        dict(chosen=turns("a", "b"), rejected=turns("a", "c")),
    )
    for row in pairs:
        parts, counts = parts_and_counts(row, chats)
        assert parts == [("<user>a</s><assistant>", False), ("b</s>", True), ("", False)]
        assert counts == {reading.UNUSED.format("rejected"): 1}


def test_the_nulls_of_an_arrow_table_are_left_out_of_calls_and_tools_at_every_depth(chats):
    answer = "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
    chats.chat_template = "{{ tools | tojson }}" + CHAT.replace("{{ m.content }}", answer)
    whole: Any = dict(city="Rome", at=[dict(day=1)])
    holey = dict(city="Rome", zone=None, at=[dict(day=1, hour=None)])
    parameters = dict(type="object", properties=dict(city=dict(type="string")))
    rows = []
    for arguments, none in ((whole, {}), (holey, dict(enum=None))):
        call = dict(type="function", function=dict(name="w", arguments=arguments))
        tool = dict(type="function", function=dict(name="w", parameters=parameters | none))
        said = [
            dict(role="user", content="a", tool_calls=None),
            dict(role="assistant", content=None, tool_calls=[call]),
        ]
        rows.append(parts_and_counts(dict(messages=said, tools=[tool]), chats))
    assert rows[0][0] == rows[1][0] and not rows[0][1] and rows[1][1] == {reading.NULLS: 2}
    as_text = [*turns("a"), dict(role="assistant", function_call=dict(name="w", arguments=json.dumps(holey)))]
    parts, counts = parts_and_counts(dict(messages=as_text), chats)
    assert '"zone": null' in parts[1][0] and not counts, "of a text that is JSON they were meant"


def test_nothing_is_doubled_in_texts_that_begin_and_end_as_the_model_wants(tokenizer):
    def ids_of(text):
        ids, labels = tokens_of(dict(text=text), tokenizer)
        assert ids[1:] == labels[:-1]
        return [*ids, labels[-1]]

    end = tokenizer.eos_token_id
    a = ids_of("a")[0]
    assert ids_of("a") == ids_of(f"a{TEXT_END}") == [a, end]
    assert ids_of(f"a{TEXT_END}\n")[:-1] == [a, end]
    assert ids_of("aa") == [a, a, end]
    start = tokenizers.processors.TemplateProcessing(
        single=f"{TEXT_END} $A", special_tokens=[(TEXT_END, end)]
    )
    tokenizer.backend_tokenizer.post_processor = start
    assert ids_of("a") == ids_of(f"{TEXT_END}a") == [end, a, end]


def test_a_text_prompt_begins_as_the_texts_that_were_learned(tmp_path, tokenizer):
    ids = tokenizer("ab")["input_ids"]
    start = tokenizers.processors.TemplateProcessing(
        single=f"{TEXT_END} $A {TEXT_END}", special_tokens=[(TEXT_END, tokenizer.eos_token_id)]
    )
    tokenizer.backend_tokenizer.post_processor = start
    (tmp_path / "a.txt").write_text("ab\n")
    lines = write_lines(tmp_path / "b.jsonl", dict(text="ab"), dict(prompt="ab"))
    prompts = [
        one
        for path in (tmp_path / "a.txt", lines)
        for one in conversations.read_prompts(path, tokenizer, is_chat=False)
    ]
    assert [found for _, found in prompts] == [[tokenizer.eos_token_id, *ids]] * 3
    assert tokens_of(dict(text="ab"), tokenizer)[0][:3] == prompts[0][1]


def test_a_chat_template_writes_the_same_date_every_day(tmp_path, chats):
    chats.chat_template = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}" + CHAT
    rows = [said("a", "b")] * 3
    train, _ = opened(write_lines(tmp_path / "a.jsonl", *rows), chats, length=63)
    assert parts_of(train, chats)[0][0].startswith("26 Jul 2024<user>") and "26 July 2024" in train.notes


COUNTED = {
    "columns": (
        dict(prompt="a", completion="b", source="web", history=[]),
        reading.UNUSED.format("source, history"),
    ),
    "the template knows no such role": (
        dict(messages=[dict(role="critic", content="no"), *turns("a", "b")]),
        conversations.UNSEEN.format("critic"),
    ),
    "reasoning": (
        dict(messages=[*turns("a"), dict(role="assistant", content="b", reasoning_content="because")]),
        conversations.UNSEEN.format("assistant"),
    ),
    "reasoning in the text": (
        dict(prompt="a", completion="because</think>b"),
        conversations.UNSEEN.format("assistant"),
    ),
    "a token of another model": (
        dict(prompt="a", completion="b<|im_end|>"),
        conversations.FOREIGN.format("<|im_end|>"),
    ),
    "a weight between": (
        dict(messages=[*turns("a"), dict(role="assistant", content="b", weight=0.5)]),
        conversations.WEIGHTED,
    ),
}


@pytest.mark.parametrize("row, told", COUNTED.values(), ids=COUNTED)
def test_what_is_not_learned_as_it_stands_there_is_counted(row, told, chats):
    template = CHAT.replace("for m in messages", "for m in messages if m.role != 'critic'")
    chats.chat_template = template.replace("m.content", "m.content.split('</think>')[-1]")
    assert parts_and_counts(row, chats)[1] == {told: 1}
    assert not parts_and_counts(said("a", "b"), chats)[1]


def test_prompts_come_from_text_files_and_from_lines(tmp_path, tokenizer, chats):
    (tmp_path / "a.txt").write_text("Hello\n")
    lines = write_lines(tmp_path / "b.jsonl", dict(prompt="x"), said("u", "left out"))
    assert conversations.read_prompts(tmp_path / "a.txt", tokenizer)[0] == (
        "a.txt",
        tokenizer("Hello")["input_ids"],
    )
    names, ids = zip(*conversations.read_prompts(lines, chats))
    assert names == ("b.jsonl, line 1", "b.jsonl, line 2")
    assert [chats.decode(one) for one in ids] == ["<user>x</s><assistant>", "<user>u</s><assistant>"]
    texts = write_lines(tmp_path / "c.jsonl", dict(text="x"), dict(prompt="x"))
    assert [ids for _, ids in conversations.read_prompts(texts, chats, is_chat=False)] == [
        chats("x")["input_ids"]
    ] * 2
    with refuses("b.jsonl, line 1: it needs a text"):
        conversations.read_prompts(write_lines(lines, dict(words="x")), chats)
