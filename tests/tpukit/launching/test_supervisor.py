"""A launch that is watched: cores that fail, hang, do not start, are interrupted; and that no process
outlives its parent."""

import json
import signal
import sys

import pytest

from tests.conftest import checkpoint, wait_for
from tests.tpukit.launching.conftest import CPU, are_gone, launched, output_of, python, started, steps_logged
from tests.tpukit.launching.launched import children, machine
from tests.tpukit.runs.faults import READS, failing_disk
from tpukit import Run
from tpukit.host.errors import Unreadable
from tpukit.launching.job import PRINTED, Job, LaunchedCall
from tpukit.launching.supervisor import Supervisor

# Failures. One kernel launches again and again in one run; in each launch but the last, rank 1 has an
# accident in step 30.

HANG_TIMEOUT_S = 10  # more than the first step takes on a busy machine
FOUND = {  # accident -> what the message has to hold
    "raise": ["core 1 (rank 1) in step 30 failed", "ValueError: sample 7 is broken", "launched.py"],
    "kill": ["core 1 in step 30", "SIGKILL", "memory"],
    "crash": ["core 1 in step 30", "SIGSEGV", "in cause"],
    # where the core hangs, and where the other waits for it
    "hang": ["core 0", "core 1", f"{HANG_TIMEOUT_S} s", "in cause", "in all_reduce_gradients"],
}


@pytest.fixture(scope="module")
def accidents(odd, tmp_path_factory):
    """name -> (run, what its launch gave) of launches in one run: whole, one for each accident, resumed."""
    launches = dict(whole=dict(epochs=1))  # the others resume at step 24
    for accident in FOUND:
        hang_timeout_s = HANG_TIMEOUT_S if accident == "hang" else 60
        launches[accident] = dict(accident=accident, accident_at=6, hang_timeout_s=hang_timeout_s)
    launches["resumed"] = {}
    for settings in launches.values():
        settings |= dict(cores=2, run="run")
    return launched("cpu", odd, tmp_path_factory.mktemp("accidents"), **launches)


@pytest.mark.slow
@pytest.mark.parametrize("accident", FOUND)
def test_a_core_that_fails_ends_the_launch_with_its_rank_step_and_traceback(accident, accidents):
    _, failed = accidents[accident]
    assert failed["error"] == "CoreFailed" and failed["seconds"] < 60  # the accident of a hang lasts 600 s
    assert [data for data in FOUND[accident] if data not in failed["message"]] == [], failed["message"]
    assert "step-00000024.pt" in failed["message"]
    assert failed["left"] == []


@pytest.mark.slow
def test_after_a_failure_a_launch_resumes_from_the_checkpoint_that_was_left_whole(accidents):
    run, done = accidents["resumed"]
    assert done["result"]["images"] == 37 and done["left"] == []
    # of a session, what came after the checkpoint is cut off
    assert [r["step"] for r in run.records("start")] == [0, 24]
    assert [r["step"] for r in run.records("train")] == list(range(1, 49))


# Four cores of a TPU, of which one does not start. The others wait for it, as libtpu does.

WAYS = {  # how core 3 fails -> what the message says
    "kill": "SIGKILL",  # before its first line
    "hang": "4 of 4 cores did not start within 8 s",
    "raise": "open(/dev/vfio/3)",
    "refuse": "os.environ.pop('TPU_PROCESS_ADDRESSES')",  # all of them, with the fix
}


