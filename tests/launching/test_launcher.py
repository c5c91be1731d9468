"""`launch`: the same training on one core, several, and several hosts; and what happens when one of them fails."""

import collections
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import ROOT, best_weights, checkpoint, exact, same
from tests.launching.launched import Watched
from tpukit import MSHNet, Run, TpukitError, train
from tpukit.devices.distributed import World
from tpukit.devices.runtime import Runtime, check_batch
from tpukit.devices.xla import XLARuntime
from tpukit.host import arrays, environment
from tpukit.launching import launcher
from tpukit.launching.supervisor import Paths, Supervisor
from tpukit.runs import weights
from tpukit.training.data import training_plan

PLAIN = dict(os.environ, CUDA_VISIBLE_DEVICES="")
CPU = {name: value for name, value in PLAIN.items() if name not in ("PJRT_DEVICE", "XLA_FLAGS")}
SHAPES = {"2 processes": ("cpu", 2), "4 processes": ("cpu", 4), "8 processes": ("cpu", 8)}
SHAPES |= {"2 XLA devices": ("xla", 2), "8 XLA devices": ("xla", 8), "spmd over 8": ("spmd", 8)}
IN_PARTS = "spmd over 8, the set in parts"  # each core may hold 100 kB of the set's 154
SHAPES |= {IN_PARTS: ("spmd", 8)}


def needs_torch_xla():
    pytest.importorskip("torch_xla", reason="torch_xla is not installed; it has wheels for Linux x86_64 only")


def started(kind, **options):
    """A process that launches; kind: cpu, xla or spmd."""
    if kind != "cpu":
        needs_torch_xla()
    if kind == "spmd":
        options["parallel"] = "spmd"
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""} if kind != "cpu" else {**CPU, "PJRT_DEVICE": "none"}
    if kind == "cpu":
        environ.pop("PJRT_DEVICE")
    else:
        environ["PJRT_DEVICE"] = "CPU"
    environ["TPUKIT_CACHE"] = os.environ["TPUKIT_CACHE"]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.launching.launched", json.dumps(options, default=str)],
        cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def python(program, *arguments, env=PLAIN, timeout=500):
    """A finished process that ran a program, on the CPU XLA device unless `env` says otherwise."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout)


def launched(kind, **options):
    """What the launches of a process gave: a list of dict(result, seconds) or dict(error, message, seconds), and what it
    printed."""
    process = started(kind, **options)
    out, err = process.communicate(timeout=500)
    assert "DONE " in out, out[-2000:] + err[-4000:]
    return json.loads(out.split("DONE ")[1]), out


def no_process_of(run):
    """Whether every process that the cores of a launch were is gone."""
    pids = [json.loads(p.read_text())["pid"] for p in (run.path / "cores").glob("*.process")]
    return pids and not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def losses(run):
    return [r["loss"] for r in run.records("train")]


def difference(a, b):
    assert len(a) == len(b) >= 20
    return max(abs(x - y) for x, y in zip(a, b))


@pytest.fixture(scope="session")
def odd(tmp_path_factory):
    """Digits of which neither the training set (200) nor the test set (37) is a multiple of every batch."""
    folder = tmp_path_factory.mktemp("data") / "odd"
    from tpukit.workloads.datasets import make_synthetic

    with np.load(make_synthetic("mnist", folder, size=240) / "mnist.npz") as arrays:
        parts = {name: arrays[name][: 37 if "test" in name else 196] for name in arrays}
    folder.mkdir()
    np.savez(folder / "mnist.npz", **parts)
    return folder


@pytest.fixture(scope="session")
def lock(odd, tmp_path_factory):
    """The training on one core that every other shape has to equal: two epochs of 24 steps, batch norm frozen."""
    task = Watched(dataset_dir=odd, log_every=1, num_workers=1, batch_norm="frozen")
    run = Run.open(tmp_path_factory.mktemp("alone"), task)
    scores = train(task, run, runtime=Runtime("cpu"), progress=False)
    return run, scores


@pytest.fixture(scope="session", params=SHAPES)
def shape(request, odd, tmp_path_factory):
    """The same training on several cores: kind, cores, run, scores, what was printed, and which samples were asked for."""
    kind, cores = SHAPES[request.param]
    folder = tmp_path_factory.mktemp("shape")
    (folder / "witness").mkdir()
    settings = dict(batch_norm="frozen", witness=folder / "witness")
    if request.param == IN_PARTS:
        settings["memory_size"] = 8 * 100_000
    done, out = launched(kind, run=folder / "run", data=odd, cores=cores, launches=[settings])
    assert "result" in done[0], done[0]["message"]
    assert ("on the device, sharded over 8 cores" in out) == (request.param == IN_PARTS)
    return kind, cores, Run(folder / "run"), done[0]["result"], out, folder / "witness"


# What every shape promises


def test_several_cores_give_the_losses_and_scores_of_one(shape, alone):
    kind, cores, run, scores, _, _ = shape
    assert difference(losses(run), losses(alone[0])) < 1e-4
    # Another program rounds differently: one of the 37 digits may lie on the edge.
    assert scores["images"] == 37 and abs(scores["accuracy"] - alone[1]["accuracy"]) < 1.5 / 37
    assert (run.records("start")[0]["cores"], run.records("start")[0]["processes"]) == (cores, 1 if kind == "spmd" else cores)


def test_several_cores_end_with_the_weights_of_one_as_plain_cpu_tensors(shape, alone):
    ours, theirs = best_weights(shape[2]), best_weights(alone[0])
    assert ours.keys() == theirs.keys() and all(v.device.type == "cpu" for v in ours.values())
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-4, rtol=0)
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
            plan = [i for epoch in (0, 1) for i, _, _ in training_plan(196, 8, seed=0, epoch=epoch)]
            assert seen == collections.Counter(np.concatenate(plan).tolist()) and max(seen.values()) == 2
        else:
            padding = 2 * 3  # 37 samples in 5 batches of 8, in two evaluations; sample 0 fills up
            assert seen == {**{sample: 2 for sample in range(37)}, 0: 2 + padding}
    assert scores["images"] == 37


def test_all_cores_say_that_they_started(shape):
    kind, cores, run, _, out, _ = shape
    lines = [line for line in out.splitlines() if line.startswith("core ")]
    assert [line.split(":")[0] for line in lines] == [f"core {n}" for n in range(cores)]
    assert all(f"{8 // cores} sample" in line for line in lines)
    assert f"all {cores} cores started" in out


def test_only_rank_0_writes_and_speaks(shape, alone):
    _, _, run, _, out, _ = shape
    assert [(r["kind"], r["step"]) for r in exact(run)] == [(r["kind"], r["step"]) for r in exact(alone[0])]
    assert out.count("epoch 1: loss") == 1
    assert run.read_progress()["step"] == run.read_progress()["total"] == 48
    for log in (run.path / "cores").glob("rank-*.log"):
        assert "epoch 1" not in log.read_text()


def test_spmd_takes_batch_norm_over_the_whole_batch_in_one_program_a_phase(infrared, tmp_path, xla):
    """MSHNet, both phases, 20 steps, against one device. SGD: see the README on Adagrad's first step."""
    program = (
        "import sys, json; from pathlib import Path; from tests.launching.test_launcher import Descending; from tpukit import Run, "
        "launch, train;"
        "task = Descending(dataset_dir=Path(sys.argv[1]), **json.loads(sys.argv[3]));"
        "launch(train, task, Run.open(sys.argv[2], task), cores=8, parallel='spmd')"
    )
    settings = dict(
        epochs=10, warm_epoch=4, batch_size=8, base_size=32, crop_size=32, log_every=1, num_workers=1, eval_every=99
    )
    ran = python(program, infrared, tmp_path / "eight", json.dumps(settings))
    assert ran.returncode == 0, ran.stderr[-3000:]
    task = Descending(dataset_dir=infrared, **settings)
    train(task, Run.open(tmp_path / "one", task), runtime=xla, progress=False)
    eight, one = Run(tmp_path / "eight"), Run(tmp_path / "one")
    assert difference(losses(eight), losses(one)) < 1e-4
    assert [(r["step"], r["programs"]) for r in eight.records("compile") if r["what"] == "step"] == [(1, 1), (11, 1)]
    ours, theirs = checkpoint(eight)["model"], checkpoint(one)["model"]
    statistics = [n for n in ours if n.endswith("running_var")]
    assert max(float((ours[n] / theirs[n] - 1).abs().max()) for n in statistics) < 1e-2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Descending(MSHNet):
    """MSHNet with plain gradient descent."""

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.01)


