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
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

import numpy as np

from tpukit import __version__
from tpukit.host import environment, files, known_errors
from tpukit.host.errors import TpukitError
from tpukit.host.json_types import has_type
from tpukit.host.tables import GIB, Table, format_duration
from tpukit.reporting import display, figures
from tpukit.runs.run import Run
from tpukit.tools import child
from tpukit.training.task import Task, from_request, to_request

if TYPE_CHECKING:
    from tpukit.devices.runtime import Runtime

FORMAT = "tpukit comparison 1"
MAX_ROWS = 100  # of a file: a batch size doubles at most seven times
ROUNDS = 5  # of timed steps; each ends with a metric sync, as an interval of a training does
WARM_UP = 4  # untimed steps after the first: torch_xla checks them for recompilations, so they are slower
NOT_MEASURED = "published, not measured"
# (host, accelerator) -> hours of the longest session, hours a week. Kaggle's as users reported them in
# November 2025; Colab's by its FAQ of May 2026, which says nothing of a week.
SESSION_HOURS = {
    ("kaggle", "tpu"): (9, 20),
    ("kaggle", "cuda"): (12, 30),
    ("colab", "tpu"): (12, math.inf),
    ("colab", "cuda"): (12, math.inf),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """The training step of a task at one batch size on one machine."""

    task: str
    sample: str  # the largest array of a training sample: "image 1x256x256"
    parameters: int  # of the model
    samples: int  # of the training set
    hardware: str
    cores: int
    host: str = NOT_MEASURED  # as `Environment` has it, and the accelerator too
    accelerator: str = ""
    precision: str = ""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    batch_size: int  # global
    steps: int = 0  # timed
    step_ms: float  # median of the rounds
    first_step_s: float | None = None  # None: not known
    memory_bytes: int | None = None  # peak of one device; None where it does not tell

    @property
    def subject(self) -> str:
        """What was measured. Only measurements of one subject can be compared."""
        return f"{self.task}, {self.sample}, {self.parameters / 1e6:.3g} M parameters"

    @property
    def machine(self) -> str:
        """The hardware with the number of its cores, its precision and where it was measured."""
        cores = f" x {self.cores}" if self.cores > 1 else ""
        return ", ".join(filter(None, (self.hardware + cores, self.precision, self.host)))


def _published(hardware: str, cores: int, batch_size: int, epoch_s: float) -> Measurement:
    """An epoch of MSHNet on the 800 training images of IRSTD-1k, 256x256, as guides on the web give it."""
    return Measurement(
        task="mshnet",
        sample="image 1x256x256",
        parameters=4_065_513,
        samples=800,
        hardware=hardware,
        cores=cores,
        batch_size=batch_size,
        step_ms=1e3 * epoch_s * batch_size / 800,
    )


PUBLISHED = (
    _published("TPU v2", cores=8, batch_size=32, epoch_s=30.0),
    _published("A100", cores=1, batch_size=16, epoch_s=60.0),
    _published("V100", cores=1, batch_size=8, epoch_s=120.0),
    _published("T4", cores=1, batch_size=4, epoch_s=180.0),
)


# Files


def file_name(*words: str) -> str:
    """Return words as the name of a file, without its ending."""
    return re.sub("[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


def write(path: Path, measurements: Sequence[Measurement]) -> None:
    """Write a file that `read` reads, here or elsewhere."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = dict(format=FORMAT, rows=[dataclasses.asdict(m) for m in measurements])
    files.write_atomic(path, json.dumps(content, indent=1) + "\n")


def read(path: Path | str) -> list[Measurement]:
    """Return the measurements of a file. Raise TpukitError if it has another form."""
    try:
        content = json.loads(Path(path).read_text())
        if not has_type(content, dict(format=Literal[FORMAT], rows=list[Any])):
            raise ValueError(f"it has not the form {FORMAT!r}")
        rows = content["rows"]
        if not (1 <= len(rows) <= MAX_ROWS and all(map(_is_measurement, rows))):
            raise ValueError("it is damaged")
        return [Measurement(**row) for row in rows]
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise TpukitError(f"{path} is no file of `tpukit compare TASK`: {error}") from error


def _is_measurement(row: Any) -> bool:
    """Return whether the values have the types of a `Measurement`'s, and all numbers are positive."""
    if not has_type(row, get_type_hints(Measurement)):
        return False
    return all(value > 0 for value in row.values() if isinstance(value, int | float))


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
            name = file_name(measured[0].subject, measured[0].machine)
            write(folder / f"{name}.json", measured)
    return measured


def _measure(task: Task, steps: int, cores: int) -> Measurement:
    """Measure one batch size in a fresh process, because a memory error, the one opening of an XLA device and
    a peak of memory belong to a whole process."""
    with tempfile.TemporaryDirectory(prefix="tpukit-compare-") as folder:
        request = dict(task=to_request(task), steps=steps, cores=cores, folder=folder)
        return Measurement(**child.call(answer_request, request))


def answer_request(request: dict[str, Any]) -> dict[str, Any]:
    """In the fresh process: time the task of a request. Return the fields of its `Measurement`."""
    from tpukit.launching.launcher import launch

    task = from_request(request["task"])
    function = functools.partial(time_steps, steps=request["steps"])
    return launch(function, task, Run.open(Path(request["folder"]) / "run", task), cores=request["cores"])


def time_steps(task: Task, run: Run, *, runtime: Runtime | None = None, steps: int = 20) -> dict[str, Any]:
    """Time the training step of `task` on this core, among others: a function for `launch`, like `train`.

    It runs a training without its evaluations and checkpoints. A phased loss is timed in its last phase.
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
        accelerator=env.accelerator,
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


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Measurements of one subject (task, size of its samples, model) on several machines."""

    subject: str
    measurements: list[Measurement]
    epochs: int  # of the training that they are compared for
    samples: int  # of an epoch

    @property
    def training(self) -> str:
        return f"{self.epochs} epochs of {self.samples} samples, without evaluations"

    def hours(self, m: Measurement) -> float:
        """Return the hours of all steps of the training at one measurement's speed."""
        return self.epochs * self.samples / m.batch_size * m.step_ms / 3.6e6

    def duration(self, m: Measurement) -> str:
        """Return these hours in words; where the host's sessions are too short, with how many it takes, or
        more, because each starts up again."""
        hours = self.hours(m)
        session_h, week_h = SESSION_HOURS.get((m.host, m.accelerator), (math.inf, math.inf))
        words = format_duration(3600 * hours)
        if hours > session_h:
            words += f", {math.ceil(hours / session_h)} or more sessions"
        if hours > week_h:
            words += f" in {math.ceil(hours / week_h)} or more weeks"
        return words

    def table(self) -> Table:
        """Return a row for each batch size on each machine, the fastest first."""
        columns = ["hardware and place", "torch", "batch", "first step, s", "ms per step", "samples/s"]
        columns += ["peak GiB", f"{self.epochs} epochs"]
        rows = [
            (
                m.machine,
                m.versions.get("torch"),
                m.batch_size,
                m.first_step_s and f"{m.first_step_s:.1f}",
                f"{m.step_ms:.4g}",
                f"{1e3 * m.batch_size / m.step_ms:.4g}",
                m.memory_bytes and f"{m.memory_bytes / GIB:.2f}",
                self.duration(m),
            )
            for m in sorted(self.measurements, key=self.hours)
        ]
        return Table(f"{self.subject}: {self.training}", columns, rows)

    def figure(self) -> Any:
        """Return bars of the hours on each machine at its fastest batch size: blue if measured, else grey."""
        slowest_first = sorted(self.measurements, key=self.hours, reverse=True)
        fastest = {m.machine: m for m in slowest_first}.values()
        shown = sorted(fastest, key=self.hours, reverse=True)
        figure, ((axis,),) = figures.subplots(1, 1, (9.6, 1.2 + 0.3 * max(len(shown), 3)))
        colours = [figures.GREY if m.host == NOT_MEASURED else figures.BLUE for m in shown]
        bars = axis.barh(range(len(shown)), [self.hours(m) for m in shown], color=colours)
        words = [figures.label(f" {self.duration(m)}") for m in shown]
        axis.bar_label(bars, words, fontsize=8, color=figures.GREY, padding=3)
        names = [f"batch {m.batch_size}, {m.machine}" for m in shown]
        axis.set_yticks(range(len(shown)), [figures.label(name) for name in names])
        axis.margins(x=0.4)  # room for the words
        figures.finish(axis, self.subject, f"hours of {self.training}")
        axis.grid(False, axis="y")  # its lines would strike the words through
        return figure

    def show(self, folder: Path | None = None) -> None:
        """Show the table and the bars. folder: gets the bars as a PNG file."""
        picture = folder / f"{file_name(self.subject)}.png" if folder else None
        display.present(self.table())
        display.present_figure(self.figure(), picture)


def compare(measurements: Sequence[Measurement] = (), *, epochs: int = 400) -> list[Comparison]:
    """Return a `Comparison` for each subject, because steps of other tasks, sizes or models are other work.

    Args:
        measurements: of `measure_here` or `read`. Published figures join those of their own subject; without
            any measurement they are all there is.
        epochs: of the whole training. An epoch has the samples of the largest training set that was measured.
    """
    if not 1 <= epochs < 2**63:
        raise TpukitError(f"epochs={epochs}: it must be 1 or more")
    comparisons = []
    for subject in sorted({m.subject for m in measurements or PUBLISHED}):
        own = [m for m in (*measurements, *PUBLISHED) if m.subject == subject]
        comparisons.append(Comparison(subject, own, epochs, max(m.samples for m in own)))
    return comparisons
