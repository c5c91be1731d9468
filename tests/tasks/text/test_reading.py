"""The formats that files of texts and conversations have."""

import collections
import json

import pytest

from tests.conftest import refuses
from tests.tasks.text.small import TEXT_END, opened, parts_and_counts, parts_of, said, turns, write_lines
from tpukit_tasks.text import reading

pytest.importorskip("tokenizers")


FORMATS = {
    "TRL, a text after messages": dict(prompt=turns("a"), completion="b"),
    "TRL, several turns": dict(prompt=turns("x", "y", "a"), completion=turns("b", first="assistant")),
    "ShareGPT": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    "Alpaca": dict(instruction="a", input="", output="b"),
    "question and answer": dict(question="a", answer="b"),
    "Dolly": dict(instruction="a", context="", response="b"),
    "query and response": dict(query="a", response="b"),
    "train false": dict(
        messages=[*turns("x"), dict(role="assistant", content="y", train=False), *turns("a", "b")]
    ),
    "other names of roles": dict(
        messages=[dict(role="prompter", content="a"), dict(role="bot", content="b")]
    ),
    "weight 0": dict(messages=[*turns("x"), dict(role="assistant", content="y", weight=0), *turns("a", "b")]),
    "parts": dict(messages=[*turns("a"), dict(role="assistant", content=[dict(type="text", text="b")])]),
    "missing values": dict(messages=[dict(one, tool_calls=None, name=None) for one in turns("a", "b")]),
    "a text of JSON": dict(messages=json.dumps(turns("a", "b"))),
    "Alpaca, all of it in the input": dict(instruction="", input="a", output="b"),
    "the end of a text after it": dict(prompt="a", completion=f"b{TEXT_END}"),
}


@pytest.mark.parametrize("row", FORMATS.values(), ids=FORMATS)
def test_the_usual_formats_are_read(row, chats):
    parts, _ = parts_and_counts(row, chats)
    assert [text for text, is_learned in parts if is_learned] == ["b</s>"]
    assert parts[0][0].endswith("<user>a</s><assistant>")


@pytest.mark.parametrize(
    "row",
    [
        dict(system="s", instruction="a", input="i", output="b"),
        dict(system_prompt="s", question="a", context="i", answer="b"),
    ],
)
def test_an_input_or_a_context_and_a_system_column_are_part_of_the_prompt(row, chats):
    parts, counts = parts_and_counts(row, chats)
    assert parts[0][0] == "<system>s</s><user>a\n\ni</s><assistant>" and not counts


def test_a_context_that_is_no_text_is_not_written_into_the_question_as_python_writes_it(chats):
    parts, counts = parts_and_counts(dict(question="a", context=["one", "two"], answer="b"), chats)
    assert parts[0][0] == "<user>a</s><assistant>" and counts == {reading.UNUSED.format("context"): 1}
    with refuses("question (int)"):
        parts_and_counts(dict(question=1, context="i", answer="b"), chats)


def test_a_list_in_a_json_file_is_read_and_so_are_lines_in_one(tmp_path, chats):
    rows = [said("a", "b"), said("c", "d")]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(rows, indent=1))
    train, test = opened(path, chats, length=63)
    assert parts_of(test, chats) + parts_of(train, chats) == [
        (f"<user>{user}</s><assistant>{text}</s>", f"{text}</s>") for user, text in ("ab", "cd")
    ]
    write_lines(path, *rows)
    assert len(opened(tmp_path, chats, length=63)[0]) == 1
    path.with_suffix(".jsonl").write_text(json.dumps(rows))
    path.unlink()
    assert len(opened(tmp_path, chats, length=63)[0]) == 1
    path.with_suffix(".jsonl").unlink()
    path.write_text(json.dumps([rows[0], dict(words="a")]))
    with refuses("a.json, entry 2", "it needs a text"):
        opened(path, chats)


def test_files_of_rows_name_their_split_anywhere_and_texts_at_the_beginning(tmp_path):
    for name in ("chats_train.jsonl", "chats-val.jsonl", "more.v2.test.jsonl", "how_to_test.md", "test.txt"):
        (tmp_path / name).write_text(json.dumps(dict(text="a")))
    files = reading.find_texts(tmp_path)
    assert {split: [path.name for path in paths] for split, paths in files.items()} == dict(
        train=["chats_train.jsonl"],
        test=["chats-val.jsonl", "more.v2.test.jsonl", "test.txt"],
        others=["how_to_test.md"],
    )
    alone = tmp_path / "test.txt"
    assert reading.find_texts(alone)["train"] == [alone], "the only file, named by the user"


def test_a_hugging_face_dataset_is_answered_with_the_page_that_turns_it_into_lines(tmp_path, tokenizer):
    for name in ("train-00000-of-00001.parquet", "test-00000-of-00001.parquet", "dataset_infos.yaml"):
        (tmp_path / name).touch()
    with refuses("has no texts", "docs/TEXT.md", "it has 2 .parquet, 1 .yaml"):
        opened(tmp_path, tokenizer)


