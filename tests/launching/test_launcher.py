"""`launch`: the same training on one core and on several; what is refused before anything starts."""

import collections
import contextlib
import json
import os

import numpy as np
import pytest
import torch

from tests.conftest import best_weights, checkpoint, exact, refuses, same, scores_of
from tests.launching.conftest import difference, launched, losses, needs_torch_xla, python
from tests.launching.launched import Descending, Watched, machine
from tpukit import CDEIT, MSHNet, Run, launch, train
from tpukit.devices.distributed import World
from tpukit.devices.runtime import Runtime
from tpukit.host import environment
from tpukit.launching import launcher
from tpukit.launching.supervisor import Supervisor
from tpukit.runs import weights
from tpukit.training import batch_norm
from tpukit.training.data import training_index_batches

IN_PARTS = "spmd over 8, the set in parts"  # each core may hold 100 kB of the set's 154
SHAPES = {
    "8 processes": ("cpu", 8),
    "4 XLA devices": ("xla", 4),
    "spmd over 8": ("spmd", 8),
    IN_PARTS: ("spmd", 8),
}


@pytest.fixture(scope="session", params=[pytest.param(name, marks=pytest.mark.slow) for name in SHAPES])
def shape(request, odd, tmp_path_factory):
    """The same training on several cores: kind, cores, run, scores, what was printed, and which samples were
    requested."""
    kind, cores = SHAPES[request.param]
    folder = tmp_path_factory.mktemp("shape")
    (folder / "witness").mkdir()
    settings = dict(batch_norm="frozen", witness=folder / "witness")
    if request.param == IN_PARTS:
        settings["memory_size"] = 8 * 100_000
    [done], out = launched(kind, run=folder / "run", data=odd, cores=cores, launches=[settings])
    assert "result" in done, done["message"]
    assert ("on the device, sharded over 8 cores" in out) == (request.param == IN_PARTS)
    return kind, cores, Run(folder / "run"), done["result"], out, folder / "witness"


def on_one_core(folder, data, **settings):
    """The run of a training on the CPU, in this process."""
    task = Watched(dataset_dir=data, log_every=1, num_workers=1, **settings)
    run = Run.open(folder, task)
    train(task, run, runtime=Runtime("cpu"), progress=False)
    return run


# What every shape promises


def test_several_cores_give_the_losses_scores_and_weights_of_one(shape, alone):
    kind, cores, run, scores, _, _ = shape
    assert difference(losses(run), losses(alone[0])) < 1e-4
    # Another compiled graph rounds differently: one of the 37 digits may lie on the edge.
    assert scores["images"] == 37 and abs(scores["accuracy"] - alone[1]["accuracy"]) < 1.5 / 37
    start = run.records("start")[0]
    assert (start["cores"], start["processes"]) == (cores, 1 if kind == "spmd" else cores)
    ours, theirs = best_weights(run), best_weights(alone[0])
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)  # by name, on the CPU
    torch.manual_seed(0)
    before = Watched().model().state_dict()
    assert all(not torch.equal(ours[n], before[n]) for n in ours if n.endswith("weight"))


def test_no_sample_is_seen_twice_in_an_epoch_and_none_is_lost_in_an_evaluation(shape):
    kind, cores, _, scores, _, witness = shape
    for split in ("train", "test"):
        files = sorted(witness.glob(f"{split}-*.txt"))
        assert len(files) == (1 if kind == "spmd" else cores)
        seen = collections.Counter(int(line) for file in files for line in file.read_text().split())
        if split == "train":
            plan = [i for epoch in (0, 1) for i, _, _ in training_index_batches(196, 8, seed=0, epoch=epoch)]
            assert seen == collections.Counter(np.concatenate(plan).tolist()) and max(seen.values()) == 2
        else:
            padding = 2 * 3  # 37 samples in 5 batches of 8, in two evaluations; sample 0 fills up
            assert seen == {**{sample: 2 for sample in range(37)}, 0: 2 + padding}
    assert scores["images"] == 37


def test_all_cores_are_listed_as_started_and_only_rank_0_writes_and_prints(shape, alone):
    _, cores, run, _, out, _ = shape
    lines = [line for line in out.splitlines() if line.startswith("core ")]
    assert [line.split(":")[0] for line in lines] == [f"core {n}" for n in range(cores)]
    assert all(f"{8 // cores} sample" in line for line in lines)
    assert out.count(f"all {cores} cores started") == out.count("epoch 1: loss") == 1
    assert [(r["kind"], r["step"]) for r in exact(run)] == [(r["kind"], r["step"]) for r in exact(alone[0])]
    assert run.read_progress()["step"] == run.read_progress()["total"] == 48
    for log in (run.path / "cores").glob("rank-*.log"):
        assert "epoch 1" not in log.read_text()


