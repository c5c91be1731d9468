"""Launches in processes of their own, and what tests ask of the runs that they leave."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.launching.launched import Watched
from tpukit import Run, train
from tpukit.devices.runtime import Runtime

CPU = {name: value for name, value in os.environ.items() if name not in ("PJRT_DEVICE", "XLA_FLAGS")}
CPU["CUDA_VISIBLE_DEVICES"] = ""
HEAD = """
import json, os, sys, time
from pathlib import Path
import torch
from tests.launching.launched import Descending, Watched, machine, noise
from tpukit import Run, TpukitError, launch, train
from tpukit.launching.supervisor import CoreFailed
from tpukit.devices.distributed import World
from tpukit.devices.runtime import Runtime
from tpukit.host import environment
from tpukit.launching import core, launcher, supervisor, tpu_chips
"""


def xla_environ():
    """The variables of a process with the CPU XLA device, which pytest sets after this file is imported."""
    return dict(os.environ, CUDA_VISIBLE_DEVICES="", PJRT_DEVICE="CPU")


def needs_torch_xla():
    pytest.importorskip("torch_xla", reason="torch_xla is not installed; it has wheels for Linux x86_64 only")


def started(kind, environ=None, **options):
    """A process that launches; kind: cpu, xla or spmd."""
    own = dict(CPU, TPUKIT_CACHE=os.environ["TPUKIT_CACHE"])
    if kind != "cpu":
        needs_torch_xla()
        own = xla_environ()
    if kind == "spmd":
        options["parallel"] = "spmd"
    command = [sys.executable, "-m", "tests.launching.launched", json.dumps(options, default=str)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, cwd=ROOT, env=own | (environ or {}), start_new_session=True, **pipes)


def launched(kind, **options):
    """What the launches of a process gave, and what it printed: a list of dict(result) or dict(error,
    message), each with `seconds`, and with `left`, the pids of processes that were not gone."""
    out, err = started(kind, **options).communicate(timeout=500)
    assert "DONE " in out, out[-2000:] + err[-4000:]
    return json.loads(out.split("DONE ")[1]), out


def python(program, *arguments, env=None, timeout=500):
    """A finished process that ran a program after HEAD, on the CPU XLA device unless `env` says otherwise."""
    env = env or xla_environ()
    command = [sys.executable, "-c", HEAD + program, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout)


def wait_for(condition, process):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.05)


def are_gone(pids, timeout_s=20):
    """Whether processes end in time. One that has, and was not waited for, is a zombie."""
    deadline = time.monotonic() + timeout_s
    while any(map(_is_running, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def steps_logged(folder):
    return len(losses(Run(folder))) if (folder / "records.jsonl").exists() else 0


def losses(run):
    return [record["loss"] for record in run.records("train")]


def difference(a, b):
    assert len(a) == len(b) >= 20
    return max(abs(x - y) for x, y in zip(a, b))


@pytest.fixture(scope="session")
def odd(tmp_path_factory):
    """Digits of which neither the training set (196) nor the test set (37) is a multiple of every batch."""
    folder = tmp_path_factory.mktemp("data") / "odd"
    from tpukit.tasks.datasets import make_synthetic

    with np.load(make_synthetic("mnist", folder, size=240) / "mnist.npz") as arrays:
        parts = {name: arrays[name][: 37 if "test" in name else 196] for name in arrays}
    folder.mkdir()
    np.savez(folder / "mnist.npz", **parts)
    return folder


@pytest.fixture(scope="session")
def alone(odd, tmp_path_factory):
    """The training on one core that every other shape has to equal: two epochs of 24 steps, batch norm
    frozen."""
    task = Watched(dataset_dir=odd, log_every=1, num_workers=1, batch_norm="frozen")
    run = Run.open(tmp_path_factory.mktemp("alone"), task)
    scores = train(task, run, runtime=Runtime("cpu"), progress=False)
    return run, scores