@pytest.fixture(scope="module")
def failed_starts(odd, tmp_path_factory):
    """way -> (message, pids left) of the launches of one kernel."""
    program = """
import signal
from tests.tpukit.launching.launched import children
def open_chip(index, processes):
    if index == 3:
        print("chip 3 is being opened")
        if way == "raise":
            raise RuntimeError("TPU initialization failed: open(/dev/vfio/3)")
    time.sleep(600)
def clear_variables():
    if way == "refuse":
        raise RuntimeError("Expected 4 worker addresses, got 1")
run_core = core_process.run_core
def run_or_be_killed(job, index):
    if index == 3 and way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    run_core(job, index)
chips = machine("tpu", 4)
environment.detect, core_process.run_core = lambda: chips, run_or_be_killed
launcher.runtime_class = lambda env: Runtime  # opens no chip, and needs no torch_xla
chip_access.open_chip, chip_access.clear_variables = open_chip, clear_variables
task = Watched(dataset_dir=Path(sys.argv[1]))
found = []
for way in json.loads(sys.argv[3]):
    Job.start_timeout_s = 8.0 if way == "hang" else 600.0
    supervisor.GRACE_S = 3.0 if way == "hang" else 0.5
    try:
        launch(train, task, Run.open(sys.argv[2], task))
    except CoreFailed as error:
        found.append([str(error), children(os.getpid())])
print("FOUND " + json.dumps(found))
"""
    run = tmp_path_factory.mktemp("starts") / "run"
    ran = python(program, odd, run, json.dumps([*WAYS]), env=CPU)
    assert "FOUND " in ran.stdout, ran.stdout + ran.stderr
    return dict(zip(WAYS, json.loads(ran.stdout.partition("FOUND ")[2]), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_one_of_four_cores_that_fails_to_start_ends_the_launch_with_its_cause(way, failed_starts):
    """Where it is gone the launch ends without waiting for the deadline."""
    message, left = failed_starts[way]
    assert ("core 3" in message or way == "refuse") and left == []
    assert [words for words in WAYS.values() if words in message] == [WAYS[way]]
    if way == "hang":
        assert "chip 3 is being opened" in message and message.count("in open_chip") == 4


# Interrupts, and parents that are killed


@pytest.mark.slow
def test_cores_meet_where_no_other_user_can_and_an_interrupt_lets_all_save_at_one_step(odd, tmp_path):
    """A cell is interrupted and executed again, then the session ends."""
    run = tmp_path / "run"
    (tmp_path / "temporary").mkdir()
    launches = [dict(run=run, cores=2, epochs=2000)] * 2  # which would take hours
    process = started("cpu", odd, launches, TMPDIR=str(tmp_path / "temporary"))
    try:
        wait_for(lambda: steps_logged(run) > 30, process)
        cores = children(process.pid)
        [rendezvous] = tmp_path.glob("temporary/*/rendezvous")
        assert rendezvous.parent.stat().st_mode & 0o777 == 0o700
        process.send_signal(signal.SIGINT)
        wait_for(lambda: len(Run(run).records("start")) == 2, process)
        saved = Run(run).records("start")[1]["step"]
        assert len(cores) == 2 and are_gone(cores, timeout_s=0)
        wait_for(lambda: steps_logged(run) > saved, process)
        cores = children(process.pid)
        process.send_signal(signal.SIGTERM)
    finally:
        out, err = output_of(process, timeout_s=120)
    assert process.returncode == 143, err
    ended = checkpoint(Run(run))["state"]["step"]
    assert ended == Run(run).records("train")[-1]["step"] > saved > 30
    log = (run / "log.txt").read_text()
    assert f"saved at step {saved}" in log and f"saved at step {ended}" in log
    assert len(cores) == 2 and are_gone(cores, timeout_s=0)


@pytest.mark.slow
def test_no_process_is_left_wherever_in_a_launch_its_parent_is_killed(odd, tmp_path):
    """Kernels that are killed once so many processes are there, or at a random moment of their launch. All
    that came from them carries their environment."""
    program = """
import random, signal
data, folder = map(Path, sys.argv[1:])
def kernel(number):
    task = Watched(dataset_dir=data, epochs=2000)
    launch(train, task, Run.open(folder / str(number), task), cores=2)
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
    for _ in range(1500):
        if not left():
            break
        time.sleep(0.02)
    return took, seen, len(left())
log = folder / "whole/log.txt"
def has_started(seconds):
    return log.exists() and "cores started" in log.read_text() or seconds > 120
def are_there(count):
    return lambda seconds: len(left()) >= count or seconds > 120
whole, most, orphans = killed("whole", has_started)
random.seed(0)
moments = [random.uniform(0, whole) for _ in range(3)]
phases = [*map(are_there, (1, 2, 3)), *(lambda seconds, end=end: seconds > end for end in moments)]
counts = [killed(number, now)[1:] for number, now in enumerate(phases)]
print("KILLED", json.dumps([most, orphans, *zip(*counts)]))
"""
    env = {**CPU, "TPUKIT_KILLED": "1", "TMPDIR": str(tmp_path)}
    ran = python(program, odd, tmp_path, env=env, start=[sys.executable])
    assert "KILLED " in ran.stdout, ran.stdout[-2000:] + ran.stderr[-2000:]
    most, orphans, seen, more_orphans = json.loads(ran.stdout.partition("KILLED ")[2])
    # A kernel and two cores, and for a moment what one of them asks of the system; at several moments
    assert most in (3, 4) and len(set(seen)) > 1
    assert [orphans, *more_orphans] == [0] * 7


def test_where_rank_0_cannot_record_all_ranks_save_the_step_at_which_they_stop(odd, tmp_path):
    program = """
from tests.conftest import best_weights, exact, same
from tests.tpukit.runs.faults import WRITES, failing_disk
from tpukit.runs import run as run_module

data, folder = map(Path, sys.argv[1:])
run_module.RETRY_AFTER_S = (0.0,)
task = Watched(dataset_dir=data, log_every=5, num_workers=1, save_every_s=1e9)
straight, disturbed = (Run.open(folder / name, task) for name in ("straight", "disturbed"))
launch(train, task, straight, cores=2)
try:
    with failing_disk([disturbed.path], WRITES - {"fsync"}, name="records.jsonl", at=12, once=False):
        launch(train, task, disturbed, cores=2)
except CoreFailed as error:
    print("REFUSED", "cannot write" in str(error) and "records.jsonl" in str(error))
print("SAVED", [entry["step"] for entry in disturbed.checkpoints()])
launch(train, task, disturbed, cores=2)
print("SAME", exact(disturbed) == exact(straight), same(best_weights(disturbed), best_weights(straight)))
"""
    ran = python(program, odd, tmp_path, env=CPU)
    assert "REFUSED True" in ran.stdout, ran.stdout[-2000:] + ran.stderr[-2000:]
    assert "SAVED [25]" in ran.stdout and "SAME True True" in ran.stdout, ran.stdout[-2000:]


@pytest.mark.parametrize("cores", [1, 2])
def test_a_closed_terminal_saves_and_ends_a_launch_as_sigterm_does(cores, odd, tmp_path):
    program = """
import signal, threading
data, folder = map(Path, sys.argv[1:3])
task = Watched(dataset_dir=data, log_every=1, num_workers=1, save_every_s=1e9, epochs=500)
run = Run.open(folder / "run", task)
def hang_up():
    while not run.records("train"):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGHUP)
threading.Thread(target=hang_up, daemon=True).start()
try:
    launch(train, task, run, cores=int(sys.argv[3]))
except SystemExit as end:
    print("ENDED", end.code, [entry["step"] for entry in run.checkpoints()] == [len(run.records("train"))])
"""
    ran = python(program, odd, tmp_path, cores, env=CPU)
    assert "ENDED 129 True" in ran.stdout, ran.stdout[-2000:] + ran.stderr[-2000:]


# Without a launch


def supervisor_of(folder):
    plan = LaunchedCall(arguments=lambda core: ((), {}))
    return Supervisor(Job(print, plan, machine("cpu", 1), 60.0, processes=2, folder=folder / "cores"))


def test_only_what_a_launch_wrote_is_deleted_by_the_next(tmp_path):
    cores, foreign = tmp_path / "cores", ["thesis.tex", "rank-00.txt", "log", ".hidden"]
    cores.mkdir()
    for name in ("rank-00.log", "rank-11.stacks", "rank-03.end", "stop", *foreign):
        (cores / name).write_text(name)
    (cores / "folder").mkdir()
    supervisor_of(tmp_path)
    assert {path.name for path in cores.iterdir()} == {*foreign, "folder", PRINTED}


def test_a_progress_bar_redraws_a_line_whose_last_state_is_shown_at_once(tmp_path, capsys):
    """Written in pieces, in the middle of a letter and of a line, and with one bar below another."""
    supervisor, shown = supervisor_of(tmp_path), []
    pieces = [
        b"loss 1\nhalf", b" a line\r\n", b"\r 0%", b"\r 10%\r 20%\xe2\x96", b"\x88|", b"\n",
        b"\r 30%\n\r 1/2\x1b[A", b"\n\r 2/2\x1b[A", b"\r 40%\nstep 1\rstep 2\r", b"", b"no \x1b[1mend",
    ]  # fmt: skip
    for number, piece in enumerate(pieces):
        with open(supervisor.printed, "ab") as file:
            file.write(piece)
        supervisor._show(is_over=number == len(pieces) - 1)
        shown.append(capsys.readouterr().out)
    assert shown == [
        "loss 1\n", "half a line\n", " 0%\r", " 20%\ufffd\r", " 20%\u2588|\r", " 20%\u2588|\n", " 1/2\r",
        " 2/2\r", " 40%\nstep 2\r", "", "no \\x1b[1mend\n",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "steps, told",
    [
        (["3 7", "4 8"], "core 0 ended after 3 steps, and core 1 waits for it in step 5"),
        (["3 7", "9 7"], ""),  # core 1 goes on alone
        (["3", "3"], ""),
        (["0", "0 1"], "core 0 ended after 0 steps, and core 1 waits for it in step 1"),
    ],
)
def test_a_core_that_waits_for_one_that_has_ended_is_told_from_one_that_goes_on_alone(steps, told, tmp_path):
    supervisor = supervisor_of(tmp_path)
    for index, numbers in enumerate(steps):
        supervisor.job.file(index, "step").write_text("".join(f"{n:>20}" for n in numbers.split()))
    assert supervisor._left_alone() == ""
    supervisor.job.file(0, "end").write_text(json.dumps(dict(outcome="done", core=0)))
    assert supervisor._left_alone().partition(":")[0] == told


def test_of_a_core_that_died_only_what_was_not_shown_yet_is_told(tmp_path):
    supervisor = supervisor_of(tmp_path)
    supervisor.job.file(0, "log").write_text("ValueError: logged\nterminate called\n")
    supervisor.printed.write_text("first words\nValueError: logged\n")
    assert supervisor._traces(0) == ["terminate called"]


def test_a_disk_that_stutters_while_cores_train_delays_what_is_shown_and_makes_none_look_dead(
    tmp_path, monkeypatch, capsys
):
    supervisor = supervisor_of(tmp_path)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    folder, ending = tmp_path / "cores", '{"outcome": "done"}'
    (folder / PRINTED).write_text("a line\n")
    (folder / "rank-00.end").write_text(ending)
    with failing_disk([folder], READS, name=PRINTED, at=1):
        supervisor._show()
        assert "a line" not in capsys.readouterr().err
        supervisor._show()
    assert "a line" in "".join(capsys.readouterr())
    with failing_disk([folder], READS, name=".end", at=1) as disk:
        assert supervisor._read(0, "end") == ending and disk.failed
    with failing_disk([folder], READS, name=".end", at=1, once=False), pytest.raises(Unreadable):
        supervisor._ends("done")