@pytest.mark.slow
def test_spmd_takes_batch_norm_over_the_whole_batch_in_one_compiled_graph(infrared, tmp_path, xla):
    """MSHNet, both phases, 20 steps, against one device. SGD: see docs/MSHNET.md on Adagrad's first step."""
    program = """
task = Descending(dataset_dir=Path(sys.argv[1]), **json.loads(sys.argv[3]))
launch(train, task, Run.open(sys.argv[2], task), cores=2, parallel="spmd")
"""
    settings = dict(epochs=10, warm_epoch=4, batch_size=8, base_size=32, crop_size=32)
    settings |= dict(log_every=1, num_workers=1, eval_every=99)
    ran = python(program, infrared, tmp_path / "two", json.dumps(settings))
    assert ran.returncode == 0, ran.stderr[-3000:]
    task = Descending(dataset_dir=infrared, **settings)
    train(task, Run.open(tmp_path / "one", task), runtime=xla, progress=False)
    two, one = Run(tmp_path / "two"), Run(tmp_path / "one")
    assert difference(losses(two), losses(one)) < 1e-4
    assert [(r["step"], r["programs"]) for r in two.records("compile") if r["what"] == "step"] == [(1, 1)]
    ours, theirs = checkpoint(two)["model"], checkpoint(one)["model"]
    statistics = [n for n in ours if n.endswith("running_var")]
    assert max(float((ours[n] / theirs[n] - 1).abs().max()) for n in statistics) < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("kind, cores", [("cpu", 2), ("xla", 2), ("spmd", 4)])
def test_several_cores_with_a_schedule_micro_batches_frozen_parts_and_patience_equal_one(
    kind, cores, odd, tmp_path
):
    settings = dict(schedule="cosine", warmup_epochs=0.5, micro_batches=2, freeze=["0"], clip_norm=0.5)
    settings |= dict(batch_norm="frozen", batch_size=16, epochs=9, patience=1)
    [done], _ = launched(kind, run=tmp_path / "several", data=odd, cores=cores, launches=[dict(settings)])
    assert "result" in done, done["message"]
    one, several = (
        on_one_core(tmp_path / "one", odd, **settings | dict(freeze=("0",))),
        Run(tmp_path / "several"),
    )
    assert difference(losses(several), losses(one)) < 1e-4
    stopped = [[record["step"] for record in run.records("stopped")] for run in (several, one)]
    assert stopped[0] == stopped[1] and len(stopped[0]) == 1 and stopped[0][0] < 9 * 12
    torch.testing.assert_close(best_weights(several), best_weights(one), atol=1e-4, rtol=0)


# Several launches of two cores, one after another from one kernel


@pytest.fixture(scope="session")
def launches(odd, tmp_path_factory):
    """name -> (run, dict(result or message)) of launches on two cores."""
    folder = tmp_path_factory.mktemp("launches")
    asked = dict(
        noise=dict(function="noise"),
        synced=dict(batch_norm="synced"),
        per_core=dict(epochs=1),
        straight=dict(dropout=0.5, epochs=4),
        parted=dict(dropout=0.5, epochs=2),
        resumed=dict(dropout=0.5, epochs=4, run=folder / "parted"),
    )
    settings = [dict(run=folder / name) | options for name, options in asked.items()]
    done, _ = launched("cpu", run=None, data=odd, cores=2, launches=settings)
    return {name: (Run(folder / name), outcome) for name, outcome in zip(asked, done)}


@pytest.mark.slow
def test_per_core_batch_norm_differs_from_one_core_and_every_rank_scores_with_rank_0s_statistics(
    launches, odd, tmp_path
):
    run, done = launches["per_core"]
    one = on_one_core(tmp_path / "one", odd, epochs=1)
    assert difference(losses(run), losses(one)) > 1e-3
    # The oracle: rank 0's weights and statistics, as they were saved, score on one core what the two cores
    # reported.
    task = Watched(dataset_dir=odd, batch_size=8)
    model = task.model()
    weights.load(model, run.path / "best.safetensors")
    assert scores_of(task, model, task.datasets()[1], Runtime("cpu")) == done["result"]


