"""Documents in files, and how they are packed into rows."""

import collections
import json

import numpy as np
import pytest

from tests.conftest import refuses
from tests.tasks.text.small import CHAT
from tpukit.tasks.text import data, hub

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
END = "<|endoftext|>"


@pytest.fixture
def tokenizer():
    return hub.load_tokenizer("tiny")


@pytest.fixture
def chats():
    found = hub.load_tokenizer("tiny")
    found.chat_template = CHAT
    found.add_tokens(["</s>"])
    return found


def write_lines(path, *rows):
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def said(user, assistant):
    return dict(messages=[dict(role="user", content=user), dict(role="assistant", content=assistant)])


def opened(place, tokenizer, length=16, test_share=0.2):
    return data.open_sets(place, tokenizer, length, test_share)


def everything(rows):
    return rows.batch(np.arange(len(rows)))


def parts_of(rows, tokenizer):
    """[(text of a document in a row, text of what is to be learned of it)], in order."""
    batch, found = everything(rows), []
    for row, numbers, labels in zip(batch["tokens"], batch["documents"], batch["labels"]):
        for number in sorted({*numbers.tolist()} - {0}):
            here = numbers == number
            told = labels[here & (labels >= 0)]
            whole = [*row[here], *(labels[here][-1:] if labels[here][-1] >= 0 else [])]
            found.append((tokenizer.decode(whole), tokenizer.decode(told)))
    return found


def test_a_text_fills_row_after_row_and_every_token_is_predicted_once(tmp_path, tokenizer):
    text = "".join(chr(ord("a") + number % 26) for number in range(300))
    (tmp_path / "train.txt").write_text(text)
    (tmp_path / "test.txt").write_text("x" * 40)
    train, test = opened(tmp_path, tokenizer)
    batch = everything(train)
    assert batch["tokens"].shape[1] == 16
    stream, labels = (batch[name][batch["documents"] > 0].tolist() for name in ("tokens", "labels"))
    assert stream + labels[-1:] == stream[:1] + labels == tokenizer(text + END)["input_ids"]
    assert (batch["labels"][batch["documents"] == 0] == -1).all() and train.targets == 300 / len(train)
    assert parts_of(test, tokenizer)[-1] == ("x" * 8 + END, "x" * 7 + END)
    assert train.notes == "340 tokens to predict, in rows of 16" and not test.notes


