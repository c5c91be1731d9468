"""Files that crash a parser, or never end, cost their own finding and nothing else; no code of a file
runs."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT
from tests.tools.migrate.helpers import written
from tpukit import cli
from tpukit.tools import migrate as tool
from tpukit.tools.migrate import files


def nested(depth):
    return "[" * depth + "]" * depth


LINE = (
    "    model.to(device).cuda(); x = x.cuda(); loss = f(model(x.to(device)), [1, 2, 3], key=(a + b) * c)\n"
)
HOSTILE = {
    "parentheses.py": b"x = " + b"(" * 5000 + b")" * 5000,
    "brackets.py": b"x = " + nested(100_000).encode(),
    "not.py": b"x = " + b"not " * 50_000 + b"y",
    "sum.py": b"x = " + b"1+" * 2_000 + b"1",
    "attributes.py": b"x = a" + b".b" * 2_000,
    "rot13.py": b"# coding: rot13\nvzcbeg bf\n",
    "zlib.py": b"# coding: zlib\nimport os\n",
    "undefined.py": b"# coding: undefined\nimport os\n",
    "surrogate.py": b"# coding: raw_unicode_escape\nx = '\\ud800'\n",
    "utf7.py": b"# coding: utf-7\nx = '+2AA-'\n",
    "zero.py": b"x = 1\0\nmodel.cuda()\n",
    "bomb.ipynb": nested(100_000).encode(),
    "objects.ipynb": b'{"cells":' * 50_000,
    "cell.ipynb": json.dumps(dict(cells=[dict(cell_type="code", source=["x = " + nested(50_000)])])).encode(),
    "number.ipynb": b'{"cells": ' + b"9" * 10_000 + b"}",
    "sources.ipynb": (
        b'{"cells": [{"cell_type": "code", "source": {"a": {}}}, {"cell_type": "code", "source": 1}]}'
    ),
}


def test_a_hostile_file_is_named_nothing_of_it_is_written_and_the_others_are_read(tmp_path, capsys):
    for name, data in HOSTILE.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "a_first.py").write_text("model.cuda()\n")
    (tmp_path / "z_last.py").write_text("model.cuda()\n")
    assert cli.main(["migrate", "--fix", "--format", "json", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    found = {}
    for finding in json.loads(shown.out):
        found.setdefault(Path(finding["path"]).name, []).append((finding["rule"], finding["level"]))
    assert "Traceback" not in shown.err and found.keys() <= {*HOSTILE, "a_first.py", "z_last.py"}
    # Those that a parser of another version reads have nothing in them to be found.
    assert {name: rules for name, rules in found.items() if rules != [("unreadable", "error")]} == {}
    must = "parentheses brackets rot13 zlib undefined surrogate utf7 zero".split()
    assert {f"{name}.py" for name in must} | {
        name for name in HOSTILE if name.endswith(".ipynb")
    } <= found.keys()
    assert {name: (tmp_path / name).read_bytes() for name in HOSTILE} == HOSTILE
    assert "cuda" not in (tmp_path / "a_first.py").read_text() + (tmp_path / "z_last.py").read_text()


def test_a_file_that_takes_too_long_is_named_and_the_next_one_is_read(tmp_path, monkeypatch):
    endless, good = tmp_path / "endless.py", written(tmp_path, "model.cuda()\n")
    os.mkfifo(endless)  # nobody ever writes into it
    monkeypatch.setattr(files, "TIME_LIMIT_S", 1)
    answers = tool.examine_all([good, endless, good])
    assert [[f.rule for f in found] for found, _ in answers] == [["cuda"], ["unreadable"], ["cuda"]]
    (found,), fixed = tool.examine(endless)
    assert "within 1 s" in found.found and fixed == ""


CHECK_INSTEAD = """
import time
from tpukit.tools.migrate import __main__ as process
process.check = lambda path, checker_class: {check}
process.main({seconds}, 'torch_xla')
"""


def checked(check, seconds):
    """What a process that has its own idea of a check answers to a request; nobody waits for it with a
    limit."""
    program = CHECK_INSTEAD.format(check=check, seconds=seconds)
    return subprocess.run(
        [sys.executable, "-c", program], input='["a.py"]', capture_output=True, text=True, timeout=60
    )


def test_a_file_that_takes_too_much_memory_is_named():
    (found,) = json.loads(checked("(bytearray(5 * 2**30), '')", 60).stdout)["findings"]
    assert found["rule"] == "unreadable" and "4 GiB" in found["found"]


def test_the_process_ends_by_itself_where_nobody_is_left_to_end_it():
    assert checked("time.sleep(600)", 1).returncode == -signal.SIGALRM


def test_no_code_of_the_current_folder_runs_while_files_are_read(tmp_path, monkeypatch):
    for name in ("libcst", "json", "tpukit", "torch", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.chdir(tmp_path)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert (
        subprocess.run([sys.executable, "-P", "-m", "tpukit", "migrate", "torch.py"], env=environ).returncode
        == 0
    )
    assert tool.examine("torch.py")[0] == []


def test_a_file_that_is_named_and_lies_in_a_named_folder_is_read_once(tmp_path):
    (tmp_path / "a.py").write_text("model.cuda()\n")
    assert files.files_in([tmp_path / "a.py", tmp_path]) == [tmp_path / "a.py"]
