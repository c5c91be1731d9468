"""The training step of a recipe, timed on this machine at several batch sizes, each in a process of its own,
and the small JSON file of the result."""

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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpukit import __version__
from tpukit.devices.chips import CHIPS, find_chip
from tpukit.host import environment, files, known_errors
from tpukit.host.errors import TpukitError
from tpukit.host.tables import GIB, Table
from tpukit.runs.run import settings_dict
from tpukit.tasks.datasets import SYNTHETIC_NOTE
from tpukit.tools.child import last_line, run_python
from tpukit.training.task import Task, from_request, to_request

if TYPE_CHECKING:
    from tpukit.devices.runtime import Runtime
    from tpukit.host.environment import Environment
    from tpukit.runs.run import Run

FORMAT = "tpukit comparison 1"
SYNTHETIC_IMAGES = {"mshnet": 640}  # where there is no dataset: enough for large batches
ROUNDS = 5  # of timed steps; each ends with a metric sync, as an interval of a training does
WARM_UP = 4  # untimed steps after the first: torch_xla checks them for recompilations, so they are slower
MAX_BATCH = 1024  # where doubling ends; on a CPU, which gains little from a large batch, after one doubling
TOO_LARGE = re.compile(
    r"does not fit into the device's memory|RESOURCE_EXHAUSTED|out of memory|can.t allocate memory|bad_alloc"
    r"|MemoryError|the host's memory was full",
    re.IGNORECASE,
)
PLACES = {"colab": "Colab", "kaggle": "Kaggle", "tpu-vm": "Google Cloud", "local": "local"}
NON_RECIPE = ("batch_size", "precision", "seed", "weights")
ENGINE = dict(torch_compile="no", channels_last="auto", cuda_graph=True, data_on="auto")  # with the defaults
COUNTS = dict.fromkeys(("batch_size", "timed_steps", "compiled_late", "memory_bytes"), int)
TIMES = dict.fromkeys(("first_step_s", "start_s", "step_ms", "step_ms_low", "step_ms_high", "wait_ms"), float)
POSITIVE = ("batch_size", "step_ms", "timed_steps", "chips", "cores", "processes", "samples")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one machine measured of one recipe: the content of a JSON file."""

    tpukit: str
    date: str
    hardware: str  # as in the price table
    chips: int
    accelerator: str
    place: str
    device: str
    cores: int
    processes: int
    precision: str
    python: str
    versions: dict
    task: str
    recipe: dict  # the settings that decide the work of a step; only files that agree in them can be compared
    engine: dict = dataclasses.field(default_factory=dict)  # those that decide how fast the same work is done
    samples: int
    synthetic: bool
    rows: list  # a dict for each batch size
    file: str = dataclasses.field(default="", compare=False)  # where it was read from

    @property
    def label(self) -> str:
        """What tables and plots call the hardware."""
        name = "CPU XLA device" if self.accelerator == "xla" else self.hardware
        name += f" x {self.cores}" if self.cores > 1 else ""
        return ", ".join([name, *_describe_engine(self.engine)])

    @property
    def fitting(self) -> list[dict]:
        return [row for row in self.rows if row["fits"]]

    def table(self) -> Table:
        """A row for each batch size."""
        columns = ("batch", "first step, s", "ms per step", "range", "data wait", "images/s")
        columns += (f"epoch of {self.samples}, s", "peak GiB", "compiled late")
        rows: list[tuple] = []
        for row in self.rows:
            if not row["fits"]:
                rows.append((row["batch_size"], "", "does not fit", row["why"], *[""] * 5))
                continue
            cells = [row["batch_size"], f"{row['first_step_s']:.1f}", f"{row['step_ms']:.4g}"]
            cells += [f"{row['step_ms_low']:.4g} to {row['step_ms_high']:.4g}"]
            cells += [f"{row['wait_ms'] / row['step_ms']:.0%}", f"{images_per_s(row):.4g}"]
            cells += [f"{epoch_seconds(row['step_ms'] / 1e3, row['batch_size'], self.samples):.4g}"]
            rows.append((*cells, f"{row['memory_bytes'] / GIB:.2f}", row["compiled_late"]))
        fitting = self.fitting[-1:]
        conditions = [f"; n = {row['timed_steps']} steps; memory: {row['memory_of']}" for row in fitting]
        title = f"{self.task} on {self.label}, {self.precision}: measured {self.date}"
        return Table("".join([title, *conditions]), columns, rows)

    def write(self, path: Path) -> None:
        content = dict(format=FORMAT, **dataclasses.asdict(self))
        del content["file"]
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_atomic(path, json.dumps(content, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path | str) -> "Measurement":
        """Read a file that was written here or elsewhere. Raises TpukitError that names what is wrong."""
        try:
            content = json.loads(Path(path).read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise TpukitError(f"{path} cannot be read, or is damaged: {error}") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise TpukitError(f"{path} is no measurement by `tpukit compare`: its format is not {FORMAT!r}")
        kinds = {field.name: field.type for field in dataclasses.fields(cls) if field.name != "file"}
        content = _check(str(path), dict(engine={}) | content, kinds)
        for number, row in enumerate(content["rows"]):
            where = f"{path}, rows[{number}]"
            fits = _check(where, row if isinstance(row, dict) else {}, dict(fits=bool))["fits"]
            _check(
                where, row, COUNTS | TIMES | dict(memory_of=str) if fits else dict(batch_size=int, why=str)
            )
        return cls(**content, file=str(path))


def _check(where: str, content: dict, kinds: dict) -> dict:
    """The values of these names. Raises TpukitError for a missing one, another type, an impossible number."""
    for name, kind in kinds.items():
        if name not in content:
            raise TpukitError(f"{where} is damaged: it has no {name}")
        value = content[name]
        right = type(value) is kind or kind is float and type(value) is int
        if kind in (int, float):  # NaN is neither below nor above a limit
            right = right and 0 <= value < 2**63 and (value > 0 or name not in POSITIVE)
        if not right:
            raise TpukitError(f"{where} is damaged: {name} is {value!r:.60}")
    return {name: content[name] for name in kinds}


def images_per_s(row: dict) -> float:
    return 1e3 * row["batch_size"] / row["step_ms"]


def epoch_seconds(step_s: float, batch_size: int, images: int) -> float:
    return images // batch_size * step_s  # a ragged tail is dropped


def build_measurement(task: Task, env: "Environment", result: dict, rows: list[dict]) -> Measurement:
    """The `Measurement` of a task. result: what `time_steps` returned for one of the rows."""
    free = {field.name for field in dataclasses.fields(task) if field.metadata.get("free")}
    recipe = {
        name: v for name, v in settings_dict(task).items() if name not in NON_RECIPE and name not in free
    }
    note = Path(task.dataset_dir or "/nowhere") / "README.txt"
    per_chip = next((chip.devices for chip in CHIPS if chip.name == hardware_of(env)), 1)
    return Measurement(
        tpukit=__version__,
        date=datetime.date.today().isoformat(),
        hardware=hardware_of(env),
        chips=math.ceil(result["cores"] / per_chip) if env.accelerator in ("tpu", "cuda") else 1,
        accelerator=env.accelerator,
        place=_place_of(env),
        device=env.device_name,
        python=env.python,
        versions=env.versions,
        task=task.name,
        recipe=recipe,
        engine={name: getattr(task, name) for name in ENGINE},
        synthetic=note.is_file() and note.read_text(errors="replace") == SYNTHETIC_NOTE,
        rows=rows,
        **{name: result[name] for name in ("cores", "processes", "precision", "samples")},
    )


def hardware_of(env: "Environment") -> str:
    """What the price table calls the accelerator of an environment."""
    if env.accelerator in ("cpu", "xla"):
        return "CPU"
    if env.accelerator == "tpu":
        chip = find_chip(env.device_name)
        return chip.name if chip else "TPU"
    name = env.device_name.split(",")[0]
    card = re.search(r"\bRTX (PRO )?\w+( Ti)?( SUPER)?|\b[A-Z]{1,2}\d+(?=\b|-|[A-Z])", name)  # A100-SXM4-40GB
    return card[0] if card else name


def _place_of(env: "Environment") -> str:
    is_rented = env.accelerator == "tpu" and env.host == "local"  # nobody has a TPU at home
    return PLACES["tpu-vm" if is_rented else env.host]


def _describe_engine(engine: dict) -> list[str]:
    """The settings that are not the defaults."""
    return [f"{name}={engine[name]}" for name in ENGINE if engine.get(name, ENGINE[name]) != ENGINE[name]]


def file_for(folder: Path, task: Task, env: "Environment", cores: int | None = None) -> Path:
    """The file of a measurement of this machine; its name says task, hardware, place and engine."""
    count = cores or _default_cores(env)
    parts = [task.name, hardware_of(env) + (" XLA" if env.accelerator == "xla" else "")]
    parts += [f"x{count}"] if count > 1 else []
    parts += [_place_of(env)] if _place_of(env) != "local" else []
    parts += _describe_engine({name: getattr(task, name) for name in ENGINE})
    return Path(folder) / f"{re.sub(r'[^a-z0-9]+', '-', '-'.join(parts).lower())}.json"


def _default_cores(env: "Environment") -> int:
    return env.cores if env.accelerator in ("tpu", "cuda") else 1


def check_out(path: Path) -> None:
    """Raises TpukitError where `path` cannot be written, or is a file of another kind."""
    if path.exists():
        Measurement.read(path)
    with files.explain_unwritable(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()


def time_steps(
    task: Task, run: "Run", *, runtime: "Runtime | None" = None, steps: int = 20, started: float | None = None
) -> dict:
    """Time the training step of `task` on this core, among others: a function for `launch`, like `train`.

    What runs is a training without its evaluations and checkpoints. A phased loss is timed in its last phase.
    steps: timed ones, in `ROUNDS` rounds. started: `time.time()` at which the session began; by default now.
    Returns a dict, on every rank the same."""
    from tpukit.runs.signals import StopSignal
    from tpukit.training.loop import Trainer

    started = started or time.time()
    with StopSignal() as stop, known_errors.explain_known_errors():
        trainer = Trainer(task, run, runtime, stop)
        trainer.model.train()
        runtime = trainer.runtime
        runtime.heartbeat(0)
        with contextlib.closing(trainer.batches(endless=True)) as batches:

            def timed(count: int) -> tuple[float, float]:
                """Milliseconds per step (with the sync after them), and of its wait for the batch."""
                began, waited_s = time.perf_counter(), 0.0
                for _ in range(count):
                    requested = time.perf_counter()
                    batch = next(batches)
                    waited_s += time.perf_counter() - requested
                    trainer.take_step(batch, task.epochs)
                trainer.sync()
                stop.check()
                return 1e3 * (time.perf_counter() - began) / count, 1e3 * waited_s / count

            first_step_ms, _ = timed(1)
            start_s = time.time() - started
            timed(WARM_UP)
            compiled, _ = runtime.compilations()
            per_round = math.ceil(steps / ROUNDS)
            rounds = [timed(per_round) for _ in range(math.ceil(steps / per_round))]
            step_ms, wait_ms = zip(*rounds)
            devices = [peak for peak, _ in runtime.memory()]
            peaks = [row[0] for row in runtime.world.all_gather([max(devices or [peak_host_bytes()])])]
            row = dict(
                batch_size=task.batch_size,
                fits=True,
                first_step_s=round(first_step_ms / 1e3, 3),
                start_s=round(start_s, 3),
                step_ms=round(statistics.median(step_ms), 3),
                step_ms_low=round(min(step_ms), 3),
                step_ms_high=round(max(step_ms), 3),
                wait_ms=round(statistics.mean(wait_ms), 3),
                timed_steps=len(rounds) * per_round,
                compiled_late=runtime.compilations()[0] - compiled,
                memory_bytes=int(max(peaks) if devices else sum(peaks)),
                memory_of="a core's device" if devices else "resident set of the processes",
            )
    return dict(
        row=row,
        cores=runtime.cores,
        processes=runtime.world.size,
        precision=runtime.precision,
        samples=len(trainer.data),
    )


def peak_host_bytes() -> int:
    """The most host memory that this process ever had; 0 where the system does not say.

    Not by getrusage: on Linux a process's ru_maxrss starts with that of its parent."""
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return 1024 * int(found[1]) if found else 0


