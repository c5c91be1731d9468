"""Where the cores of a TPU meet."""

import os

import pytest
import torch.distributed as dist

from tests.launching.launched import machine
from tpukit import MNIST, Run, train
from tpukit.devices import processes
from tpukit.launching import joining
from tpukit.launching.job import Job


class Flagged(MNIST):
    def libtpu_args(self, batch_size):
        return f"--images={batch_size}"


@pytest.mark.parametrize("is_spmd", [False, True], ids=["processes", "SPMD"])
def test_tpu_cores_meet_in_a_file_after_the_compilers_flags(is_spmd, group, tmp_path, monkeypatch):
    os.environ.pop("LIBTPU_INIT_ARGS", None)
    monkeypatch.setattr("tpukit.devices.version_of", lambda package: "0.0.21.1")
    monkeypatch.setattr("tpukit.devices.tpu_chips", lambda: 8)
    flags = []

    def open_chip(index, processes):
        flags.append(os.environ["LIBTPU_INIT_ARGS"])  # libtpu reads them when the chip is opened
        return 5, 8

    monkeypatch.setattr(processes, "open_chip", open_chip)
    shape = dict(spmd_cores=8) if is_spmd else dict(processes=8, rendezvous=tmp_path / "rendezvous")
    env, task = machine("tpu", 8), Flagged(batch_size=128)
    world = joining.join(Job(train, task.launch_plan(Run(tmp_path)), env, 60.0, **shape), 3)
    assert os.environ["LIBTPU_INIT_ARGS"] == "--images=16"
    if is_spmd:
        assert not flags and not group and world.size == 1
        return
    [(backend, how)] = group
    assert (flags, backend, world.rank, world.size) == (["--images=16"], "gloo", 5, 8)
    assert isinstance(how["store"], dist.FileStore) and (how["rank"], how["world_size"]) == (5, 8)
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == "lo"