def test_per_core_batch_norm_differs_from_one_core_and_every_rank_scores_with_rank_0s_statistics(odd, tmp_path):
    settings = dict(epochs=1)
    done, _ = launched("cpu", run=tmp_path / "two", data=odd, cores=2, launches=[settings])
    task = Watched(dataset_dir=odd, log_every=1, num_workers=1, **settings)
    one = Run.open(tmp_path / "one", task)
    train(task, one, runtime=Runtime("cpu"), progress=False)
    assert difference(losses(Run(tmp_path / "two")), losses(one)) > 1e-3
    # The oracle: rank 0's weights and statistics, as they were saved, score on one core what the two cores reported.
    from tpukit.training.evaluation import evaluate

    model = task.model()
    weights.load(model, tmp_path / "two/best.safetensors")
    assert evaluate(task, model, task.datasets()[1], Runtime("cpu")) == done[0]["result"]


# Resume


def test_a_run_moves_between_numbers_and_kinds_of_cores_and_equals_a_straight_one(odd, tmp_path, alone):
    """One epoch each on 8 XLA devices in one program, 1 CPU core, 8 processes, and 1 XLA device."""
    settings = dict(batch_norm="frozen")
    for epochs, (kind, cores) in enumerate((("spmd", 8), ("cpu", 1), ("cpu", 8), ("xla", 1)), 1):
        done, _ = launched(kind, run=tmp_path / "run", data=odd, cores=cores, launches=[dict(settings, epochs=epochs)])
        assert "result" in done[0], done[0]["message"]
    task = Watched(dataset_dir=odd, log_every=1, num_workers=1, epochs=4, **settings)
    straight = Run.open(tmp_path / "straight", task)
    train(task, straight, runtime=Runtime("cpu"), progress=False)
    moved = Run(tmp_path / "run")
    assert [r["cores"] for r in moved.records("start")] == [8, 1, 8, 1]
    assert [r["accelerator"] for r in moved.records("start")] == ["xla", "cpu", "cpu", "xla"]
    assert difference(losses(moved), losses(straight)) < 1e-4
    assert all(v.device.type == "cpu" for v in best_weights(moved).values())


def test_every_rank_goes_on_with_its_own_random_numbers(odd, tmp_path):
    """With dropout, two and two epochs on two cores equal four; and the two cores do not drop the same."""
    for name, launches in (("straight", [4]), ("parted", [2, 4])):
        for epochs in launches:
            settings = dict(dropout=0.5, epochs=epochs)
            launched("cpu", run=tmp_path / name, data=odd, cores=2, launches=[settings])
    assert exact(Run(tmp_path / "parted")) == exact(Run(tmp_path / "straight"))
    assert same(best_weights(Run(tmp_path / "parted")), best_weights(Run(tmp_path / "straight")))
    done, _ = launched("cpu", run=tmp_path / "noise", data=odd, cores=2, function="noise", launches=[{}])
    assert done[0]["result"][0] != done[0]["result"][1]


# Failures


RAISED = ["core 1 (rank 1 of 2", "in step 30 failed", "ValueError: sample 7 is broken", "launched.py"]
HUNG = ["no core ended a step for 4 s", "core 0", "core 1", "in cause", "in _sum_gradients|in backward"]


