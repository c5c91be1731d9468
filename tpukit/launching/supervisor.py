"""The notebook's side of a launch: an agent in a process of its own, and what its cores leave in the run directory.

The agent forks the cores (`launching.py` says how). Here they are watched: what rank 0 writes is shown, and when a core fails
or hangs the agent and all cores are ended, with the rank, the step and the traceback of the first.
"""

import contextlib
import ctypes
import json
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

from tpukit.host import files
from tpukit.host.errors import TpukitError
from tpukit.host.known_errors import fix_for
from tpukit.host.tables import printable
from tpukit.runs.signals import StopSignal

POLL_S = 0.1
GRACE_S = 3.0  # from the first core's failure to the end of all
# What a launch leaves in cores/, all of which the next one may delete.
OURS = re.compile(r"rank-\d+\.(process|log|step|stacks|error|stopped|done)|agent\.(log|error)|result\.json")


class CoreFailed(TpukitError):
    """A core failed or hung; the message holds its rank, step and traceback."""


class Paths:
    """The files of one process of a launch in the run's folder cores/, by its index on this host (its rank, on one host)."""

    def __init__(self, folder, index):
        name = f"rank-{index:02d}"
        self.process, self.log, self.step, self.stacks = (
            folder / f"{name}.{kind}" for kind in ("process", "log", "step", "stacks")
        )
        self.error, self.stopped, self.done = (folder / f"{name}.{kind}" for kind in ("error", "stopped", "done"))


