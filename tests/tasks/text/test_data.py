"""Documents packed into rows."""

import numpy as np
import pytest

from tests.conftest import refuses
from tests.tasks.text.small import CHAT, TEXT_END, everything, opened, parts_of, said, turns, write_lines
from tpukit_tasks.text import conversations, data, reading

pytest.importorskip("tokenizers")


def test_a_text_fills_row_after_row_and_every_token_is_predicted_once(tmp_path, tokenizer):
    text = "".join(chr(ord("a") + number % 26) for number in range(300))
    (tmp_path / "train.txt").write_text(text)
    (tmp_path / "test.txt").write_text("x" * 40)
    train, test = opened(tmp_path, tokenizer)
    batch = everything(train)
    assert batch["tokens"].shape[1] == 16
    stream, labels = (batch[name][batch["documents"] > 0].tolist() for name in ("tokens", "labels"))
    assert stream + labels[-1:] == stream[:1] + labels == tokenizer(text + TEXT_END)["input_ids"]
    assert (batch["labels"][batch["documents"] == 0] == -1).all() and train.targets.sum() == 300
    assert parts_of(test, tokenizer)[-1] == ("x" * 8 + TEXT_END, "x" * 7 + TEXT_END)
    assert train.notes == "340 tokens to predict, in rows of 16" and not test.notes