BAD_LINES = {
    "not JSON": ('{"text": "a', "line 2", "is not JSON"),
    "no text": (dict(words="a"), "line 2", "it needs a text", "words"),
    "a list": ([1, 2], "line 2", "it needs a text"),
    "numbers": (dict(prompt=1, completion=2), "line 2", "prompt (int), completion (int)"),
    "a list of Python": (dict(messages=str(turns("a", "b"))), "line 2", "messages (str)"),
    "no messages": (dict(messages=[]), "line 2", "messages, a list"),
    "no content": (dict(messages=[dict(role="user")]), "line 2", "messages, a list"),
    "half an emoji": ('{"prompt": "\\ud83d", "completion": "b"}', "line 2", "half of a character"),
    "deep": ("[" * 5000, "line 2", "is not JSON"),
}


@pytest.mark.parametrize("line, told", [(line, told) for line, *told in BAD_LINES.values()], ids=BAD_LINES)
def test_a_bad_line_is_named_by_its_number(line, told, tmp_path, tokenizer):
    path = write_lines(tmp_path / "a.jsonl", dict(text="fine"), line, dict(text="fine, too"))
    with refuses("a.jsonl", *told):
        opened(path, tokenizer)


def test_lists_beside_lines_are_read_and_files_about_the_data_or_in_no_split_are_counted(tmp_path, chats):
    write_lines(tmp_path / "b.jsonl", said("a", "b"))
    (tmp_path / "a.json").write_text(json.dumps([said("c", "d"), said("e", "f")]))
    (tmp_path / "settings.json").write_text("{}")
    (tmp_path / "README.md").write_text("About these data.")
    (tmp_path / "table.csv").write_text("prompt,completion")
    (tmp_path / ".git").mkdir()
    for name in (".DS_Store", ".git/HEAD"):
        (tmp_path / name).touch()
    train, test = opened(tmp_path, chats, length=63)
    assert len(parts_of(train, chats) + parts_of(test, chats)) == 3
    assert "3 files are not used: README.md, settings.json, table.csv" in train.notes


def test_places_without_texts_and_other_encodings_are_told(tmp_path, tokenizer):
    with refuses("does not exist"):
        opened(tmp_path / "nowhere", tokenizer)
    (tmp_path / "photo.png").write_bytes(b"")
    with refuses("has no texts", ".jsonl"):
        opened(tmp_path, tokenizer)
    (tmp_path / "empty.txt").write_text("")
    with refuses("nothing is left"):
        opened(tmp_path, tokenizer)
    (tmp_path / "latin.txt").write_bytes("Füße".encode("latin-1"))
    with refuses("latin.txt", "UTF-8"):
        opened(tmp_path, tokenizer)


ASKED, SYSTEM = dict(role="user", content="Q"), dict(role="system", content="Be kind.")
EARLIER = [dict(role="user", content="O"), dict(role="assistant", content="P")]
GOOD, BAD = (dict(role="assistant", content=text) for text in ("good", "bad"))


@pytest.mark.parametrize(
    "row, wanted",
    [
        (dict(prompt="Q", chosen=[ASKED, GOOD]), [ASKED, GOOD]),  # as UltraFeedback has it
        (dict(prompt="Q", chosen=[SYSTEM, ASKED, GOOD]), [SYSTEM, ASKED, GOOD]),
        (dict(prompt=[SYSTEM, ASKED], chosen=[SYSTEM, ASKED, GOOD]), [SYSTEM, ASKED, GOOD]),
        (dict(prompt=[*EARLIER, ASKED], chosen=[*EARLIER, ASKED, GOOD]), [*EARLIER, ASKED, GOOD]),
        (dict(prompt=[ASKED], completion=[ASKED, GOOD]), [ASKED, GOOD]),
        (dict(prompt="Q", chosen=[{"from": "human", "value": "Q"}, GOOD]), [ASKED, GOOD]),
        (dict(prompt=[ASKED], chosen=[GOOD]), [ASKED, GOOD]),
        (dict(prompt="Q", chosen=[dict(role="assistant", content="Q")]), [ASKED, dict(GOOD, content="Q")]),
        (dict(chosen=[*EARLIER, ASKED, GOOD]), [*EARLIER, ASKED, GOOD]),
        (dict(prompt=[], chosen=[ASKED, GOOD]), [ASKED, GOOD]),
    ],
)
def test_a_question_that_its_answer_repeats_is_asked_once(row, wanted):
    messages, _ = reading.read_row(row | dict(rejected=[BAD]), collections.Counter())
    assert [{name: one[name] for name in ("role", "content")} for one in messages] == wanted
    learned = [one["content"] for one in messages if one["role"] == "assistant" and one.get("weight", 1)]
    assert learned == ([wanted[-1]["content"]] if "prompt" in row else ["P", "good"])