def end_with_parent(parent):
    """Ask Linux to end this process when its parent (a pid) ends, so that a restarted kernel leaves no core behind."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended before that was asked
        os._exit(1)


class Supervisor:
    """An agent in a process group of its own, and what its cores leave in the run directory."""

    def __init__(self, job, agent, cores, processes):
        self.job, self.cores, self.processes = job, cores, processes
        self.folder = job.folder
        if self.folder.is_symlink():
            raise TpukitError(f"{self.folder} is a link to another place: remove it, or choose another run folder")
        with files.explain_unwritable(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            for old in self.folder.iterdir():
                if OURS.fullmatch(old.name):
                    old.unlink()
        self.stop = self.job.run.path / "cores/stop"  # read by rank 0, on whatever host that is
        self.stop.unlink(missing_ok=True)
        (self.job.run.path / "progress.json").unlink(missing_ok=True)
        self.log = self.job.run.path / "log.txt"
        self.died = []  # the first cores that went without a word
        self.late = []  # the cores that had not started in time
        self.process = multiprocessing.get_context("fork").Process(target=_agent, args=(agent, self.folder, os.getpid()))

    def wait(self):
        """Show the run's progress until all cores have ended. Returns rank 0's result."""
        self.job.run.print(f"starting {self.cores} cores")
        sys.stdout.flush(), sys.stderr.flush()
        self.shown = self.log.stat().st_size
        with StopSignal() as stop, _adopting(), warnings.catch_warnings(), _Bar(self.job.run) as bar:
            warnings.simplefilter("ignore", DeprecationWarning)  # "fork() of a multi-threaded process": no lock of ours is held
            self.process.start()
            try:
                self._watch(stop, bar)
            finally:
                self._end()
                self._show_log()
        return self._result(stop)

    def _watch(self, stop, bar):
        deadline, failed_at, told = time.monotonic() + self.job.start_timeout_s, None, False
        while self.process.is_alive():
            self.process.join(POLL_S)
            self._show_log()
            bar.update()
            starting = self._starting()
            if stop.signal and not told:
                told = True
                # By a file, which rank 0 reads where all ranks agree on the step to stop at.
                files.write_atomic(self.stop, str(int(stop.signal)))
                if starting:  # there is nothing to save
                    return
            self.died = self.died or self._dead()
            if failed_at is None:
                self.late = starting if time.monotonic() > deadline else []
                hung = self._hung()
                if self.died or self._errors() or hung or self.late:
                    failed_at = time.monotonic()
                    for index, pid in self._pids().items():
                        if (hung or self.late) and index not in hung:
                            _send(pid, signal.SIGUSR1)  # its stack too
            if failed_at and time.monotonic() - failed_at > GRACE_S:
                return
        self.died = self.died or self._dead()  # a core that went together with the agent

    def _end(self):
        """End the agent and every process that came from it, and wait until they are gone."""
        if self.process.pid is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # it may not lead its group yet
        self.process.join()
        with contextlib.suppress(ChildProcessError):  # cores whose agent went before them are ours by now
            while True:
                os.waitpid(-self.process.pid, 0)

    def _result(self, stop):
        errors, hung = self._errors(), self._hung()
        if self.died and not self.late:  # first: the errors of the others say that it is gone
            raise CoreFailed(self._said_of_death())
        if errors:
            raise CoreFailed(self._describe(errors[0]))
        if hung or self.late:
            raise CoreFailed(self._said_of_hang())
        if stop.signal or list(self.folder.glob("*.stopped")):
            raise SystemExit(128 + stop.signal) if stop.signal == signal.SIGTERM else KeyboardInterrupt
        result = self.folder / "result.json"
        if self.process.exitcode == 0 and result.exists():
            return json.loads(result.read_text())
        raise CoreFailed(self._said_of_death())

    # Reading what the cores left

    def _show_log(self):
        if not self.log.exists():
            return
        with open(self.log, "rb") as file:
            file.seek(self.shown)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self.shown += len(whole)
        from tqdm import tqdm

        for line in printable(whole.decode(errors="replace")).splitlines():
            with contextlib.suppress(BrokenPipeError):  # as in `Run.print`
                tqdm.write(re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", "", line))

    def _errors(self):
        """What failed cores left, the first to fail first: the others fail because it is gone."""
        return sorted((json.loads(p.read_text()) for p in self.folder.glob("*.error")), key=lambda e: e["time"])

    def _hung(self):
        """index -> stacks, of the cores whose time ran out."""
        found = self._stacks()
        return found if any("Timeout (" in text for text in found.values()) else {}

    def _stacks(self):
        found = {index: _text(Paths(self.folder, index).stacks) for index in range(self.processes)}
        return {index: text for index, text in found.items() if text}

    def _starting(self):
        """The cores that have not come to their first step: where they stand there writes its number."""
        return [index for index in range(self.processes) if not _text(Paths(self.folder, index).step)]

    def _dead(self):
        """The cores whose process is gone and left neither a result nor an error."""
        gone = [index for index, pid in self._pids().items() if not _alive(pid)]
        names = {p.name for p in self.folder.iterdir()}  # looked at afterwards: a core leaves its word before it goes
        return [i for i in gone if not names & {f"rank-{i:02d}.{kind}" for kind in ("done", "error", "stopped")}]

    def _pids(self):
        written = sorted(self.folder.glob("rank-*.process"))
        return {int(p.stem.split("-")[1]): json.loads(p.read_text())["pid"] for p in written}

    def _describe(self, error):
        where = "the launch"
        if "rank" in error:
            step = " while it started" if error["step"] is None else f" in step {error['step'] + 1}"
            where = f"core {error['core']} (rank {error['rank']} of {self.processes}, on {error['host']}){step}"
        what = error["message"] or error["traceback"].rstrip()
        return "\n".join([f"{where} failed:", what, *[error["fix"]] * bool(error["fix"]), self._said_of_checkpoint()])

    def _said_of_hang(self):
        if self.late:
            said = f"{len(self.late)} of {self.processes} cores did not start within {self.job.start_timeout_s:g} s"
        else:
            said = f"no core ended a step for {self.job.hang_timeout_s:g} s"
        lines, stacks = [f"{said}. What each was doing, the latest call first:"], self._stacks()
        for index, text in sorted(stacks.items()):
            paths = Paths(self.folder, index)
            lines += ["", f"core {index} (all of it: {paths.stacks})", *_essence(text)]
            lines += _last_lines(paths.log) if index in self.late else []
        lines += [f"core {index} gave no stack" for index in sorted({*self._pids(), *self.late} - set(stacks))]
        return "\n".join([*lines, "", self._said_of_checkpoint()])

    def _said_of_death(self):
        lines = []
        for index in self.died:
            paths = Paths(self.folder, index)
            crash, step = _text(paths.stacks), _text(paths.step)
            when = f"in step {int(step) + 1}" if step else "while it started"
            cause = "crashed in native code:" if crash else "was killed, often because the host's memory was full."
            lines += [f"core {index} (rank {index} of {self.processes}) ended without a Python error {when}: it {cause}"]
            lines += [*_essence(crash), *(_last_lines(paths.log) or _last_lines(self.folder / "agent.log"))]
        if not lines:
            lines = [f"the launcher ended with code {self.process.exitcode}:", *_last_lines(self.folder / "agent.log")]
        return "\n".join([*lines, self._said_of_checkpoint()])

    def _said_of_checkpoint(self):
        newest = next((c["file"] for c in self.job.run.checkpoints()), None)
        saved = f"The last checkpoint is {newest}; launch again to go on from it." if newest else "There is no checkpoint yet."
        return f"{saved} What each core printed: {self.folder}/rank-NN.log"


def _agent(start, folder, parent):
    """The agent's process: start the cores and wait for them. It ends as they end."""
    os.setsid()  # an interrupt in the terminal goes to the notebook's process alone, which passes it on
    end_with_parent(parent)
    with open(folder / "agent.log", "w", buffering=1) as log:
        os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
        sys.stdout = sys.stderr = log
        try:
            start()
        except BaseException as error:
            traceback.print_exc()
            if not list(folder.glob("*.error")):
                found = dict(message="", traceback=traceback.format_exc(), fix=fix_for(str(error)) or "", time=0)
                files.write_atomic(folder / "agent.error", json.dumps(found))
            log.flush()
            os._exit(1)
        log.flush()
        os._exit(0)