def test_without_a_test_set_some_rows_are_left_out_for_tests(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("\ufeff" + "".join(chr(ord("a") + n // 16) for n in range(20 * 16)))
    train, test = opened(tmp_path, tokenizer, length=16, test_share=0.2)
    assert len(train) == 16 and [whole[0] for whole, _ in parts_of(test, tokenizer)] == list("afkp")
    assert everything(train)["tokens"][:, 0].tolist() == [
        64 + number for number in range(20) if number % 5
    ] and not {*train.kept} & {*test.kept}


def test_a_long_text_is_several_documents(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(reading, "DOCUMENT", 40)
    monkeypatch.setattr(data, "MANY", 2)
    (tmp_path / "train.txt").write_text("abcdefghij" * 10)
    write_lines(tmp_path / "train.jsonl", dict(prompt="1", completion="2"))
    (tmp_path / "test.txt").write_text("xyz")
    train, _ = opened(tmp_path, tokenizer, length=128)
    found = [whole.removesuffix(TEXT_END) for whole, _ in parts_of(train, tokenizer)]
    assert sorted(found) == ["12", "abcdefghij" * 2, *["abcdefghij" * 4] * 2]


def test_conversations_stay_whole_and_what_the_assistant_says_is_learned(tmp_path, chats):
    rows = [said(f"q{number}", "ja" * (1 + number % 4)) for number in range(40)]
    train, test = opened(write_lines(tmp_path / "chat.jsonl", *rows), chats, length=63)
    found = parts_of(train, chats) + parts_of(test, chats)
    wanted = [
        (f"<user>q{n}</s><assistant>{'ja' * (1 + n % 4)}</s>", "ja" * (1 + n % 4) + "</s>") for n in range(40)
    ]
    assert sorted(found) == sorted(wanted) and 6 <= len(parts_of(test, chats)) <= 10
    assert len(train) + len(test) < 30, "rows hold several conversations"


def test_documents_are_held_out_of_lines_so_that_few_of_them_train(tmp_path, chats):
    rows = [said(f"q{number}", "ja") for number in range(20)]
    train, test = opened(write_lines(tmp_path / "a.jsonl", *rows), chats, length=1024, test_share=0.1)
    assert len(parts_of(train, chats)) == 18 and len(parts_of(test, chats)) == 2


def test_a_conversation_longer_than_a_row_keeps_its_beginning_and_what_it_loses_is_counted(
    tmp_path, tokenizer
):
    rows = [dict(prompt="p" * 6, completion="c" * 40), *(dict(prompt="q", completion="r") for _ in range(9))]
    rows += [dict(prompt="t" * 30, completion="u"), dict(prompt="s" * 15, completion="v")]
    write_lines(tmp_path / "train.jsonl", *rows)
    write_lines(tmp_path / "test.jsonl", rows[1])
    train, _ = opened(tmp_path, tokenizer)
    found = [part for part in parts_of(train, tokenizer) if "q" not in part[0]]
    wanted = ("p" * 6 + "c" * 11, "c" * 11), ("s" * 15 + "v" + TEXT_END, "v" + TEXT_END)
    assert sorted(found) == sorted(wanted), "one has nothing to learn in its first row"
    assert "2 conversations are longer than a row, up to 46 tokens" in train.notes
    assert "lose their ends, 45 tokens, 32 of them to learn; 1 lose all answers" in train.notes


def test_no_answer_is_learned_without_the_beginning_of_its_conversation(tmp_path, chats):
    """Chats of all lengths, most of them a little too long for what is left of a row."""
    rows = [dict(messages=turns("q" * (20 + n % 50), "a" * 20, "r", "b" * (n % 9))) for n in range(80)]
    train, test = opened(write_lines(tmp_path / "chat.jsonl", *rows), chats, length=63)
    documents = parts_of(train, chats) + parts_of(test, chats)
    assert all(whole.startswith("<user>q") for whole, learned in documents if learned)
    assert len(documents) >= 50 and "conversations are longer than a row" in train.notes


def test_questions_are_learned_too_if_that_is_asked(tmp_path, chats):
    path = write_lines(tmp_path / "chat.jsonl", *[said("q", "a")] * 4)
    train, _ = data.open_sets(path, chats, 63, 0.3, learns_all=True)
    assert parts_of(train, chats)[0] == ("<user>q</s><assistant>a</s>", "user>q</s><assistant>a</s>")
    assert parts_of(opened(path, chats, length=63)[0], chats)[0][1] == "a</s>", "not of the same cache"


def test_conversations_of_all_lengths_fit_in_rows_with_little_room_left(tmp_path, tokenizer):
    rng = np.random.default_rng(0)
    rows = [dict(prompt="p" * int(n), completion="c" * 5) for n in rng.integers(1, 50, 400)]
    train, _ = opened(write_lines(tmp_path / "many.jsonl", *rows), tokenizer, length=64)
    assert (everything(train)["documents"] == 0).mean() < 0.06


def test_texts_are_tokenised_once_and_anew_where_files_or_settings_change(tmp_path, tokenizer, monkeypatch):
    made = []
    pack = data._pack
    monkeypatch.setattr(data, "_pack", lambda *all: (made.append(1), pack(*all))[1])
    (tmp_path / "a.txt").write_text("abc " * 50)
    first, _ = opened(tmp_path, tokenizer)
    again, _ = opened(tmp_path, tokenizer)
    assert len(made) == 1 and first.signature == again.signature
    assert isinstance(again.rows, np.memmap)
    assert opened(tmp_path, tokenizer, length=20)[0].signature != first.signature
    (tmp_path / "a.txt").write_text("abd " * 50)
    assert opened(tmp_path, tokenizer)[0].signature != first.signature and len(made) == 3


LEFT_OUT = {
    "no completion": (dict(prompt="a", completion=None), "line 1: no message is from the assistant"),
    "nothing said": (dict(messages=turns("a")), "line 1: no message is from the assistant, only from user"),
    "nothing written": (dict(text=" "), "line 1: the text is empty"),
    "an answer that is not wanted": (dict(prompt="a", completion="b", label=False), "line 1: its label"),
    "refused": (
        dict(messages=turns("a", "b", first="assistant")),
        "line 1: the model's chat template refuses",
    ),
}


@pytest.mark.parametrize("row, told", LEFT_OUT.values(), ids=LEFT_OUT)
def test_a_row_without_anything_to_learn_is_left_out_and_told_and_a_set_of_such_is_refused(
    row, told, tmp_path, chats
):
    chats.chat_template = (
        "{% if messages[0].role == 'assistant' %}{{ raise_exception('the user begins') }}{% endif %}" + CHAT
    )
    train, test = opened(write_lines(tmp_path / "a.jsonl", row, *[said("a", "b")] * 3), chats, length=63)
    assert len(parts_of(train, chats) + parts_of(test, chats)) == 3
    assert "1 texts are left out" in train.notes and told in train.notes
    with refuses(told):
        opened(write_lines(tmp_path / "a.jsonl", row, row), chats)


def test_a_set_whose_answers_are_all_empty_is_refused_with_their_number(tmp_path, chats):
    path = write_lines(tmp_path / "a.jsonl", *[dict(prompt="a", completion=" ")] * 3)
    with refuses("nothing is left", f"3 {conversations.UNLEARNED}"):
        opened(path, chats)
    assert data.fitting_sizes(path, chats, 1024, 1) == (1, data.SHORTEST)


def test_test_texts_that_are_training_texts_are_counted(tmp_path, chats):
    write_lines(tmp_path / "train.jsonl", said("a", "b"), said("c", "d"))
    write_lines(tmp_path / "test.jsonl", dict(said("c", "d"), id=7), said("e", "f"))
    assert f"1 {data.COPIES}" in opened(tmp_path, chats, length=63)[0].notes
    (tmp_path / "rows").mkdir()
    for name in "ab":  # of which rows are held out, rather than texts
        (tmp_path / f"rows/{name}.txt").write_text("x" * 100)
    assert data.COPIES not in opened(tmp_path / "rows", chats)[0].notes
