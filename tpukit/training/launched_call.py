"""What a launch must know of the call of a training run: `launched_call`."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from tpukit.devices.runtime import check_batch
from tpukit.launching.core import Core
from tpukit.launching.job import LaunchedCall
from tpukit.runs.folder_lock import exclusive_lock
from tpukit.runs.run import Run
from tpukit.training import batch_norm


class Launched(Protocol):
    """The part of a task that a launch asks for."""

    @property
    def batch_size(self) -> int: ...
    @property
    def micro_batches(self) -> int: ...
    @property
    def batch_norm(self) -> str: ...
    @property
    def precision(self) -> str: ...
    def model(self) -> nn.Module: ...


def launched_call(task: Launched, run: Run, *others: Any) -> LaunchedCall:
    """Return the plan of `launch(train, task, run)`, or of another function of a task and a run.

    It gets this core's `runtime`, and on ranks other than 0 a run that writes nothing. The cores leave their
    files in the run's folder."""

    def arguments(core: Core) -> tuple[tuple, dict[str, Any]]:
        run.is_launched = core.is_forked
        own = run if core.rank == 0 else run.read_only()
        return (task, own, *others), dict(runtime=core.runtime)

    @contextlib.contextmanager
    def reserve() -> Iterator[Path]:
        with exclusive_lock(run.path / ".launch.lock"):
            with run.lock():  # a training run on one core may be at work there
                pass
            (run.path / "progress.json").unlink(missing_ok=True)
            yield run.path / "cores"

    def check(function: Callable[..., Any], cores: int) -> None:
        if not hasattr(getattr(function, "func", function), "rounds_batch_up"):  # as `evaluation.test` does
            check_batch(task.batch_size, cores)

    def why_one_gpu(gpus: int) -> str:
        share = task.batch_size // gpus // task.micro_batches
        return batch_norm.why_one_gpu(task.model, task.batch_norm, share, task.batch_size)

    def saved() -> str:
        for entry in run.checkpoints()[:1]:
            return f"The last checkpoint is {entry['file']}; launch again to resume from it."
        return "There is no checkpoint yet."

    return LaunchedCall(
        arguments=arguments,
        reserve=reserve,
        say=run.print,
        progress=run.read_progress,
        saved=saved,
        precision=task.precision,
        check=check,
        why_one_gpu=why_one_gpu,
        trains=True,
    )
