"""How a command ends: its exit code, what it prints then, and what is left undone."""

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tpukit import Run
from tpukit_tools import cli


def test_ctrl_c_ends_with_130(infrared, monkeypatch):
    from tpukit.training import loop

    monkeypatch.setattr(loop, "train", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    assert cli.main(["train", "mshnet", "--dataset-dir", str(infrared), "--base-size", "32"]) == 130


@pytest.mark.slow
def test_a_training_whose_reader_goes_away_is_trained_to_its_end(digits, tmp_path):
    words = f"train mnist --dataset-dir {digits} --run {tmp_path / 'run'} --epochs 1 --batch-size 16".split()
    command = [sys.executable, "-u", "-m", "tpukit", *words]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    ran = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)
    assert ran.stdout.readline().startswith("dataset mnist")
    ran.stdout.close()
    assert "Traceback" not in ran.stderr.read() and ran.wait() == 1
    assert Run(tmp_path / "run").records("evaluation")[-1]["step"] == 12


@pytest.mark.parametrize(
    "line, code",
    [("--version", 0), (f"migrate {ROOT}/tpukit/leaves.py", 0), ("train mnist", 1), ("plan mnist", 1)],
)
def test_where_torch_is_broken_what_needs_none_runs_and_the_rest_names_doctor(line, code, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('torch is broken')")
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "tpukit", *line.split()]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert ran.returncode == code and "Traceback" not in ran.stderr
    assert ("tpukit doctor" in ran.stderr) == bool(code)
    assert ran.stderr.startswith("tpukit: torch is broken") if code else ran.stdout


LEAVING = """
import atexit, gc, os, sys, types
torch_version, cudnn_version, used, *sys.argv = sys.argv[1:]
cudnn = types.SimpleNamespace(version=lambda: int(cudnn_version))
cuda = types.SimpleNamespace(is_initialized=lambda: used == "used")
backends = types.SimpleNamespace(cudnn=cudnn)
sys.modules["torch"] = types.SimpleNamespace(__version__=torch_version, cuda=cuda, backends=backends)
# In place of the libraries' end, which comes after what a command registers
atexit.register(lambda: os._exit(99 if gc.get_freeze_count() else 98))
from tpukit_tools import cli
def command(argv):
    atexit.register(print, "saved")
    if argv == ["stopped"]:
        sys.exit(143)
    return 2
cli._run = command
sys.exit(cli.main())
"""


@pytest.mark.parametrize(
    "versions, use, command, code",
    [
        (("2.9.0+cu128", "91002"), "used", "finished", 2),
        (("2.9.1", "91002"), "used", "stopped", 143),
        (("2.9.0", "91002"), "unused", "finished", 99),
        (("2.9.0", "90900"), "used", "finished", 99),
        (("2.10.0", "91002"), "used", "finished", 99),
    ],
)
def test_a_command_ends_before_cudnn_does_where_that_crashes_and_after_all_else(versions, use, command, code):
    """99: the process ended as usual, without a search of all that is loaded."""
    words = [sys.executable, "-c", LEAVING, *versions, use, "tpukit", command]
    ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == code, ran.stderr
    assert code == 99 or "saved" in ran.stdout


FAILING = """
import atexit, sys, types
torch_xla = sys.modules["torch_xla"] = types.ModuleType("torch_xla")
torch_xla._prepare_to_exit = lambda: print("again")
atexit.register(torch_xla._prepare_to_exit)
from tpukit.host.errors import TpukitError
from tpukit_tools import cli
def fail(argv):
    raise TpukitError(sys.argv[1])
cli._run = fail
sys.exit(cli.main(["train"]))
"""


@pytest.mark.parametrize(
    "words, is_opened_again", [("TPU initialization failed: busy", False), ("it is full", True)]
)
def test_a_chip_that_could_not_be_opened_is_left_alone_when_the_command_ends(words, is_opened_again):
    ran = subprocess.run([sys.executable, "-c", FAILING, words], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 1 and words in ran.stderr
    assert ("again" in ran.stdout) == is_opened_again