@pytest.mark.slow
def test_every_rank_resumes_with_its_own_random_numbers(launches):
    """With dropout, two and two epochs on two cores equal four; and the two cores do not drop the same."""
    straight, parted = launches["straight"][0], launches["parted"][0]
    assert len(losses(straight)) == 4 * 24
    assert exact(parted) == exact(straight)
    assert same(best_weights(parted), best_weights(straight))
    noise = launches["noise"][1]["result"]
    assert noise[0] != noise[1]


@pytest.mark.slow
def test_synced_batch_norm_off_gpus_is_refused(launches):
    done = launches["synced"][1]
    assert done["error"] == "CoreFailed" and "parallel='spmd'" in done["message"]


def test_synced_batch_norm_on_gpus_is_torchs_own():
    runtime = Runtime("cpu", world=World(0, 2))
    runtime.device = torch.device("cuda")
    model = batch_norm.apply(Watched().model(), "synced", runtime)
    assert [type(m) for m in model.modules() if "Norm" in type(m).__name__] == [torch.nn.SyncBatchNorm]


@pytest.mark.slow
def test_a_run_moves_between_numbers_and_kinds_of_cores_and_equals_a_straight_one(odd, tmp_path):
    """One epoch each on 4 XLA devices in one process, 2 processes, and 1 XLA device."""
    for epochs, (kind, cores) in enumerate((("spmd", 4), ("cpu", 2), ("xla", 1)), 1):
        launches = [dict(batch_norm="frozen", epochs=epochs)]
        [done], _ = launched(kind, run=tmp_path / "run", data=odd, cores=cores, launches=launches)
        assert "result" in done, done["message"]
    straight = on_one_core(tmp_path / "straight", odd, batch_norm="frozen", epochs=3)
    moved = Run(tmp_path / "run")
    starts = [(record["cores"], record["accelerator"]) for record in moved.records("start")]
    assert starts == [(4, "xla"), (2, "cpu"), (1, "xla")]
    assert difference(losses(moved), losses(straight)) < 1e-4
    assert all(v.device.type == "cpu" for v in best_weights(moved).values())


# What is refused before anything starts


@pytest.mark.parametrize(
    "env, requested, parallel, wanted",
    [
        (machine("tpu", 8), None, "processes", 8),
        (machine("tpu", 8), 1, "processes", 1),
        (machine("cuda", 4), 2, "processes", 2),
        (machine("cpu", 1), None, "processes", 1),
        (machine("xla", 1), 8, "processes", 8),
        (machine("tpu", 4, "tpu-vm"), 16, "processes", 4),
        (machine("tpu", 1, "colab"), 8, "processes", ["8", "found 1", environment.TPU_MENU["colab"]]),
        (machine("cuda", 1), 2, "processes", ["2", "found 1", environment.GPU_MENU["kaggle"]]),
        (machine("tpu", 8), 4, "processes", ["4 of 8", "cores=1", "cores=8"]),
        (machine("tpu", 8), 0, "processes", ["cores=0"]),
        (machine("cuda", 2), None, "spmd", ["parallel='spmd'", "GPU", "'processes'"]),
    ],
)
def test_all_cores_are_taken_unless_fewer_are_requested_and_impossible_shapes_are_refused(
    env, requested, parallel, wanted
):
    with refuses(*wanted) if isinstance(wanted, list) else contextlib.nullcontext():
        assert launcher._count_cores(env, requested, parallel) == wanted


@pytest.mark.parametrize(
    "task, gpus, one",
    [
        (MSHNet(batch_size=4), 2, True),  # the recipe, of which two cards would see two images each
        (MSHNet(batch_size=32), 2, False),
        (MSHNet(batch_size=32), 4, True),
        (MSHNet(batch_size=4, batch_norm="frozen"), 2, False),
        (CDEIT(batch_size=4, width=64, heads=2, levels=1), 2, False),  # has no batch norm
    ],
)
def test_one_gpu_is_taken_if_a_share_of_the_batch_is_too_small_for_batch_norm(task, gpus, one):
    assert batch_norm.wants_one_gpu(task, gpus) == one


