"""Files on the command line: hostile ones cost their own finding and nothing else, no code of a file runs,
and what is rewritten can be had back."""

import os
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.tools.migrate.helpers import written
from tpukit import TpukitError
from tpukit_tools import cli, migrate
from tpukit_tools.migrate import files

NESTED = b"[" * 100_000 + b"]" * 100_000
# name -> bytes; those that a Python of another version reads have nothing in them to be found
HOSTILE = {
    "parentheses.py": b"x = " + b"(" * 5000 + b")" * 5000,
    "brackets.py": b"x = " + NESTED,
    "not.py": b"x = " + b"not " * 50_000 + b"y",
    "sum.py": b"x = " + b"1+" * 2_000 + b"1",
    "attributes.py": b"x = a" + b".b" * 2_000,
    "latin.py": b"# coding: latin-1\nname = '\xe9'\nmodel.cuda()\n",
    "zero.py": b"x = 1\0\nmodel.cuda()\n",
    "bytes.py": b"\xff\xfe\x00",
    "words.ipynb": b"no json",
    "empty.ipynb": b"{}",
    "bomb.ipynb": NESTED,
    "objects.ipynb": b'{"cells":' * 50_000,
    "cell.ipynb": b'{"cells": [{"cell_type": "code", "source": ["x = ' + NESTED + b'"]}]}',
    "number.ipynb": b'{"cells": ' + b"9" * 10_000 + b"}",
    "infinite.ipynb": b'{"cells": [{"cell_type": "code", "source": ["x.cuda()"]}], "big": 1e999}',
    "surrogate.ipynb": b'{"cells": [{"cell_type": "code", "source": ["x.cuda()", "# \\ud83d \xc3\xa9"]}]}',
    "sources.ipynb": b'{"cells": [{"cell_type": "code", "source": 1}]}',
}
READABLE = {"not.py", "sum.py", "attributes.py"}