def measure_here(
    task: Task,
    *,
    batch_sizes: Iterable[int] = (),
    steps: int = 20,
    cores: int | None = None,
    parallel: str = "processes",
    out: Path | None = None,
    log: Callable[[str], Any] = print,
) -> Measurement:
    """Measure a task on this machine, at several global batch sizes, each in a process of its own.

    batch_sizes: by default they double from the task's own until a step does not fit, or MAX_BATCH or the
    training set ends it. out: the JSON file, written after every size, so that an interrupt keeps what is
    there. Raises TpukitError where nothing could be measured, saying why."""
    if steps < 1:
        raise TpukitError(f"steps={steps}: give 1 or more")
    if any(size < 1 for size in batch_sizes):
        raise TpukitError(f"batch sizes {', '.join(map(str, batch_sizes))}: each must be 1 or more")
    if environment.under_torchrun():
        raise TpukitError("start `tpukit compare` without torchrun: it takes all GPUs of this host by itself")
    if out:
        check_out(Path(out))  # now, not after minutes
    task.check_dataset_dir()
    env = environment.detect()
    count = cores or _default_cores(env)
    first = math.ceil(task.batch_size / count) * count
    limit = 2 * first if env.accelerator in ("cpu", "xla") else MAX_BATCH
    rows: list[dict] = []
    measured: dict = {}
    for size in dict.fromkeys(batch_sizes) or (first * 2**n for n in itertools.count()):
        if not batch_sizes and rows and size > min(limit, measured["samples"]):
            log(f"batch {size}: not tried; doubling ends here, --batch-sizes tries others")
            break
        log(f"batch {size}: measuring in a process of its own")
        result = _run_process(dataclasses.replace(task, batch_size=size), steps, cores, parallel)
        row = result["row"]
        rows.append(row)
        if row["fits"]:
            measured = result
            log(f"batch {size}: {row['step_ms']:.4g} ms per step, {images_per_s(row):.4g} images/s")
        else:
            log(f"batch {size}: does not fit: {row['why']}")
        if measured and out:
            build_measurement(task, env, measured, rows).write(Path(out))
        if not row["fits"] and not batch_sizes:
            break
    if not measured:
        raise TpukitError(f"no batch size fits: {rows[-1]['why']}")
    if out:
        log(f"saved: {out}")
    return build_measurement(task, env, measured, rows)


