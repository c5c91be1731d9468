"""`train_core` in the processes that torch_xla starts: the form of the older guides."""

import dataclasses
import os
import subprocess

import pytest

from tests import warm
from tests.conftest import ROOT, refuses
from tests.tpukit.launching.conftest import (
    HEAD,
    difference,
    losses,
    needs_torch_xla,
    on_one_core,
    xla_environ,
)
from tests.tpukit.launching.launched import machine
from tpukit import MNIST, Run, TpukitError, train_core
from tpukit.devices import chip_access
from tpukit.host import environment
from tpukit.launching import core_process

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


@pytest.mark.slow
def test_torch_xla_starts_it_by_both_of_its_names(odd, tmp_path):
    needs_torch_xla()
    (tmp_path / "program.py").write_text(HEAD + BY_TORCH_XLA)
    command = [*warm.python(), str(tmp_path / "program.py"), str(odd), str(tmp_path)]
    env = dict(xla_environ(), PYTHONPATH=str(ROOT))
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    one, _ = on_one_core(tmp_path / "one", odd, batch_norm="frozen", epochs=1)
    for name in ("launch", "spawn"):
        assert difference(losses(Run(tmp_path / name)), losses(one)) < 1e-4


def test_it_is_refused_where_torch_xla_starts_no_processes(digits, tmp_path, monkeypatch):
    by_torch_tpu = dataclasses.replace(machine("tpu", 8), versions=dict(torch="2.11.0", torch_tpu="0.1.0"))
    for here in (machine("cuda", 2), by_torch_tpu):
        monkeypatch.setattr(environment, "detect", lambda: here)
        with refuses("torch_xla's processes", "tpukit.launch"):
            train_core(1, MNIST(dataset_dir=digits), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_core_of_a_tpu_joins_by_pjrt_and_ends_its_process_when_it_fails(
    group, tmp_path, monkeypatch, capfd
):
    needs_torch_xla()
    here, codes = machine("tpu", 8), []
    monkeypatch.setattr(environment, "detect", lambda: here)
    monkeypatch.setattr(chip_access, "rank_of_opened_chip", lambda: (5, 8))
    monkeypatch.setattr(os, "_exit", codes.append)

    def fail(job, world):
        raise ValueError(f"{world.rank} of {world.size}")

    monkeypatch.setattr(core_process, "open_core", fail)
    monkeypatch.setattr("tpukit.devices.distributed.World.broadcast", lambda world, tree: tree)
    with pytest.raises(TpukitError):
        train_core(3, MNIST(dataset_dir=tmp_path), tmp_path / "run")
    [(_, how)] = group
    assert how["init_method"] == "xla://" and codes == [1]
    assert "core 3 while starting failed: 5 of 8" in capfd.readouterr().err
