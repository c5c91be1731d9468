"""`tpukit compare`: time the training step of a task on this machine, keep that as a JSON file, and put the
files of several machines side by side."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tpukit import __version__
from tpukit.host import environment, files, known_errors
from tpukit.host.errors import TpukitError, reading
from tpukit.host.tables import Table
from tpukit.host.text import GIB, format_duration
from tpukit.runs.run import Run
from tpukit.training.task import Task
from tpukit_tools import subprocess_call
from tpukit_tools.subprocess_call import from_request, to_request

if TYPE_CHECKING:
    from tpukit.devices.runtime import Runtime

FORMAT = "tpukit comparison 1"
ROUNDS = 5  # rounds of timed steps; each ends with a metric sync, as an interval of a training run does
WARM_UP = 4  # untimed steps after the first: torch_xla checks them for recompilations, so they are slower


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """The training step of a task at one batch size on one machine."""

    task: str
    sample: str
    """The largest array of a training sample: "image 1x256x256"."""
    parameters: int
    """Of the model."""
    samples: int
    """Size of the training set."""
    hardware: str
    cores: int
    host: str
    """As `Environment` has it."""
    precision: str
    versions: dict[str, str]
    batch_size: int
    """Global batch size."""
    steps: int
    """Steps that were timed."""
    step_ms: float
    """Median of the rounds."""
    first_step_s: float
    memory_bytes: int | None = None
    """Peak of one device; None if it does not tell."""

    @property
    def subject(self) -> str:
        """One measurement. Only measurements of one subject can be compared."""
        return f"{self.task}, {self.sample}, {self.parameters / 1e6:.3g} M parameters"

    @property
    def machine(self) -> str:
        """The hardware with the number of its cores, its precision and where it was measured."""
        cores = f" x {self.cores}" if self.cores > 1 else ""
        return f"{self.hardware}{cores}, {self.precision}, {self.host}"


# Files


def write(path: Path, measurements: Sequence[Measurement]) -> None:
    """Write a file that `read` reads, here or elsewhere."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = dict(format=FORMAT, rows=[dataclasses.asdict(m) for m in measurements])
    files.write_atomic(path, json.dumps(content, indent=1) + "\n")


def read(path: Path | str) -> list[Measurement]:
    """Return the measurements of a file. Raise TpukitError if it has another form."""
    with reading(Path(path), f"{path} is not a file of `tpukit compare TASK`", TpukitError):
        content = json.loads(Path(path).read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}, not {FORMAT!r}")
        return [Measurement(**row) for row in content["rows"]]


# Measuring


def measure_here(
    task: Task,
    *,
    folder: Path | None = None,
    batch_sizes: Sequence[int] = (),
    steps: int = 20,
    cores: int | None = None,
    log: Callable[[str], Any] = print,
) -> list[Measurement]:
    """Measure a task on this machine at several global batch sizes, until one fails: most often, because it
    does not fit into the memory. Raise TpukitError with the reason if the first one fails.

    Args:
        folder: gets the JSON file, written after every size, so that an interrupt keeps what is there.
        batch_sizes: by default the task's own, doubled seven times; on a CPU, which gains little from a large
            batch, once.
        steps: timed steps of each size, rounded up to `ROUNDS` equal rounds.
        cores: TPU cores, GPUs, or processes on a CPU; by default all that are here.
    """
    if steps < 1:
        raise TpukitError(f"steps={steps}: it must be 1 or more")
    env = environment.detect()
    task = task.choose_settings(env)
    cores = cores or env.cores  # the same for every size
    smallest = math.ceil(task.batch_size / cores) * cores
    count = 8 if env.accelerator in ("tpu", "cuda") else 2
    measured = []
    for size in batch_sizes or [smallest * 2**n for n in range(count)]:
        log(f"batch {size}: measuring in a process of its own")
        try:
            measured.append(_measure(dataclasses.replace(task, batch_size=size), steps, cores))
        except TpukitError as error:
            if not measured:
                raise TpukitError(f"{task.name} at batch {size} cannot be measured: {error}") from error
            log(f"batch {size}: {error}")
            break
        log(f"batch {size}: {measured[-1].step_ms:.4g} ms per step")
        if folder:
            name = f"{measured[0].subject} {measured[0].machine}".lower()
            write(folder / f"{re.sub('[^a-z0-9]+', '-', name)}.json", measured)
    return measured


