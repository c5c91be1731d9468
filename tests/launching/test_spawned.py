"""`train_core` in the processes that torch and torch_xla start: the form of the older guides."""

import os
import socket
import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT, best_weights
from tests.launching.conftest import CPU, HEAD, difference, losses, needs_torch_xla, on_one_core, xla_environ
from tests.launching.launched import machine
from tpukit import MNIST, Run, TpukitError, train_core
from tpukit.devices import processes
from tpukit.host import environment
from tpukit.launching import joining

SPAWN = """
from tpukit import train_core

if __name__ == "__main__":
    data, folder = sys.argv[1:]
    settings = dict(dataset_dir=data, log_every=1, num_workers=1, **RECIPE)
    torch.multiprocessing.spawn(train_core, args=(Watched(**settings), folder + "/run"), nprocs=2)
    broken = Watched(**settings, accident="raise")
    torch.multiprocessing.spawn(train_core, args=(broken, folder + "/broken"), nprocs=2)
"""
BY_TORCH_XLA = """
import torch_xla
from torch_xla.distributed import xla_multiprocessing as xmp
from tpukit import train_core

if __name__ == "__main__":
    data, folder = sys.argv[1:]
    task = Watched(dataset_dir=data, log_every=1, num_workers=1, batch_norm="frozen", epochs=1)
    torch_xla.launch(train_core, args=(task, folder + "/launch"), start_method="fork")
    xmp.spawn(train_core, args=(task, folder + "/spawn"), start_method="fork")
"""


def spawned_by(program, tmp_path, env, data):
    """A finished process that ran a program from a file, which each spawned process imports again."""
    (tmp_path / "program.py").write_text(HEAD + program)
    command = [sys.executable, str(tmp_path / "program.py"), str(data), str(tmp_path)]
    env = dict(env, PYTHONPATH=str(ROOT), TPUKIT_CACHE=os.environ["TPUKIT_CACHE"])
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_two_spawned_processes_train_as_a_launch_does_and_one_that_fails_ends_both(odd, alone, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    meeting = dict(WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=str(port))
    ran = spawned_by(SPAWN, tmp_path, CPU | meeting, odd)
    run = Run(tmp_path / "run")
    assert difference(losses(run), losses(alone[0])) < 1e-4, ran.stderr[-3000:]
    torch.testing.assert_close(best_weights(run), best_weights(alone[0]), atol=1e-4, rtol=0)
    assert run.records("start")[0]["cores"] == 2
    assert ran.returncode == 1
    assert "core 1 (rank 1) in step 15 failed: sample 7 is broken" in ran.stderr  # in its 30th micro-batch


@pytest.mark.slow
def test_torch_xla_starts_it_by_both_of_its_names(odd, tmp_path):
    needs_torch_xla()
    ran = spawned_by(BY_TORCH_XLA, tmp_path, xla_environ(), odd)
    assert ran.returncode == 0, ran.stderr[-3000:]
    one, _ = on_one_core(tmp_path / "one", odd, batch_norm="frozen", epochs=1)
    for name in ("launch", "spawn"):
        assert difference(losses(Run(tmp_path / name)), losses(one)) < 1e-4


@pytest.mark.parametrize("told", [{}, dict(WORLD_SIZE="two"), dict(WORLD_SIZE="1")], ids=str)
def test_a_process_that_does_not_know_how_many_there_are_says_what_to_set(
    told, digits, tmp_path, monkeypatch
):
    monkeypatch.setattr(os, "environ", {n: v for n, v in os.environ.items() if n != "WORLD_SIZE"} | told)
    with pytest.raises(TpukitError, match="WORLD_SIZE"):
        train_core(1, MNIST(dataset_dir=digits), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_core_of_a_tpu_joins_by_pjrt_and_ends_its_process_when_it_fails(
    group, tmp_path, monkeypatch, capfd
):
    needs_torch_xla()
    here, codes = machine("tpu", 8), []
    monkeypatch.setattr(environment, "detect", lambda: here)
    monkeypatch.setattr(processes, "rank_of_opened_chip", lambda: (5, 8))
    monkeypatch.setattr(os, "_exit", codes.append)

    def fail(job, world):
        raise ValueError(f"{world.rank} of {world.size}")

    monkeypatch.setattr(joining, "open_core", fail)
    monkeypatch.setattr("tpukit.devices.distributed.World.broadcast", lambda world, tree: tree)
    with pytest.raises(TpukitError):
        train_core(3, MNIST(dataset_dir=tmp_path), tmp_path / "run")
    [(_, how)] = group
    assert how["init_method"] == "xla://" and codes == [1]
    assert "core 3 while starting failed: 5 of 8" in capfd.readouterr().err
