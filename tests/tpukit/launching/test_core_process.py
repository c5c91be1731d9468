"""Where the cores of a TPU meet."""

import os

import torch.distributed as dist

from tests.tpukit.launching.conftest import needs_torch_xla
from tests.tpukit.launching.launched import machine
from tpukit import MNIST, Run, train
from tpukit.devices import NO_LAUNCH_BARRIER, chip_access
from tpukit.launching import core_process
from tpukit.launching.job import Job


def test_tpu_cores_meet_in_a_file_after_libtpus_flag(group, tmp_path, monkeypatch):
    needs_torch_xla()
    os.environ.pop("LIBTPU_INIT_ARGS", None)
    monkeypatch.setattr("tpukit.devices.version_of", lambda package: "0.0.21.1")
    monkeypatch.setattr("tpukit.devices.tpu_chips", lambda: 0)
    flags = []

    def open_chip(index, processes):
        flags.append(os.environ["LIBTPU_INIT_ARGS"])  # libtpu reads it when the chip is opened
        return 5, 8

    monkeypatch.setattr(chip_access, "open_chip", open_chip)
    plan, meeting = MNIST(batch_size=128).for_launch(Run(tmp_path)), tmp_path / "rendezvous"
    job = Job(train, plan, machine("tpu", 8), 60.0, processes=8, rendezvous=meeting)
    world = core_process.join(job, 3)
    [(backend, how)] = group
    assert (flags, backend, world.rank, world.size) == ([NO_LAUNCH_BARRIER], "gloo", 5, 8)
    assert isinstance(how["store"], dist.FileStore) and (how["rank"], how["world_size"]) == (5, 8)
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == "lo"
