"""The notebook's side of a launch: fork the cores, watch the files that they leave, end them, explain how one
failed."""

import contextlib
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

from tpukit.host import files
from tpukit.host.bars import tqdm
from tpukit.host.errors import TpukitError, Unreadable, unreadable
from tpukit.host.signals import AFTER_THIS_STEP, StopSignal, end_with_parent
from tpukit.host.text import printable
from tpukit.launching.job import PRINTED, Job
from tpukit.runs.tensors import load_tensors

POLL_S = 0.1
GRACE_S = 3.0  # from the first core's failure to the end of all
# What the next launch deletes
STALE_FILES = re.compile(rf"rank-\d+\.(log|step|stacks|hang|result|end)|stop|{re.escape(PRINTED)}")
# What tqdm prints for a bar below another one: down, the bar, and up again
NESTED_BAR = re.compile(rb"\n+(\r[^\n]*?)(?:\x1b\[A)+")
OVERWRITTEN = re.compile(rb"(?:[^\r\n]*\r)+(?=[^\r\n])")


class CoreFailed(TpukitError):
    """A core failed or hung; the message holds its rank, step and traceback."""


class Supervisor:
    """Runs a `Job`: `wait` forks its cores, and returns or raises when none is left."""

    def __init__(self, job: Job):
        self.job, self.plan = job, job.plan
        self.dead_cores: list[int] = []  # those that died first, without writing an end file
        self.bytes_read = 0  # how much of rank 0's output was read
        self.unended = b""  # its last line, which may go on
        self.bar: tqdm | None = None
        job.folder.mkdir(parents=True, exist_ok=True)
        for old in job.folder.iterdir():
            if STALE_FILES.fullmatch(old.name):
                old.unlink()
        self.printed, self.stop_file = job.folder / PRINTED, job.folder / "stop"
        self.printed.touch()
        fork, here = multiprocessing.get_context("fork"), os.getpid()
        numbers = range(job.processes)
        self.processes = [fork.Process(target=_run_forked, args=(job, number, here)) for number in numbers]

    def wait(self) -> Any:
        """Start the cores and wait until all have ended. Return rank 0's result; raise `CoreFailed`."""
        self.plan.say(f"starting {self.job.processes} cores")
        sys.stdout.flush()
        sys.stderr.flush()
        with StopSignal(AFTER_THIS_STEP if self.plan.trains else "ending all cores") as stop:
            try:
                with warnings.catch_warnings():
                    # That a process of several threads should not fork: no lock of ours is held.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    for process in self.processes:
                        process.start()
                self._watch(stop)
            finally:
                self._end_processes()
                self._show(is_over=True)
                if self.bar is not None:
                    self.bar.close()
        return self._result(stop)

    def _watch(self, stop: StopSignal) -> None:
        """Return when all cores have ended, or GRACE_S after the first failure, in which the others leave
        errors and stacks."""
        failed_at = None
        while any(process.is_alive() for process in self.processes):
            time.sleep(POLL_S)
            self._show()
            if stop.signal and not self.stop_file.exists():
                if self._starting() or not self.plan.trains:  # there is nothing to save
                    return
                with contextlib.suppress(OSError):  # else the next round asks for it
                    self.stop_file.write_text(str(int(stop.signal)))
            self.dead_cores = self.dead_cores or self._find_dead()
            if failed_at is None:
                if is_hung := self._is_hung():
                    for _, pid in self._started():
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGUSR1)  # the core writes its stacks
                if is_hung or self.dead_cores or self._ends("failed") or self._left_alone():
                    failed_at = time.monotonic()
            elif time.monotonic() - failed_at > GRACE_S:
                return
        self.dead_cores = self.dead_cores or self._find_dead()

    def _end_processes(self) -> None:
        """Kill the cores and what they started, and wait until they are gone."""
        for process, pid in self._started():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            process.kill()  # it may not lead its group yet
        for process, _ in self._started():
            process.join()

    def _started(self):
        """Return (process, pid) of the cores that were started."""
        return [(process, process.pid) for process in self.processes if process.pid is not None]

    def _result(self, stop: StopSignal) -> Any:
        if self.dead_cores:  # first: the others failed because it is gone
            raise CoreFailed(self._describe(self._deaths()))
        if sentence := self._left_alone():
            raise CoreFailed(self._describe([sentence]))
        if failures := self._ends("failed"):
            first = min(failures, key=lambda end: end["time"])  # the others failed because it was gone
            raise CoreFailed(self._describe([f"{first['where']} failed:", first["description"]]))
        if self._is_hung():
            raise CoreFailed(self._describe(self._hang()))
        if stop.signal and stop.signal != signal.SIGINT:
            raise SystemExit(128 + stop.signal)
        if stop.signal or self._ends("stopped"):
            raise KeyboardInterrupt
        alone = [end["alone"] for end in self._ends("done")]  # see `_StepsAlone.end`
        if all(alone) and len({number for _, number in alone}) > 1:
            self.plan.say(
                f"{alone[0][0]} optimizer steps, and nothing averaged their gradients: each core trained its"
                " own model. After backward(), call core.average_gradients(optimizer)."
            )
        [result] = self.job.folder.glob("rank-*.result")
        with open(result, "rb") as file:
            return load_tensors(file)

    def _show(self, *, is_over: bool = False) -> None:
        """Show what rank 0 has printed since the last call, in whole lines until the launch is over, or as
        far as a progress bar has redrawn one, and how far the function is."""
        data = b""
        with contextlib.suppress(OSError), open(self.printed, "rb") as file:  # else the next call shows it
            file.seek(self.bytes_read)
            data = file.read()
        self.bytes_read += len(data)
        text = NESTED_BAR.sub(rb"\1", self.unended + data)
        *lines, self.unended = OVERWRITTEN.sub(b"\r", text).split(b"\n")
        shown = [(line, "\n") for line in lines]
        if self.unended and (is_over or data and b"\r" in self.unended):
            shown.append((self.unended, "\n" if is_over else "\r"))
        for line, end in shown:
            words = printable(line.strip(b"\r").decode(errors="replace"))
            with contextlib.suppress(OSError):  # the reader may be gone (`| head`), or the terminal
                tqdm.write(words, end=end)
        now = self.plan.progress()
        if not now:
            return
        if self.bar is None:
            self.bar = tqdm(
                total=now["total"], initial=now["step"], desc=now["name"], unit=now["unit"], mininterval=0.5
            )
        shown = {name: now[name] for name in ("epoch", "loss") if name in now}
        self.bar.set_postfix(shown, refresh=False)  # pyright: ignore[reportUnknownMemberType] (of the stub)
        self.bar.update(now["step"] - self.bar.n)

    # Reading what the cores left

    def _read(self, index: int, name: str) -> str:
        """Return what a core wrote to one of its files; nothing if it is not there yet. Raises Unreadable if
        the disk does not tell for some seconds: without it, cores that train on would look dead."""
        path = self.job.file(index, name)
        for pause_s in (0.0, 0.5, 3.0):
            time.sleep(pause_s)
            with contextlib.suppress(Unreadable):
                return files.read_bytes(path).decode(errors="replace") if files.exists(path) else ""
        raise unreadable(path, "tried three times")

    def _ends(self, outcome: str) -> list[dict[str, Any]]:
        """Return the endings of the cores that ended in this way, see `core_process.run_core`."""
        ends = [self._read(index, "end") for index in range(self.job.processes)]
        return [end for end in map(json.loads, filter(None, ends)) if end["outcome"] == outcome]

    def _find_dead(self) -> list[int]:
        gone = [index for index, process in enumerate(self.processes) if not process.is_alive()]
        return [index for index in gone if not self._read(index, "end")]  # read second: it is written before

    def _left_alone(self) -> str:
        """Return a sentence if a core has ended, and another one is in a collective that waits for it."""
        if not (done := self._ends("done")):
            return ""
        steps = [[*map(int, self._read(index, "step").split()), 0, 0] for index in range(self.job.processes)]
        entered = [numbers[1] for numbers in steps]
        first: int = min((end["core"] for end in done), key=entered.__getitem__)
        last = entered.index(max(entered))
        sentence = f"core {first} ended after {steps[first][0]} steps, and core {last} waits for it in step"
        advice = "give every core the same number of batches, as drop_last=True does"
        return f"{sentence} {steps[last][0] + 1}: {advice}" if entered[first] < entered[last] else ""

    def _starting(self) -> list[int]:
        return [index for index in range(self.job.processes) if not self._read(index, "step")]

    def _is_hung(self) -> bool:
        return any(self._read(index, "hang") for index in range(self.job.processes))

    # Explaining, in lines

    def _describe(self, lines: list[str]) -> str:
        """Return the message of a `CoreFailed`."""
        logs = f"What each core printed: {self.job.folder}/rank-NN.log"
        return "\n".join([*lines, f"{self.plan.saved()} {logs}".strip()])

    def _deaths(self) -> list[str]:
        lines: list[str] = []
        for index in self.dead_cores:
            step = self._read(index, "step")
            where = self.job.describe(index, int(step.split()[0]) if step else None)
            code = self.processes[index].exitcode or 0
            cause = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
            if code == -signal.SIGKILL:
                cause += ", often because the host's memory was full"
            lines += [f"{where} ended unexpectedly: {cause}", *self._traces(index)]
        return lines

    def _hang(self) -> list[str]:
        starting = self._starting()
        event = f"no core completed a step for {self.job.hang_timeout_s:g} s"
        if starting:
            missing = f"{len(starting)} of {self.job.processes} cores"
            event = f"{missing} did not start within {self.job.start_timeout_s:g} s"
        lines = [f"{event}. What each was doing, most recent call first:"]
        for index in range(self.job.processes):
            lines += ["", f"core {index} (full stack: {self.job.file(index, 'stacks')})"]
            lines += self._traces(index)
        return [*lines, ""]

    def _traces(self, index: int) -> list[str]:
        """Return the lines of a core's faulthandler dump, without idle threads and what called the core, and
        the last lines of its log."""
        lines: list[str] = []
        for thread in re.split(r"(?m)^(?=Thread 0x|Current thread 0x|Fatal )", self._read(index, "stacks")):
            is_idle = re.match(r".*\n.*in _worker$", thread, re.M) or "tqdm/_monitor.py" in thread
            if not is_idle:
                lines += itertools.takewhile(
                    lambda line: not line.endswith("in run_core"), thread.splitlines()
                )
        shown = files.read_bytes(self.printed).decode(errors="replace").splitlines()
        log = self._read(index, "log").strip().splitlines()[-15:]
        return [*filter(None, lines), *(line for line in log if line not in shown)]


def _run_forked(job: Job, index: int, parent: int) -> None:
    from tpukit.launching.core_process import run_core  # here: the notebook's process opens no device

    os.setsid()  # an interrupt in the terminal goes to the notebook's process alone, which passes it on
    end_with_parent(parent)
    run_core(job, index)
