"""`launch`: the same training on one core and on several; what is refused before anything starts."""

import contextlib
import fcntl
import functools
import signal

import numpy as np
import pytest
import torch

import tpukit
from tests import warm
from tests.conftest import best_weights, checkpoint, exact, refuses, same, scores_of, wait_for
from tests.tpukit.launching.conftest import (
    CPU,
    difference,
    launched,
    losses,
    needs_torch_xla,
    on_one_core,
    output_of,
    python,
    started,
    steps_logged,
)
from tests.tpukit.launching.launched import RECIPE, Watched, machine
from tpukit import CDEIT, MNIST, MSHNet, Run, launch, train
from tpukit.devices import chip_access
from tpukit.devices.runtime import Runtime
from tpukit.host import environment
from tpukit.launching import core as core_module
from tpukit.launching import launcher
from tpukit.runs import weights
from tpukit.training.launched_call import launched_call


@pytest.fixture(scope="module")
def launches(odd, tmp_path_factory):
    """name -> (run, what its launch gave) of launches of one kernel, of processes on a CPU."""
    folder = tmp_path_factory.mktemp("launches")
    frozen, dropout = dict(batch_norm="frozen"), dict(dropout=0.5, cores=2)
    return launched(
        "cpu",
        odd,
        folder,
        recipe=dict(RECIPE, cores=4),
        mapped=dict(function="mapped_memory", cores=4),
        noise=dict(function="noise", cores=2),
        per_core=dict(epochs=1, cores=2),
        straight=dict(dropout, epochs=2),
        parted=dict(dropout, epochs=1),
        resumed=dict(dropout, epochs=2, run="parted"),
        on_four=dict(frozen, epochs=1, cores=4),
        on_two=dict(frozen, epochs=2, cores=2, run="on_four"),
        on_one=dict(frozen, epochs=3, cores=1, run="on_four"),
    )


@pytest.fixture(scope="module")
def on_xla(odd, tmp_path_factory):
    """The same of processes with an XLA device each."""
    return launched("xla", odd, tmp_path_factory.mktemp("xla"), recipe=dict(RECIPE, cores=2))


@pytest.mark.slow
@pytest.mark.parametrize("kind, cores", [("launches", 4), ("on_xla", 2)])
def test_several_cores_give_the_losses_scores_and_weights_of_one(kind, cores, alone, request):
    """With a schedule, micro-batches, a frozen part, clipping, and patience that ends it at one epoch."""
    run, done = request.getfixturevalue(kind)["recipe"]
    assert "result" in done, done
    one, scores = alone
    assert difference(losses(run), losses(one)) < 1e-4
    # Another compiled graph rounds differently: one of the 37 digits may lie on the edge.
    assert done["result"]["images"] == 37
    assert abs(done["result"]["accuracy"] - scores["accuracy"]) < 1.5 / 37
    start = run.records("start")[0]
    assert (start["cores"], start["processes"]) == (cores, cores)
    [stopped], [stopped_alone] = run.records("stopped"), one.records("stopped")
    assert stopped["step"] == stopped_alone["step"] < 9 * 12
    ours, theirs = best_weights(run), best_weights(one)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)  # by name, on the CPU
    torch.manual_seed(0)
    before = Watched().model().state_dict()
    kept = [name for name in ours if name.endswith("weight") and torch.equal(ours[name], before[name])]
    assert kept == ["0.weight"]  # which is frozen


@pytest.mark.slow
@pytest.mark.parametrize("kind, cores", [("launches", 4), ("on_xla", 2)])
def test_all_cores_are_listed_as_started_and_only_rank_0_writes_and_prints(kind, cores, alone, request):
    run, done = request.getfixturevalue(kind)["recipe"]
    lines = [line for line in done["out"].splitlines() if line.startswith("core ")]
    assert [line.split(":")[0] for line in lines] == [f"core {n}" for n in range(cores)]
    assert done["out"].count(f"all {cores} cores started") == done["out"].count("epoch 1: loss") == 1
    assert [(r["kind"], r["step"]) for r in exact(run)] == [(r["kind"], r["step"]) for r in exact(alone[0])]
    assert run.read_progress()["step"] == run.read_progress()["total"] == len(losses(run))
    for log in (run.path / "cores").glob("rank-*.log"):
        assert "epoch 1" not in log.read_text()


@pytest.mark.slow
def test_per_core_batch_norm_differs_from_one_core_and_every_rank_scores_with_rank_0s_statistics(
    launches, odd, tmp_path
):
    run, done = launches["per_core"]
    one, _ = on_one_core(tmp_path / "one", odd, epochs=1)
    assert difference(losses(run), losses(one)) > 1e-3
    # The oracle: rank 0's weights and statistics, as they were saved, score on one core what the two cores
    # reported.
    task = Watched(dataset_dir=odd, batch_size=8)
    model = task.model()
    weights.load(model, run.path / "best.safetensors")
    assert scores_of(task, model, task.datasets()[1], Runtime("cpu")) == done["result"]