@pytest.mark.parametrize(
    "kind, accident, words",
    [
        ("cpu", "raise", RAISED),
        ("xla", "raise", RAISED),
        ("cpu", "exit", ["core 1 (rank 1 of 2", "in step 30 failed", "SystemExit: 3"]),
        ("cpu", "kill", ["core 1 (rank 1 of 2", "without a Python error in step 30", "memory was full"]),
        ("cpu", "crash", ["core 1 (rank 1 of 2", "in step 30", "Fatal Python error: Segmentation fault", "in cause"]),
        ("cpu", "hang", HUNG),
        ("xla", "hang", HUNG),
    ],
)
def test_a_core_that_fails_ends_the_launch_with_its_rank_step_and_traceback_and_a_second_launch_goes_on(
    kind, accident, words, odd, tmp_path
):
    launches = [dict(accident=accident), dict()]
    done, out = launched(
        kind, run=tmp_path, data=odd, cores=2, hang_timeout_s=4 if accident == "hang" else 60, launches=launches
    )
    failed, second = done
    assert failed["error"] == "CoreFailed" and failed["seconds"] < 30
    for word in words:
        assert re.search(word if "|" in word else re.escape(word), failed["message"]), failed["message"]
    assert "The last checkpoint is step-00000024.pt" in failed["message"] and "BrokenProcessPool" not in failed["message"]
    assert second["result"]["images"] == 37, second
    run = Run(tmp_path)
    assert no_process_of(run)
    assert [r["step"] for r in run.records("start")] == [0, 24]  # from the checkpoint that the failure left whole
    assert [r["step"] for r in run.records("train")] == list(range(1, 49))


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 1), (signal.SIGTERM, 143)])
def test_an_interrupt_lets_all_cores_save_at_one_step_before_they_leave(number, code, odd, tmp_path):
    launches = [dict(epochs=2000)]
    process = started("cpu", run=tmp_path, data=odd, cores=2, launches=launches)
    _wait_for(lambda: (tmp_path / "records.jsonl").exists() and len(losses(Run(tmp_path))) > 30, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code or "KeyboardInterrupt" in err, err
    run = Run(tmp_path)
    saved = checkpoint(run)["state"]["step"]
    assert f"saved at step {saved}" in out and saved == run.records("train")[-1]["step"] and no_process_of(run)


def test_cores_end_when_the_process_that_launched_them_is_killed(odd, tmp_path):
    process = started("cpu", run=tmp_path, data=odd, cores=2, launches=[dict(epochs=2000)])
    _wait_for(lambda: (tmp_path / "records.jsonl").exists() and len(losses(Run(tmp_path))) > 5, process)
    process.kill()
    process.communicate(timeout=60)
    deadline = time.monotonic() + 20
    while not no_process_of(Run(tmp_path)):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_no_process_is_left_wherever_in_a_launch_its_parent_is_killed(odd, tmp_path):
    """20 kernels, each killed at a random moment of its launch. Everything that came from them carries their environment."""
    program = """
import os, random, signal, sys, time
from pathlib import Path
from tests.launching.launched import Watched
from tpukit import Run, launch, train
data, folder = map(Path, sys.argv[1:])
def kernel(number):
    task = Watched(dataset_dir=data, epochs=2000)
    launch(train, task, Run.open(folder / str(number), task), cores=4)
    os._exit(0)
def left():
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if b"TPUKIT_KILLED=" in (process / "environ").read_bytes() and int(process.name) != os.getpid():
                found.append(process.name)
        except OSError:
            pass
    return found
def killed(number, now):
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        kernel(number)
    while not now(time.monotonic() - started):
        time.sleep(0.001)
    seen, took = len(left()), time.monotonic() - started
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for _ in range(500):
        if not left():
            break
        time.sleep(0.02)
    return took, seen, len(left())
log = folder / "whole/log.txt"
forked, most, _ = killed("forked", lambda seconds: len(left()) == 6 or seconds > 120)
whole, *_ = killed("whole", lambda seconds: log.exists() and "cores started" in log.read_text() or seconds > 120)
random.seed(0)
moments = [random.uniform(0, end) for end in [forked] * 10 + [whole] * 10]
counts = [killed(number, lambda seconds: seconds > moment)[1:] for number, moment in enumerate(moments)]
print("KILLED", most, [seen for seen, _ in counts], [orphans for _, orphans in counts])
"""
    ran = python(program, odd, tmp_path, env={**CPU, "TPUKIT_KILLED": "1", "TMPDIR": str(tmp_path)})
    assert "KILLED" in ran.stdout, ran.stdout[-2000:] + ran.stderr[-2000:]
    most, seen, orphans = re.search(r"KILLED (\d+) \[(.*)\] \[(.*)\]", ran.stdout).groups()
    assert int(most) == 6 and len(set(seen.split(", "))) > 2  # a kernel, an agent, four cores; at several moments
    assert orphans.split(", ") == ["0"] * 20


def test_no_socket_of_a_launch_on_one_host_listens_beyond_loopback(odd, tmp_path):
    if not shutil.which("ss"):
        pytest.skip("looking at sockets needs ss, of iproute2")
    process = started("cpu", run=tmp_path, data=odd, cores=4, launches=[dict(epochs=2000)])
    try:
        _wait_for(lambda: (tmp_path / "records.jsonl").exists() and len(losses(Run(tmp_path))) > 5, process)
        sockets = subprocess.run(["ss", "-Hlntup"], capture_output=True, text=True, check=True).stdout.splitlines()
        cores = [json.loads(p.read_text())["pid"] for p in (tmp_path / "cores").glob("*.process")]
        agent = Path(f"/proc/{cores[0]}/stat").read_text().rpartition(")")[2].split()[1]
    finally:
        process.kill()
        process.communicate(timeout=60)
    ours = {f"pid={pid}," for pid in (*cores, agent, process.pid)}
    addresses = [line.split()[4] for line in sockets if any(pid in line for pid in ours)]
    assert len(addresses) >= len(cores)  # gloo's
    assert not [address for address in addresses if not address.startswith(("127.", "[::1]"))]


def test_a_launched_core_is_never_in_a_bad_fork_of_cuda(odd, tmp_path):
    if not torch.backends.cuda.is_built():
        pytest.skip("this torch was built without CUDA")
    done, _ = launched("cpu", run=tmp_path, data=odd, cores=2, function="bad_fork", launches=[{}])
    assert done[0]["result"] == [[0.0], [0.0]]


def test_two_gpu_cores_start_outside_a_bad_fork_from_a_kernel_that_asked_cuda_nothing(odd, tmp_path):
    """All of a launch on GPUs but the GPUs: gloo and the CPU stand in for NCCL and the cards."""
    program = """
import sys
from pathlib import Path
import torch.distributed as dist
from tests.launching.launched import Watched, bad_fork
from tests.launching.test_launcher import machine
from tpukit import Run, environment, launching
from tpukit.devices.runtime import Runtime
from tpukit.devices.distributed import World
gpus = machine("cuda", 2)
def join(job, local_rank, **how):
    dist.init_process_group("gloo", **how)
    return World(how["rank"], how["world_size"])
environment.detect, launching._join_group = lambda: gpus, join
launching.open_runtime = lambda env, precision, world, spmd_cores: Runtime("cpu", world=world)
task = Watched(dataset_dir=Path(sys.argv[1]))
print("RESULT", launching.launch(bad_fork, task, Run.open(sys.argv[2], task)))
"""
    ran = python(program, odd, tmp_path, env=CPU)
    assert "RESULT [[0.0], [0.0]]" in ran.stdout, ran.stdout + ran.stderr


def test_a_torch_without_cuda_is_not_taken_for_a_kernel_that_used_it(monkeypatch, xla):
    codes = []
    monkeypatch.delattr(torch._C, "_cuda_isInBadFork", raising=False)
    monkeypatch.setattr(os, "_exit", codes.append)
    launcher._compute_in_fork()
    assert codes == [0]


def test_a_drive_that_goes_after_the_run_was_opened_is_noticed_by_the_cores(odd, tmp_path):
    """The kernel's run knows where Drive was mounted; a folder of that name that stays behind is not Drive."""
    program = """
import os, shutil, sys
from pathlib import Path
from tests.launching.launched import Watched
from tpukit import Run, launch, train
drive, gone = Path(sys.argv[2]) / "drive", []
drive.mkdir()
os.path.ismount = lambda path: str(path) == "/" or (str(path) == str(drive) and not gone)
task = Watched(dataset_dir=Path(sys.argv[1]), epochs=1)
run = Run.open(Path(sys.argv[2]) / "run", task, backup=drive / "runs/one")
gone.append(True)
shutil.rmtree(drive)
drive.mkdir()
launch(train, task, run, cores=2)
print("LEFT", list(drive.rglob("*")))
"""
    ran = python(program, odd, tmp_path, env=CPU)
    assert "LEFT []" in ran.stdout, ran.stdout + ran.stderr
    assert "nothing is mounted at" in (tmp_path / "run/log.txt").read_text()


@pytest.mark.parametrize(
    "before, well",
    [
        ("torch.ones(1, requires_grad=True).backward()", True),  # on the CPU alone autograd starts no threads
        ("torch.cuda.is_available()", False),
        ("import torch_xla; x = torch.ones(1, device='xla', requires_grad=True); x.backward()", False),
    ],
)
def test_a_kernel_from_which_no_gpu_process_can_be_forked_is_refused(before, well, tmp_path):
    if "cuda" in before and not torch.backends.cuda.is_built():
        pytest.skip("this torch was built without CUDA")
    if "torch_xla" in before:
        needs_torch_xla()
    program = f"""
import torch
from tests.launching.test_launcher import machine
from tpukit import TpukitError, environment, launching
{before}
torch.cuda.is_initialized = lambda: False
try:
    launching._refuse_an_opened_device(machine("cuda", 2))
except TpukitError as error:
    print("REFUSED", error)
"""
    ran = python(program)
    assert ran.returncode == 0, ran.stderr
    assert ("REFUSED" not in ran.stdout) == well and ("forked subprocess" in ran.stdout) == (not well)


def test_a_core_that_leaves_its_last_word_while_it_is_looked_at_is_not_taken_for_dead(tmp_path, monkeypatch):
    watch = Supervisor(types.SimpleNamespace(folder=tmp_path / "cores", run=Run(tmp_path)), None, 2, 2)
    for index in (0, 1):
        Paths(tmp_path / "cores", index).process.write_text(json.dumps(dict(pid=index)))

    def ends(pid):
        if pid == 0:
            Paths(tmp_path / "cores", pid).stopped.touch()
        return False

    monkeypatch.setattr("tpukit.launching.supervisor._alive", ends)
    assert watch._dead() == [1]


def test_only_what_a_launch_wrote_is_deleted_by_the_next(tmp_path):
    run, cores = Run(tmp_path / "run"), tmp_path / "run/cores"
    cores.mkdir(parents=True)
    own = ["rank-00.log", "rank-11.stacks", "agent.error", "result.json", "stop"]
    foreign = ["thesis.tex", "rank-00.txt", "log", ".hidden"]
    for name in (*own, *foreign):
        (cores / name).write_text(name)
    (cores / "folder").mkdir()
    Supervisor(types.SimpleNamespace(folder=cores, run=run), None, 2, 2)
    assert sorted(p.name for p in cores.iterdir()) == sorted([*foreign, "folder"])
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/cores").symlink_to(cores)
    with pytest.raises(TpukitError, match="is a link"):
        Supervisor(types.SimpleNamespace(folder=tmp_path / "linked/cores", run=Run(tmp_path / "linked")), None, 2, 2)


def _wait_for(condition, process):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.05)


