"""The runtime of CPUs and GPUs (of which there is none here)."""

import dataclasses
import json
import os
import platform
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from tests.conftest import refuses
from tests.tpukit.devices.emulated_gpu import EmulatedRuntime
from tpukit import detect
from tpukit.devices import RUNTIMES, open_runtime, runtime_class
from tpukit.devices.cuda import CUDARuntime
from tpukit.devices.runtime import Runtime
from tpukit.host.environment import Backend
from tpukit_tools.subprocess_call import run_python


def test_every_backend_has_a_runtime_of_its_own_and_the_table_loads_none():
    ran = run_python("-c", "import sys, tpukit.devices as _; print('torch' in sys.modules)", timeout_s=60)
    assert ran.stdout.split() == ["False"], ran.stderr
    assert [*RUNTIMES] == [*get_args(Backend)]
    pytest.importorskip("torch_xla")
    found = [runtime_class(SimpleNamespace(backend=backend, check_versions=list)) for backend in RUNTIMES]
    assert len({*found}) == 4 and all(issubclass(one, Runtime) for one in found)


def gpu(monkeypatch):
    """Let torch find a GPU, on which nothing can be computed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)


def test_gpus_without_bf16_take_fp16_with_a_scaler(monkeypatch):
    gpu(monkeypatch)
    assert CUDARuntime("cuda").precision == "fp16"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert CUDARuntime("cuda").precision == "bf16"


def test_a_gpu_measures_its_algorithms_and_one_that_torch_cannot_use_is_refused(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    gpu(monkeypatch)
    assert CUDARuntime("cuda").device.type == "cuda" and torch.backends.cudnn.benchmark
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refuses("built without CUDA, or the driver is too old"):
        CUDARuntime("cuda")


@pytest.mark.parametrize("device", ["cpu", "xla", "emulated"])
def test_a_number_for_a_graph_is_the_one_that_was_asked_for_and_made_once_while_it_stays(device, request):
    runtime = EmulatedRuntime() if device == "emulated" else request.getfixturevalue(device)
    asked = [1.0, 0.5, 0.5, 0.25, 1.0]
    given, others = [], []
    for number in asked:
        given.append(runtime.as_graph_input("lr_factor", number))
        others.append(runtime.as_graph_input("share", 3.0))  # of the same type
    assert [float(number) for number in given] == asked and {float(number) for number in others} == {3.0}
    assert runtime.as_graph_input("lr_factor", None) is None
    assert given[1] is given[2] and len({id(other) for other in others}) == 1 or device == "cpu"


@pytest.mark.parametrize("others, is_last", [(35, True), (37, False)])
def test_channels_come_last_where_more_than_half_of_the_weights_are_convolutions(others, is_last, cpu):
    convolution = torch.nn.Conv2d(2, 2, 3, bias=False)  # 36 weights
    model = cpu.to_device(torch.nn.Sequential(convolution, torch.nn.Linear(others, 1, bias=False)))
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last) == is_last


@pytest.fixture
def opened(monkeypatch):
    """The environment variables with which each runtime of an XLA device was opened."""
    pytest.importorskip("torch_xla")
    seen = []
    monkeypatch.setattr("tpukit.devices.xla.XLARuntime", lambda *_: seen.append(dict(os.environ)))
    return seen


COUNT_FAULTS = """
import os, resource, torch
from tpukit.devices.runtime import Runtime

torch.set_num_threads(1)  # OpenMP's threads do not survive a fork, and it would wait for them

def faults():
    for step in range(20):
        if step == 15:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(2**24)  # 64 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(faults())