def _run_process(task: Task, steps: int, cores: int | None, parallel: str) -> dict:
    """What `time_steps` returned in a fresh process; for a step that needs too much memory its row alone.

    Fresh, because a memory error, the one opening of an XLA device and a peak of memory are the whole
    process's."""
    request = to_request(task) | dict(steps=steps, cores=cores, parallel=parallel, started=time.time())
    with tempfile.TemporaryDirectory(prefix="tpukit-compare-") as folder:
        ran = run_python("-m", "tpukit.tools.measure", folder, text=json.dumps(request))
        answer = Path(folder) / "result.json"
        result = json.loads(answer.read_text()) if answer.exists() else {}
    if "row" in result:
        return result
    if ran.returncode in (-signal.SIGINT, 128 + signal.SIGINT):
        raise KeyboardInterrupt
    error = result.get("error") or last_line(ran)
    lines = [line.strip()[:300] for line in (ran.stderr + error).splitlines() if TOO_LARGE.search(line)]
    if ran.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL):
        lines = ["the process was killed, most likely because this machine's memory was full"]
    if not lines:
        raise TpukitError(f"batch {task.batch_size} of {task.name} could not be measured: {error}")
    return dict(row=dict(batch_size=task.batch_size, fits=False, why=lines[0]))


def answer_request() -> None:
    """In the fresh process: time the task of the request on stdin; the result goes into the given folder."""
    from tpukit.launching.launcher import launch
    from tpukit.launching.supervisor import end_with_parent
    from tpukit.runs.run import Run

    end_with_parent(os.getppid())
    folder, request = Path(sys.argv[1]), json.loads(sys.stdin.read())
    try:
        task = from_request(request)
        run = Run.open(folder / "run", task)
        run.echo = False
        function = functools.partial(time_steps, steps=request["steps"], started=request["started"])
        result = launch(function, task, run, cores=request["cores"], parallel=request["parallel"])
    except TpukitError as error:
        result = dict(error=str(error))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    files.write_atomic(folder / "result.json", json.dumps(result))
