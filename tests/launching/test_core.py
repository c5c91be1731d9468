"""What a core does beside its training: where it meets the others, what it shares with them, what it knows of
Drive."""

import os
import subprocess
import sys

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.launching.conftest import CPU, HEAD, launched, needs_torch_xla, python, xla_environ
from tests.launching.launched import machine
from tpukit import MNIST, Run, train
from tpukit.launching import core, tpu_chips


class Flagged(MNIST):
    def libtpu_args(self, batch_size):
        return f"--images={batch_size}"


@pytest.mark.parametrize("size", [1, 8, 16], ids=["SPMD", "a host", "two hosts"])
def test_tpu_cores_of_one_host_meet_in_a_file_and_those_of_several_by_pjrt_after_the_compilers_flags(
    size, tmp_path, monkeypatch
):
    import torch.distributed as dist

    if size == 16:
        needs_torch_xla()
    calls = []
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop("LIBTPU_INIT_ARGS", None)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "host-0,host-1" if size == 16 else "localhost")
    monkeypatch.setattr("tpukit.devices.version_of", lambda package: "0.0.21.1")
    monkeypatch.setattr("tpukit.devices.tpu_chips", lambda: 8)

    def open_chip(index, processes):
        calls.append(os.environ["LIBTPU_INIT_ARGS"])
        return 5, size

    monkeypatch.setattr(tpu_chips, "open_chip", open_chip)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **how: calls.append((backend, how)))
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    monkeypatch.setattr(dist, "get_world_size", lambda: size)
    shape = dict(spmd_cores=8) if size == 1 else dict(processes=8, rendezvous=tmp_path / "rendezvous")
    env, task = machine("tpu", 8), Flagged(batch_size=128)
    world = core.join(core.Job(train, task, Run(tmp_path), env, None, 60.0, **shape), 3)
    if size == 1:
        assert os.environ["LIBTPU_INIT_ARGS"] == "--images=16" and not calls and world.size == 1
        return
    [flags, (backend, how)] = calls
    assert flags == f"--images={128 // size}"  # libtpu reads them when the chip is opened
    assert (backend, world.rank, world.size) == ("gloo", 5, size)
    if size == 8:
        assert isinstance(how["store"], dist.FileStore) and (how["rank"], how["world_size"]) == (5, 8)
        assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    else:
        assert how["init_method"] == "xla://" and "store" not in how


@pytest.mark.slow
def test_two_hosts_of_a_slice_that_share_a_disk_keep_their_cores_apart_and_each_get_the_result(odd, tmp_path):
    """Two launches of two cores each, as on two hosts: PJRT's ranks and rendezvous are mocked, all else is
    real."""
    needs_torch_xla()
    program = """
import socket
import torch.distributed as dist
host, ranks = int(sys.argv[3]), []
socket.gethostname = lambda: f"host-{host}"
vm = machine("tpu", 2, "tpu-vm")
def open_chip(index, processes):
    ranks.append(2 * host + index)
    return ranks[0], 4
init = dist.init_process_group
def meet(backend, init_method, timeout):
    assert init_method == "xla://"
    init(backend, store=dist.FileStore(sys.argv[4], 4), rank=ranks[0], world_size=4, timeout=timeout)
environment.detect, tpu_chips.open_chip, dist.init_process_group = lambda: vm, open_chip, meet
task = Watched(dataset_dir=Path(sys.argv[1]), precision="fp32")
print("RESULT", launch(noise, task, Run.open(sys.argv[2], task)))
"""
    command = [sys.executable, "-c", HEAD + program, odd, tmp_path / "run"]
    pipes = dict(cwd=ROOT, env=xla_environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    hosts = [subprocess.Popen([*map(str, command), str(n), str(tmp_path / "store")], **pipes) for n in (0, 1)]
    printed = [host.communicate(timeout=300) for host in hosts]
    results = [out.partition("RESULT ")[2].strip() for out, _ in printed]
    assert results[0] and results[0] == results[1], printed
    assert sorted(p.name for p in (tmp_path / "run/cores").iterdir()) == ["host-0", "host-1"]


@pytest.mark.slow
def test_a_drive_that_goes_after_the_run_was_opened_is_noticed_by_the_cores(odd, tmp_path):
    """The kernel's run knows where Drive was mounted; a folder of that name that stays behind is not
    Drive."""
    program = """
import shutil
drive, gone = Path(sys.argv[2]) / "drive", []
drive.mkdir()
os.path.ismount = lambda path: str(path) == "/" or (str(path) == str(drive) and not gone)
task = Watched(dataset_dir=Path(sys.argv[1]), epochs=1)
run = Run.open(Path(sys.argv[2]) / "run", task, backup=drive / "runs/one")
gone.append(True)
shutil.rmtree(drive)
drive.mkdir()
launch(train, task, run, cores=2)
print("LEFT", list(drive.rglob("*")))
"""
    ran = python(program, odd, tmp_path, env=CPU)
    assert "LEFT []" in ran.stdout, ran.stdout + ran.stderr
    assert str(tmp_path / "drive/runs/one") in (tmp_path / "run/log.txt").read_text()


@pytest.mark.slow
def test_the_dataset_is_held_once_for_all_processes_of_a_host(tmp_path):
    """Four processes that have read every pixel: their shares of the map (Pss) add up to one dataset, not to
    four."""
    folder = tmp_path / "big"
    folder.mkdir()
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (60_000, 28, 28), np.uint8), rng.integers(0, 10, 60_000, np.uint8)
    np.savez(folder / "mnist.npz", x_train=images, y_train=labels, x_test=images[:100], y_test=labels[:100])
    [done], _ = launched(
        "cpu", run=tmp_path / "run", data=folder, cores=4, launches=[dict(function="mapped_memory")]
    )
    rows = done["result"]
    assert [total for total, *_ in rows] == [int(images.sum())] * 4
    assert all(whole >= images.nbytes for _, _, whole, _ in rows)
    assert sum(share for _, share, _, _ in rows) < 1.1 * images.nbytes
    assert sum(private for *_, private in rows) == 0
