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

from tpukit import files
from tpukit.errors import TpukitError
from tpukit.stopping import Stop
from tpukit.troubles import mend_for

POLL_S = 0.1
GRACE_S = 3.0  # from the first core's failure to the end of all


class CoreFailed(TpukitError):
    """A core failed or hung; the message holds its rank, step and traceback."""


class Paths:
    """The files of one rank in the run's folder cores/."""

    def __init__(self, folder, rank):
        name = f"rank-{rank:02d}"
        self.process, self.log, self.step, self.stacks = (
            folder / f"{name}.{kind}" for kind in ("process", "log", "step", "stacks")
        )
        self.error, self.stopped, self.done = (folder / f"{name}.{kind}" for kind in ("error", "stopped", "done"))


def end_with_parent():
    """Ask Linux to end this process when the one that started it ends, so that a restarted kernel leaves no core behind."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Watch:
    """An agent in a process group of its own, and what its cores leave in the run directory."""

    def __init__(self, job, agent, cores, processes):
        self.job, self.cores, self.processes = job, cores, processes
        self.folder = job.folder
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.glob("*"):
            old.unlink()
        (self.job.run.path / "progress.json").unlink(missing_ok=True)
        self.log = self.job.run.path / "log.txt"
        self.died = []  # ranks of the first cores that went without a word
        self.process = multiprocessing.get_context("fork").Process(target=_agent, args=(agent, self.folder))

    def wait(self):
        """Show the run's progress until all cores have ended. Returns rank 0's result."""
        self.job.run.say(f"starting {self.cores} cores")
        sys.stdout.flush(), sys.stderr.flush()
        self.shown = self.log.stat().st_size
        with Stop() as stop, _adopting(), warnings.catch_warnings(), _Bar(self.job.run) as bar:
            warnings.simplefilter("ignore", DeprecationWarning)  # "fork() of a multi-threaded process": no lock of ours is held
            self.process.start()
            try:
                self._watch(stop, bar)
            finally:
                self._end()
                self._show_log()
        return self._result(stop)

    def _watch(self, stop, bar):
        failed_at, told = None, False
        while self.process.is_alive():
            self.process.join(POLL_S)
            self._show_log()
            bar.update()
            if stop.signal and not told:
                told = True
                # Not by a signal: a TPU core runs in a thread of its process, where Python handles none.
                files.write_whole(self.folder / "stop", str(int(stop.signal)))
                if len(self._pids()) < self.processes:  # still starting: there is nothing to save
                    return
            self.died = self.died or self._dead()
            if failed_at is None and (self.died or self._errors() or self._hung()):
                failed_at = time.monotonic()
                hung = self._hung()
                for rank, pid in self._pids().items():
                    if hung and rank not in hung:
                        _send(pid, signal.SIGUSR1)  # its stack too
            if failed_at and time.monotonic() - failed_at > GRACE_S:
                return

    def _end(self):
        """End the agent and every process that came from it, and wait until they are gone."""
        if self.process.pid is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        with contextlib.suppress(ChildProcessError):  # cores whose agent went before them are ours by now
            while True:
                os.waitpid(-self.process.pid, 0)

    def _result(self, stop):
        errors, hung = self._errors(), self._hung()
        if self.died:  # first: the errors of the others say that it is gone
            raise CoreFailed(self._said_of_death())
        if errors:
            raise CoreFailed(self._said_of(errors[0]))
        if hung:
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

        for line in whole.decode(errors="replace").splitlines():
            with contextlib.suppress(BrokenPipeError):  # as in `Run.say`
                tqdm.write(re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", "", line))

    def _errors(self):
        """What failed cores left, the first to fail first: the others fail because it is gone."""
        return sorted((json.loads(p.read_text()) for p in self.folder.glob("*.error")), key=lambda e: e["time"])

    def _hung(self):
        """rank -> stacks, of the cores whose time ran out."""
        found = {int(p.stem.split("-")[1]): p.read_text() for p in self.folder.glob("rank-*.stacks")}
        return {rank: text for rank, text in found.items() if text} if any("Timeout (" in t for t in found.values()) else {}

    def _dead(self):
        """Ranks whose process is gone and left neither a result nor an error."""
        files = {p.name for p in self.folder.iterdir()}
        spoke = lambda rank: files & {f"rank-{rank:02d}.{kind}" for kind in ("done", "error", "stopped")}  # noqa: E731
        return [rank for rank, pid in self._pids().items() if not _alive(pid) and not spoke(rank)]

    def _pids(self):
        files = sorted(self.folder.glob("rank-*.process"))
        return {int(p.stem.split("-")[1]): json.loads(p.read_text())["pid"] for p in files}

    def _said_of(self, error):
        where = "the launch"
        if "rank" in error:
            step = "" if error["step"] is None else f" in step {error['step'] + 1}"
            where = f"core {error['rank']} (rank {error['rank']} of {self.processes}, on {error['host']}){step}"
        what = error["message"] or error["traceback"].rstrip()
        return "\n".join([f"{where} failed:", what, *[error["mend"]] * bool(error["mend"]), self._said_of_checkpoint()])

    def _said_of_hang(self):
        hung = self._hung()
        lines = [f"no core ended a step for {self.job.hang_timeout_s:g} s. What each was doing, the latest call first:"]
        for rank, text in sorted(hung.items()):
            lines += ["", f"core {rank} (all of it: {Paths(self.folder, rank).stacks})", *_essence(text)]
        lines += [f"core {rank} gave no stack" for rank in sorted(set(self._pids()) - set(hung))]
        return "\n".join([*lines, "", self._said_of_checkpoint()])

    def _said_of_death(self):
        lines = []
        for rank in self.died:
            crash = Paths(self.folder, rank).stacks.read_text()
            step = int(Paths(self.folder, rank).step.read_text() or 0) + 1
            cause = "crashed in native code:" if crash else "was killed, often because the host's memory was full."
            lines += [f"core {rank} (rank {rank} of {self.processes}) ended without a Python error in step {step}: it {cause}"]
            lines += _essence(crash)
        if not lines:
            log = (self.folder / "agent.log").read_text().strip().splitlines()
            lines = [f"the launcher ended with code {self.process.exitcode}:", *log[-15:]]
        return "\n".join([*lines, self._said_of_checkpoint()])

    def _said_of_checkpoint(self):
        newest = next((c["file"] for c in self.job.run.checkpoints()), None)
        saved = f"The last checkpoint is {newest}; launch again to go on from it." if newest else "There is no checkpoint yet."
        return f"{saved} What each core printed: {self.folder}/rank-NN.log"


def _agent(start, folder):
    """The agent's process: start the cores and wait for them. It ends as they end."""
    os.setsid()  # an interrupt in the terminal goes to the notebook's process alone, which passes it on
    end_with_parent()
    with open(folder / "agent.log", "w", buffering=1) as log:
        os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
        sys.stdout = sys.stderr = log
        try:
            start()
        except BaseException as error:
            traceback.print_exc()
            if not list(folder.glob("*.error")) and not list(folder.glob("*.process")):  # no core came so far
                found = dict(message="", traceback=traceback.format_exc(), mend=mend_for(str(error)) or "", time=0)
                files.write_whole(folder / "agent.error", json.dumps(found))
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
        live = self.run.live()
        if not live:
            return
        if self.bar is None:
            from tqdm.auto import tqdm

            self.bar = tqdm(total=live["total"], initial=live["step"], desc=live["name"], unit=live["unit"], mininterval=0.5)
        self.bar.set_postfix({name: live[name] for name in ("epoch", "loss") if name in live}, refresh=False)
        self.bar.update(live["step"] - self.bar.n)