# What is refused before anything starts


@pytest.mark.parametrize(
    "batch_size, cores, words", [(60, 8, "use 56 or 64"), (3, 8, "use 8, or another multiple"), (9, 2, "use 8 or 10")]
)
def test_a_batch_size_that_does_not_divide_says_which_sizes_do(batch_size, cores, words):
    with pytest.raises(TpukitError, match=words):
        check_batch(batch_size, cores)
    check_batch(64, 8)


def machine(accelerator, cores, host="kaggle", **variables):
    found = environment.detect(variables)
    return dataclasses.replace(found, accelerator=accelerator, cores=cores, host=host, device_name="stand-in")


BOUNDS = dict(TPU_CHIPS_PER_HOST_BOUNDS="2,2,1")


@pytest.mark.parametrize(
    "env, asked, parallel, words",
    [
        (machine("tpu", 1, "colab"), 8, "processes", "asked for 8 cores, found 1 .*\n.*Runtime > Change runtime type"),
        (machine("cuda", 1), 2, "processes", "asked for 2 cores, found 1 .*\n.*GPU T4 x2"),
        (machine("tpu", 8), 4, "processes", "asked for 4 of 8 TPU cores: torch_xla starts one or all"),
        (machine("tpu", 8), 0, "processes", "ask for 1 or more"),
        (machine("tpu", 2, **BOUNDS), None, "processes", "2 TPU chips are here, but .*=2,2,1 speaks of 4.*use cores=1"),
        (machine("cuda", 2), None, "spmd", "is for TPU cores; GPUs take 'processes'"),
    ],
)
def test_fewer_cores_than_asked_and_other_impossible_shapes_are_errors(env, asked, parallel, words):
    with pytest.raises(TpukitError, match=words):
        launcher._count_cores(env, asked, parallel)