@pytest.mark.slow
def test_every_rank_resumes_with_its_own_random_numbers(launches):
    """With dropout, one and one epoch on two cores equal two; and the two cores do not drop the same."""
    straight, parted = launches["straight"][0], launches["parted"][0]
    assert len(losses(straight)) == 2 * 24
    assert exact(parted) == exact(straight)
    assert same(best_weights(parted), best_weights(straight))
    noise = launches["noise"][1]["result"]
    assert noise[0] != noise[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cpu", "xla"])
def test_a_launch_that_is_killed_and_terminated_draws_what_a_straight_one_draws(kind, odd, tmp_path):
    settings = dict(dropout=0.5, cores=2, epochs=8, save_every_s=0.0)
    for number, at in ((signal.SIGKILL, 7), (signal.SIGTERM, 40)):
        process = started(kind, odd, [dict(settings, run=tmp_path / "parted")], warm.python())
        wait_for(lambda: steps_logged(tmp_path / "parted") >= at, process)
        process.send_signal(number)
        output_of(process)
        for name in (".launch.lock", ".lock"):  # which its cores hold until they are gone, a moment later
            with open(tmp_path / "parted" / name) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
    runs = launched(kind, odd, tmp_path, straight=dict(settings), parted=dict(settings))
    (straight, _), (parted, _) = runs["straight"], runs["parted"]
    assert len(parted.records("start")) == 3 and len(losses(parted)) == 8 * 24
    assert exact(parted) == exact(straight) and same(best_weights(parted), best_weights(straight))
    assert same(checkpoint(parted)["model"], checkpoint(straight)["model"])


@pytest.mark.slow
def test_a_run_moves_between_numbers_of_cores_and_equals_a_straight_one(launches, odd, tmp_path):
    straight, _ = on_one_core(tmp_path / "straight", odd, batch_norm="frozen", epochs=3)
    moved, _ = launches["on_one"]
    assert [record["cores"] for record in moved.records("start")] == [4, 2, 1]
    assert difference(losses(moved), losses(straight)) < 1e-4


@pytest.mark.slow
def test_the_dataset_is_held_once_for_all_processes_of_a_host(launches, odd):
    """Four processes that have read every pixel: their shares of the map (Pss) add up to one dataset, not to
    four."""
    with np.load(odd / "mnist.npz") as arrays:
        images = arrays["x_train"]
    rows = launches["mapped"][1]["result"]
    assert [total for total, *_ in rows] == [int(images.sum())] * 4
    assert all(whole >= images.nbytes for _, _, whole, _ in rows)
    assert sum(share for _, share, _, _ in rows) < 1.1 * images.nbytes
    assert sum(private for *_, private in rows) == 0


# What is refused before anything starts


@pytest.mark.parametrize(
    "env, requested, wanted",
    [
        (machine("tpu", 8), None, 8),
        (machine("tpu", 8), 1, 1),
        (machine("cuda", 4), 2, 2),
        (machine("cpu", 1), None, 1),
        (machine("xla", 1), 8, 8),
        (machine("tpu", 1, "colab"), 8, ["8", "found 1", environment.TPU_MENU["colab"]]),
        (machine("tpu", 8), 4, ["4 of 8", "cores=1", "cores=8"]),
        (machine("tpu", 8), 0, ["cores=0"]),
    ],
)
def test_all_cores_are_taken_unless_fewer_are_requested_and_impossible_shapes_are_refused(
    env, requested, wanted
):
    with refuses(*wanted) if isinstance(wanted, list) else contextlib.nullcontext():
        assert launcher._count_cores(env, requested) == wanted


@pytest.mark.parametrize(
    "message, words",
    [
        ("TPU initialization failed: No ba16c7433 device found.", "Change runtime type"),
        ("open(/dev/vfio/0): Device or resource busy", "`tpukit doctor` names it"),
        ("Unexpected PJRT_Client_Create_Args size: expected 88, got 72", "Start a fresh session"),
        ("_XLAC.so: undefined symbol: _ZN3c10", "Start a fresh session"),
    ],
)
@pytest.mark.parametrize("opens", [lambda: launch(print, cores=1), lambda: core_module._alone.__wrapped__()])
def test_on_one_core_too_an_error_of_the_device_comes_with_its_fix(message, words, opens, monkeypatch):
    def refuse(*arguments):
        raise RuntimeError(message)

    monkeypatch.setattr(Runtime, "__init__", refuse)
    monkeypatch.setenv(environment.CHOSEN, "cpu")
    with refuses(message, words):
        opens()


def test_a_test_takes_any_batch_and_a_training_one_that_the_cores_share(digits, tmp_path):
    task = MNIST(dataset_dir=digits, batch_size=4)
    plan = launched_call(task, Run(tmp_path))
    plan.check(tpukit.test, 8)
    plan.check(functools.partial(tpukit.test, progress=False), 8)
    with refuses("multiple of 8"):
        plan.check(train, 8)


def test_one_of_several_hosts_is_refused(digits, tmp_path, monkeypatch):
    here = machine("tpu", 8)
    monkeypatch.setattr(environment, "detect", lambda: here)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "host-0,host-1")
    task = Watched(dataset_dir=digits)
    with refuses("one of 2 hosts", "trains on one host"):
        launch(train, task, Run.open(tmp_path, task))


