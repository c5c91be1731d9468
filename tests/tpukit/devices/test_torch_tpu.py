"""The runtime of torch_tpu, on CPU tensors with a mock of the package; and the names that are used of it,
against the package itself."""

import dataclasses
import functools
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from tests import warm
from tests.conftest import COMPILERS, ROOT, best_weights, exact, refuses, same
from tests.tpukit.devices import torch_tpu_mock
from tests.tpukit.launching.conftest import CPU, losses, on_one_core
from tests.tpukit.training.conftest import train_in
from tpukit import MNIST, Run, train
from tpukit.devices import open_runtime, torch_tpu
from tpukit.devices.torch_tpu import TorchTPURuntime
from tpukit.host import environment
from tpukit.host.folders import atomic_folder
from tpukit.launching import core_process, launcher
from tpukit.launching.job import Job
from tpukit_tools.subprocess_call import run_python

SMALL = dict(epochs=2, batch_size=16, channels=4, log_every=3, precision="fp32")


@pytest.fixture
def mock(monkeypatch):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_TPU")}
    monkeypatch.setattr(os, "environ", environ)
    yield torch_tpu_mock.install(functools.partial(monkeypatch.setattr, raising=False))
    for name in [name for name in sys.modules if name.startswith(("torch_tpu", "torch.tpu"))]:
        del sys.modules[name]


def test_a_resumed_training_gives_the_records_and_weights_of_the_cpu(mock, digits, tmp_path, cpu):
    task = MNIST(dataset_dir=digits, **SMALL)
    on_cpu = train_in(tmp_path / "cpu", task, cpu)
    for epochs in (1, 2):
        torch.tpu.default_generators[0].manual_seed(99 if epochs == 2 else 5)
        part = dataclasses.replace(task, epochs=epochs)
        resumed = train_in(tmp_path / "halves", part, open_runtime(torch_tpu_mock.machine(1), "fp32"))
    assert exact(on_cpu) == exact(resumed) and same(best_weights(on_cpu), best_weights(resumed))
    restored = torch.tpu.default_generators[0].get_state()
    assert torch.equal(restored, torch.Generator().manual_seed(5).get_state())
    # fp32 is exact. The loss and the predictions are compiled graphs, the step around the loss is not.
    assert ("set_float32_matmul_precision", ("highest",), {}) in mock and ("synchronize", (), {}) in mock
    compiled = [(arguments[0], keywords) for call, arguments, keywords in mock if call == "compile"]
    assert all(keywords == dict(dynamic=False) for _, keywords in compiled)
    assert {name for name, _ in compiled} == {"loss", "without_gradient", "compose"}


def test_a_chip_computes_in_bf16_and_refuses_fp16(mock):
    assert TorchTPURuntime("tpu").precision == "bf16"
    with refuses("fp16", "use 'bf16' or 'auto'"):
        TorchTPURuntime("tpu", "fp16")


def test_where_torch_tpu_finds_no_tpu_the_error_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_tpu", torch)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    with refuses("no TPU", "tpukit doctor"):
        torch_tpu.open_device()


# Launches


def test_a_launch_is_refused_where_this_process_has_used_the_chips(mock, digits, tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "detect", lambda: torch_tpu_mock.machine(8))
    monkeypatch.setattr(torch.tpu, "is_initialized", lambda: True)
    task = MNIST(dataset_dir=digits, **SMALL)
    run = Run.open(tmp_path, task)
    with refuses("already initialized", "Restart"):
        launcher.launch(train, task, run)


def test_a_launch_is_refused_where_other_chips_are_set(mock):
    TorchTPURuntime.set_launch_variables(8)
    assert os.environ["TORCH_TPU_SLICEBUILDER_ADDRESSES"].count(":") == 8
    with refuses("8 TPU chips", "4 processes"):
        TorchTPURuntime.set_launch_variables(4)


def test_a_launch_may_take_any_number_of_the_chips_each_of_which_opens_before_its_group(
    mock, tmp_path, monkeypatch
):
    opened = []

    def open_device():
        opened.append(not dist.is_initialized())
        return torch_tpu_mock.open_device()  # which refuses where a variable is missing

    monkeypatch.setattr(torch_tpu, "open_device", open_device)
    env = torch_tpu_mock.machine(8)
    assert launcher._count_cores(env, 4) == 4
    TorchTPURuntime.set_launch_variables(1)
    job = Job(train, MNIST().for_launch(Run(tmp_path)), env, 60.0, processes=1, rendezvous=tmp_path / "store")
    world = core_process.join(job, 0)
    dist.destroy_process_group()
    assert (opened, world.size) == ([True], 1)


@pytest.mark.slow
def test_two_chips_of_a_launch_have_the_losses_of_one(digits, tmp_path):
    command = [
        *warm.python(),
        "-m",
        "tests.tpukit.devices.torch_tpu_mock",
        str(tmp_path / "two"),
        str(digits),
    ]
    ran = subprocess.run(command, cwd=ROOT, env=CPU, capture_output=True, text=True, timeout=400)
    assert ran.returncode == 0, ran.stderr[-4000:]
    alone, _ = on_one_core(tmp_path / "alone", digits, **torch_tpu_mock.TRAINING)
    assert losses(Run(tmp_path / "two")) == pytest.approx(losses(alone), rel=1e-4)


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
        with atomic_folder(folder) as work:
            options = ("--quiet", "--target", work)
            ran = run_python("-m", "pip", "install", *options, *PACKAGES, timeout_s=1800)
            assert ran.returncode == 0, ran.stderr[-3000:]
    variables = dict(PYTHONPATH=str(folder), TORCH_DEVICE_BACKEND_AUTOLOAD="0", TPU_SKIP_MDS_QUERY="1")
    wrong = "torch.tpu.no_such_name"  # so that this test can fail
    ran = run_python("-c", MISSING, *names, wrong, variables=variables, timeout_s=300)
    assert f'MISSING ["{wrong}"]' in ran.stdout, ran.stdout + ran.stderr[-3000:]