@pytest.mark.parametrize(
    "env, asked, count",
    [(machine("tpu", 8), None, 8), (machine("tpu", 8), 1, 1), (machine("cuda", 4), 2, 2), (machine("cpu", 1), None, 1)]
    + [(machine("cpu", 1), 3, 3), (machine("xla", 1), 8, 8), (machine("tpu", 4, "tpu-vm", **BOUNDS), 16, 4)]
    + [(machine("tpu", 1, "colab", **BOUNDS), None, 1), (machine("tpu", 2, **BOUNDS), 1, 1)],
)
def test_all_cores_that_are_here_are_taken_unless_fewer_are_asked_for(env, asked, count):
    assert launcher._count_cores(env, asked, "processes") == count


def test_a_kernel_that_already_used_the_device_is_told_to_restart(digits, tmp_path, xla):
    task = Watched(dataset_dir=digits)
    with pytest.raises(TpukitError, match="Runtime is already initialized: .*Restart the session"):
        launcher.launch(train, task, Run.open(tmp_path, task), cores=2)


def test_an_unknown_way_and_synced_batch_norm_off_gpus_are_refused(digits, tmp_path):
    task = Watched(dataset_dir=digits, batch_norm="synced")
    with pytest.raises(TpukitError, match="choose one of processes, spmd"):
        launcher.launch(train, task, None, parallel="threads")
    done, _ = launched("cpu", run=tmp_path, data=digits, cores=2, launches=[dict(batch_norm="synced")])
    assert "runs on GPUs. On TPU cores parallel='spmd'" in done[0]["message"]


def test_synced_batch_norm_on_gpus_is_torchs_own(digits, tmp_path, monkeypatch):
    from tpukit.training.loop import Training

    class Hooked(Training):
        def __init__(self):
            self.runtime, self.world = Runtime("cpu"), World(0, 2)
            self.runtime.device = torch.device("cuda")

    model = Hooked()._with_synced_batch_norm(Watched().model())
    assert [type(m) for m in model.modules() if "Norm" in type(m).__name__] == [torch.nn.SyncBatchNorm]


# Host memory


def test_the_dataset_is_held_once_for_all_processes_of_a_host(tmp_path):
    """Four processes that have read every pixel: their shares of the map (Pss) add up to one dataset, not to four."""
    folder = tmp_path / "big"
    folder.mkdir()
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (60_000, 28, 28), np.uint8), rng.integers(0, 10, 60_000, np.uint8)
    np.savez(folder / "mnist.npz", x_train=images, y_train=labels, x_test=images[:100], y_test=labels[:100])
    done, _ = launched("cpu", run=tmp_path / "run", data=folder, cores=4, function="mapped_memory", launches=[{}])
    rows = done[0]["result"]
    assert [total for total, *_ in rows] == [int(images.sum())] * 4
    assert all(whole >= images.nbytes for _, _, whole, _ in rows)
    assert sum(share for _, share, _, _ in rows) < 1.1 * images.nbytes
    assert sum(private for *_, private in rows) == 0


