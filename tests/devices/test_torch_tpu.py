"""The runtime of torch_tpu, on CPU tensors with a mock of the package; and the names that are used of it,
against the package itself."""

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.conftest import ROOT, best_weights, exact, refuses, same
from tests.devices import torch_tpu_mock
from tests.devices.torch_tpu_calls import in_the_real_package
from tpukit import MNIST, Run, cli, train
from tpukit.devices import open_runtime, torch_tpu_private
from tpukit.devices.torch_tpu import TorchTPURuntime
from tpukit.host import environment
from tpukit.host.known_errors import KNOWN_ERRORS
from tpukit.launching import core, launcher

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
    task = MNIST(dataset_dir=digits, channels_last="no", cuda_graph=False, **SMALL)
    chip = open_runtime(torch_tpu_mock.machine(1), "fp32")
    runs = {name: Run.open(tmp_path / name, task) for name in ("cpu", "whole", "halves")}
    for name, runtime in dict(cpu=cpu, whole=chip).items():
        train(task, runs[name], runtime=runtime, progress=False)
    for epochs in (1, 2):
        torch.tpu.default_generators[0].manual_seed(99 if epochs == 2 else 5)
        part = dataclasses.replace(task, epochs=epochs)
        train(part, runs["halves"], runtime=TorchTPURuntime("tpu", "fp32"), progress=False)
    assert exact(runs["cpu"]) == exact(runs["whole"]) == exact(runs["halves"])
    for name in ("whole", "halves"):
        assert same(best_weights(runs["cpu"]), best_weights(runs[name]))
    restored = torch.tpu.default_generators[0].get_state()
    assert torch.equal(restored, torch.Generator().manual_seed(5).get_state())
    # fp32 is exact. The model and the predictions are compiled graphs, the step around the model is not.
    assert ("set_float32_matmul_precision", ("highest",), {}) in mock and ("synchronize", (), {}) in mock
    compiled = [(arguments[0], keywords) for call, arguments, keywords in mock if call == "compile"]
    assert all(keywords == dict(dynamic=False) for _, keywords in compiled)
    assert {name for name, _ in compiled} == {"Sequential", "without_gradient", "compose"}


def test_a_chip_computes_in_bf16_reports_its_memory_takes_what_is_put_and_refuses_fp16_and_spmd(
    mock, tmp_path
):
    runtime = TorchTPURuntime("tpu")
    assert runtime.precision == "bf16" and runtime.memory_size() == 16 * 2**30 and runtime.memory() == []
    with runtime.traced(tmp_path):
        pass
    assert ("xprof_trace_handler", (), dict(dir_name=str(tmp_path))) in mock
    with refuses("fp16", "bf16"):
        TorchTPURuntime("tpu", "fp16")
    with refuses("spmd", "processes"):
        open_runtime(torch_tpu_mock.machine(8), spmd_cores=8)
    runtime.device = torch.device("meta")
    placed = list(runtime.to_device(torch.nn.Linear(2, 2), channels_last="yes").parameters())
    for put in (runtime.put, runtime.put_batch, runtime.put_dataset):
        placed += put(dict(x=np.ones(2))).values()
    placed += [runtime.as_graph_input(0.5), runtime.as_graph_input(3)]
    assert {tensor.device.type for tensor in placed} == {"meta"} and runtime.as_graph_input(None) is None