for name in ("NOTHING", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES"):
    if os.fork() == 0:
        os.environ[name] = "glibc.malloc.top_pad=131072"
        Runtime("cpu")
        print(faults(), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or "LD_PRELOAD" in os.environ, reason="another malloc than glibc's"
)
def test_memory_that_a_step_on_a_cpu_frees_is_there_for_the_next_unless_the_user_sets_malloc():
    unset = dict.fromkeys(name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES")))
    ran = run_python("-u", "-c", COUNT_FAULTS, variables=unset, timeout_s=120)
    alone, kept, *with_settings = map(int, ran.stdout.split())
    assert alone >= 5 * 32  # of 2 MiB each, where the system has large pages
    assert kept < alone / 10 and len(with_settings) == 2 and min(with_settings) >= alone / 10


def test_a_gpu_updates_by_fused_kernels_and_counts_steps_itself_unless_asked_otherwise(monkeypatch):
    gpu(monkeypatch)
    weights = [torch.nn.Parameter(torch.ones(3))]
    expected = {
        torch.optim.Adam(weights): dict(fused=True, capturable=True),
        # whose fused step fails where a gradient comes later
        torch.optim.SGD(weights, 0.1): dict(fused=None),
        torch.optim.AdamW(weights, fused=False): dict(fused=False, capturable=True),
        torch.optim.Adagrad(weights): dict(fused=None),  # torch has its fused kernel for CPUs only
        torch.optim.RMSprop(weights): dict(capturable=True),
    }
    for optimizer, wanted in expected.items():
        assert CUDARuntime("cuda", "bf16").init_optimizer_state(optimizer)
        assert {name: optimizer.param_groups[0][name] for name in wanted} == wanted
    adam = torch.optim.Adam(weights)
    Runtime("cpu").init_optimizer_state(adam)
    assert not adam.param_groups[0]["capturable"] and adam.param_groups[0]["fused"] is None


@pytest.mark.parametrize(
    ("version", "chips", "given", "wanted"),
    [
        # as torch_xla does for chips on a bus
        ("0.0.17", 0, None, "--xla_tpu_use_enhanced_launch_barrier=false"),
        ("0.0.21", 0, "--c=3", "--c=3 --xla_tpu_use_enhanced_launch_barrier=false"),
        ("0.0.17", 0, *["--xla_tpu_use_enhanced_launch_barrier=true --c=3"] * 2),  # the user's own wins
        ("0.0.17", 8, "--c=3", "--c=3"),  # torch_xla sees the chips itself
        ("0.0.99", 0, "--c=3", "--c=3"),  # a flag that it does not know would end the process
        (None, 1, None, None),
    ],
)
def test_a_libtpu_without_a_bus_gets_no_launch_barrier_before_it_opens_the_chips(
    monkeypatch, opened, version, chips, given, wanted
):
    monkeypatch.setattr("tpukit.devices.tpu_chips", lambda: chips)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", given or "")  # so that it is as before when the test has ended
    if given is None:
        monkeypatch.delenv("LIBTPU_INIT_ARGS")
    monkeypatch.setattr("tpukit.devices.version_of", lambda package: version if package == "libtpu" else "1")
    for accelerator in ("xla", "tpu", "tpu"):  # the CPU XLA device has another compiler
        env = SimpleNamespace(accelerator=accelerator, backend="torch_xla", versions={}, check_versions=list)
        open_runtime(env)
    assert [environ.get("LIBTPU_INIT_ARGS") for environ in opened] == [given, wanted, wanted]


FP32 = """
import json, os, sys, warnings, torch
from tpukit.devices.cuda import CUDARuntime

warnings.simplefilter("ignore")
torch.set_num_threads(1)
class Opened(CUDARuntime):
    _open_device = lambda self: torch.device("cpu")
cudnn = torch.backends.cudnn
for setting in json.loads(sys.argv[1]):
    if os.fork() == 0:
        exec(setting)  # by the user
        Opened("cuda", "fp32")
        matmul = torch.backends.cuda.matmul
        found = [matmul.allow_tf32, cudnn.allow_tf32, torch.get_float32_matmul_precision()]
        if hasattr(cudnn, "conv"):
            precisions = matmul, cudnn.conv, cudnn.rnn
            found += [one.fp32_precision for one in precisions]
            torch.backends.fp32_precision = "tf32"
            found.append(cudnn.conv.fp32_precision)
        print(json.dumps(found), flush=True)
        os._exit(0)
    os.wait()
"""


def test_fp32_is_not_tf32_by_any_of_torchs_settings_whatever_the_user_has_set():
    settings = [
        "",
        "torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True",
        "torch.set_float32_matmul_precision('high')",
    ]
    has_newer = hasattr(torch.backends.cudnn, "conv")
    if has_newer:
        settings += [
            "torch.backends.fp32_precision = 'tf32'",
            "cudnn.conv.fp32_precision = torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        ]
    ran = run_python("-c", FP32, json.dumps(settings), timeout_s=120)
    found = list(map(json.loads, ran.stdout.splitlines()))
    assert found == len(settings) * [[False, False, "highest", *["ieee"] * 4 * has_newer]], ran.stderr


def test_a_process_of_a_group_takes_its_own_gpu_before_it_looks_whether_there_is_one(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", asked.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: asked == [3])
    assert runtime_class(dataclasses.replace(detect(), accelerator="cuda")).open_for_group(3).endswith("nccl")


@pytest.mark.parametrize("installed, value", [(["torch_tpu"], "1"), ([], None)])
def test_on_a_machine_without_a_tpu_torch_tpu_looks_for_none(installed, value, monkeypatch):
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    versions = dict.fromkeys(installed, "0.2.0")
    open_runtime(dataclasses.replace(detect(), accelerator="cpu", versions=versions))
    assert os.environ.get("TPU_SKIP_MDS_QUERY") == value
