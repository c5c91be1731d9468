"""The notebook's side of a launch: fork the cores, watch the files that they leave, end them, explain how one
failed."""

import contextlib
import ctypes
import itertools
import json
import multiprocessing
import os
import re
import signal
import sys
import time
import warnings
from typing import Any

from tqdm.auto import tqdm

from tpukit.host import files
from tpukit.host.errors import TpukitError
from tpukit.host.tables import printable
from tpukit.launching.core import Job, run_core
from tpukit.runs.signals import StopSignal

POLL_S = 0.1
GRACE_S = 3.0  # from the first core's failure to the end of all
START_TIMEOUT_S = 600.0  # for importing torch_xla and opening the chips; not yet measured on eight chips
PR_SET_PDEATHSIG = 1
STALE_FILES = re.compile(r"rank-\d+\.(log|step|stacks|hang|end)")  # what the next launch deletes


class CoreFailed(TpukitError):
    """A core failed or hung; the message holds its rank, step and traceback."""


class Supervisor:
    """Runs a `Job`: `wait` forks its cores, and returns or raises when none is left."""

    def __init__(self, job: Job):
        self.job, self.run = job, job.run
        self.dead_cores: list[int] = []  # those that went first, without leaving how they ended
        self.not_started: list[int] = []  # those that had not started in time
        self.log_shown = 0  # bytes of log.txt
        self.bar: tqdm | None = None
        job.folder.mkdir(parents=True, exist_ok=True)
        for old in job.folder.iterdir():
            if STALE_FILES.fullmatch(old.name):
                old.unlink()
        self.stop_file = self.run.path / "cores/stop"
        self.stop_file.unlink(missing_ok=True)
        (self.run.path / "progress.json").unlink(missing_ok=True)
        fork, here = multiprocessing.get_context("fork"), os.getpid()
        numbers = range(job.processes)
        self.processes = [fork.Process(target=_run_forked, args=(job, number, here)) for number in numbers]

    def wait(self) -> Any:
        """Start the cores and wait until all have ended. Returns rank 0's result; raises `CoreFailed`."""
        self.run.print(f"starting {self.job.spmd_cores or self.job.processes} cores")
        self.log_shown = (self.run.path / "log.txt").stat().st_size
        sys.stdout.flush()
        sys.stderr.flush()
        with StopSignal() as stop:
            try:
                with warnings.catch_warnings():
                    # That a process of several threads should not fork: no lock of ours is held.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    for process in self.processes:
                        process.start()
                self._watch(stop)
            finally:
                self._end_processes()
                self._show()
                if self.bar is not None:
                    self.bar.close()
        return self._result(stop)

    def _watch(self, stop):
        """Return when all cores have ended, or GRACE_S after the first failure, in which the others leave
        errors and stacks."""
        start_by, failed_at = time.monotonic() + START_TIMEOUT_S, None
        while any(process.is_alive() for process in self.processes):
            time.sleep(POLL_S)
            self._show()
            starting = [index for index in range(self.job.processes) if not self._read(index, "step")]
            if stop.signal and not self.stop_file.exists():
                files.write_atomic(self.stop_file, str(int(stop.signal)))
                if starting:  # there is nothing to save
                    return
            self.dead_cores = self.dead_cores or self._find_dead()
            if failed_at is None:
                self.not_started = starting if time.monotonic() > start_by else []
                stuck = self.not_started or self._is_hung()
                for _, pid in self._started() if stuck else ():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGUSR1)  # which makes it write its stacks
                if stuck or self.dead_cores or self._ends("failed"):
                    failed_at = time.monotonic()
            elif time.monotonic() - failed_at > GRACE_S:
                return
        self.dead_cores = self.dead_cores or self._find_dead()

    def _end_processes(self):
        """Kill the cores and what they started, and wait until they are gone."""
        for process, pid in self._started():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            process.kill()  # it may not lead its group yet
        for process, _ in self._started():
            process.join()

    def _started(self):
        """The cores that were started: (process, pid) of each."""
        return [(process, process.pid) for process in self.processes if process.pid is not None]

    def _result(self, stop):
        if self.dead_cores and not self.not_started:  # first: the others failed because it is gone
            raise CoreFailed(self._describe(self._deaths()))
        if failures := self._ends("failed"):
            first = min(failures, key=lambda end: end["time"])  # the others failed because it was gone
            what = f"{self._core(first['core'], first['step'], first['rank'])} failed:"
            raise CoreFailed(self._describe([what, first["description"]]))
        if self.not_started or self._is_hung():
            raise CoreFailed(self._describe(self._hang()))
        if stop.signal == signal.SIGTERM:
            raise SystemExit(128 + stop.signal)
        if stop.signal or self._ends("stopped"):
            raise KeyboardInterrupt
        return next(end["result"] for end in self._ends("done") if end["rank"] == 0)

    def _show(self):
        """Show the lines of log.txt that are new, and how far the function is."""
        with files.explain_unwritable(self.run.path), open(self.run.path / "log.txt", "rb") as file:
            file.seek(self.log_shown)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]
        self.log_shown += len(text)
        for line in printable(text.decode(errors="replace")).splitlines():
            with contextlib.suppress(BrokenPipeError):  # as in `Run.print`
                tqdm.write(re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", "", line))
        now = self.run.read_progress()
        if not now:
            return
        if self.bar is None:
            self.bar = tqdm(
                total=now["total"], initial=now["step"], desc=now["name"], unit=now["unit"], mininterval=0.5
            )
        self.bar.set_postfix({name: now[name] for name in ("epoch", "loss") if name in now}, refresh=False)
        self.bar.update(now["step"] - self.bar.n)

    # Reading what the cores left

    def _read(self, index, name):
        """What a core wrote to one of its files; nothing where it is not there yet."""
        path = self.job.file(index, name)
        return path.read_text(errors="replace") if path.exists() else ""

    def _ends(self, outcome):
        """What the cores that ended in this way left, see `core.run_core`."""
        ends = [self._read(index, "end") for index in range(self.job.processes)]
        return [end for end in map(json.loads, filter(None, ends)) if end["outcome"] == outcome]

    def _find_dead(self):
        gone = [index for index, process in enumerate(self.processes) if not process.is_alive()]
        return [index for index in gone if not self._read(index, "end")]  # read second: it is written before

    def _is_hung(self):
        return any(self._read(index, "hang") for index in range(self.job.processes))

    # Explaining, in lines

    def _describe(self, lines):
        """The message of a `CoreFailed`."""
        saved = "There is no checkpoint yet."
        for entry in self.run.checkpoints()[:1]:
            saved = f"The last checkpoint is {entry['file']}; launch again to resume from it."
        return "\n".join([*lines, f"{saved} What each core printed: {self.job.folder}/rank-NN.log"])

    def _deaths(self):
        lines = []
        for index in self.dead_cores:
            step, code = self._read(index, "step"), self.processes[index].exitcode or 0
            cause = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
            if code == -signal.SIGKILL:
                cause += ", often because the host's memory was full"
            lines.append(f"{self._core(index, int(step) if step else None)} ended unexpectedly: {cause}")
            lines += [*self._stack(index), *self._last_lines(index)]
        return lines

    def _hang(self):
        event = f"no core completed a step for {self.job.hang_timeout_s:g} s"
        if self.not_started:
            missing = f"{len(self.not_started)} of {self.job.processes} cores"
            event = f"{missing} did not start within {START_TIMEOUT_S:g} s"
        lines = [f"{event}. What each was doing, most recent call first:"]
        for index in range(self.job.processes):
            lines += ["", f"core {index} (full stack: {self.job.file(index, 'stacks')})"]
            lines += self._stack(index) or ["no stack"]
            if index in self.not_started:
                lines += self._last_lines(index)
        return [*lines, ""]

    def _core(self, index, step, rank=None):
        when = "while starting" if step is None else f"in step {step + 1}"
        return f"core {index}{'' if rank is None else f' (rank {rank})'} {when}"

    def _last_lines(self, index):
        return self._read(index, "log").strip().splitlines()[-15:]

    def _stack(self, index):
        """The lines of a core's faulthandler dump without idle threads, and without what called the core."""
        lines = []
        for thread in re.split(r"(?m)^(?=Thread 0x|Current thread 0x|Fatal )", self._read(index, "stacks")):
            is_idle = re.match(r".*\n.*in _worker$", thread, re.M) or "tqdm/_monitor.py" in thread
            if not is_idle:
                lines += itertools.takewhile(
                    lambda line: not line.endswith("in run_core"), thread.splitlines()
                )
        return [line for line in lines if line]


def _run_forked(job: Job, index: int, parent: int) -> None:
    os.setsid()  # an interrupt in the terminal goes to the notebook's process alone, which passes it on
    end_with_parent(parent)
    run_core(job, index)


def end_with_parent(parent: int) -> None:
    """Let Linux end this process when its parent (a pid) ends, so that a restarted kernel leaves no core
    behind."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that was asked
        os._exit(1)
