"""A launch that is watched: cores that fail, hang, do not start, are interrupted; and that no process
outlives its parent."""

import json
import re
import shutil
import signal
import subprocess
from types import SimpleNamespace

import pytest

from tests.conftest import checkpoint, refuses
from tests.launching.conftest import (
    CPU,
    are_gone,
    launched,
    needs_torch_xla,
    python,
    started,
    steps_logged,
    wait_for,
)
from tests.launching.launched import children, machine
from tpukit import Run, train
from tpukit.launching.core import Job
from tpukit.launching.supervisor import Supervisor

# Failures. One kernel launches again and again in one run; in each launch but the last, rank 1 has an
# accident in step 30.

HANG_TIMEOUT_S = 10  # more than the first step takes on a busy machine
ACCIDENTS = dict(cpu=("raise", "exit", "kill", "crash", "hang", None), xla=("raise", "hang", None))
# of the core that hangs, and of the one that waits for it
FIRST_CALL = ["in cause", "in all_reduce_gradients|in backward"]
FOUND = {  # what the message has to hold
    "raise": ["core 1 (rank 1) in step 30", "ValueError: sample 7 is broken", "launched.py"],
    "exit": ["core 1 (rank 1) in step 30", "SystemExit: 3"],
    "kill": ["core 1 in step 30", "SIGKILL", "memory"],
    "crash": ["core 1 in step 30", "SIGSEGV", "in cause"],
    "hang": ["core 0", "core 1", f"{HANG_TIMEOUT_S} s", *FIRST_CALL],
}


@pytest.fixture(scope="session")
def accidents(odd, tmp_path_factory):
    """For a kind of device: (run, what the launches gave)."""
    kept = {}

    def of(kind):
        if kind not in kept:
            folder = tmp_path_factory.mktemp("accidents") / "run"
            settings = [dict(epochs=1)]  # the others resume at step 24
            for accident in ACCIDENTS[kind]:
                hang_timeout_s = HANG_TIMEOUT_S if accident == "hang" else 60
                settings.append(dict(accident=accident or "", accident_at=6, hang_timeout_s=hang_timeout_s))
            whole, *after = launched(kind, run=folder, data=odd, cores=2, launches=settings)[0]
            assert "result" in whole, whole
            kept[kind] = Run(folder), after
        return kept[kind]

    return of


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, accident", [(kind, name) for kind, names in ACCIDENTS.items() for name in names if name]
)
def test_a_core_that_fails_ends_the_launch_with_its_rank_step_and_traceback(kind, accident, accidents):
    failed = accidents(kind)[1][ACCIDENTS[kind].index(accident)]
    assert failed["error"] == "CoreFailed" and failed["seconds"] < (45 if accident == "hang" else 30)
    for data in FOUND[accident]:
        assert re.search(data if "|" in data else re.escape(data), failed["message"]), failed["message"]
    assert "step-00000024.pt" in failed["message"]
    assert failed["left"] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ACCIDENTS)
def test_after_a_failure_a_launch_resumes_from_the_checkpoint_that_was_left_whole(kind, accidents):
    run, done = accidents(kind)
    assert done[-1]["result"]["images"] == 37, done[-1]
    # of a session, what came after the checkpoint is cut off
    assert [r["step"] for r in run.records("start")] == [0, 24]
    assert [r["step"] for r in run.records("train")] == list(range(1, 49))
    assert done[-1]["left"] == []


# Eight cores of a TPU, of which one does not start. The others wait for it, as libtpu does.

FIRST, OPENING = "before its first line", "while it opens its chip"
# Of core 3: where it fails, how, and what the message says
WAYS = {
    ("kill", FIRST): "SIGKILL",
    ("hang", FIRST): "8 of 8 cores did not start within 3 s",
    ("hang", OPENING): "8 of 8 cores did not start within 3 s",
    ("raise", OPENING): "open(/dev/vfio/3)",
}
REFUSED = ("refuse", "before any core came up")