@contextlib.contextmanager
def _adopting():
    """Within it, processes whose parent ends become children of this process (Linux), so that none is lost from sight."""
    set_option, option = None, 36  # PR_SET_CHILD_SUBREAPER
    with contextlib.suppress(OSError, AttributeError):
        set_option = ctypes.CDLL(None).prctl
        set_option(option, 1)
    try:
        yield
    finally:
        if set_option:
            set_option(option, 0)


def _text(path):
    """What stands in a file; nothing where it is not there yet."""
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""


def _last_lines(path, count=15):
    return _text(path).strip().splitlines()[-count:]


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return not Path("/proc").is_dir()  # where it cannot be seen, believe that it lives


def _essence(stacks):
    """The lines of a faulthandler dump that tell something: without idle threads, and without what called the core."""
    lines = []
    for block in re.split(r"(?m)^(?=Thread 0x|Current thread 0x|Fatal )", stacks):
        block = block.strip().splitlines()
        if any("tqdm/_monitor.py" in line for line in block) or (len(block) > 1 and block[1].endswith("in _worker")):
            continue
        end = next((n for n, line in enumerate(block) if line.endswith("in _core")), len(block))
        lines += [line for line in block[:end] if line and not line.startswith("Timeout (")]
    return lines


def _send(pid, number):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class _Bar:
    """A progress bar of what the run directory says."""

    def __init__(self, run):
        self.run, self.bar = run, None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.bar is not None:
            self.update()
            self.bar.close()

    def update(self):
        live = self.run.read_progress()
        if not live:
            return
        if self.bar is None:
            from tqdm.auto import tqdm

            self.bar = tqdm(total=live["total"], initial=live["step"], desc=live["name"], unit=live["unit"], mininterval=0.5)
        self.bar.set_postfix({name: live[name] for name in ("epoch", "loss") if name in live}, refresh=False)
        self.bar.update(live["step"] - self.bar.n)
