"""The runtime of torch_tpu, on CPU tensors with a mock of the package; and the names that are used of it,
against the package itself."""

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.conftest import COMPILERS, ROOT, best_weights, exact, refuses, same
from tests.devices import torch_tpu_mock
from tests.launching.conftest import CPU, losses, on_one_core
from tests.training.conftest import train_in
from tpukit import MNIST, Run, train
from tpukit.devices import open_runtime, torch_tpu
from tpukit.devices.torch_tpu import TorchTPURuntime
from tpukit.host import environment, files
from tpukit.launching import launcher
from tpukit.tools.child import run_python

SMALL = dict(epochs=2, batch_size=16, channels=4, log_every=3, precision="fp32")


@pytest.fixture
def mock(monkeypatch):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_TPU")}
    monkeypatch.setattr(os, "environ", environ)
    yield torch_tpu_mock.install(functools.partial(monkeypatch.setattr, raising=False))
    for name in [name for name in sys.modules if name.startswith(("torch_tpu", "torch.tpu"))]:
        del sys.modules[name]


def test_a_training_gives_the_records_and_weights_of_the_cpu_and_a_resumed_one_too(
    mock, digits, tmp_path, cpu
):
    task = MNIST(dataset_dir=digits, **SMALL)
    chip = open_runtime(torch_tpu_mock.machine(1), "fp32")
    on_cpu, whole = train_in(tmp_path / "cpu", task, cpu), train_in(tmp_path / "whole", task, chip)
    for epochs in (1, 2):
        torch.tpu.default_generators[0].manual_seed(99 if epochs == 2 else 5)
        part = dataclasses.replace(task, epochs=epochs)
        halves = train_in(tmp_path / "halves", part, TorchTPURuntime("tpu", "fp32"))
    assert exact(on_cpu) == exact(whole) == exact(halves)
    assert all(same(best_weights(on_cpu), best_weights(run)) for run in (whole, halves))
    restored = torch.tpu.default_generators[0].get_state()
    assert torch.equal(restored, torch.Generator().manual_seed(5).get_state())
    # fp32 is exact. The loss and the predictions are compiled graphs, the step around the loss is not.
    assert ("set_float32_matmul_precision", ("highest",), {}) in mock and ("synchronize", (), {}) in mock
    compiled = [(arguments[0], keywords) for call, arguments, keywords in mock if call == "compile"]
    assert all(keywords == dict(dynamic=False) for _, keywords in compiled)
    assert {name for name, _ in compiled} == {"loss", "without_gradient", "compose"}


def test_a_chip_computes_in_bf16_takes_what_is_put_and_refuses_fp16_and_spmd(mock):
    runtime = TorchTPURuntime("tpu")
    assert runtime.precision == "bf16"
    with refuses("fp16", "use 'bf16' or 'auto'"):
        TorchTPURuntime("tpu", "fp16")
    with refuses("spmd", "processes"):
        open_runtime(torch_tpu_mock.machine(8), spmd_cores=8)
    runtime.device = torch.device("meta")
    placed = list(runtime.to_device(torch.nn.Linear(2, 2)).parameters())
    batch = dict(x=np.ones(2))
    placed += [runtime.put(batch)["x"], runtime.put_batch(batch)["x"], runtime.put_dataset(batch)["x"].rows]
    placed += [runtime.as_graph_input(0.5), runtime.as_graph_input(3)]
    assert {tensor.device.type for tensor in placed} == {"meta"} and runtime.as_graph_input(None) is None


