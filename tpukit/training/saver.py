"""Write the files of a training run while it trains."""

import concurrent.futures
import time
from typing import Any

from torch import Tensor, nn

from tpukit.runs.run import Run

# The arguments of `Run.save_best`, and the model that had these weights at step values["step"]
Best = tuple[dict[str, Tensor], dict[str, Any], nn.Module]


class Saver:
    """Write checkpoints on a thread, one at a time, each with the best weights that it knows of.

    The training loop only copies its state. What fails, on a full disk for instance, is raised by the next
    `wait` or save; nothing is written after it.

    best: the best weights since the last checkpoint, or None."""

    def __init__(self, run: Run, save_every_s: float) -> None:
        self.run, self.save_every_s = run, save_every_s
        self.executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="save")
        self.pending: concurrent.futures.Future | None = None
        self.best: Best | None = None
        self.writing: Best | None = None  # by `pending`
        self.due_at = time.monotonic() + save_every_s

    def is_due(self) -> bool:
        """Return True if it is time for a checkpoint and the one before is on the disk."""
        return time.monotonic() >= self.due_at and (self.pending is None or self.pending.done())

    def save(self, state: dict, step: int) -> None:
        """Start writing a checkpoint, after the best weights. state: as `Run.save`."""
        self.wait()
        records = self.run.mark_records()
        self.pending = self.executor.submit(_write, self.run, self.best, state, step, records)
        self.best, self.writing = None, self.best
        self.due_at = time.monotonic() + self.save_every_s

    def forget_failure(self) -> None:
        """Let the next save try again what failed."""
        if self.pending is not None and self.pending.exception() is not None:
            self.pending, self.best = None, self.best or self.writing

    def wait(self) -> None:
        """Wait until all is written. Raises what made the last save fail."""
        if self.pending is not None:
            self.pending.result()
            self.writing = None

    def copy_of(self, model: nn.Module | None, step: int) -> dict[str, Tensor]:
        """Return a copy of the weights that a model has at this step, if they are the best; else {}."""
        tensors, values, best_model = self.best or ({}, {}, None)
        return tensors if best_model is model and values.get("step") == step else {}

    def close(self) -> None:
        """Wait until all is written, and end the thread."""
        self.executor.shutdown()


def _write(run: Run, best: Best | None, state: dict, step: int, records: dict) -> None:
    if best is not None:
        tensors, values, _ = best
        run.save_best(tensors, **values)
    run.save(state, step, records)