def test_mapped_arrays_are_made_once_and_again_when_what_they_are_made_from_changes(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TPUKIT_CACHE", str(tmp_path / "cache"))
    made = []

    def make():
        made.append(1)
        return dict(a=np.arange(5))

    for key in ("one", "one", "two"):
        array = arrays.mapped("set", key, make)["a"]
        assert array.tolist() == [0, 1, 2, 3, 4] and not array.flags.writeable
    assert len(made) == 2
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TPUKIT_CACHE", str(tmp_path / "file"))
    assert arrays.mapped("set", "one", make)["a"].tolist() == [0, 1, 2, 3, 4]
    assert "every process keeps its own copy" in capsys.readouterr().out


# TPU cores, with a recording stand-in where torch_xla meets the chips


@pytest.mark.parametrize(
    "hosts, processes, kept",
    [
        ("localhost", 8, ()),
        ("localhost", 1, launcher.ONE_PROCESS_VARIABLES),  # by SPMD one process stays
        ("host-0,host-1", 4, launcher.LEFTOVER_VARIABLES),  # which tell each host where it stands
    ],
)
def test_variables_that_would_send_cores_to_the_wrong_chip_or_peers_are_cleared(hosts, processes, kept, monkeypatch):
    names = {*launcher.ONE_PROCESS_VARIABLES, *launcher.LEFTOVER_VARIABLES}
    monkeypatch.setattr(os, "environ", {"TPU_WORKER_HOSTNAMES": hosts, "TPU_HOST_BOUNDS": "1,1,1", **dict.fromkeys(names, "0")})
    launcher._clear_variables(processes)
    assert names & os.environ.keys() == set(kept) and os.environ["TPU_HOST_BOUNDS"] == "1,1,1"


@pytest.mark.parametrize("size", [8, 16])
def test_tpu_cores_of_one_host_meet_in_a_file_and_those_of_several_by_pjrt(size, tmp_path, monkeypatch):
    import torch.distributed as dist

    if size == 16:
        needs_torch_xla()
    calls = []
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(launcher, "_open_tpu", lambda index, count: (5, size))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **how: calls.append((backend, how)))
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    monkeypatch.setattr(dist, "get_world_size", lambda: size)
    job = launcher._Job(train, None, Run(tmp_path), machine("tpu", 8), None, 60.0, str(tmp_path / "store"))
    world = launcher._join(job, 3, 8)
    [(backend, how)] = calls
    assert (backend, world.rank, world.size) == ("gloo", 5, size)
    if size == 8:
        assert isinstance(how["store"], dist.FileStore) and (how["rank"], how["world_size"]) == (5, 8)
        assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    else:
        assert how["init_method"] == "xla://" and "store" not in how


def test_a_tpu_core_is_opened_by_torch_xlas_own_function(odd, tmp_path):
    """PJRT's opening of one of several processes and the run directory for real, with the one core that PJRT_DEVICE=CPU has."""
    needs_torch_xla()
    program = """
import sys, functools
from pathlib import Path
from tests.launching.launched import Watched
from tests.launching.test_launcher import machine
from tpukit import Run, launching, train, watching
task = Watched(dataset_dir=Path(sys.argv[1]), epochs=1, precision="fp32")
job = launching._Job(train, task, Run.open(sys.argv[2], task), machine("tpu", 8), None, 60.0, sys.argv[2] + "/store")
print(watching.Supervisor(job, functools.partial(launching._start_cores, job, 1), 1, processes=1).wait())
"""
    ran = python(program, odd, tmp_path)
    assert ran.returncode == 0 and "'images': 37" in ran.stdout and "all 1 cores started" in ran.stdout, ran.stderr[-3000:]


def test_an_error_before_any_core_came_up_is_shown_with_its_mend(odd, tmp_path):
    needs_torch_xla()
    program = """
import sys
from pathlib import Path
from tests.launching.launched import Watched
from tests.launching.test_launcher import machine
from tpukit import Run, environment, launching, train, watching
def refuse(count):
    raise RuntimeError("Expected 4 worker addresses, got 1")
kaggle = machine("tpu", 8)
environment.detect, launching._clear_variables = lambda: kaggle, refuse
task = Watched(dataset_dir=Path(sys.argv[1]))
try:
    launching.launch(train, task, Run.open(sys.argv[2], task))
except watching.CoreFailed as error:
    print(error)
"""
    ran = python(program, odd, tmp_path)
    assert "the launch failed" in ran.stdout and "os.environ.pop('TPU_PROCESS_ADDRESSES')" in ran.stdout, (
        ran.stdout + ran.stderr
    )


@pytest.mark.parametrize("where", ["before its first line", "while it opens its chip"])
@pytest.mark.parametrize("way", ["kill", "hang", "raise"])
def test_one_of_eight_cores_that_fails_to_start_ends_the_launch_with_its_own_words(way, where, odd, tmp_path):
    """The seven others wait for it, as libtpu does. Where it is gone the launch ends without waiting for the deadline."""
    needs_torch_xla()
    program = """
import os, signal, sys, time
from pathlib import Path
from tests.launching.launched import Watched
from tests.launching.test_launcher import machine
from tpukit import Run, environment, launching, train, watching
way, where = sys.argv[3:]
def fail():
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "raise":
        raise RuntimeError("TPU initialization failed: open(/dev/vfio/3)")
    time.sleep(600)
def open_tpu(index, count):
    if index == 3 and where == "while it opens its chip":
        print("chip 3 is being opened")
        fail()
    time.sleep(600)
core = launching._core
def first_line(job, index, count):
    if index == 3 and where == "before its first line":
        fail()
    core(job, index, count)
kaggle = machine("tpu", 8)
environment.detect, launching._core, launching._open_tpu = lambda: kaggle, first_line, open_tpu
launching.START_TIMEOUT_S = 3.0 if way == "hang" else 600.0
task = Watched(dataset_dir=Path(sys.argv[1]))
try:
    launching.launch(train, task, Run.open(sys.argv[2], task))
except watching.CoreFailed as error:
    print("FAILED", error)
"""
    ran = python(program, odd, tmp_path, way, where, timeout=100)
    said = ran.stdout.partition("FAILED ")[2]
    assert "core 3" in said and no_process_of(Run(tmp_path)), ran.stdout + ran.stderr
    expected = {"kill": "was killed", "hang": "8 of 8 cores did not start within 3 s", "raise": "open(/dev/vfio/3)"}[way]
    assert expected in said and ("was killed" in said) == (way == "kill")
    if way == "hang":
        inside = said.partition("core 3 (all of it")[2].partition("core 4 (")[0]
        assert ("in fail" in inside and "chip 3 is being opened" in inside) or "core 3 gave no stack" in said
        assert said.count("in open_tpu") >= 7


