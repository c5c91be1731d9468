"""Launches in processes of their own, and what tests ask of the runs that they leave."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from tests import warm
from tests.conftest import ROOT
from tests.tpukit.launching.launched import RECIPE, Watched
from tpukit import Run, train
from tpukit.devices.runtime import Runtime

CPU = {name: value for name, value in os.environ.items() if name not in ("PJRT_DEVICE", "XLA_FLAGS")}
CPU["CUDA_VISIBLE_DEVICES"] = ""
HEAD = """
import json, os, sys, time
from pathlib import Path
import torch
from tests.tpukit.launching.launched import RECIPE, Watched, machine, noise
from tpukit import Run, TpukitError, launch, train
from tpukit.launching.supervisor import CoreFailed
from tpukit.devices.distributed import World
from tpukit.devices.runtime import Runtime
from tpukit.host import environment
from tpukit.devices import chip_access, distributed
from tpukit.launching import core_process, launcher, supervisor
from tpukit.launching.job import Job
"""


def xla_environ():
    """The variables of a process with the CPU XLA device, which pytest sets after this file is imported."""
    return dict(os.environ, CUDA_VISIBLE_DEVICES="", PJRT_DEVICE="CPU")


def needs_torch_xla():
    pytest.importorskip("torch_xla", reason="torch_xla is not installed; it has wheels for Linux x86_64 only")


def started(kind, data, launches, start=(sys.executable,), **environ):
    """A process that launches; kind: cpu or xla. launches: run and settings of each."""
    own = dict(CPU, TPUKIT_CACHE=os.environ["TPUKIT_CACHE"])
    if kind == "xla":
        needs_torch_xla()
        own = xla_environ()
    options = json.dumps(dict(data=data, launches=launches), default=str)
    command = [*start, "-m", "tests.tpukit.launching.launched", options]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, cwd=ROOT, env=own | environ, **pipes)


def output_of(process, timeout_s=500):
    """(stdout, stderr) of a process that ends in time; with it end the cores that it has launched."""
    try:
        return process.communicate(timeout=timeout_s)
    finally:
        process.kill()


def launched(kind, data, folder, **launches):
    """name -> (run, what its launch gave) of launches of one kernel. launches: settings by name; the run is
    in the folder of that name, or of `run`.

    What a launch gave: dict(result) or dict(error, message), with `seconds`, what it printed (`out`), and
    `left`, the pids of processes that were not gone."""
    runs = {name: folder / settings.pop("run", name) for name, settings in launches.items()}
    asked = [dict(settings, run=runs[name]) for name, settings in launches.items()]
    out, err = output_of(started(kind, data, asked, warm.python()))
    assert "DONE " in out, out[-2000:] + err[-4000:]
    done = json.loads(out.partition("DONE ")[2])
    return {name: (Run(runs[name]), outcome) for name, outcome in zip(runs, done, strict=True)}


def python(program, *arguments, env=None, timeout=500, start=None):
    """A finished process that ran a program after HEAD, on the CPU XLA device unless `env` says otherwise.
    start: of its command; by default a warm one, of which /proc has the environment of another process."""
    env = env or xla_environ()
    command = [*(start or warm.python()), "-c", HEAD + program, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout)


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
    from tpukit.data.datasets import make_synthetic

    with np.load(make_synthetic("mnist", folder, size=240) / "mnist.npz") as arrays:
        parts = {name: arrays[name][: 37 if "test" in name else 196] for name in arrays}
    folder.mkdir()
    np.savez(folder / "mnist.npz", **parts)
    return folder


def on_one_core(folder, data, **settings):
    """(run, scores) of a training on the CPU, in this process."""
    task = Watched(dataset_dir=data, log_every=1, num_workers=1, **settings)
    run = Run.open(folder, task)
    return run, train(task, run, runtime=Runtime("cpu"), progress=False)


@pytest.fixture(scope="session")
def alone(odd, tmp_path_factory):
    """(run, scores) of RECIPE on one core, which several cores have to equal."""
    return on_one_core(tmp_path_factory.mktemp("alone"), odd, **RECIPE)


@pytest.fixture
def group(monkeypatch):
    """This process as rank 5 of 8, with variables of its own: (backend, how) of the groups that it joined."""
    told = []
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **how: told.append((backend, how)))
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    return told