def _measure(task: Task, steps: int, cores: int) -> Measurement:
    """Measure one batch size in a fresh process, because a memory error, the one opening of an XLA device and
    a peak of memory belong to a whole process."""
    with tempfile.TemporaryDirectory(prefix="tpukit-compare-") as folder:
        request = dict(task=to_request(task), steps=steps, cores=cores, folder=folder)
        return Measurement(**subprocess_call.call(answer_request, request))


def answer_request(request: dict[str, Any]) -> dict[str, Any]:
    """In the fresh process: time the task of a request. Return the fields of its `Measurement`."""
    from tpukit.launching.launcher import launch

    task = from_request(request["task"])
    function = functools.partial(time_steps, steps=request["steps"])
    return launch(function, task, Run.open(Path(request["folder"]) / "run", task), cores=request["cores"])


def time_steps(task: Task, run: Run, *, runtime: Runtime | None = None, steps: int = 20) -> dict[str, Any]:
    """Time the training step of `task` on this core, among others: a function for `launch`, like `train`.

    It is a training run without evaluations and checkpoints. A phased loss is timed in its last phase.
    Return the fields of a `Measurement`."""
    from tpukit.host.signals import StopSignal
    from tpukit.training.setup import Trainer

    per_round = math.ceil(steps / ROUNDS)
    rounds_s = []
    with StopSignal() as stop, known_errors.explain_known_errors():
        trainer = Trainer(task, run, runtime, stop)
        trainer.model.train()
        with contextlib.closing(trainer.batches(endless=True)) as batches:
            for count in (1, WARM_UP, *[per_round] * ROUNDS):
                started = time.monotonic()
                for batch in itertools.islice(batches, count):
                    trainer.take_step(batch, task.epochs)
                memory = trainer.sync().memory
                rounds_s.append(time.monotonic() - started)
                stop.check()
    first_step_s, _, *timed_s = rounds_s
    env = environment.detect()
    return dict(
        task=task.name,
        sample=sample_size(trainer.data),
        parameters=sum(p.numel() for p in trainer.model.parameters()),
        samples=len(trainer.data),
        hardware=env.device_name.partition(" (")[0],
        cores=trainer.runtime.cores,
        host=env.host,
        precision=trainer.runtime.precision,
        versions=dict(tpukit=__version__, python=env.python, **env.versions),
        batch_size=task.batch_size,
        steps=per_round * ROUNDS,
        step_ms=1e3 * statistics.median(timed_s) / per_round,
        first_step_s=first_step_s,
        memory_bytes=max((int(peak) for peak, _ in memory), default=None),
    )


def sample_size(data: Any) -> str:
    """Return the name and shape of the largest array of a training sample: "image 1x256x256"."""
    sample = data.batch(np.arange(1), np.full((1, data.num_uniforms), 0.5))
    shapes = {name: np.shape(values)[1:] for name, values in sample.items()}
    largest = max(shapes, key=lambda name: math.prod(shapes[name]))
    return f"{largest} {'x'.join(map(str, shapes[largest]))}"


# Comparing


def compare(measurements: Sequence[Measurement], *, epochs: int = 400) -> list[Table]:
    """Return a table for each subject, because steps of other tasks, sizes or models are other work. It has a
    row for each batch size on each machine, the fastest first.

    Args:
        measurements: of `measure_here` or `read`.
        epochs: of the whole training run. An epoch has the samples of the largest training set.
    """
    if not 1 <= epochs < 2**63:
        raise TpukitError(f"epochs={epochs}: it must be 1 or more")
    tables = []
    for subject in sorted({m.subject for m in measurements}):
        own = [m for m in measurements if m.subject == subject]
        samples = max(m.samples for m in own)
        columns = ["hardware and place", "torch", "batch", "first step, s", "ms per step", "samples/s"]
        columns += ["peak GiB", f"{epochs} epochs"]
        rows = [
            (
                m.machine,
                m.versions.get("torch"),
                m.batch_size,
                f"{m.first_step_s:.1f}",
                f"{m.step_ms:.4g}",
                f"{1e3 * m.batch_size / m.step_ms:.4g}",
                m.memory_bytes and f"{m.memory_bytes / GIB:.2f}",
                format_duration(epochs * samples / m.batch_size * m.step_ms / 1e3),
            )
            for m in sorted(own, key=lambda m: m.step_ms / m.batch_size)
        ]
        title = f"{subject}: {epochs} epochs of {samples} samples, without evaluations"
        tables.append(Table(title, columns, rows))
    return tables