@pytest.mark.parametrize(
    "left",
    [
        dict(TPU_HOST_BOUNDS="1,1,1", TPU_CHIPS_PER_HOST_BOUNDS="2,4,1"),
        dict(TPU_HOST_BOUNDS="1,1,1", TPU_CHIPS_PER_HOST_BOUNDS="2,4,1")
        | dict(
            TPU_PROCESS_BOUNDS="1,1,1", TPU_CHIPS_PER_PROCESS_BOUNDS="1,1,1", TPU_VISIBLE_CHIPS="0", TPU_PROCESS_PORT="8476"
        ),
        dict(TPU_PROCESS_BOUNDS="1,1,1", TPU_CHIPS_PER_PROCESS_BOUNDS="2,4,1"),  # the newer names alone
    ],
    ids=["Kaggle's", "Kaggle's after one chip was used", "newer names"],
)
def test_torch_xla_gives_each_of_eight_processes_a_chip_and_a_port_of_its_own(left, monkeypatch, xla):
    """By torch_xla's own function, which reads what `_clear_variables` leaves."""
    from torch_xla._internal import tpu

    found = []
    for index in range(8):
        kaggle = dict(
            TPU_SKIP_MDS_QUERY="1", TPU_ACCELERATOR_TYPE="v5litepod-8", TPU_WORKER_ID="0", TPU_PROCESS_ADDRESSES="local"
        )
        for name in list(os.environ):
            if name.startswith(("TPU_", "CLOUD_TPU")):
                monkeypatch.delenv(name)
        for name, value in (kaggle | left).items():
            monkeypatch.setenv(name, value)
        launcher._clear_variables(8)
        tpu.configure_topology(index, 8)
        found.append({name: value for name, value in os.environ.items() if name.startswith(("TPU_", "CLOUD_TPU"))})
    for name in ("TPU_VISIBLE_CHIPS", "TPU_PROCESS_PORT", "CLOUD_TPU_TASK_ID"):
        assert len({variables[name] for variables in found}) == 8, name
    same = {(v["TPU_PROCESS_BOUNDS"], v["TPU_CHIPS_PER_PROCESS_BOUNDS"], v["TPU_PROCESS_ADDRESSES"]) for v in found}
    assert same == {("2,4,1", "1,1,1", ",".join(f"localhost:{port}" for port in range(8476, 8484)))}