@pytest.mark.parametrize("kind", [None, "cuda"])
def test_where_torch_tpu_finds_no_tpu_the_error_says_so(kind, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_tpu", torch)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: kind and torch.device(kind))
    with refuses("no TPU", "tpukit doctor"):
        torch_tpu.open_device()


# Launches


def test_a_launch_is_refused_where_this_process_has_used_the_chips_and_spmd_as_it_is_torch_xlas(
    mock, digits, tmp_path, monkeypatch
):
    monkeypatch.setattr(environment, "detect", lambda: torch_tpu_mock.machine(8))
    monkeypatch.setattr(torch.tpu, "is_initialized", lambda: True)
    task = MNIST(dataset_dir=digits, **SMALL)
    for parallel, words in dict(processes=("already initialized", "Restart"), spmd=("torch_xla",)).items():
        with refuses(*words):
            launcher.launch(train, task, Run.open(tmp_path, task), parallel=parallel)


def test_a_launch_prepares_its_chips_and_is_refused_where_others_are_set_and_under_torchrun(
    mock, digits, tmp_path, monkeypatch
):
    torch_tpu.set_launch_variables(8)
    assert os.environ["TORCH_TPU_SLICEBUILDER_ADDRESSES"].count(":") == 8
    os.environ["TORCH_TPU_SLICEBUILDER_ADDRESSES"] = "host-a:1,host-b:1,host-c:1,host-d:1"
    with refuses("4 TPU chips", "8 processes"):
        torch_tpu.set_launch_variables(8)
    monkeypatch.setattr(environment, "detect", lambda: torch_tpu_mock.machine(8))
    task = MNIST(dataset_dir=digits, **SMALL)
    os.environ.update(TORCHELASTIC_RUN_ID="1", LOCAL_WORLD_SIZE="1", WORLD_SIZE="2")
    with refuses("torchrun is for GPUs"):
        launcher.launch(train, task, Run.open(tmp_path, task))


TRAINING = dict(batch_norm="frozen", precision="fp32", log_every=1, num_workers=1)


@pytest.mark.slow
def test_a_chip_of_two_that_fails_ends_the_launch_and_the_next_gives_the_losses_of_one(digits, tmp_path):
    launches = [TRAINING | dict(accident="raise", save_every_s=0), TRAINING]
    options = json.dumps(dict(run=tmp_path / "run", data=digits, launches=launches), default=str)
    command = [sys.executable, "-m", "tests.devices.torch_tpu_mock", options]
    ran = subprocess.run(command, cwd=ROOT, env=CPU, capture_output=True, text=True, timeout=400)
    assert "ENDS " in ran.stdout, ran.stdout[-2000:] + ran.stderr[-4000:]
    failed, resumed = json.loads(ran.stdout.partition("ENDS ")[2])
    assert "core 1 (rank 1)" in failed["error"] and "result" in resumed
    alone, _ = on_one_core(tmp_path / "alone", digits, batch_norm="frozen", precision="fp32")
    assert losses(Run(tmp_path / "run")) == pytest.approx(losses(alone), rel=1e-4)


# The real package

PACKAGES = ("torch==2.13.0", "torch_tpu==0.2.0", "libtpu==0.0.52")
MISSING = """
import importlib, json, sys, torch_tpu
from torch_tpu import _loader

_loader._init_device("tpu")  # registers the device, whether there is one or not

def resolve(name):
    outer, _, inner = name.rpartition(".")
    try:
        return importlib.import_module(name)
    except ImportError:
        return getattr(resolve(outer), inner)

def is_missing(name):
    try:
        return getattr(resolve(name), "__tt_api_stage__", "") in ("Internal", "Deprecated")
    except AttributeError:
        return True
    except RuntimeError as error:  # it is there, and opens a chip
        return "No jellyfish device found" not in str(error)

print("MISSING", json.dumps([name for name in sys.argv[1:] if is_missing(name)]))
"""


@pytest.mark.nightly
def test_every_name_of_torch_tpu_in_the_source_is_in_the_real_package():
    source = "".join(path.read_text() for path in (ROOT / "tpukit/devices").glob("torch_tpu.py"))
    names = {f"torch.tpu.{name}" for name in re.findall(r"(?<!`)\btorch\.tpu\.(\w+)", source)}
    names |= set(map(".".join, re.findall(r"from (torch_tpu[\w.]*|torch\.tpu\.\w+) import (\w+)", source)))
    assert len(names) == 5
    folder = COMPILERS / "torch_tpu-0.2.0"  # 2.5 GB, installed once
    if not folder.exists():
        with files.atomic_folder(folder) as work:
            options = ("--quiet", "--target", work)
            ran = run_python("-m", "pip", "install", *options, *PACKAGES, timeout_s=1800)
            assert ran.returncode == 0, ran.stderr[-3000:]
    variables = dict(PYTHONPATH=str(folder), TORCH_DEVICE_BACKEND_AUTOLOAD="0", TPU_SKIP_MDS_QUERY="1")
    wrong = "torch.tpu.no_such_name"  # so that this test can fail
    ran = run_python("-c", MISSING, *names, wrong, variables=variables, timeout_s=300)
    assert f'MISSING ["{wrong}"]' in ran.stdout, ran.stdout + ran.stderr[-3000:]
