"""Writes a training's files to the disk while the training goes on."""

import collections
import concurrent.futures
import time
from collections.abc import Callable

from torch import Tensor

from tpukit.runs.run import Run

MAX_SHARE = 0.01  # of the training's time that its checkpoints may take


class Saver:
    """Writes checkpoints and best weights on a thread of its own, in the order in which it gets them.

    The training itself only copies its state. What fails, on a full disk for instance, is raised by the next
    `check` or `wait`; nothing is written after it."""

    def __init__(self, run: Run, save_every_s: float) -> None:
        self.run, self.save_every_s = run, save_every_s
        self.thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="save")
        self.last: concurrent.futures.Future | None = None  # of what was started last
        self.best = collections.deque(maxlen=1)  # still to be written: only the newest weights matter
        self.due_at = time.monotonic() + save_every_s

    def is_due(self) -> bool:
        """Whether it is time for a checkpoint, and the one before is on the disk."""
        return time.monotonic() >= self.due_at and (self.last is None or self.last.done())

    def save(self, state: dict, step: int, *, cost_s: float) -> None:
        """Start writing a checkpoint. state: as `Run.save`. cost_s: seconds it took the training to copy it.

        The next one is due `save_every_s` later, or so much later that the training spends at most MAX_SHARE
        of its time on it."""
        self._start(self.run.save, state, step, self.run.records_size())
        self.due_at = time.monotonic() + max(self.save_every_s, cost_s / MAX_SHARE)

    def save_best(self, tensors: dict[str, Tensor], **values: object) -> None:
        """Start writing the best weights, as `Run.save_best`: before any checkpoint that is started later."""
        self.best.append((tensors, values))
        self._start(self._write_best)

    def _write_best(self) -> None:
        if self.best:  # else an earlier call has written them already
            tensors, values = self.best.pop()
            self.run.save_best(tensors, **values)

    def _start(self, function: Callable, *arguments: object) -> None:
        self.last = self.thread.submit(_call_after, self.last, function, *arguments)

    def check(self) -> None:
        """Raise what made a save fail."""
        if self.last is not None and self.last.done():
            self.last.result()

    def wait(self) -> None:
        """Wait until all is written, and `check`."""
        if self.last is not None:
            self.last.result()

    def close(self) -> None:
        """Wait until all is written, and end the thread."""
        self.thread.shutdown()


def _call_after(previous: concurrent.futures.Future | None, function: Callable, *arguments: object) -> None:
    if previous is not None:
        previous.result()  # raises what made it fail, so that nothing is written after it
    function(*arguments)