def test_a_hostile_file_is_named_nothing_of_it_is_written_and_the_others_are_read(tmp_path, capsys):
    for name, data in HOSTILE.items():
        (tmp_path / name).write_bytes(data)
    for name in ("a_first.py", "z_last.py"):
        written(tmp_path, "model.cuda()\n", name)
    assert cli.main(["migrate", "--fix", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    named = re.findall(rf"^{tmp_path}/([\w.]+).*error \[unreadable\]", shown.out, re.MULTILINE)
    assert "Traceback" not in shown.err and HOSTILE.keys() - READABLE <= set(named) <= HOSTILE.keys()
    assert shown.out.count(" [") == len(named), "no other finding"
    assert {name: (tmp_path / name).read_bytes() for name in HOSTILE} == HOSTILE
    assert "cuda" not in (tmp_path / "a_first.py").read_text() + (tmp_path / "z_last.py").read_text()


def test_no_code_of_the_current_folder_runs_while_files_are_read(tmp_path, monkeypatch):
    for name in ("json", "tpukit", "torch", "sitecustomize"):
        written(tmp_path, "import os\nos._exit(3)\n", f"{name}.py")
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-P", "-m", "tpukit", "migrate", "torch.py"]
    ran = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120)
    assert ran.returncode == 0


def test_one_name_without_code_stops_all_before_anything_is_written(tmp_path, capsys):
    good, other = (written(tmp_path, "model.cuda()\n", name) for name in ("good.py", "a.txt"))
    for wrong in (other, tmp_path / "missing.py"):
        assert cli.main(["migrate", "--fix", str(good), str(wrong)]) == 1
        assert wrong.name in capsys.readouterr().err and good.read_text() == "model.cuda()\n"


def test_a_folder_without_code_and_what_cannot_be_written_are_said(tmp_path, monkeypatch):
    def refuse(path, data):
        raise OSError(30, "Read-only file system")

    with pytest.raises(TpukitError, match=r"\.py or \.ipynb"):
        files.files_in([tmp_path])
    monkeypatch.setattr(files, "write_atomic", refuse)
    with pytest.raises(TpukitError, match="script.py.*read-only file system"):
        migrate.examine(written(tmp_path, "model.cuda()\n")).write()


def test_each_file_that_is_rewritten_leaves_a_copy_that_replaces_none(tmp_path):
    path = written(tmp_path, "model.cuda()\n")
    written(tmp_path, "mine", "script.py.orig")
    cli.main(["migrate", "--fix", str(path)])
    path.write_text("again.cuda()\n")
    cli.main(["migrate", "--fix", str(path)])
    copies = [(tmp_path / f"script.py.orig{number}").read_text() for number in ("", 2, 3)]
    assert copies == ["mine", "model.cuda()\n", "again.cuda()\n"] and "cuda" not in path.read_text()


def test_a_file_and_its_copy_keep_the_mode_and_owner_and_nobody_else_reads_them_meanwhile(
    tmp_path, monkeypatch
):
    path, modes, fsync = written(tmp_path, "token = 1\nmodel.cuda()\n"), [], os.fsync
    path.chmod(0o600)
    is_root = os.geteuid() == 0
    if is_root:
        os.chown(path, 12345, 54321)

    def seen(number):
        modes.extend(one.stat().st_mode & 0o777 for one in tmp_path.iterdir())
        fsync(number)

    monkeypatch.setattr(os, "fsync", seen)
    copy = migrate.examine(path).write()
    assert set(modes) == {0o600} and path.read_text() != copy.read_text()
    for one in (path, copy):
        found = one.stat()
        assert found.st_mode & 0o777 == 0o600
        assert not is_root or (found.st_uid, found.st_gid) == (12345, 54321)
    path.chmod(0o754)
    path.write_text("again.cuda()\n")
    copy = migrate.examine(path).write()
    assert [one.stat().st_mode & 0o777 for one in (path, copy)] == [0o754, 0o754]


def test_an_edit_that_is_saved_between_the_check_and_the_fix_stays_and_the_other_files_are_fixed(
    tmp_path, monkeypatch, capsys
):
    first, second = (written(tmp_path, "model.cuda()\n", name) for name in ("a.py", "b.py"))
    write_atomic = files.write_atomic

    def edit(path, data):
        write_atomic(path, data)
        if path.name == "a.py.orig":
            first.write_text("model.cuda()  # mine\n")

    monkeypatch.setattr(files, "write_atomic", edit)
    assert cli.main(["migrate", "--fix", str(tmp_path)]) == 1
    assert first.read_text() == "model.cuda()  # mine\n" and "cuda" not in second.read_text()
    assert sorted(os.listdir(tmp_path)) == ["a.py", "b.py", "b.py.orig"]
    assert f"{first} was edited meanwhile" in capsys.readouterr().out


TYING = (
    "class Net(nn.Module):\n    def __init__(self):\n        self.head.weight = self.transformer.wte.weight\n"
)


def test_files_that_a_script_imports_and_that_were_not_given_are_named(tmp_path, capsys):
    """A model in a file of its own may tie weights, which a move separates: that is found only there."""
    (tmp_path / "parts").mkdir()
    for name in ("model", "parts/__init__", "parts/loss", "unused"):
        written(tmp_path, TYING, f"{name}.py")
    code = "import torch, os\nfrom model import GPT\nfrom .parts.loss import dice\nimport parts\n"
    script = written(tmp_path, code, "train.py")
    cli.main(["migrate", str(script)])
    said = capsys.readouterr().out
    assert "imported, but not looked at:" in said and "unused.py" not in said
    for name in ("model.py", "parts/loss.py", "parts/__init__.py"):
        assert str(tmp_path / name) in said
    for given in ([tmp_path], [script, *(tmp_path / name for name in ("model.py", "parts"))]):
        cli.main(["migrate", *map(str, given)])
        said = capsys.readouterr().out
        assert "not looked at" not in said and "[untied]" in said


def test_what_a_link_in_a_folder_leads_to_is_not_rewritten(tmp_path):
    outside, repository = tmp_path / "outside", tmp_path / "repository"
    for folder in (outside, repository):
        folder.mkdir()
    kept, fixed = (written(folder, "model.cuda()\n") for folder in (outside, repository))
    (repository / "link.py").symlink_to(kept)
    (repository / "folder").symlink_to(outside)
    assert files.files_in([fixed, repository]) == [fixed]  # each once
    cli.main(["migrate", "--fix", str(repository)])
    assert kept.read_text() == "model.cuda()\n" and "cuda" not in fixed.read_text()


def test_what_is_shown_of_a_file_holds_no_control_character(tmp_path, capsys):
    path = written(tmp_path, "model.cuda()  # \x1b]0;title\x07\nx = f'{loss.item()}\x9b'\n", "\x1b[2J.py")
    cli.main(["migrate", str(path), "--fix"])
    shown = "".join(capsys.readouterr())
    assert "cuda" not in path.read_text() and not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)


def test_the_table_of_one_file_names_it_in_its_title_and_that_of_several_in_a_short_column(tmp_path):
    place = tmp_path / "a/long/folder/of/outputs"
    (place / "more").mkdir(parents=True)
    for name in ("train.py", "more/test.py"):
        (place / name).write_text("model.cuda()\nx.cuda()\n")
    one = migrate.as_table(migrate.examine(place / "train.py").findings)
    assert one.columns == ("line", "level", "code", "what to do", "fix")
    assert one.title.startswith("train.py: ") and str(tmp_path) not in one.as_html()
    found = [
        finding for path in migrate.files_in((str(place),)) for finding in migrate.examine(path).findings
    ]
    several = migrate.as_table(found)
    assert several.columns[0] == "file" and str(tmp_path) not in several.as_html()
    assert {row[0] for row in several.rows} == {"train.py", "", "more/test.py"}
    assert migrate.as_table([]).rows == []
