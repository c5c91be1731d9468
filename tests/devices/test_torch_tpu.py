"""The runtime of torch_tpu, on CPU tensors with a recording mock of the package, and its calls against the package itself."""

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT, best_weights, exact, refuses, same
from tests.devices import torch_tpu_mock
from tpukit import MNIST, Run, train
from tpukit.devices import open_runtime, torch_tpu_private
from tpukit.devices.torch_tpu import TorchTPURuntime
from tpukit.launching import launcher
from tpukit.tools import plan
from tpukit.tools.child import run_python

SMALL = dict(epochs=2, batch_size=16, channels=4, log_every=3, precision="fp32")


@pytest.fixture
def mock(monkeypatch):
    yield torch_tpu_mock.install(functools.partial(monkeypatch.setattr, raising=False))
    torch_tpu_mock.remove()


def test_a_training_through_torch_tpu_gives_the_records_and_weights_of_the_cpu(mock, digits, tmp_path, cpu):
    task = MNIST(dataset_dir=digits, channels_last="no", **SMALL)
    runs = {}
    for name, runtime in (("cpu", cpu), ("tpu", open_runtime(torch_tpu_mock.machine(1), "fp32"))):
        runs[name] = Run.open(tmp_path / name, task)
        train(task, runs[name], runtime=runtime, progress=False)
    assert isinstance(runtime, TorchTPURuntime)
    assert exact(runs["cpu"]) == exact(runs["tpu"]) and same(best_weights(runs["cpu"]), best_weights(runs["tpu"]))
    assert not same(task.model().state_dict(), best_weights(runs["tpu"]))
    wanted = {"torch.compile", "torch.set_float32_matmul_precision", "torch.tpu.get_device_name"}
    assert wanted <= mock.names()
    assert all(keywords == dict(dynamic=False) for name, _, keywords in mock.calls if name == "torch.compile")


def test_a_resumed_training_equals_an_uninterrupted_one_and_the_chips_generator_is_restored(mock, digits, tmp_path):
    task = MNIST(dataset_dir=digits, **SMALL)
    whole, halves = Run.open(tmp_path / "whole", task), Run.open(tmp_path / "halves", task)
    train(task, whole, runtime=TorchTPURuntime(precision="fp32"), progress=False)
    train(dataclasses.replace(task, epochs=1), halves, runtime=TorchTPURuntime(precision="fp32"), progress=False)
    saved = torch.tpu.default_generators[0].get_state()
    torch.tpu.default_generators[0].manual_seed(99)
    train(task, halves, runtime=TorchTPURuntime(precision="fp32"), progress=False)
    assert exact(whole) == exact(halves) and same(best_weights(whole), best_weights(halves))
    assert torch.equal(torch.tpu.default_generators[0].get_state(), saved)


def test_a_chip_computes_in_bf16_reports_its_memory_and_refuses_fp16_and_spmd(mock, tmp_path):
    runtime = TorchTPURuntime()
    assert runtime.precision == "bf16" and runtime.memory_size() == 16 * 2**30 and runtime.memory() == []
    assert "TPU v5 lite" in str(runtime) and float(runtime.scalar(3)) == 3
    with runtime.traced(tmp_path):
        pass
    assert ("torch_tpu._internal.profiler.xprof_trace_handler", (), dict(dir_name=str(tmp_path))) in mock.calls
    with refuses("fp16", "bf16"):
        TorchTPURuntime(precision="fp16")
    with refuses("spmd", "processes"):
        open_runtime(torch_tpu_mock.machine(8), spmd_cores=8)


def test_where_torch_tpu_finds_no_tpu_the_error_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_tpu", torch)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    with refuses("no TPU", "tpukit doctor"):
        torch_tpu_private.open_device()


def launched(**options):
    command = [sys.executable, "-m", "tests.devices.torch_tpu_mock", json.dumps(options, default=str)]
    environ = {name: value for name, value in os.environ.items() if name not in ("PJRT_DEVICE", "XLA_FLAGS")}
    ran = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=400)
    assert "DONE " in ran.stdout, ran.stdout[-2000:] + ran.stderr[-4000:]
    return json.loads(ran.stdout.split("DONE ")[1])


@pytest.mark.slow
def test_eight_chips_give_the_losses_of_one_and_their_variables_are_set_before_the_fork(digits, tmp_path):
    one = launched(run=tmp_path / "one", data=digits, cores=[1], batch_norm="frozen")
    eight = launched(run=tmp_path / "eight", data=digits, cores=[8], batch_norm="frozen")
    assert eight["launches"] == [dict(nproc_per_node=8)] and one["launches"] == []
    assert "result" in one["ends"][0] and "result" in eight["ends"][0], eight
    losses = [[r["loss"] for r in Run(tmp_path / name).records("train")] for name in ("one", "eight")]
    assert len(losses[0]) == len(losses[1]) > 3 and losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.slow
def test_a_chip_that_fails_ends_the_launch_with_its_rank_and_the_next_launch_resumes(digits, tmp_path):
    found = launched(run=tmp_path / "run", data=digits, cores=[4, 4], accident="raise", save_every_s=0)
    failed, resumed = found["ends"]
    assert "rank 1 of 4" in failed["error"] and "result" in resumed, found


def test_two_of_eight_chips_are_refused_because_torch_tpu_knows_no_such_shape():
    with refuses("1, 4, 8"):
        launcher._count_cores(torch_tpu_mock.machine(8), 2, "processes")
    assert launcher._count_cores(torch_tpu_mock.machine(8), 4, "processes") == 4


CHECK = """
import inspect, json, sys
from tpukit.devices import torch_tpu_export  # sets the variables
import torch
from tpukit.devices import torch_tpu_private
torch_tpu_private.load()
import torch_tpu._internal.profiler
wrong = []
for name, count, keywords in json.load(sys.stdin):
    parts, found = name.split("."), sys.modules[name.split(".")[0]]
    try:
        for part in parts[1:]:
            found = getattr(found, part)
        inspect.signature(found).bind(*[None] * count, **dict.fromkeys(keywords))
    except Exception as error:
        wrong.append(f"{name}: {error}")
print("WRONG", json.dumps(wrong))
"""


@pytest.mark.slow
def test_every_call_fits_the_signatures_of_the_real_package(mock, digits, tmp_path):
    if sys.platform != "linux" or sys.version_info < (3, 11) or shutil.disk_usage(tmp_path).free < 6e9:
        pytest.skip("torch_tpu has wheels for Linux and Python 3.11 and newer, and takes 2.5 GB")
    runtime = TorchTPURuntime(precision="fp32")
    str(runtime), runtime.sync(), runtime.memory_size(), runtime.traced(tmp_path), runtime.random_state()
    runtime.torch_compile(torch.nn.Linear(2, 2), "no")
    torch_tpu_private.set_launch_variables(8)
    torch_tpu_private.is_open()
    calls = [(name, len(arguments), list(keywords)) for name, arguments, keywords in mock.calls]
    calls.append(("torch.tpu.no_such_name", 0, []))  # so that this test can fail
    folder = plan.install_compiler(backend="torch_tpu")
    ran = run_python("-c", CHECK, text=json.dumps(calls), variables=dict(PYTHONPATH=f"{ROOT}{os.pathsep}{folder}"))
    assert "WRONG" in ran.stdout, ran.stderr[-3000:]
    wrong = json.loads(ran.stdout.split("WRONG ")[1])
    assert len(wrong) == 1 and "no_such_name" in wrong[0], wrong
