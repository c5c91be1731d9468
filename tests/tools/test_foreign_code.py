"""A folder with somebody else's code: what tpukit starts there runs none of it."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

MINE = "from tpukit import MNIST\n\nclass Mine(MNIST):\n    name = 'mine'\n"
COMMAND_LINE = "import sys; from tpukit.cli import main; sys.exit(main())"  # as the installed command does


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """The current folder, where files with the names of packages leave a mark when they are imported; and a
    task."""
    folder = tmp_path / "hostile"
    for name in ("torch", "numpy", "json", "pip", "tqdm", "tpukit/__init__"):
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f"open({str(folder / 'ran')!r}, 'a').write('{name} ')\nraise SystemExit('a stranger was run')\n"
        )
    (folder / "mine.py").write_text(MINE)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}")  # an empty place is the current folder
    return folder


@pytest.fixture
def mine(hostile, digits, monkeypatch):
    """A task of a class that lies beside that code."""
    spec = importlib.util.spec_from_file_location("mine", hostile / "mine.py")
    monkeypatch.setitem(sys.modules, "mine", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(sys.modules["mine"])
    return sys.modules["mine"].Mine(dataset_dir=digits, batch_size=8)


def test_every_python_that_tpukit_starts_leaves_the_current_folder_out_of_its_path():
    starts = [
        (str(path.relative_to(ROOT / "tpukit")), line.strip())
        for path in (ROOT / "tpukit").rglob("*.py")
        for line in path.read_text().splitlines()
        if "[sys.executable" in line
    ]
    assert "tools/child.py" in {name for name, _ in starts}
    assert [line for _, line in starts if '[sys.executable, "-P"' not in line] == []


@pytest.mark.slow
def test_doctor_runs_nothing_of_the_current_folder(hostile):
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-c", COMMAND_LINE, "doctor", "--json"]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert json.loads(ran.stdout)["checks"] and not (hostile / "ran").exists()


@pytest.mark.slow
def test_compare_measures_a_task_of_the_users_own_and_runs_nothing_else_beside_it(mine, hostile):
    from tpukit.tools.measure import measure_here

    assert measure_here(mine, batch_sizes=[8], steps=5, cores=1)
    assert not (hostile / "ran").exists()


@pytest.mark.slow
def test_plan_traces_a_task_of_the_users_own_and_runs_nothing_else_beside_it(mine, hostile, xla, tmp_path):
    from tpukit.devices.chips import MACHINES
    from tpukit.tools.plan.trace import trace_graphs

    (tmp_path / "graphs").mkdir()
    assert trace_graphs(mine, "train", 8, MACHINES["v5e-1"], tmp_path / "graphs")
    assert not (hostile / "ran").exists()