@pytest.mark.parametrize("accelerator, cores", [("cuda", 2), ("tpu", 8), ("cpu", 1)])
def test_a_process_of_torchrun_is_told_to_start_without_it(accelerator, cores, monkeypatch):
    here, called = machine(accelerator, cores), []
    monkeypatch.setattr(environment, "detect", lambda: here)
    for name, value in dict(TORCHELASTIC_RUN_ID="none", RANK="1", WORLD_SIZE="2").items():
        monkeypatch.setenv(name, value)
    with refuses("torchrun", "without torchrun", "itself"):
        launch(called.append, 1, cores=1)
    assert not called


@pytest.mark.parametrize(
    "task, gpus, one",
    [
        (MSHNet(batch_size=4), 2, True),  # the recipe, of which two cards would see two images each
        (MSHNet(batch_size=32), 2, False),
        (MSHNet(batch_size=32), 4, True),
        (MSHNet(batch_size=4, batch_norm="frozen"), 2, False),
        (CDEIT(batch_size=4, network="small"), 2, False),  # has no batch norm
    ],
)
def test_one_gpu_is_taken_if_a_share_of_the_batch_is_too_small_for_batch_norm(task, gpus, one):
    assert bool(launched_call(task, Run("run")).why_one_gpu(gpus)) == one


@pytest.mark.parametrize(
    "accelerator, is_open, waits", [("tpu", False, 1), ("tpu", True, 0), ("cpu", False, 0)]
)
def test_one_core_too_waits_until_its_chip_is_free_unless_this_process_has_it(
    accelerator, is_open, waits, digits, tmp_path, monkeypatch
):
    needs_torch_xla()
    waited = []
    here = machine(accelerator, 1)
    monkeypatch.setattr(environment, "detect", lambda: here)
    monkeypatch.setattr("tpukit.devices.xla_private.is_open", lambda: is_open)
    monkeypatch.setattr(chip_access, "wait_until_free", waited.append)
    monkeypatch.setattr(launcher, "open_runtime", lambda *_, **__: Runtime("cpu"))
    task = Watched(dataset_dir=digits)
    assert launcher.launch(lambda task, run, runtime: "done", task, Run.open(tmp_path, task)) == "done"
    assert len(waited) == waits


@pytest.mark.parametrize("chips", [0, 8])
def test_a_launch_beside_a_tpu_that_it_does_not_use_says_so(chips, monkeypatch, capsys):
    here = machine("cpu", 1)
    monkeypatch.setattr(environment, "detect", lambda: here)
    monkeypatch.setattr(environment, "chips_here", lambda environ: chips)
    assert launch(int, 1) == 1
    assert ("the TPU here is not used" in capsys.readouterr().out) == bool(chips)


@pytest.mark.parametrize(
    "options, data",
    [
        ({}, [environment.NAMES["xla"], "Restart the session"]),  # this kernel has used the device
        (dict(hang_timeout_s=-1), ["hang_timeout_s=-1"]),
    ],
)
def test_a_kernel_that_used_the_device_and_no_time_until_a_core_hangs_are_refused(
    options, data, digits, tmp_path, xla
):
    task = Watched(dataset_dir=digits)
    with refuses(*data):
        launcher.launch(train, task, Run.open(tmp_path, task), cores=2, **options)


@pytest.mark.slow
def test_a_kernel_from_which_no_gpu_process_can_be_forked_is_refused(odd, tmp_path):
    """Each core finds out. gloo and the CPU replace NCCL and the cards; the error is torch's own."""
    if not torch.backends.cuda.is_built():
        pytest.skip("this torch was built without CUDA")
    program = """
import torch.distributed as dist
from tpukit.devices import cuda
gpus, init = machine("cuda", 2), dist.init_process_group
environment.detect = lambda: gpus
set_device = torch.cuda.set_device
cuda.check_cuda = torch.cuda.set_device = lambda *_: None
dist.init_process_group = lambda backend, **how: init("gloo", **how)
core_process.open_runtime = lambda env, precision, world: Runtime("cpu", world=world)
task = Watched(dataset_dir=Path(sys.argv[1]), epochs=1)
run = Run.open(sys.argv[2], task)
torch.ones(1, requires_grad=True).backward()  # on the CPU alone autograd starts no threads
print("WELL", launch(noise, task, run, cores=2))
torch.cuda.is_available()
torch.cuda.set_device = set_device
try:
    launch(noise, task, run, cores=2)
except CoreFailed as error:
    print("REFUSED", "Restart the session and launch first" in str(error))
"""
    ran = python(program, odd, tmp_path, env=CPU)
    assert "WELL [[" in ran.stdout and "REFUSED True" in ran.stdout, ran.stdout + ran.stderr