def test_the_commands_run_unchanged_through_torch_tpu(mock, digits, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(environment, "detect", lambda *_: torch_tpu_mock.machine(1))
    monkeypatch.chdir(tmp_path)  # where `test` writes
    data, run, size = ["mnist", "--dataset-dir", str(digits)], tmp_path / "run", ["--channels", "4"]
    settings = ["--epochs", "1", "--batch-size", "16", "--log-every", "3", *size]
    assert cli.main(["train", *data, "--run", str(run), *settings]) == 0
    assert "TPU v5 lite through torch_tpu" in capsys.readouterr().out
    assert cli.main(["report", str(run), "--trace", "2"]) == 0
    report = capsys.readouterr().out
    assert "torch_tpu compiled the model" in report and "Nothing is compiled" not in report
    assert cli.main(["test", *data, "--weights", str(run / "best.safetensors"), *size]) == 0
    assert "accuracy" in capsys.readouterr().out


@pytest.mark.parametrize("kind", [None, "cuda"])
def test_where_torch_tpu_finds_no_tpu_the_error_says_so(kind, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_tpu", torch)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: kind and torch.device(kind))
    with refuses("no TPU", "tpukit doctor"):
        torch_tpu_private.open_device()


# Launches


def test_a_rank_opens_its_chip_and_then_joins_over_the_hosts_memory_and_the_chips_links(monkeypatch):
    calls = []
    monkeypatch.setattr(torch_tpu_private, "open_device", lambda: calls.append("opened"))
    monkeypatch.setattr(core.dist, "init_process_group", lambda backend, **_: calls.append(backend))
    monkeypatch.setattr(core.dist, "get_rank", lambda: 3)
    monkeypatch.setattr(core.dist, "get_world_size", lambda: 8)
    world = core.join_group(SimpleNamespace(env=torch_tpu_mock.machine(8), hang_timeout_s=60), 3)
    assert calls == ["opened", "cpu:gloo,tpu:tpu_dist"] and (world.rank, world.size) == (3, 8)


def test_a_launch_is_refused_where_this_process_has_used_the_chips_and_spmd_as_it_is_torch_xlas(
    mock, digits, tmp_path, monkeypatch
):
    monkeypatch.setattr(environment, "detect", lambda: torch_tpu_mock.machine(8))
    monkeypatch.setattr(torch.tpu, "is_initialized", lambda: True)
    task = MNIST(dataset_dir=digits, **SMALL)
    for parallel, words in dict(processes=("already initialized", "Restart"), spmd=("torch_xla",)).items():
        with refuses(*words):
            launcher.launch(train, task, Run.open(tmp_path, task), parallel=parallel)


def started(options, torchrun=0, **variables):
    """A finished process that launched on mock chips; by torchrun, with this number of processes."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(torchrun)] if torchrun else []
    options = json.dumps(options, default=str)
    command = [sys.executable, *torchrun, "-m", "tests.devices.torch_tpu_mock", options]
    environ = {name: value for name, value in os.environ.items() if name not in ("PJRT_DEVICE", "XLA_FLAGS")}
    environ |= variables
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=400)


def ends(ran):
    """What each process of `started` printed: ranks write at once, so two lines may become one."""
    assert "DONE " in ran.stdout, ran.stdout[-2000:] + ran.stderr[-4000:]
    return [json.JSONDecoder().raw_decode(part)[0] for part in ran.stdout.split("DONE ")[1:]]


def losses(folder):
    return [record["loss"] for record in Run(folder).records("train")]


@pytest.fixture(scope="module")
def one_chip(digits, tmp_path_factory):
    """The run of a training on one chip, and its scores."""
    folder = tmp_path_factory.mktemp("one") / "run"
    [done] = ends(started(dict(run=folder, data=digits, cores=[1], batch_norm="frozen")))
    assert done["launches"] == [] and len(losses(folder)) > 3
    return folder, done["ends"][0]["result"]


@pytest.mark.slow
def test_a_chip_of_four_that_fails_ends_the_launch_and_the_next_gives_the_losses_of_one(
    digits, tmp_path, one_chip
):
    options = dict(cores=[4, 4], batch_norm="frozen", accident="raise", save_every_s=0)
    [done] = ends(started(dict(run=tmp_path, data=digits, **options)))
    failed, resumed = done["ends"]
    assert "core 1 (rank 1)" in failed["error"] and "result" in resumed, done
    assert done["launches"] == 2 * [dict(nproc_per_node=4)]
    assert losses(tmp_path) == pytest.approx(losses(one_chip[0]), rel=1e-4)


OF_FOUR = dict(
    TORCH_TPU_SLICEBUILDER_ADDRESSES=",".join(f"localhost:{port}" for port in range(4)),
    TORCH_TPU_TOPOLOGY="2,2,1",
)


@pytest.mark.slow
def test_torchrun_starts_four_chips_which_give_the_losses_of_one(digits, tmp_path, one_chip):
    options = dict(run=tmp_path, data=digits, cores=[4], batch_norm="frozen")
    ran = started(options, torchrun=4, TPU_VISIBLE_DEVICES="0", **OF_FOUR)
    assert ran.returncode == 0 and ran.stdout.count("all 4 cores started") == 1, ran.stderr[-4000:]
    done = ends(ran)
    [first] = [end for end in done if end["rank"] == "0"]
    assert len(done) == 4 and first["ends"][0]["result"] == one_chip[1]
    # A leftover of one chip is cleared, or every rank would open that one; torchrun's processes set nothing
    # of their own.
    assert all(end["visible"] is None and end["launches"] == [] for end in done)
    assert losses(tmp_path) == pytest.approx(losses(one_chip[0]), rel=1e-4)


@pytest.mark.slow
def test_a_rank_that_fails_under_torchrun_ends_all_although_torch_tpu_would_wait_for_the_others_at_exit(
    digits, tmp_path
):
    options = dict(run=tmp_path / "run", data=digits, cores=[2], accident="raise")
    addresses = ",".join(OF_FOUR["TORCH_TPU_SLICEBUILDER_ADDRESSES"].split(",")[:2])
    ran = started(options, torchrun=2, **OF_FOUR | dict(TORCH_TPU_SLICEBUILDER_ADDRESSES=addresses))
    assert ran.returncode == 1 and "rank 1 on" in ran.stderr and "sample 7 is broken" in ran.stderr


def test_each_launch_prepares_its_own_chips_and_is_refused_where_the_user_or_torchrun_set_others(
    mock, digits, tmp_path, monkeypatch
):
    for count in (8, 4):
        torch_tpu_private.set_launch_variables(count)
        assert os.environ["TORCH_TPU_SLICEBUILDER_ADDRESSES"].count(":") == count
    os.environ["TORCH_TPU_SLICEBUILDER_ADDRESSES"] = "host-a:1,host-b:1,host-c:1,host-d:1"
    torch_tpu_private.set_launch_variables(4)
    assert os.environ["TORCH_TPU_SLICEBUILDER_ADDRESSES"].startswith("host-a")
    with refuses("4 TPU chips", "8 processes"):
        torch_tpu_private.set_launch_variables(8)
    monkeypatch.setattr(environment, "detect", lambda: torch_tpu_mock.machine(8))
    task = MNIST(dataset_dir=digits, **SMALL)
    os.environ.update(TORCHELASTIC_RUN_ID="1", LOCAL_WORLD_SIZE="1")
    for processes, chips in ((2, 4), (8, 4), (4, 0)):
        os.environ["WORLD_SIZE"] = str(processes)
        if not chips:
            del os.environ["TORCH_TPU_SLICEBUILDER_ADDRESSES"]
        with refuses(f"{chips} TPU chips", f"{processes} processes", "torch.tpu.distributed"):
            launcher.launch(train, task, Run.open(tmp_path, task))

    def refuse(nproc_per_node):
        raise RuntimeError("No TPU topology found for count: 2")

    monkeypatch.setattr(torch.tpu.distributed, "set_tpu_launch_env", refuse)
    with refuses("2 processes", "count: 2", "tpukit doctor"):
        torch_tpu_private.set_launch_variables(2)


# In the environment of the planner, which holds torch_tpu itself

COMPILE = "torch_tpu._internal.compile.tpu_torch_compile"
USED = {  # name -> (number of positional arguments, keywords) of tpukit's call; None: it is not called
    "torch.tpu.get_device_name": (0, []),
    "torch.tpu.get_device_properties": (0, []),
    "torch.tpu.is_initialized": (0, []),
    "torch.tpu.default_generators": None,
    "torch.tpu._shutdown_runtime": None,
    "torch.tpu.distributed.set_tpu_launch_env": (0, ["nproc_per_node"]),
    "torch_tpu._loader._init_device": (1, []),
    "torch_tpu._internal.env_utils._resolved_values": None,
    "torch_tpu._internal.profiler.profile": (0, ["on_trace_ready"]),
    "torch_tpu._internal.profiler.xprof_trace_handler": (0, ["dir_name"]),
    "torch_tpu._internal.execution_mode.set_eager_mode": (1, []),
    "torch_tpu._internal.execution_mode.EagerMode._INTERNAL_COMPILE_FX_GRAPH": None,
    "torch_tpu._internal.export.export.EagerLikeFxInterpreter": (1, []),
    f"{COMPILE}.placeholder": (2, []),
    f"{COMPILE}.make_constant_tensor": (1, []),
    f"{COMPILE}.build_mlir": (0, ["result_tensors", "argument_tensors"]),
    f"{COMPILE}.serialize_mlir_text": (1, []),
    f"{COMPILE}.serialize_mlir_portable_artifact": (1, []),
}


def test_every_name_of_torch_tpu_in_the_source_is_in_the_list_that_the_real_package_is_searched_for():
    source = "".join(path.read_text() for path in (ROOT / "tpukit").rglob("torch_tpu*.py"))
    used = set(re.findall(r"(?<!`)\btorch\.tpu\.(?!distributed)\w+", source))
    used |= set(map(".".join, re.findall(r"from (torch_tpu[\w.]*|torch\.tpu\.\w+) import (\w+)", source)))
    used |= {f"{COMPILE}.{name}" for name in re.findall(r"\btpu_torch_compile\.(\w+)", source)}
    assert (
        len(used) > 12 and [name for name in used if not any(known.startswith(name) for known in USED)] == []
    )


@pytest.mark.nightly
def test_every_name_that_tpukit_uses_is_in_the_real_package_and_every_call_fits_its_signature(tmp_path):
    wrong = {"torch.tpu.no_such_name": None, "torch_tpu._internal.profiler.profile": (0, ["folder"])}
    for calls, faults in ((USED, []), (wrong, list(wrong))):  # so that this test can fail
        uses = [("", name, *(call or (None, []))) for name, call in calls.items()]
        ran = in_the_real_package(tmp_path, "-m", "tests.devices.torch_tpu_calls", text=json.dumps(uses))
        assert "FAULTS" in ran.stdout, ran.stderr[-3000:]
        assert [name for _, name, _ in json.loads(ran.stdout.split("FAULTS")[1])] == faults


# Code of a known error -> what the package's own source has of its text.
TEXTS = {
    "torch-tpu-fork": "cannot access or re-initialize TPU in a forked subprocess. ",
    "torch-tpu-symbol": "libpywrap_2_15_0_common.so",
    "torch-tpu-launch": "missing required environment variables for distributed training: ",
    "torch-tpu-torch": "torch_tpu has no extension module compatible with PyTorch ",
    "torch-tpu-shape": "No TPU topology found for count: ",
    "torch-tpu-inductor": "torch.compile(..., backend='inductor') on TPU is experimental and does",
    "torch-tpu-dynamic": "TPU backend does not support torch.compile(..., dynamic=True, ...).",
    "torch-tpu-device": "Cannot set TPU device to index ",
    "torch-tpu-internal": "is internal to TorchTPU",
}


@pytest.mark.nightly
def test_the_known_errors_of_torch_tpu_are_texts_of_the_real_package(tmp_path):
    folder = in_the_real_package(tmp_path, "-c", "").folder / "torch_tpu"
    files = [*folder.rglob("*.py"), *folder.rglob("libpywrap_2_13_0_common.so")]
    source = b"".join(path.read_bytes() for path in files)
    source += " ".join(path.name for path in folder.rglob("*.so")).encode()
    assert TEXTS.keys() == {code for code in KNOWN_ERRORS if code.startswith("torch-tpu")}
    for code, text in TEXTS.items():
        assert text.encode() in source and text in KNOWN_ERRORS[code].title, code
    assert b"no such text in it" not in source


RANK = """
import os, sys
from types import SimpleNamespace
from tpukit.devices import torch_tpu_private
torch_tpu_private.load()
from torch_tpu._internal.utils import hardware
hardware.get_tpu_topology = {8: "2,4,1", 1: "1,1,1"}.get  # by count, as of a host with a v5e-8
from tests.devices import torch_tpu_mock
from tests.devices.torch_tpu_calls import in_the_real_package
from tpukit.launching import core
for count in (8, 1):
    torch_tpu_private.set_launch_variables(count)
    addresses = os.environ["TORCH_TPU_SLICEBUILDER_ADDRESSES"]
    print("SET", count, addresses.count(":"), os.environ["TORCH_TPU_TOPOLOGY"], flush=True)
if os.fork() == 0:
    here = dict(env=torch_tpu_mock.machine(1), processes=1, spmd_cores=None, rendezvous=sys.argv[1])
    job = SimpleNamespace(**here, hang_timeout_s=60)
    try:
        core.join(job, 0)
    except RuntimeError as error:
        print("JOINED", error, flush=True)
    os._exit(0)
os.wait()
import torch
print("OPEN", torch_tpu_private.is_open())
torch.tpu.manual_seed_all = lambda seed: print("SEEDED", seed)
torch.manual_seed(7)
torch.tpu._is_in_bad_fork = lambda: print("LEFT THROUGH TORCH_TPU") or True  # asked at exit
if sys.argv[2] == "failed":
    torch_tpu_private.leave_without_waiting()
"""


@pytest.mark.nightly
@pytest.mark.parametrize("end", ["done", "failed"])
def test_a_forked_rank_gets_as_far_in_the_real_package_as_one_can_without_a_chip(end, tmp_path):
    """It takes the variables of the last launch, and for each rank those that the package asks for before it
    opens a chip."""
    ran = in_the_real_package(tmp_path, "-c", RANK, str(tmp_path / "rendezvous"), end)
    printed = ran.stdout
    assert "SET 8 8 2,4,1\nSET 1 1 1,1,1\n" in printed, ran.stderr[-3000:]
    assert "No jellyfish device found" in printed.split("JOINED")[1], printed
    assert "SEEDED 7" in printed  # so a runtime's `seed` reaches the chip
    assert "OPEN False" in printed and ("LEFT THROUGH TORCH_TPU" in printed) == (end == "done")
