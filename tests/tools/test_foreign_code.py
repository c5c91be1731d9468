"""A folder with somebody else's code: what tpukit starts there runs none of it."""

import importlib.util
import os
import sys

from tests.conftest import ROOT
from tests.test_code import MODULES
from tpukit_tools import subprocess_call
from tpukit_tools.subprocess_call import from_request, to_request

MINE = "from tpukit import MNIST\n\nclass Mine(MNIST):\n    name = 'mine'\n"


def test_every_python_that_tpukit_starts_leaves_the_current_folder_out_of_its_path():
    starts = [
        (str(path.relative_to(ROOT)), line.strip())
        for path in MODULES
        for line in path.read_text().splitlines()
        if "[sys.executable" in line
    ]
    assert "tpukit_tools/subprocess_call.py" in {name for name, _ in starts}
    assert [line for _, line in starts if '[sys.executable, "-P"' not in line] == []


def batch_size_of(request):
    return from_request(request).batch_size


def test_a_task_of_the_users_own_is_found_in_a_fresh_process_and_nothing_else_beside_it_runs(
    tmp_path, monkeypatch
):
    for name in ("torch", "numpy", "json", "pip", "tqdm", "tpukit/__init__"):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')\nraise SystemExit('{name}')\n"
        )
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{os.pathsep}{ROOT}")  # an empty place is the current folder
    spec = importlib.util.spec_from_file_location("mine", tmp_path / "mine.py")
    monkeypatch.setitem(sys.modules, "mine", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(sys.modules["mine"])
    request = to_request(sys.modules["mine"].Mine(batch_size=24))
    assert subprocess_call.call(batch_size_of, request, timeout_s=240) == 24
    assert not (tmp_path / "ran").exists()