@pytest.mark.parametrize("cores, processes", [(None, 1), (2, 2)])
def test_a_launch_says_why_it_leaves_a_gpu_idle_and_takes_it_if_told_to(
    cores, processes, monkeypatch, tmp_path, capsys
):
    gpus = machine("cuda", 2)
    monkeypatch.setattr(environment, "detect", lambda: gpus)
    monkeypatch.setattr(launcher, "open_runtime", lambda *_, **__: Runtime("cpu"))
    monkeypatch.setattr(Supervisor, "wait", lambda supervisor: supervisor.job.processes)
    monkeypatch.setattr(launcher, "_has_opened_a_device", lambda _: False)
    task = MSHNet(dataset_dir=str(tmp_path), batch_size=4)
    run = Run.open(tmp_path / "run", task)
    assert launch(lambda task, run, runtime: runtime.cores, task, run, cores=cores) == processes
    assert ("training on 1 of 2 GPUs" in capsys.readouterr().out) == (cores is None)


@pytest.mark.parametrize(
    "accelerator, is_open, visible, waits",
    [("tpu", False, "", 1), ("tpu", True, "", 0), ("tpu", False, "3", 0), ("cpu", False, "", 0)],
)
def test_one_core_too_waits_until_its_chip_is_free_unless_this_process_has_it(
    accelerator, is_open, visible, waits, digits, tmp_path, monkeypatch
):
    needs_torch_xla()
    waited = []
    monkeypatch.setenv("TPU_VISIBLE_CHIPS", visible)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "WARNING: could not determine them, please set env var")
    here = machine(accelerator, 1)
    monkeypatch.setattr(environment, "detect", lambda: here)
    monkeypatch.setattr("tpukit.devices.xla_private.is_open", lambda: is_open)
    monkeypatch.setattr(
        launcher.tpu_chips, "wait_until_free", lambda run: waited.append(os.environ["TPU_WORKER_HOSTNAMES"])
    )
    monkeypatch.setattr(launcher, "open_runtime", lambda *_, **__: None)
    task = Watched(dataset_dir=digits)
    assert launcher.launch(lambda task, run, runtime: "done", task, Run.open(tmp_path, task)) == "done"
    assert waited == ["localhost"] * waits


@pytest.mark.parametrize(
    "options, data",
    [
        ({}, [environment.NAMES["xla"], "Restart the session"]),  # this kernel has used the device
        (dict(parallel="threads"), ["parallel='threads'"]),
        (dict(hang_timeout_s=0), ["hang_timeout_s=0"]),
        (dict(hang_timeout_s=-1), ["hang_timeout_s=-1"]),
    ],
)
def test_a_kernel_that_used_the_device_an_unknown_way_and_no_time_until_a_core_hangs_are_refused(
    options, data, digits, tmp_path, xla
):
    task = Watched(dataset_dir=digits)
    with refuses(*data):
        launcher.launch(train, task, Run.open(tmp_path, task), cores=2, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "before, well",
    [
        ("torch.ones(1, requires_grad=True).backward()", True),  # on the CPU alone autograd starts no threads
        ("torch.cuda.is_available()", False),
        ("import torch_xla; x = torch.ones(1, device='xla', requires_grad=True); x.backward()", False),
    ],
)
def test_a_kernel_from_which_no_gpu_process_can_be_forked_is_refused(before, well, odd, tmp_path):
    """Each core finds out. gloo and the CPU replace NCCL and the cards; the check of `join_group` is the real
    one."""
    if "cuda" in before and not torch.backends.cuda.is_built():
        pytest.skip("this torch was built without CUDA")
    if "torch_xla" in before:
        needs_torch_xla()
    program = f"""
import torch.distributed as dist
from tpukit.devices import cuda
{before}
gpus, init = machine("cuda", 2), dist.init_process_group
environment.detect = lambda: gpus
cuda.check_cuda = torch.cuda.set_device = lambda *_: None
dist.init_process_group = lambda backend, **how: init("gloo", **how)
core.open_runtime = lambda env, precision, world, spmd_cores: Runtime("cpu", world=world)
task = Watched(dataset_dir=Path(sys.argv[1]), epochs=1)
try:
    launch(train, task, Run.open(sys.argv[2], task), cores=2)
    print("WELL")
except CoreFailed as error:
    print(error)
    print("REFUSED" if "Restart the session" in str(error) else "FAILED")
"""
    ran = python(program, odd, tmp_path)
    assert ran.stdout.split()[-1] == ("WELL" if well else "REFUSED"), ran.stdout + ran.stderr
