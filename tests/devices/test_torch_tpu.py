"""The runtime of torch_tpu, on CPU tensors with a recording mock of the package, and its calls against the
package itself."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.conftest import ROOT, best_weights, exact, refuses, same
from tests.devices import torch_tpu_calls, torch_tpu_mock
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
    monkeypatch.setattr(
        os, "environ", {name: value for name, value in os.environ.items() if not name.startswith("TORCH_TPU")}
    )
    yield torch_tpu_mock.install(functools.partial(monkeypatch.setattr, raising=False))
    torch_tpu_mock.remove()


def test_a_training_through_torch_tpu_gives_the_records_and_weights_of_the_cpu(mock, digits, tmp_path, cpu):
    task = MNIST(dataset_dir=digits, channels_last="no", cuda_graph=False, **SMALL)
    runs = {}
    for name, runtime in (("cpu", cpu), ("tpu", open_runtime(torch_tpu_mock.machine(1), "fp32"))):
        runs[name] = Run.open(tmp_path / name, task)
        train(task, runs[name], runtime=runtime, progress=False)
    assert isinstance(runtime, TorchTPURuntime)
    assert exact(runs["cpu"]) == exact(runs["tpu"]) and same(
        best_weights(runs["cpu"]), best_weights(runs["tpu"])
    )
    assert not same(task.model().state_dict(), best_weights(runs["tpu"]))
    # fp32 is exact. The model and the predictions are compiled graphs, the step around the model is not.
    assert ("torch.set_float32_matmul_precision", ("highest",), {}) in mock.calls
    compiled = [
        (arguments[0], keywords) for name, arguments, keywords in mock.calls if name == "torch.compile"
    ]
    assert all(keywords == dict(dynamic=False) for _, keywords in compiled)
    names = {getattr(function, "__name__", type(function).__name__) for function, _ in compiled}
    assert names == {"Sequential", "without_gradient", "compose"}


def test_a_resumed_training_equals_an_uninterrupted_one_and_the_chips_generator_is_restored(
    mock, digits, tmp_path
):
    task = MNIST(dataset_dir=digits, **SMALL)
    whole, halves = Run.open(tmp_path / "whole", task), Run.open(tmp_path / "halves", task)
    train(task, whole, runtime=TorchTPURuntime(precision="fp32"), progress=False)
    train(
        dataclasses.replace(task, epochs=1), halves, runtime=TorchTPURuntime(precision="fp32"), progress=False
    )
    saved = torch.tpu.default_generators[0].get_state()
    torch.tpu.default_generators[0].manual_seed(99)
    train(task, halves, runtime=TorchTPURuntime(precision="fp32"), progress=False)
    assert exact(whole) == exact(halves) and same(best_weights(whole), best_weights(halves))
    assert torch.equal(torch.tpu.default_generators[0].get_state(), saved)
    assert ("torch.accelerator.synchronize", (), {}) in mock.calls  # once all was restored


def test_a_chip_computes_in_bf16_reports_its_memory_and_refuses_fp16_and_spmd(mock, tmp_path):
    runtime = TorchTPURuntime()
    assert ("torch.set_float32_matmul_precision", ("highest",), {}) in mock.calls  # for what stays fp32
    assert runtime.precision == "bf16" and runtime.memory_size() == 16 * 2**30 and runtime.memory() == []
    assert "TPU v5 lite" in str(runtime) and float(runtime.scalar(3)) == 3
    with runtime.traced(tmp_path):
        pass
    assert (
        "torch_tpu._internal.profiler.xprof_trace_handler",
        (),
        dict(dir_name=str(tmp_path)),
    ) in mock.calls
    with refuses("fp16", "bf16"):
        TorchTPURuntime(precision="fp16")
    with refuses("spmd", "processes"):
        open_runtime(torch_tpu_mock.machine(8), spmd_cores=8)


def test_the_commands_run_unchanged_through_torch_tpu(mock, digits, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(environment, "detect", lambda *_: torch_tpu_mock.machine(1))
    monkeypatch.chdir(tmp_path)  # where `test` writes
    run = tmp_path / "run"
    settings = ["--epochs", "1", "--batch-size", "16", "--channels", "4", "--log-every", "3"]
    assert cli.main(["train", "mnist", "--dataset-dir", str(digits), "--run", str(run), *settings]) == 0
    assert "TPU v5 lite through torch_tpu" in capsys.readouterr().out
    assert cli.main(["report", str(run), "--trace", "2"]) == 0
    assert {"torch_tpu._internal.profiler.profile", "torch.accelerator.synchronize"} <= mock.names()
    report = capsys.readouterr().out
    assert "torch_tpu compiled the model" in report and "Nothing is compiled" not in report
    assert (
        cli.main(
            [
                "test",
                "mnist",
                "--dataset-dir",
                str(digits),
                "--weights",
                str(run / "best.safetensors"),
                *settings[4:6],
            ]
        )
        == 0
    )
    assert "accuracy" in capsys.readouterr().out


def test_models_batches_and_numbers_are_placed_on_the_chip(mock):
    runtime = TorchTPURuntime(precision="fp32")
    runtime.device = torch.device("meta")
    model = runtime.place(torch.nn.Linear(2, 2), channels_last="yes")
    placed = [
        *model.parameters(),
        *runtime.put(dict(x=np.ones(2))).values(),
        *runtime.put_batch(dict(x=np.ones(2))).values(),
    ]
    placed += [*runtime.put_dataset(dict(x=np.ones(2))).values(), runtime.scalar(0.5), runtime.scalar(3)]
    assert {tensor.device.type for tensor in placed} == {"meta"} and runtime.scalar(None) is None


def test_the_random_state_is_the_hosts_and_the_chips_and_a_state_of_another_device_leaves_the_chips(mock):
    runtime = TorchTPURuntime(precision="fp32")
    (chip,) = torch.tpu.default_generators

    def draw():
        return torch.rand(1).item(), torch.rand(1, generator=chip).item()

    runtime.seed(5)
    saved = runtime.random_state()
    first, second = draw(), draw()
    runtime.set_random_state(saved)
    assert draw() == first != second
    runtime.set_random_state({"cpu": saved["cpu"]})
    assert draw() == (first[0], second[1])


@pytest.mark.parametrize("found, opens", [(None, False), ("cuda", False), ("tpu", True)])
def test_where_torch_tpu_finds_no_tpu_the_error_says_so(found, opens, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_tpu", torch)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda: found and SimpleNamespace(type=found)
    )
    monkeypatch.setattr(torch, "device", str)  # this torch may know no "tpu"
    if opens:
        assert torch_tpu_private.open_device() == "tpu"
        return
    with refuses("no TPU", "tpukit doctor"):
        torch_tpu_private.open_device()


def test_a_rank_opens_its_chip_and_then_joins_over_the_hosts_memory_and_the_chips_links(monkeypatch):
    calls = []
    monkeypatch.setattr(torch_tpu_private, "open_device", lambda: calls.append("opened"))
    monkeypatch.setattr(core.dist, "init_process_group", lambda backend, **how: calls.append(backend))
    monkeypatch.setattr(core.dist, "get_rank", lambda: 3)
    monkeypatch.setattr(core.dist, "get_world_size", lambda: 8)
    world = core.join_group(SimpleNamespace(env=torch_tpu_mock.machine(8), hang_timeout_s=60), 3)
    assert calls == ["opened", "cpu:gloo,tpu:tpu_dist"] and (world.rank, world.size) == (3, 8)


def test_a_launch_is_refused_where_this_process_has_used_the_chips(mock, digits, tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "detect", lambda: torch_tpu_mock.machine(8))
    monkeypatch.setattr(torch.tpu, "is_initialized", lambda: True)
    task = MNIST(dataset_dir=digits, **SMALL)
    with refuses("already initialized", "Restart"):
        launcher.launch(train, task, Run.open(tmp_path, task))


def started(options, torchrun=0, **variables):
    """A finished process that launched on mock chips; by torchrun, with this number of processes."""
    start = [sys.executable]
    if torchrun:
        start += ["-m", "torch.distributed.run", "--nproc-per-node", str(torchrun)]
    command = [*start, "-m", "tests.devices.torch_tpu_mock", json.dumps(options, default=str)]
    environ = {name: value for name, value in os.environ.items() if name not in ("PJRT_DEVICE", "XLA_FLAGS")}
    return subprocess.run(
        command, cwd=ROOT, env=environ | variables, capture_output=True, text=True, timeout=400
    )


def launched(**options):
    ran = started(options)
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


OF_FOUR = dict(
    TORCH_TPU_SLICEBUILDER_ADDRESSES=",".join(f"localhost:{port}" for port in range(4)),
    TORCH_TPU_TOPOLOGY="2,2,1",
)


@pytest.mark.slow
def test_torchrun_starts_four_chips_which_give_the_losses_of_one(digits, tmp_path):
    one = launched(run=tmp_path / "one", data=digits, cores=[1], batch_norm="frozen")
    options = dict(run=tmp_path / "four", data=digits, cores=[4], batch_norm="frozen", witness=tmp_path)
    ran = started(options, torchrun=4, TPU_VISIBLE_DEVICES="0", **OF_FOUR)
    assert ran.returncode == 0 and ran.stdout.count("all 4 cores started") == 1, ran.stderr[-4000:]
    # Ranks write at once: the lines of two may follow one another before their ends.
    ends = [json.JSONDecoder().raw_decode(part)[0] for part in ran.stdout.split("DONE ")[1:]]
    assert len(ends) == 4 and all(
        end["ends"][0]["result"] == one["ends"][0]["result"] for end in ends if end["rank"] == 0
    )
    # A leftover of one chip is cleared, or every rank would open that one; torchrun's processes set nothing
    # of their own.
    assert all(end["visible"] is None and end["launches"] == [] for end in ends)
    losses = [[r["loss"] for r in Run(tmp_path / name).records("train")] for name in ("one", "four")]
    assert len(losses[0]) == len(losses[1]) > 3 and losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.slow
def test_a_rank_that_fails_under_torchrun_ends_all_although_torch_tpu_would_wait_for_the_others_at_exit(
    digits, tmp_path
):
    options = dict(run=tmp_path / "run", data=digits, cores=[4], accident="raise")
    ran = started(options, torchrun=4, **OF_FOUR)
    assert ran.returncode == 1 and "rank 1 on" in ran.stderr and "sample 7 is broken" in ran.stderr


@pytest.mark.parametrize("processes, addresses", [(4, None), (2, 4), (3, 4), (8, 4)])
def test_torchrun_is_refused_where_its_processes_are_not_as_many_as_torch_tpu_was_prepared_for(
    processes, addresses, mock, digits, tmp_path, monkeypatch
):
    for name, value in dict(TORCHELASTIC_RUN_ID="1", WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE="1").items():
        monkeypatch.setenv(name, value)
    if addresses:
        monkeypatch.setenv("TORCH_TPU_SLICEBUILDER_ADDRESSES", OF_FOUR["TORCH_TPU_SLICEBUILDER_ADDRESSES"])
    monkeypatch.setattr(environment, "detect", lambda: torch_tpu_mock.machine(8))
    task = MNIST(dataset_dir=digits, **SMALL)
    with refuses(f"{addresses or 0} TPU chips", f"{processes} processes", "torch.tpu.distributed"):
        launcher.launch(train, task, Run.open(tmp_path, task))


def test_each_launch_prepares_its_own_chips_and_keeps_what_the_user_has_set(mock, monkeypatch):
    for count in (8, 4):
        torch_tpu_private.set_launch_variables(count)
        assert os.environ["TORCH_TPU_SLICEBUILDER_ADDRESSES"].count(":") == count
    monkeypatch.setenv("TORCH_TPU_SLICEBUILDER_ADDRESSES", "host-a:1,host-b:1,host-c:1,host-d:1")
    torch_tpu_private.set_launch_variables(4)
    assert os.environ["TORCH_TPU_SLICEBUILDER_ADDRESSES"].startswith("host-a")
    with refuses("4 TPU chips", "8 processes"):
        torch_tpu_private.set_launch_variables(8)

    def refuse(nproc_per_node):
        raise RuntimeError("No TPU topology found for count: 2")

    monkeypatch.setattr(torch.tpu.distributed, "set_tpu_launch_env", refuse)
    with refuses("2 processes", "count: 2", "tpukit doctor"):
        torch_tpu_private.set_launch_variables(2)


@pytest.mark.slow
def test_a_chip_that_fails_ends_the_launch_with_its_rank_and_the_next_launch_resumes(digits, tmp_path):
    found = launched(run=tmp_path / "run", data=digits, cores=[4, 4], accident="raise", save_every_s=0)
    failed, resumed = found["ends"]
    assert "core 1 (rank 1)" in failed["error"] and "result" in resumed, found


def test_two_of_eight_chips_are_refused_because_torch_tpu_knows_no_such_shape():
    with refuses("1, 4, 8"):
        launcher._count_cores(torch_tpu_mock.machine(8), 2, "processes")
    assert launcher._count_cores(torch_tpu_mock.machine(8), 4, "processes") == 4
    with refuses("spmd", "torch_xla"):
        launcher._count_cores(torch_tpu_mock.machine(8), 8, "spmd")


@pytest.mark.slow
def test_every_name_that_tpukit_uses_is_in_the_real_package_and_every_call_fits_its_signature(tmp_path):
    uses = torch_tpu_calls.used()
    (tmp_path / "tpukit/host").mkdir(parents=True)
    (tmp_path / "tpukit/host/new.py").write_text(
        "import torch, torch_tpu\nfrom torch_tpu import _loader as loader, no_such_module\nimport"
        " torch_tpu._internal.profiler as p\ndef f():\n    torch.tpu.no_such_name(1)\n   "
        " torch.tpu.get_device_name(1, 2)\n    loader._init_device(name='tpu')\n   "
        " torch.tpu.get_device_properties().no_such_field\n    torch.tpu.synchronize()\n    tpu = torch.tpu\n"
        "    p.profile(folder='x')\n    return torch.tpu.default_generators[0].get_state()\n"
    )
    wrong = torch_tpu_calls.used(tmp_path / "tpukit")  # so that this test can fail
    ran = in_the_real_package(
        tmp_path, "-m", "tests.devices.torch_tpu_calls", text=json.dumps([*uses, *wrong])
    )
    assert "FAULTS" in ran.stdout, ran.stderr[-3000:]
    faults = json.loads(ran.stdout.split("FAULTS")[1])
    assert sorted(place for place, _, _ in faults) == [
        f"host/new.py:{line}" for line in (10, 11, 2, 5, 6, 7, 8, 9)
    ], faults


def test_the_mock_knows_only_names_that_tpukit_uses_and_that_the_real_package_is_searched_for(
    mock, digits, tmp_path
):
    runtime = TorchTPURuntime(precision="fp32")
    str(runtime), runtime.sync(), runtime.memory_size(), runtime.traced(tmp_path), runtime.random_state()
    runtime.torch_compile(torch.nn.Linear(2, 2), "no")
    torch_tpu_private.set_launch_variables(8), torch_tpu_private.is_open()
    assert len(mock.names()) > 8 and mock.names() <= {name for _, name, *_ in torch_tpu_calls.used()}


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


@pytest.mark.slow
def test_the_known_errors_of_torch_tpu_are_texts_of_the_real_package(tmp_path):
    folder = in_the_real_package(tmp_path, "-c", "").folder / "torch_tpu"
    files = [*folder.rglob("*.py"), *folder.rglob("libpywrap_2_13_0_common.so")]
    source = (
        b"".join(path.read_bytes() for path in files)
        + " ".join(path.name for path in folder.rglob("*.so")).encode()
    )
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
from tests.devices import torch_tpu_calls, torch_tpu_mock
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
torch.tpu._is_in_bad_fork = lambda: print("LEFT THROUGH TORCH_TPU") or True  # the first thing that its function asks at exit
if sys.argv[2] == "failed":
    torch_tpu_private.leave_without_waiting()
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["done", "failed"])
def test_a_forked_rank_gets_as_far_in_the_real_package_as_one_can_without_a_chip(end, tmp_path):
    """It takes the variables of the last launch, and for each rank those that the package asks for before it
    opens a chip."""
    ran = in_the_real_package(tmp_path, "-c", RANK, str(tmp_path / "rendezvous"), end)
    assert "SET 8 8 2,4,1\nSET 1 1 1,1,1\n" in ran.stdout, ran.stderr[-3000:]
    assert "No jellyfish device found" in ran.stdout.split("JOINED")[1], ran.stdout
    assert "SEEDED 7" in ran.stdout  # so a runtime's `seed` reaches the chip
    assert "OPEN False" in ran.stdout and ("LEFT THROUGH TORCH_TPU" in ran.stdout) == (end == "done")