@pytest.fixture(scope="session")
def failed_starts(odd, tmp_path_factory):
    """(way, where) -> (message, pids left) of the launches of one kernel."""
    needs_torch_xla()
    program = """
import signal
from tests.launching.launched import children
def fail():
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "raise":
        raise RuntimeError("TPU initialization failed: open(/dev/vfio/3)")
    time.sleep(600)
def open_chip(index, processes):
    if index == 3 and where == "while it opens its chip":
        print("chip 3 is being opened")
        fail()
    time.sleep(600)
def clear_variables(processes):
    if way == "refuse":
        raise RuntimeError("Expected 4 worker addresses, got 1")
run_core, enable = core.run_core, core.faulthandler.enable
def numbered(job, index):
    def first_line(file):
        if index == 3 and where == "before its first line":
            fail()
        enable(file=file)
    core.faulthandler.enable = first_line
    run_core(job, index)
kaggle = machine("tpu", 8)
environment.detect, supervisor.run_core = lambda: kaggle, numbered
tpu_chips.open_chip, tpu_chips.clear_variables = open_chip, clear_variables
task = Watched(dataset_dir=Path(sys.argv[1]))
found = []
for way, where in json.loads(sys.argv[3]):
    supervisor.START_TIMEOUT_S = 3.0 if way == "hang" else 600.0
    supervisor.GRACE_S = 3.0 if way == "hang" else 0.5
    try:
        launch(train, task, Run.open(sys.argv[2], task))
    except CoreFailed as error:
        found.append([str(error), children(os.getpid())])
print("FOUND " + json.dumps(found))
"""
    ways = [*WAYS, REFUSED]
    ran = python(program, odd, tmp_path_factory.mktemp("starts") / "run", json.dumps(ways), timeout=200)
    assert "FOUND " in ran.stdout, ran.stdout + ran.stderr
    return dict(zip(ways, json.loads(ran.stdout.partition("FOUND ")[2]), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("way, where", WAYS)
def test_one_of_eight_cores_that_fails_to_start_ends_the_launch_with_its_cause(way, where, failed_starts):
    """Where it is gone the launch ends without waiting for the deadline."""
    message, left = failed_starts[way, where]
    assert "core 3" in message and left == []
    assert {words for words in WAYS.values() if words in message} == {WAYS[way, where]}
    if way == "hang":
        inside = message.partition("core 3 (full stack")[2].partition("core 4 (")[0]
        assert ("in fail" in inside and "chip 3 is being opened" in inside) or "no stack" in inside
        assert message.count("in open_chip") >= 7


@pytest.mark.slow
def test_an_error_before_any_core_came_up_is_shown_with_its_fix(failed_starts):
    message, left = failed_starts[REFUSED]
    assert "Expected 4 worker addresses" in message and left == []
    assert "os.environ.pop('TPU_PROCESS_ADDRESSES')" in message


# Interrupts, and parents that are killed


def launched_in_step(step, odd, run, cores, **environ):
    """A process whose launch has come to a step of a training that would take hours."""
    process = started("cpu", run=run, data=odd, cores=cores, launches=[dict(epochs=2000)], environ=environ)
    wait_for(lambda: steps_logged(run) > step, process)
    return process


@pytest.mark.slow
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 1), (signal.SIGTERM, 143)])
def test_an_interrupt_lets_all_cores_save_at_one_step_before_they_leave(number, code, odd, tmp_path):
    process = launched_in_step(30, odd, tmp_path, cores=2)
    cores = children(process.pid)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code or "KeyboardInterrupt" in err, err
    run = Run(tmp_path)
    saved = checkpoint(run)["state"]["step"]
    assert f"saved at step {saved}" in out and saved == run.records("train")[-1]["step"]
    assert len(cores) == 2 and are_gone(cores, timeout_s=0)


@pytest.mark.slow
def test_cores_meet_where_no_other_user_can_and_end_with_the_process_that_launched_them(odd, tmp_path):
    (tmp_path / "temporary").mkdir()
    process = launched_in_step(5, odd, tmp_path / "run", cores=4, TMPDIR=str(tmp_path / "temporary"))
    try:
        [rendezvous] = tmp_path.glob("temporary/*/rendezvous")
        assert rendezvous.parent.stat().st_mode & 0o777 == 0o700
        cores = children(process.pid)
        if shutil.which("ss"):  # of iproute2, lists sockets
            command = ["ss", "-Hlntup"]
            sockets = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
            ours = [f"pid={pid}," for pid in (*cores, process.pid)]
            addresses = [line.split()[4] for line in sockets if any(pid in line for pid in ours)]
            assert len(addresses) >= 4  # gloo's
            assert not [address for address in addresses if not address.startswith(("127.", "[::1]"))]
    finally:
        process.kill()
        process.communicate(timeout=60)
    assert len(cores) == 4 and are_gone(cores)


@pytest.mark.slow
def test_no_process_is_left_wherever_in_a_launch_its_parent_is_killed(odd, tmp_path):
    """12 kernels: each killed once so many processes are there, or at a random moment of its launch. All that
    came from them carries their environment."""
    program = """
import random, signal
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
def has_started(seconds):
    return log.exists() and "cores started" in log.read_text() or seconds > 120
def are_there(count):
    return lambda seconds: len(left()) >= count or seconds > 120
_, most, _ = killed("forked", are_there(5))
whole, *_ = killed("whole", has_started)
random.seed(0)
moments = [random.uniform(0, whole) for _ in range(7)]
phases = [*map(are_there, range(1, 6)), *(lambda seconds, end=end: seconds > end for end in moments)]
counts = [killed(number, now)[1:] for number, now in enumerate(phases)]
print("KILLED", json.dumps([most, *zip(*counts)]))
"""
    ran = python(program, odd, tmp_path, env={**CPU, "TPUKIT_KILLED": "1", "TMPDIR": str(tmp_path)})
    assert "KILLED " in ran.stdout, ran.stdout[-2000:] + ran.stderr[-2000:]
    most, seen, orphans = json.loads(ran.stdout.partition("KILLED ")[2])
    assert most == 5 and len(set(seen)) > 2  # a kernel and four cores; at several moments
    assert orphans == [0] * 12


# Without a launch


def supervisor_of(run):
    return Supervisor(Job(train, None, run, machine("cpu", 1), None, 60.0, processes=2))


def test_a_core_that_ends_while_it_is_checked_is_not_taken_for_dead(tmp_path):
    supervisor = supervisor_of(Run(tmp_path))

    def ends_now():
        supervisor.job.file(0, "end").write_text("{}")
        return False

    supervisor.processes = [SimpleNamespace(is_alive=ends_now), SimpleNamespace(is_alive=lambda: False)]
    assert supervisor._find_dead() == [1]


def test_only_what_a_launch_wrote_is_deleted_by_the_next(tmp_path):
    cores, foreign = tmp_path / "cores", ["thesis.tex", "rank-00.txt", "log", ".hidden"]
    cores.mkdir()
    for name in ("rank-00.log", "rank-11.stacks", "rank-03.end", "stop", *foreign):
        (cores / name).write_text(name)
    (cores / "folder").mkdir()
    supervisor_of(Run(tmp_path))
    assert {path.name for path in cores.iterdir()} == {*foreign, "folder"}


def test_a_run_folder_that_was_moved_while_it_trains_is_named(tmp_path):
    run = Run(tmp_path / "run")
    supervisor = supervisor_of(run)
    run.path.rename(tmp_path / "moved")
    with refuses(run.path, "no such file"):
        supervisor._show()
