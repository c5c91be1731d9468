"""`tpukit migrate` on the command line: formats, files that cannot be read or written, what is shown of
them."""

import json
import re

import pytest

from tests.tools.migrate.helpers import written
from tpukit import TpukitError, cli
from tpukit.tools import migrate as tool


def test_json_has_every_finding_with_its_rule_place_and_fix(tmp_path, capsys):
    path = written(tmp_path, "model = model.cuda()\nimport os\nos.environ['XLA_USE_BF16'] = '1'\n", "a.py")
    assert cli.main(["migrate", str(path), "--format", "json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [(f["rule"], f["level"], f["line"], f["column"], f["fixable"]) for f in found] == [
        ("cuda", "error", 1, 9, True),
        ("old-variable", "warning", 3, 12, False),
    ]


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("a.ipynb", "{}", r"a.ipynb:1:1: error \[unreadable\] .*KeyError"),
        ("a.ipynb", "no json", r"\[unreadable\] .*JSONDecodeError"),
        ("a.py", b"\xff\xfe\x00", r"\[unreadable\] .*UTF-8"),
        ("a.txt", "words", r"a\.txt .*\.py or \.ipynb"),
        ("missing.py", None, r"missing\.py"),
        ("folder", "", r"\.py or \.ipynb .*folder"),
    ],
)
def test_what_cannot_be_read_is_said_and_nothing_is_written(name, text, words, tmp_path, capsys):
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
    elif text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert cli.main(["migrate", "--fix", str(path)]) == 1
    shown = capsys.readouterr()
    assert re.search(words, shown.out + shown.err)
    assert text is None or path.is_dir() or path.read_bytes() in (text, str(text).encode())


def test_a_missing_file_is_said_before_any_other_is_rewritten(tmp_path, capsys):
    path = written(tmp_path, "model.cuda()\n")
    assert cli.main(["migrate", "--fix", str(path), str(tmp_path / "missing.py")]) == 1
    assert "missing.py" in capsys.readouterr().err and path.read_text() == "model.cuda()\n"


def test_what_cannot_be_written_is_said(tmp_path, monkeypatch):
    path = written(tmp_path, "model.cuda()\n")

    def refuse(path, data):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(tool.files, "write_atomic", refuse)
    with pytest.raises(TpukitError, match="script.py.*Read-only file system"):
        tool.write(path, "x")


def test_a_file_that_is_edited_while_it_is_checked_keeps_the_edit(tmp_path, monkeypatch, capsys):
    edited, other = written(tmp_path, "model.cuda()\n", "a.py"), written(tmp_path, "model.cuda()\n", "b.py")

    def examine_all(paths, to):
        yield from list(examine_paths(paths, to))
        edited.write_text("model.cuda()\nmine = 1\n")

    examine_paths = tool.examine_all
    monkeypatch.setattr(tool, "examine_all", examine_all)
    assert cli.main(["migrate", "--fix", str(tmp_path)]) == 1
    assert edited.read_text() == "model.cuda()\nmine = 1\n" and "a.py was edited" in capsys.readouterr().out
    assert "cuda" not in other.read_text()


def test_each_file_that_is_rewritten_leaves_a_copy_that_replaces_none(tmp_path):
    path = written(tmp_path, "model.cuda()\n")
    (tmp_path / "script.py.orig").write_text("mine")
    cli.main(["migrate", "--fix", str(path)])
    path.write_text("again.cuda()\n")
    cli.main(["migrate", "--fix", str(path)])
    copies = [(tmp_path / f"script.py.orig{number}").read_text() for number in ("", 2, 3)]
    assert copies == ["mine", "model.cuda()\n", "again.cuda()\n"] and "cuda" not in path.read_text()


def test_what_a_link_in_a_folder_leads_to_is_not_rewritten(tmp_path):
    outside, repository = tmp_path / "outside", tmp_path / "repository"
    for folder in (outside, repository):
        folder.mkdir()
        written(folder, "model.cuda()\n")
    (repository / "link.py").symlink_to(outside / "script.py")
    (repository / "folder").symlink_to(outside)
    cli.main(["migrate", "--fix", str(repository)])
    assert (outside / "script.py").read_text() == "model.cuda()\n" and "cuda" not in (
        repository / "script.py"
    ).read_text()


def test_what_is_shown_of_a_file_holds_no_control_character(tmp_path, capsys):
    path = tmp_path / "\x1b[2J.py"
    path.write_text("model.cuda()  # \x1b]0;title\x07\nx = f'{loss.item()}\x9b'\n")
    for form in tool.FORMATS:
        cli.main(["migrate", str(path), "--format", form])
    cli.main(["migrate", str(path), "--fix"])
    assert "cuda" not in path.read_text() and not re.search(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "".join(capsys.readouterr())
    )
