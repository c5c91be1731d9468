"""How long a step of a task takes on this machine, and the JSON files that say so to another."""

import contextlib
import dataclasses
import datetime
import functools
import itertools
import json
import math
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpukit import __version__
from tpukit.devices.chips import CHIPS, find_chip
from tpukit.host import environment, files, known_errors
from tpukit.host.environment import Environment
from tpukit.host.errors import TpukitError
from tpukit.host.tables import GIB, Table
from tpukit.runs.run import Run
from tpukit.tools.child import last_line, run_python
from tpukit.training.task import Task, from_request, model_settings, to_request

if TYPE_CHECKING:
    from tpukit.devices.runtime import Runtime

FORMAT = "tpukit comparison 1"
SYNTHETIC_IMAGES = {"mshnet": 1000}  # where there is no dataset: as many as IRSTD-1k has
ROUNDS = 5  # of timed steps; each ends with a metric sync, as an interval of a training does
WARM_UP = 4  # untimed steps after the first: torch_xla checks them for recompilations, so they are slower
CHILD = "from tpukit.tools.measure import timing; timing.answer_request()"
PLACES = {"colab": "Colab", "kaggle": "Kaggle", "tpu-vm": "Google Cloud", "local": "local"}
ENGINE = dict(torch_compile="no", channels_last="auto", cuda_graph=True, data_on="auto")  # with the defaults
POSITIVE = ("batch_size", "step_ms", "timed_steps", "chips", "cores", "samples")


# Measurements and their files


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one machine measured of one batch size of a recipe."""

    hardware: str = ""  # as in the price table
    chips: int = 0
    cores: int = 0
    accelerator: str = ""
    place: str = ""  # as in the price table; "" for a published figure
    device: str = ""
    precision: str = ""
    date: str = ""
    tpukit: str = ""
    python: str = ""
    versions: dict = dataclasses.field(default_factory=dict)
    task: str = ""
    recipe: dict = dataclasses.field(default_factory=dict)  # settings that decide the work of a step
    engine: dict = dataclasses.field(default_factory=dict)  # those that decide how fast the same work is done
    samples: int = 0  # of the training set
    batch_size: int = 0  # global
    timed_steps: int = 0
    first_step_s: float = 0.0
    start_s: float = 0.0  # from the start of the session to the end of the first step
    step_ms: float = 0.0  # median of the rounds
    step_ms_low: float = 0.0
    step_ms_high: float = 0.0
    wait_ms: float = 0.0  # of a step, for its batch
    compiled_late: int = 0  # graphs after the first steps
    memory_bytes: int = 0  # peak of a core's device; 0 where it does not tell

    @property
    def label(self) -> str:
        """What tables and pictures call the hardware."""
        name = "CPU XLA device" if self.accelerator == "xla" else self.hardware
        name += f" x {self.cores}" if self.cores > 1 else ""
        engine = [f"{key}={value}" for key, value in self.engine.items() if value != ENGINE.get(key)]
        return ", ".join([name, *engine])

    @property
    def file_name(self) -> str:
        return re.sub("[^a-z0-9]+", "-", f"{self.task} {self.label} {self.place}".lower()) + ".json"

    def epoch_s(self, images: int) -> float:
        return images // self.batch_size * self.step_ms / 1e3  # a ragged tail is dropped


def _published(hardware: str, chips: int, cores: int, epoch_s: float) -> Measurement:
    """What guides on the web say of MSHNet on IRSTD-1k, 800 images of 256x256. They do not say the batch
    size: a batch of one image stands for its share of the epoch."""
    about = Measurement(task="mshnet", recipe=dict(base_size=256, crop_size=256), samples=800, batch_size=1)
    step_ms = 1e3 * epoch_s / about.samples
    return dataclasses.replace(about, hardware=hardware, chips=chips, cores=cores, step_ms=step_ms)


PUBLISHED = (
    _published("TPU v2", 4, 8, epoch_s=30.0),
    _published("A100", 1, 1, epoch_s=60.0),
    _published("V100", 1, 1, epoch_s=120.0),
    _published("T4", 1, 1, epoch_s=180.0),
)


def write(path: Path, measurements: Sequence[Measurement]) -> None:
    """Write a file that `read` reads, here or elsewhere."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = dict(format=FORMAT, rows=[dataclasses.asdict(m) for m in measurements])
    files.write_atomic(path, json.dumps(content, indent=1) + "\n")