def test_two_hosts_of_a_slice_that_share_a_disk_keep_their_cores_apart_and_each_get_the_result(odd, tmp_path):
    """Two launches of two cores each, as on two hosts: PJRT's ranks and rendezvous are stand-ins, all else is real."""
    needs_torch_xla()
    program = """
import os, socket, sys
from pathlib import Path
import torch.distributed as dist
from tests.launching.launched import Watched, noise
from tests.launching.test_launcher import machine
from tpukit import Run, environment, launching
host = int(sys.argv[3])
socket.gethostname = lambda: f"host-{host}"
vm = machine("tpu", 2, "tpu-vm")
environment.detect = lambda: vm
launching._open_tpu = lambda index, count: (2 * host + index, 4)
init = dist.init_process_group
def meet(backend, init_method, timeout):
    assert init_method == "xla://"
    rank = 2 * host + int(os.environ["TPUKIT_INDEX"])
    init(backend, store=dist.FileStore(sys.argv[4], 4), rank=rank, world_size=4, timeout=timeout)
dist.init_process_group = meet
core = launching._core
def numbered(job, index, count):
    os.environ["TPUKIT_INDEX"] = str(index)
    core(job, index, count)
launching._core = numbered
task = Watched(dataset_dir=Path(sys.argv[1]), precision="fp32")
print("RESULT", launching.launch(noise, task, Run.open(sys.argv[2], task)))
"""
    command = [sys.executable, "-c", program, odd, tmp_path / "run"]
    pipes = dict(cwd=ROOT, env=PLAIN, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    hosts = [subprocess.Popen([*map(str, command), str(n), str(tmp_path / "store")], **pipes) for n in (0, 1)]
    said = [host.communicate(timeout=300) for host in hosts]
    results = [out.partition("RESULT ")[2].strip() for out, _ in said]
    assert results[0] and results[0] == results[1], said
    assert sorted(p.name for p in (tmp_path / "run/cores").iterdir()) == ["host-0", "host-1"]


def test_a_launch_waits_for_chips_that_a_dying_process_still_holds(tmp_path, monkeypatch, capsys):
    (tmp_path / "dev/vfio").mkdir(parents=True)
    for name in ("0", "1", "vfio"):
        (tmp_path / "dev/vfio" / name).touch()
    answers = iter([True, False, False, False])  # chip 0 at the first look alone
    monkeypatch.setattr(launcher, "_is_busy", lambda device: next(answers))
    launcher._wait_for_chips(Run(tmp_path), tmp_path, timeout_s=1.0)
    assert "dev/vfio/0; waiting" in capsys.readouterr().out and next(answers, None) is None
    monkeypatch.setattr(launcher, "_is_busy", lambda device: True)
    with pytest.raises(TpukitError, match="dev/vfio/0, .*dev/vfio/1 for 0.2 s"):
        launcher._wait_for_chips(Run(tmp_path), tmp_path, timeout_s=0.2)


def test_a_chip_is_busy_where_the_system_says_so(tmp_path, monkeypatch):
    import errno

    (tmp_path / "0").touch()
    assert not launcher._is_busy(tmp_path / "0") and not launcher._is_busy(tmp_path / "none")

    def refuse(*_):
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(os, "open", refuse)
    assert launcher._is_busy(tmp_path / "0")


def test_on_tpu_cores_the_gradients_are_summed_within_the_step_by_torch_xla(xla, monkeypatch):
    import torch_xla.core.xla_model as xm

    seen = []
    monkeypatch.setattr(xm, "all_reduce", lambda kind, tensors, scale: seen.append((kind, len(tensors), scale)))
    runtime = XLARuntime("tpu", "fp32", World(3, 8))
    model = runtime.place(torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = runtime.host(model.weight)
    step = runtime.compile(lambda x: runtime.update(model(x).sum(), optimizer))
    step(torch.ones(4, 3, device=runtime.device))
    assert seen == [(xm.REDUCE_SUM, 2, 1 / 8)]
    assert not torch.equal(runtime.host(model.weight), before)


# torchrun, on one host and on two


TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def trained(data, run, *more):
    """The command after `torchrun ... -m`; `--` keeps torchrun from reading tpukit's options as its own."""
    settings = ["--batch-size", "8", "--channels", "4", "--log-every", "1", "--lr", "0.1", *more]
    return ["-m", "--", "tpukit", "train", "mnist", "--dataset-dir", str(data), "--run", str(run), *settings]


@pytest.fixture
def mnist_alone(odd, tmp_path):
    from tpukit import MNIST

    task = MNIST(dataset_dir=odd, batch_size=8, channels=4, lr=0.1, log_every=1, epochs=2)
    run = Run.open(tmp_path / "alone", task)
    train(task, run, runtime=Runtime("cpu"), progress=False)
    return run


def test_the_same_command_runs_under_torchrun(odd, tmp_path, mnist_alone):
    command = [*TORCHRUN, "--nproc-per-node", "2", *trained(odd, tmp_path / "run", "--epochs", "2")]
    ran = subprocess.run(command, cwd=ROOT, env=CPU, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert difference(losses(Run(tmp_path / "run")), losses(mnist_alone)) < 1e-4
    assert ran.stdout.count("dataset mnist:") == 1 == ran.stdout.count("all 2 cores started") == ran.stdout.count("Scores")


def test_torchruns_report_names_the_rank_that_failed_first(odd, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "from pathlib import Path; from tests.launching.launched import Watched; from tpukit import Run, launch, train\n"
        f"task = Watched(dataset_dir=Path({str(odd)!r}), accident='raise')\n"
        f"launch(train, task, Run.open({str(tmp_path / 'run')!r}, task))\n"
    )
    command = [*TORCHRUN, "--nproc-per-node", "2", str(program)]
    ran = subprocess.run(command, env={**CPU, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 1 and "failed in step 30: sample 7 is broken" in ran.stderr
    first = ran.stderr.split("Root Cause")[1]
    assert "rank      : 1" in first and "ValueError: sample 7 is broken" in first


@pytest.fixture
def two_hosts():
    """Two network namespaces with a link between them: their names and addresses."""
    if os.getuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2")
    tag = f"tk{os.getpid() % 100000}"
    names, addresses = [f"{tag}a", f"{tag}b"], ["10.213.7.1", "10.213.7.2"]

    def ip(*words):
        return subprocess.run(["ip", *words], check=True, capture_output=True)

    made = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                made.append(name)
            ip("link", "add", "link0", "netns", names[0], "type", "veth", "peer", "name", "link0", "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        for name, address in zip(names, addresses):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "link0")
            for device in ("link0", "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield list(zip(names, addresses))
    finally:
        for name in made:
            ip("netns", "del", name)


def test_two_hosts_that_share_no_disk_train_as_one_and_resume(two_hosts, odd, tmp_path, mnist_alone):
    """Two processes on each of two hosts. Only the first host has the run; the second gets the checkpoint over the network."""

    def train_on_both(epochs, node_ranks=(0, 1)):
        agents = []
        for host, ((name, address), node_rank) in enumerate(zip(two_hosts, node_ranks)):
            command = ["ip", "netns", "exec", name, *TORCHRUN, "--nnodes", "2", "--nproc-per-node", "2"]
            command += [
                "--node-rank",
                str(node_rank),
                "--master-addr",
                two_hosts[node_ranks.index(0)][1],
                "--master-port",
                "29511",
            ]
            command += ["--local-addr", address, *trained(odd, tmp_path / f"host{host}", "--epochs", str(epochs))]
            environ = {**CPU, "GLOO_SOCKET_IFNAME": "link0", "TPUKIT_CACHE": str(tmp_path / f"cache{host}")}
            pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            agents.append(subprocess.Popen(command, cwd=ROOT, env=environ, **pipes))
        said = [agent.communicate(timeout=300) for agent in agents]
        return [agent.returncode for agent in agents], said

    for epochs in (1, 2):
        codes, said = train_on_both(epochs)
        assert codes == [0, 0], said[0][1][-3000:] + said[1][1][-3000:]
        assert "all 4 cores started" in said[0][0] and "Scores" not in said[1][0]
    run = Run(tmp_path / "host0")
    assert difference(losses(run), losses(mnist_alone)) < 1e-4
    assert [r["step"] for r in run.records("start")] == [0, 24]
    assert not (tmp_path / "host1/records.jsonl").exists() and not list(tmp_path.glob("host1/checkpoints/*"))
    codes, said = train_on_both(3, node_ranks=(1, 0))
    assert codes == [1, 1] and "rank 0 has no checkpoint there, but rank 2 has one of step 48" in said[1][1], said[1][1][-2000:]


def test_what_rank_0_said_is_shown_without_the_time_and_otherwise_whole(tmp_path, capsys):
    job = types.SimpleNamespace(folder=tmp_path / "cores", run=Run(tmp_path))
    watch = Supervisor(job, None, 2, 2)
    watch.shown = 0
    said = ["two lines are damaged:", "  line 12: XDU7: no image in images/", "2026 is a year"]
    job.run.echo = False
    for text in ("\n".join(said[:2]), said[2]):
        job.run.print(text)
    watch._show_log()
    assert capsys.readouterr().out.splitlines() == said


@pytest.mark.parametrize("seconds", [0, -1])
def test_no_time_at_all_until_a_core_hangs_is_refused(seconds, digits, tmp_path):
    task = Watched(dataset_dir=digits)
    with pytest.raises(TpukitError, match=f"hang_timeout_s={seconds}: it has to be more than 0"):
        launcher.launch(train, task, Run.open(tmp_path, task), cores=2, hang_timeout_s=seconds)