def test_without_a_test_set_some_rows_are_left_out_for_tests(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("\ufeff" + "".join(chr(ord("a") + n // 16) for n in range(20 * 16)))
    train, test = opened(tmp_path, tokenizer, length=16, test_share=0.2)
    assert len(train) == 16 and [whole[0] for whole, _ in parts_of(test, tokenizer)] == list("afkp")
    assert everything(train)["tokens"][:, 0].tolist() == [
        64 + number for number in range(20) if number % 5
    ] and not {*train.kept} & {*test.kept}


def test_a_long_text_is_several_documents(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(data, "DOCUMENT", 40)
    monkeypatch.setattr(data, "MANY", 2)
    (tmp_path / "train.txt").write_text("abcdefghij" * 10)
    write_lines(tmp_path / "train.jsonl", dict(prompt="1", completion="2"))
    (tmp_path / "test.txt").write_text("xyz")
    train, _ = opened(tmp_path, tokenizer, length=128)
    found = [whole.removesuffix(END) for whole, _ in parts_of(train, tokenizer)]
    assert sorted(found) == ["12", "abcdefghij" * 2, *["abcdefghij" * 4] * 2]


@pytest.fixture
def pieces():
    """A tokenizer as Llama 2's, which writes a space before whatever it is given."""
    letters = ["▁", *map(chr, range(33, 127)), *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {text: number for number, text in enumerate(["<unk>", "<s>", "</s>", *letters, "▁a", "ab"])}
    model = tokenizers.models.BPE(vocabulary, [("▁", "a"), ("a", "b")], byte_fallback=True, unk_token="<unk>")
    found = tokenizers.Tokenizer(model)
    spaces = [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    found.normalizer = tokenizers.normalizers.Sequence(spaces)
    found.add_special_tokens(["<s>", "</s>"])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=found, eos_token="</s>", chat_template="<s>" + CHAT
    )


@pytest.mark.parametrize("row", [said("ab ab", "ab"), dict(text="ab" * 2**16)], ids=["chat", "long text"])
def test_ids_are_those_of_the_whole_though_a_tokenizer_adds_a_space_to_each_part(row, pieces):
    whole = pieces.apply_chat_template(row["messages"], tokenize=False) if "messages" in row else row["text"]
    expected = pieces(whole, add_special_tokens=False)["input_ids"]
    tokens, _ = data.tokens_of(row, pieces, "x")
    assert tokens["tokens"].tolist() == (expected[:-1] if "messages" in row else expected)


def test_two_texts_share_a_row_as_two_documents(tmp_path, tokenizer):
    for name in ("train_a", "train_b", "test"):
        (tmp_path / f"{name}.txt").write_text(name[-1] * 4)
    train, _ = opened(tmp_path, tokenizer)
    assert parts_of(train, tokenizer) == [
        ("aaaa" + END, "aaa" + END),
        ("bbbb" + END, "bbb" + END),
    ]
    assert everything(train)["documents"].tolist() == [[1] * 4 + [2] * 4 + [0] * 8]
    assert train.targets == 8, "the first token of a document has none to be predicted from"


def test_conversations_stay_whole_and_what_the_assistant_says_is_learned(tmp_path, chats):
    rows = [said(f"q{number}", "ja" * (1 + number % 4)) for number in range(40)]
    train, test = opened(write_lines(tmp_path / "chat.jsonl", *rows), chats, length=63)
    found = parts_of(train, chats) + parts_of(test, chats)
    wanted = [
        (f"<user>q{n}</s><assistant>{'ja' * (1 + n % 4)}</s>", "ja" * (1 + n % 4) + "</s>") for n in range(40)
    ]
    assert sorted(found) == sorted(wanted) and 6 <= len(parts_of(test, chats)) <= 10
    assert len(train) + len(test) < 30, "rows hold several conversations"


def turns(*texts, first="user"):
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [dict(role=roles[number % 2], content=text) for number, text in enumerate(texts)]


def learned(row, tokenizer):
    """[text of each part that is learned]"""
    return [text for text, is_learned in data.parts_of(row, tokenizer, "x")[0] if is_learned]


def test_every_answer_of_a_conversation_is_learned_though_the_template_writes_the_last_one_in_another_way(
    chats,
):
    messages = turns("a", "b", "c", "d")
    assert learned(dict(messages=messages), chats) == ["b</s>", "d</s>"]
    chats.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}THOUGHT{% endif %}"
        "{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    parts, _ = data.parts_of(dict(messages=messages), chats, "x")
    assert parts == [
        ("<user>a</s><assistant>", False),
        ("b</s>", True),
        ("<user>c</s><assistant>", False),
        ("THOUGHTd</s>", True),
        ("", False),
    ]
    assert learned(dict(messages=turns("a", "b", "c")), chats) == ["b</s>"], "it ends with the user"
    assert learned(dict(messages=turns("a", "b", "c", first="assistant")), chats)[0] == "a</s>"


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
    counts = collections.Counter()
    data.parts_of(row, chats, "x", counts)
    assert +counts == {data.UNLEARNED: 1, data.TOOLLESS: 1}, "of a template without tools"
    chats.chat_template = WITH_TOOLS
    counts.clear()
    parts, _ = data.parts_of(row, chats, "x", counts)
    assert parts[1] == ("weather(Rome)</s>", True) and '"name": "weather"' in parts[0][0] and not +counts


FORMATS = {
    "TRL": dict(prompt=turns("a"), completion=turns("b", first="assistant")),
    "TRL, a text after messages": dict(prompt=turns("a"), completion="b"),
    "messages of the prompt": dict(prompt=turns("x", "y", "a"), completion=turns("b", first="assistant")),
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
    "the end of a text after it": dict(prompt="a", completion=f"b{END}"),
}


@pytest.mark.parametrize("row", FORMATS.values(), ids=FORMATS)
def test_the_usual_formats_are_read(row, chats):
    parts, _ = data.parts_of(row, chats, "x")
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
    assert data.parts_of(row, chats, "x")[0][0][0] == "<system>s</s><user>a\n\ni</s><assistant>"


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


def test_nothing_is_doubled_in_texts_that_begin_and_end_as_the_model_wants(tokenizer):
    assert data.parts_of(dict(text=f"a{END}"), tokenizer, "x")[0][1:] == [(f"a{END}", True), ("", True)]
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, 256)]
    )
    assert [data.parts_of(dict(text=text), tokenizer, "x")[0][0][0] for text in ("a", f"{END}a")] == [END, ""]


def test_a_chat_template_writes_the_same_date_every_day(tmp_path, chats):
    chats.chat_template = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}" + CHAT
    rows = [said("a", "b")] * 3
    train, _ = opened(write_lines(tmp_path / "a.jsonl", *rows), chats, length=63)
    assert parts_of(train, chats)[0][0].startswith("26 Jul 2024<user>") and "26 July 2024" in train.notes


def test_documents_are_held_out_of_lines_so_that_few_of_them_train(tmp_path, chats):
    rows = [said(f"q{number}", "ja") for number in range(20)]
    train, test = opened(write_lines(tmp_path / "a.jsonl", *rows), chats, length=1024, test_share=0.1)
    assert len(parts_of(train, chats)) == 18 and len(parts_of(test, chats)) == 2


def test_a_prompt_without_a_template_is_followed_by_its_completion_and_the_end(tmp_path, tokenizer):
    rows = [dict(prompt=f"{n}+1=", completion=str(n + 1)) for n in range(9)]
    train, test = opened(write_lines(tmp_path / "sums.jsonl", *rows), tokenizer)
    found = sorted(parts_of(train, tokenizer) + parts_of(test, tokenizer))
    assert found == sorted((f"{n}+1={n + 1}{END}", f"{n + 1}{END}") for n in range(9))


def test_a_conversation_longer_than_a_row_goes_on_in_the_next_one_and_is_counted(tmp_path, tokenizer):
    rows = [dict(prompt="p" * 6, completion="c" * 40), *(dict(prompt="q", completion="r") for _ in range(9))]
    rows += [dict(prompt="t" * 30, completion="u")]
    write_lines(tmp_path / "train.jsonl", *rows)
    write_lines(tmp_path / "test.jsonl", rows[1])
    train, _ = opened(tmp_path, tokenizer)
    found = [part for part in parts_of(train, tokenizer) if "q" not in part[0] and part[1]]
    # As a text, of which each row goes on where the one before ended.
    wanted = [("p" * 6 + "c" * 11, "c" * 11), ("c" * 17, "c" * 16), ("c" * 14 + END, "c" * 13 + END)]
    assert found == [*wanted, ("t" * 12 + "u" + END, "u" + END)]
    assert "2 conversations longer than that" in train.notes


def test_conversations_of_all_lengths_fit_in_rows_with_little_room_left(tmp_path, tokenizer):
    rng = np.random.default_rng(0)
    rows = [dict(prompt="p" * int(n), completion="c" * 5) for n in rng.integers(1, 50, 300)]
    train, _ = opened(write_lines(tmp_path / "many.jsonl", *rows), tokenizer, length=64)
    _, test = opened(tmp_path, tokenizer, length=64)
    assert (everything(train)["documents"] == 0).mean() < 0.06
    whole = [part for rows in (train, test) for part, _ in parts_of(rows, tokenizer)]
    assert sorted(len(tokenizer(part)["input_ids"]) for part in whole) == sorted(
        len(row["prompt"]) + 6 for row in rows
    )


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


def test_a_hugging_face_dataset_is_answered_with_the_page_that_turns_it_into_lines(tmp_path, tokenizer):
    (tmp_path / "train-00000-of-00001.parquet").touch()
    with refuses("train-00000", "docs/TEXT.md"):
        opened(tmp_path, tokenizer)
    (tmp_path / "train.txt").write_text("abc" * 200)
    assert "docs/TEXT.md" in opened(tmp_path, tokenizer)[0].notes


BAD_LINES = {
    "not JSON": ('{"text": "a', "line 2", "no JSON"),
    "no text": (dict(words="a"), "line 2", "it needs a text", "words"),
    "a list": ([1, 2], "line 2", "it needs a text"),
    "numbers": (dict(prompt=1, completion=2), "line 2", "prompt (int), completion (int)"),
    "pairs to choose from": (dict(prompt="a", chosen="b", rejected="c"), "line 2", "chosen (str)"),
    "no messages": (dict(messages=[]), "line 2", "messages, a list"),
    "a number": (dict(messages=5), "line 2", "messages, a list"),
    "no content": (dict(messages=[dict(role="user")]), "line 2", "messages, a list"),
    "half an emoji": ('{"text": "a \\ud83d"}', "line 2", "half of a character"),
    "half an emoji in a prompt": (
        '{"prompt": "\\ud83d", "completion": "b"}',
        "line 2",
        "half of a character",
    ),
    "deep": ("[" * 5000, "line 2", "no JSON"),
}


@pytest.mark.parametrize("line, told", [(line, told) for line, *told in BAD_LINES.values()], ids=BAD_LINES)
def test_a_bad_line_is_named_by_its_number(line, told, tmp_path, tokenizer):
    path = write_lines(tmp_path / "a.jsonl", dict(text="fine"), line, dict(text="fine, too"))
    with refuses("a.jsonl", *told):
        opened(path, tokenizer)


LEFT_OUT = {
    "an empty completion": (dict(prompt="a", completion=" "), "line 1: the completion is empty"),
    "no completion": (dict(prompt="a", completion=None), "line 1: no message is of the assistant"),
    "nothing said": (dict(messages=turns("a")), "line 1: no message is of the assistant, only of user"),
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


COUNTED = {
    "columns": (
        dict(prompt="a", completion="b", source="web", history=[]),
        data.UNUSED.format("source, history"),
    ),
    "the template knows no such role": (
        dict(messages=[dict(role="critic", content="no"), *turns("a", "b")]),
        data.UNSEEN.format("critic"),
    ),
    "reasoning": (
        dict(messages=[*turns("a"), dict(role="assistant", content="b", reasoning_content="because")]),
        data.SHORTENED,
    ),
    "a token of another model": (
        dict(prompt="a", completion="b<|im_end|>"),
        data.FOREIGN.format("<|im_end|>"),
    ),
    "a weight between": (
        dict(messages=[*turns("a"), dict(role="assistant", content="b", weight=0.5)]),
        data.WEIGHTED,
    ),
}


@pytest.mark.parametrize("row, told", COUNTED.values(), ids=COUNTED)
def test_what_is_not_learned_as_it_stands_there_is_counted(row, told, chats):
    chats.chat_template = CHAT.replace(
        "{% for m in messages %}", "{% for m in messages if m.role != 'critic' %}"
    )
    counts = collections.Counter()
    data.parts_of(row, chats, "x", counts)
    assert +counts == {told: 1}
    counts.clear()
    data.parts_of(said("a", "b"), chats, "x", counts)
    assert not +counts


def test_test_texts_that_are_training_texts_are_counted(tmp_path, chats):
    write_lines(tmp_path / "train.jsonl", said("a", "b"), said("c", "d"))
    write_lines(tmp_path / "test.jsonl", said("c", "d"), said("e", "f"))
    assert f"1 {data.COPIES}" in opened(tmp_path, chats, length=63)[0].notes


def test_lists_beside_lines_are_read_and_files_about_the_data_or_in_no_split_are_counted(tmp_path, chats):
    write_lines(tmp_path / "b.jsonl", said("a", "b"))
    (tmp_path / "a.json").write_text(json.dumps([said("c", "d"), said("e", "f")]))
    (tmp_path / "settings.json").write_text("{}")
    (tmp_path / "README.md").write_text("About these data.")
    (tmp_path / "table.csv").write_text("prompt,completion")
    train, test = opened(tmp_path, chats, length=63)
    assert len(parts_of(train, chats) + parts_of(test, chats)) == 3
    assert "3 files are not used: README.md, settings.json, table.csv" in train.notes
    for name in ("a.json", "b.jsonl"):
        (tmp_path / name).unlink()
    write_lines(tmp_path / "settings.json", said("a", "b"), said("c", "d"))  # lines, by another ending
    assert "2 files are not used: README.md, table.csv" in opened(tmp_path, chats, length=63)[0].notes


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


def test_prompts_come_from_text_files_and_from_lines(tmp_path, tokenizer, chats):
    (tmp_path / "a.txt").write_text("Hello\n")
    lines = write_lines(tmp_path / "b.jsonl", dict(prompt="x"), said("u", "left out"))
    assert data.read_prompts(tmp_path / "a.txt", tokenizer)[0] == (
        "a.txt",
        tokenizer("Hello")["input_ids"],
    )
    names, ids = zip(*data.read_prompts(lines, chats))
    assert names == ("b.jsonl, line 1", "b.jsonl, line 2")
    assert [chats.decode(one) for one in ids] == ["<user>x</s><assistant>", "<user>u</s><assistant>"]