def read(path: Path | str) -> list[Measurement]:
    """Read a file, one of an earlier version too. Raises TpukitError that names what is wrong."""
    try:
        content = json.loads(Path(path).read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        # Earlier versions wrote once what all rows share, and also the sizes that do not fit.
        found = [_of_values(content | row) for row in content["rows"] if row.get("fits", True)]
        if not found:
            raise ValueError("no batch size fits")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise TpukitError(f"{path} is damaged, or no file of `tpukit compare`: {error}") from error
    return found


def _of_values(values: dict) -> Measurement:
    """A `Measurement` of what a file holds. Raises ValueError for another type or an impossible number."""
    plain = vars(Measurement())
    for name, default in plain.items():
        value: Any = values.get(name, default)
        right = type(value) is type(default) or (type(default), type(value)) == (float, int)
        if right and isinstance(value, int | float):  # NaN is neither below nor above a limit
            right = 0 <= value < 2**63 and (value > 0 or name not in POSITIVE)
        if not right:
            raise ValueError(f"{name} is {value!r:.60}")
    return Measurement(**{name: value for name, value in values.items() if name in plain})


def table(measurements: Sequence[Measurement]) -> Table:
    """A row for each batch size on each machine."""
    columns = ("hardware", "place", "batch", "first step, s", "ms per step", "range", "data wait")
    columns += ("images/s", "peak GiB", "compiled late")
    rows = [
        (
            f"{m.label}, {m.precision}",
            m.place,
            m.batch_size,
            f"{m.first_step_s:.1f}",
            f"{m.step_ms:.4g}",
            f"{m.step_ms_low:.4g} to {m.step_ms_high:.4g}",
            f"{m.wait_ms / m.step_ms:.0%}",
            f"{1e3 * m.batch_size / m.step_ms:.4g}",
            f"{m.memory_bytes / GIB:.2f}",
            m.compiled_late,
        )
        for m in measurements
    ]
    kinds = sorted({f"{m.task}, n = {m.timed_steps} steps, {m.date}" for m in measurements})
    return Table(f"Measured: {'; '.join(kinds)}", columns, rows)


# This machine


def hardware_of(env: Environment) -> str:
    """What the price table calls the accelerator of an environment."""
    if env.accelerator in ("cpu", "xla"):
        return "CPU"
    if env.accelerator == "tpu":
        chip = find_chip(env.device_name)
        return chip.name if chip else "TPU"
    name = env.device_name.split(",")[0]
    card = re.search(r"\bRTX (PRO )?\w+( Ti)?( SUPER)?|\b[A-Z]{1,2}\d+(?=\b|-|[A-Z])", name)  # A100-SXM4-40GB
    return card[0] if card else name


def describe(task: Task, env: Environment, cores: int) -> Measurement:
    """The `Measurement` of a task on this machine before anything is measured."""
    hardware = hardware_of(env)
    per_chip = next((chip.devices for chip in CHIPS if chip.name == hardware), 1)
    is_rented = env.accelerator == "tpu" and env.host == "local"  # nobody has a TPU at home
    recipe = model_settings(task)
    return Measurement(
        hardware=hardware,
        chips=1 if hardware == "CPU" else math.ceil(cores / per_chip),
        cores=cores,
        accelerator=env.accelerator,
        place=PLACES["tpu-vm" if is_rented else env.host],
        device=env.device_name,
        date=datetime.date.today().isoformat(),
        tpukit=__version__,
        python=env.python,
        versions=env.versions,
        task=task.name,
        recipe={name: recipe[name] for name in recipe if name not in ("batch_size", "precision", "seed")},
        engine={name: getattr(task, name) for name in ENGINE},
    )


def measure_here(
    task: Task,
    *,
    folder: Path | None = None,
    batch_sizes: Sequence[int] = (),
    steps: int = 20,
    cores: int | None = None,
    parallel: str = "processes",
    log: Callable[[str], Any] = print,
) -> list[Measurement]:
    """Measure a task on this machine at several global batch sizes, each in a process of its own, until one
    fails: most often, because it does not fit into the memory.

    folder: gets the JSON file, written after every size, so that an interrupt keeps what is there.
    batch_sizes: by default the task's own, doubled seven times, on a CPU, which gains little from a large
    batch, once. Raises TpukitError where nothing could be measured, saying why."""
    if min(steps, *batch_sizes, 1) < 1:
        raise TpukitError(f"steps={steps}, batch sizes {batch_sizes}: each must be 1 or more")
    task.check_dataset_dir()
    env = environment.detect()
    cores = cores or env.cores  # the same for every size
    blank = describe(task, env, cores)
    path = folder / blank.file_name if folder else None
    if path and path.exists():
        read(path)  # raises for a file of another kind
    first = math.ceil(task.batch_size / cores) * cores
    doubled = [first * 2**n for n in range(2 if blank.hardware == "CPU" else 8)]
    found = []
    for size in batch_sizes or doubled:
        log(f"batch {size}: measuring in a process of its own")
        answer = _run_process(dataclasses.replace(task, batch_size=size), steps, cores, parallel)
        if "why" in answer:
            log(f"batch {size}: {answer['why']}")
            break
        found.append(dataclasses.replace(blank, **answer))
        log(f"batch {size}: {found[-1].step_ms:.4g} ms per step")
        if path:
            write(path, found)
    if not found:
        raise TpukitError(f"{task.name} at batch {size} cannot be measured: {answer['why']}")
    return found


def _run_process(task: Task, steps: int, cores: int, parallel: str) -> dict:
    """What `time_steps` returned in a fresh process, or dict(why=...).

    Fresh, because a memory error, the one opening of an XLA device and a peak of memory are the whole
    process's."""
    request = to_request(task) | dict(steps=steps, cores=cores, parallel=parallel, started=time.time())
    with tempfile.TemporaryDirectory(prefix="tpukit-compare-") as folder:
        ran = run_python("-c", CHILD, folder, text=json.dumps(request))
        answer = Path(folder) / "answer.json"
        if answer.exists():  # whatever the exit code is: some devices crash when they are closed
            return json.loads(answer.read_text())
    if ran.returncode == -signal.SIGKILL:
        return dict(why="the process was killed, most likely because this machine's memory was full")
    return dict(why=last_line(ran))


def answer_request() -> None:
    """In the fresh process: time the task of the request on stdin; the answer goes into the given folder."""
    from tpukit.launching.launcher import launch
    from tpukit.launching.supervisor import end_with_parent

    end_with_parent(os.getppid())
    folder, request = Path(sys.argv[1]), json.loads(sys.stdin.read())
    task = from_request(request)
    function = functools.partial(time_steps, steps=request["steps"], started=request["started"])
    try:
        run = Run.open(folder / "run", task)
        answer = launch(function, task, run, cores=request["cores"], parallel=request["parallel"])
    except TpukitError as error:
        answer = dict(why=str(error))
    files.write_atomic(folder / "answer.json", json.dumps(answer))


def time_steps(
    task: Task, run: Run, *, runtime: "Runtime | None" = None, steps: int = 20, started: float | None = None
) -> dict:
    """Time the training step of `task` on this core, among others: a function for `launch`, like `train`.

    What runs is a training without its evaluations and checkpoints. A phased loss is timed in its last phase.
    steps: timed ones, rounded up to `ROUNDS` equal rounds. started: `time.time()` at which the session began;
    by default now. Returns a dict of fields of `Measurement`."""
    from tpukit.runs.signals import StopSignal
    from tpukit.training.setup import Trainer

    started = started or time.time()
    per_round = math.ceil(steps / ROUNDS)
    intervals = []
    with StopSignal() as stop, known_errors.explain_known_errors():
        trainer = Trainer(task, run, runtime, stop)
        trainer.model.train()
        with contextlib.closing(trainer.batches(endless=True)) as batches:
            for count in (1, WARM_UP, *[per_round] * ROUNDS):
                trainer.throughput.restart()
                for batch in trainer.throughput.batches(itertools.islice(batches, count)):
                    trainer.take_step(batch, task.epochs)
                memory = trainer.sync().memory
                compiled = trainer.runtime.counters().get("compilations", 0)
                speed = trainer.throughput.measure(task.batch_size)
                intervals.append(speed | dict(compiled=compiled, ended=time.time()))
                stop.check()
    first, warm_up, *timed = intervals
    step_ms = [1e3 * interval["seconds"] / per_round for interval in timed]
    return dict(
        precision=trainer.runtime.precision,
        samples=len(trainer.data),
        batch_size=task.batch_size,
        timed_steps=per_round * ROUNDS,
        first_step_s=first["seconds"],
        start_s=first["ended"] - started,
        step_ms=statistics.median(step_ms),
        step_ms_low=min(step_ms),
        step_ms_high=max(step_ms),
        wait_ms=1e3 * statistics.mean(interval["wait_s"] for interval in timed) / per_round,
        compiled_late=timed[-1]["compiled"] - warm_up["compiled"],
        memory_bytes=int(max((peak for peak, _ in memory), default=0)),
    )
