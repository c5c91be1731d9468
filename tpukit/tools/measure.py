"""`tpukit compare`: a recipe's step timed on this machine, each batch size in a process of its own; and how
many sessions, hours and dollars the whole training takes by hardware and place: from the JSON files of
several machines, published figures, and the price table `prices.csv`, which users edit as a copy."""

import contextlib
import csv
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
from typing import TYPE_CHECKING, Any, NamedTuple

from tpukit import __version__, tasks
from tpukit.devices.chips import CHIPS, find_chip, session_chips
from tpukit.host import environment, files, known_errors
from tpukit.host.errors import TpukitError
from tpukit.host.tables import GIB, Sentences, Table, format_duration
from tpukit.reporting import display, figures
from tpukit.runs.run import settings_dict
from tpukit.tools.child import last_line, run_python
from tpukit.training.task import Task, from_request, to_request

if TYPE_CHECKING:
    from tpukit.devices.runtime import Runtime
    from tpukit.host.environment import Environment
    from tpukit.runs.run import Run

FORMAT = "tpukit comparison 1"
SYNTHETIC_IMAGES = {"mshnet": 1000}  # where there is no dataset: as many as IRSTD-1k has
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
# What a row says of a batch size that fits. `memory_bytes`: of a core's device; 0 where it does not tell.
ROW = dict.fromkeys(("batch_size", "timed_steps", "compiled_late", "memory_bytes"), int)
ROW |= dict.fromkeys(("first_step_s", "start_s", "step_ms", "step_ms_low", "step_ms_high", "wait_ms"), float)
POSITIVE = ("batch_size", "step_ms", "timed_steps", "chips", "cores", "samples")
PRICES = Path(__file__).with_name("prices.csv")
# MSHNet on IRSTD-1k, 800 images of 256x256: hardware, chips, label, seconds per epoch in guides on the web.
PUBLISHED_EPOCHS = (
    ("TPU v2", 4, "TPU v2-8", 30.0),
    ("A100", 1, "A100", 60.0),
    ("V100", 1, "V100", 120.0),
    ("T4", 1, "T4", 180.0),
    ("CPU", 1, "CPU", 600.0),
)
PUBLISHED_TASK, PUBLISHED_IMAGES, PUBLISHED_SIZE = "mshnet", 800, 256
BASES = ("measured", "published, not measured")  # the more trustworthy first
WEEK_H = 168.0
MAX_SESSIONS = 10_000  # a training that needs more of them never ends
NOTES = [
    "Hours count training steps and start-up; evaluations and checkpoints come on top.",
    "The shipped prices of a T4 and a V100 at Google Cloud are of the card alone: its host machine is billed"
    " separately.",
]


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
    precision: str
    python: str
    versions: dict
    task: str
    recipe: dict  # the settings that decide the work of a step; only files that agree in them can be compared
    engine: dict = dataclasses.field(default_factory=dict)  # those that decide how fast the same work is done
    samples: int
    rows: list  # a dict for each batch size: those of ROW, or `why` it does not fit

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
            cells += [f"{epoch_seconds(row, self.samples):.4g}", f"{row['memory_bytes'] / GIB:.2f}"]
            rows.append((*cells, row["compiled_late"]))
        title = f"{self.task} on {self.label}, {self.precision}: measured {self.date}"
        steps = [f"; n = {row['timed_steps']} steps" for row in self.fitting[-1:]]
        return Table("".join([title, *steps]), columns, rows)

    def write(self, path: Path) -> None:
        content = dict(format=FORMAT, **dataclasses.asdict(self))
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
        content.setdefault("engine", {})  # which earlier versions did not write
        content = _check(str(path), content, {field.name: field.type for field in dataclasses.fields(cls)})
        for number, row in enumerate(content["rows"]):
            row = row if isinstance(row, dict) else {}
            kinds = ROW if row.get("fits") else dict(batch_size=int, why=str)
            _check(f"{path}, rows[{number}]", row, dict(fits=bool) | kinds)
        if not any(row["fits"] for row in content["rows"]):
            raise TpukitError(f"{path} is damaged: no batch size fits")
        return cls(**content)


def _check(where: str, content: dict, kinds: dict) -> dict:
    """The values of these names. Raises TpukitError for a missing one, another type, an impossible number."""
    for name, kind in kinds.items():
        value: Any = content.get(name)  # None is none of the types
        right = type(value) is kind or kind is float and type(value) is int
        if right and kind in (int, float):  # NaN is neither below nor above a limit
            right = 0 <= value < 2**63 and (value > 0 or name not in POSITIVE)
        if not right:
            raise TpukitError(f"{where} is damaged: {name} is {value!r:.60}")
    return {name: content[name] for name in kinds}


def images_per_s(row: dict) -> float:
    return 1e3 * row["batch_size"] / row["step_ms"]


def epoch_seconds(row: dict, images: int) -> float:
    return images // row["batch_size"] * row["step_ms"] / 1e3  # a ragged tail is dropped


# This machine


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


def _default_cores(env: "Environment") -> int:
    return env.cores if env.accelerator in ("tpu", "cuda") else 1


def _describe_engine(engine: dict) -> list[str]:
    """The settings that are not the defaults."""
    return [f"{name}={engine[name]}" for name in ENGINE if engine.get(name, ENGINE[name]) != ENGINE[name]]


def file_for(folder: Path, task: Task, env: "Environment", cores: int | None = None) -> Path:
    """The file of a measurement of this machine; its name says task, hardware, place and engine."""
    count, place = cores or _default_cores(env), _place_of(env)
    parts = [task.name, hardware_of(env), "XLA" if env.accelerator == "xla" else ""]
    parts += [f"x{count}" if count > 1 else "", place if place != "local" else ""]
    parts += _describe_engine(vars(task))
    return Path(folder) / f"{re.sub(r'[^a-z0-9]+', '-', ' '.join(parts).strip().lower())}.json"


def check_out(path: Path) -> None:
    """Raises TpukitError where `path` cannot be written, or is a file of another kind."""
    if path.exists():
        Measurement.read(path)
    with files.explain_unwritable(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()


def measure_here(
    task: Task,
    *,
    batch_sizes: Sequence[int] = (),
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
    measured = None
    for size in dict.fromkeys(batch_sizes) or (first * 2**n for n in itertools.count()):
        if not batch_sizes and measured and size > min(limit, measured.samples):
            log(f"batch {size}: not tried; doubling ends here, --batch-sizes tries others")
            break
        log(f"batch {size}: measuring in a process of its own")
        result = _run_process(dataclasses.replace(task, batch_size=size), steps, cores, parallel)
        row = result.pop("row")
        rows.append(row)
        if row["fits"]:
            measured = build_measurement(task, env, result, rows)  # whose list of rows still grows
            log(f"batch {size}: {row['step_ms']:.4g} ms per step, {images_per_s(row):.4g} images/s")
        else:
            log(f"batch {size}: does not fit: {row['why']}")
        if measured and out:
            measured.write(Path(out))
        if not row["fits"] and not batch_sizes:
            break
    if not measured:
        raise TpukitError(f"no batch size fits: {rows[-1]['why']}")
    if out:
        log(f"saved: {out}")
    return measured


def build_measurement(task: Task, env: "Environment", result: dict, rows: list[dict]) -> Measurement:
    """The `Measurement` of a task. result: what `time_steps` returned besides its row."""
    free = {field.name for field in dataclasses.fields(task) if field.metadata.get("free")}
    recipe = settings_dict(task)
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
        recipe={name: recipe[name] for name in recipe if name not in free.union(NON_RECIPE)},
        engine={name: getattr(task, name) for name in ENGINE},
        rows=rows,
        **result,
    )


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


def time_steps(
    task: Task, run: "Run", *, runtime: "Runtime | None" = None, steps: int = 20, started: float | None = None
) -> dict:
    """Time the training step of `task` on this core, among others: a function for `launch`, like `train`.

    What runs is a training without its evaluations and checkpoints. A phased loss is timed in its last phase.
    steps: timed ones, in `ROUNDS` rounds. started: `time.time()` at which the session began; by default now.
    Returns a dict, on every rank the same: its `row`, and fields of `Measurement`."""
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
            compiled = runtime.counters().get("compilations", 0)
            per_round = math.ceil(steps / ROUNDS)
            rounds = [timed(per_round) for _ in range(math.ceil(steps / per_round))]
            step_ms, wait_ms = zip(*rounds)
            peak = max((peak for peak, _ in runtime.memory()), default=0)
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
                compiled_late=runtime.counters().get("compilations", 0) - compiled,
                memory_bytes=int(max(found for (found,) in runtime.world.all_gather([peak]))),
            )
    return dict(row=row, cores=runtime.cores, precision=runtime.precision, samples=len(trainer.data))


# Prices and sessions


@dataclasses.dataclass(frozen=True)
class Price:
    """One kind of hardware at one place: a row of `prices.csv`. None: no trustworthy figure was found."""

    hardware: str  # one chip or card: "TPU v5e", "T4", "RTX 4090", "CPU" ...
    place: str  # "Google Cloud", "Colab", "Colab free", "Kaggle", "local"
    usd_per_hour: float | None = None  # of one chip or card, on demand; 0 where it is free
    spot_usd_per_hour: float | None = None  # of spare capacity, which can be taken away at any time
    session_h: float | None = None  # hours of the longest session, where there is a limit
    week_h: float | None = None  # hours per week, where there is a limit
    as_of: str = ""  # year and month of the figures
    source: str = ""

    def per_hour(self, *, chips: int = 1, spot: bool = False) -> float | None:
        """USD per hour. Google Cloud alone sells spot capacity; elsewhere spot costs the same."""
        spot = spot and (self.place == "Google Cloud" or self.spot_usd_per_hour is not None)
        usd = self.spot_usd_per_hour if spot else self.usd_per_hour
        return None if usd is None else chips * usd


def read_prices(path: Path | str = PRICES) -> list[Price]:
    """The rows of the price table, or of an edited copy. Raises TpukitError that names line and column."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:  # spreadsheets write a byte order mark
            reader = csv.DictReader(file)
            rows = [(f"prices {path}, line {reader.line_num}", row) for row in reader if any(row.values())]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        advice = f"copy {PRICES} there, and edit the copy"
        raise TpukitError(f"prices {path}: cannot be read ({error}); {advice}") from error
    names = [field.name for field in dataclasses.fields(Price)]
    if missing := [name for name in names if name not in (reader.fieldnames or ())]:
        raise TpukitError(f"prices {path}, line 1: no column {', '.join(missing)}")
    return [Price(**{name: _parse_cell(where, name, row) for name in names}) for where, row in rows]


def _parse_cell(where: str, name: str, row: dict[str, Any]) -> Any:
    if None in row or None in row.values():
        raise TpukitError(f"{where}: expected as many columns as line 1 has; quote a comma in a text")
    cell = row[name].strip()
    if not name.endswith(("_hour", "_h")):
        return cell
    if not cell:
        return None
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf or value == 0 and name.endswith("_h"):
        raise TpukitError(f"{where}, column {name}: {cell!r} is not a possible number; empty means unknown")
    return value


def prices_table(prices: list[Price]) -> Table:
    """The rows of the price table, for people."""
    columns = ("hardware", "place", "USD per hour", "spot", "session, h", "week, h", "as of", "source")
    rows = [[f"{c:g}" if isinstance(c, float) else c for c in dataclasses.astuple(price)] for price in prices]
    return Table("Prices of one chip or card, and how long a session may be", columns, rows)


def sessions_needed(
    train_h: float,
    *,
    start_h: float = 0.0,
    lost_h: float = 0.0,
    session_h: float | None = None,
    week_h: float | None = None,
) -> tuple[int, float, float] | None:
    """(sessions, hours on the machine, hours on the calendar) of a training, or None where it never ends.

    Every session starts up for `start_h`. One that is cut off also loses `lost_h`, the work since its last
    checkpoint. A session lasts at most `session_h`, all sessions of a week at most `week_h`; what a week has
    left is not used where it is too short to train."""
    longest_h = session_h or math.inf
    week_h = week_h if week_h and week_h < WEEK_H else math.inf
    rounding_h = 1e-9  # sums of hours are exact to this
    sessions = weeks = 0
    used_h = week_used_h = trained_h = 0.0
    while sessions < MAX_SESSIONS:
        length_h = min(longest_h, week_h - week_used_h)
        needed_h = start_h + train_h - trained_h
        if needed_h <= length_h + rounding_h:
            return sessions + 1, used_h + needed_h, weeks * WEEK_H + week_used_h + needed_h
        if length_h > start_h + lost_h + rounding_h:
            sessions += 1
            used_h += length_h
            week_used_h += length_h
            trained_h += length_h - start_h - lost_h
        elif week_used_h:
            weeks += 1
            week_used_h = 0.0
        else:
            return None
    return None


# The comparison


class Estimate(NamedTuple):
    """The training of an epoch on one kind of hardware."""

    hardware: str
    chips: int
    label: str
    basis: str  # one of BASES: what `epoch_s` comes from
    epoch_s: float  # without evaluations and checkpoints
    start_s: float = 0.0  # from the start of a session to the end of its first step; 0 where it is not known
    measured_at: str = ""


class Offer(NamedTuple):
    """The whole training on one kind of hardware at one place. None: not known, or it never ends there."""

    estimate: Estimate
    place: str
    usd: float | None
    sessions: int | None
    machine_h: float | None
    calendar_h: float

    @property
    def name(self) -> str:
        is_elsewhere = self.estimate.measured_at not in ("", self.place.removesuffix(" free"))
        elsewhere = f" (measured at {self.estimate.measured_at})" if is_elsewhere else ""
        return f"{self.estimate.label}, {self.place}{elsewhere}"


def offers(estimates: list[Estimate], prices: list[Price], *, epochs: int, spot: bool = False) -> list[Offer]:
    """Every estimate at every place that has its hardware: what was measured before what was published, those
    that end before the others, the cheaper and then the faster first."""
    found = []
    for one in estimates:
        for price in _places(one, prices):
            needed = sessions_needed(
                epochs * one.epoch_s / 3600,
                start_h=one.start_s / 3600,
                lost_h=Task.save_every_s / 3600,
                session_h=price.session_h,
                week_h=price.week_h,
            )
            sessions, machine_h, calendar_h = needed or (None, None, math.inf)
            usd_per_hour = price.per_hour(chips=one.chips, spot=spot)
            usd = None if usd_per_hour is None or machine_h is None else usd_per_hour * machine_h
            found.append(Offer(one, price.place, usd, sessions, machine_h, calendar_h))

    def rank(offer):
        usd = math.inf if offer.usd is None else offer.usd
        return BASES.index(offer.estimate.basis), offer.sessions is None, usd, offer.calendar_h

    return sorted(found, key=rank)


def _places(one: Estimate, prices: list[Price]) -> list[Price]:
    """The prices of the places that have this hardware in this number; and where it was measured."""
    found = []
    for price in prices:
        limit = session_chips(price.hardware, price.place) or math.inf
        is_own = price.place.removesuffix(" free") == one.measured_at
        if price.hardware == one.hardware and one.chips <= limit and (is_own or price.hardware != "CPU"):
            found.append(price)  # one CPU says nothing of another
    is_listed = any(price.place.removesuffix(" free") == one.measured_at for price in found)
    return found if is_listed or not one.measured_at else [*found, Price(one.hardware, one.measured_at)]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The offers, the best first, and notes on their figures. `show_comparison` shows it."""

    title: str
    epochs: int
    offers: list[Offer]
    notes: list[str]

    def table(self) -> Table:
        """A row for each offer."""
        columns = ("hardware and place", "basis", "s per epoch", "sessions", "machine", "calendar", "cost")
        rows = []
        for offer in self.offers:
            sessions = "never ends" if offer.sessions is None else offer.sessions
            hours = (_hours(offer.machine_h), _hours(offer.calendar_h))
            epoch_s = f"{offer.estimate.epoch_s:.4g}"
            rows.append((offer.name, offer.estimate.basis, epoch_s, sessions, *hours, _usd(offer.usd)))
        return Table(self.title, columns, rows)

    def sentences(self) -> Sentences:
        """In words the cheapest offer by what was measured and by what was published, and the notes."""
        cheapest: dict[str, Offer] = {}
        for offer in self.offers:
            if offer.sessions is not None:
                cheapest.setdefault(offer.estimate.basis, offer)
        found = []
        for basis, offer in cheapest.items():
            hours = (
                f"{_hours(offer.machine_h)} in {offer.sessions} session{'' if offer.sessions == 1 else 's'}"
            )
            words = f"{basis.capitalize()}, the cheapest: {offer.name}: {self.epochs} epochs take {hours}"
            found.append(f"{words}, {_usd(offer.usd)}.")
        return Sentences([*found, *self.notes])

    def figure(self) -> Any:
        """Hours on the machine, and the cost beside them, a bar for each offer that ends."""
        shown = [offer for offer in reversed(self.offers) if offer.machine_h is not None]
        figure, ((axis,),) = figures.subplots(1, 1, (9.6, 1.2 + 0.27 * max(len(shown), 3)))
        for basis, look in zip(BASES, (dict(color=figures.BLUE), dict(color=figures.GREY, hatch="//"))):
            rows = {row: offer for row, offer in enumerate(shown) if offer.estimate.basis == basis}
            if not rows:
                continue
            hours = [offer.machine_h for offer in rows.values()]
            bars = axis.barh(list(rows), hours, height=0.65, edgecolor="white", label=basis, **look)
            costs = [f" {_hours(offer.machine_h)}, {_usd(offer.usd)}" for offer in rows.values()]
            axis.bar_label(bars, costs, fontsize=7)
        figures.style(axis)
        axis.set_xlabel(f"hours on the machine, and cost, of {self.epochs} epochs", fontsize=9)
        axis.margins(x=0.2)
        names = [figures.label(f"{offer.estimate.label}, {offer.place}") for offer in shown]
        axis.set_yticks(range(len(shown)), names)
        figure.legend(loc="outside lower center", ncols=2, fontsize=8)
        return figure


def show_comparison(comparison: Comparison, picture: Path | None = None) -> None:
    """Show what `compare` found: table, bars, and the choice in words. picture: a PNG file for the bars."""
    display.present(comparison.table())
    display.present_figure(comparison.figure(), picture)
    display.present(comparison.sentences())


def _hours(hours: float | None) -> str:
    return format_duration(None if hours in (None, math.inf) else 3600 * hours)


def _usd(usd: float | None) -> str:
    if not usd:
        return "cost not known" if usd is None else "free"
    return f"{usd:.2f} USD"  # two dollar signs are a formula in notebooks


def compare(
    measurements: Sequence[Measurement],
    *,
    epochs: int = 400,
    prices: list[Price] | None = None,
    spot: bool = False,
) -> Comparison:
    """Merge measurements of one recipe and the published figures into a `Comparison`.

    An epoch has the images of the largest measured set, or of the published figures, and each measurement
    counts with its fastest batch size. Raises TpukitError for measurements of different recipes."""
    if epochs < 1:
        raise TpukitError(f"epochs={epochs}: it must be 1 or more")
    _check_same_recipe(measurements)
    images = max((m.samples for m in measurements), default=PUBLISHED_IMAGES)
    estimates, notes = [], list(NOTES)
    for m in measurements:
        best = min(m.fitting, key=lambda row: epoch_seconds(row, images))
        label, epoch_s = f"{m.label} at batch {best['batch_size']}", epoch_seconds(best, images)
        estimates.append(Estimate(m.hardware, m.chips, label, BASES[0], epoch_s, best["start_s"], m.place))
    task = measurements[0].task if measurements else PUBLISHED_TASK
    sizes = {m.recipe.get(name) for m in measurements for name in ("base_size", "crop_size")}
    if task == PUBLISHED_TASK and sizes <= {PUBLISHED_SIZE}:
        for hardware, chips, label, epoch_s in PUBLISHED_EPOCHS:
            estimates.append(Estimate(hardware, chips, label, BASES[1], epoch_s * images / PUBLISHED_IMAGES))
    elif task == PUBLISHED_TASK:
        notes.append("The published figures are left out: they are of images of 256x256, these are not.")
    found = offers(estimates, read_prices() if prices is None else prices, epochs=epochs, spot=spot)
    return Comparison(f"{task}, {epochs} epochs of {images} images", epochs, found, notes)


def _check_same_recipe(measurements: Sequence[Measurement]) -> None:
    for other in measurements[1:]:
        first = measurements[0]
        one, two = (f"{m.label} ({m.place})" for m in (first, other))
        if other.task != first.task:
            raise TpukitError(f"{one} measured {first.task}, {two} {other.task}: compare one task at a time")
        # A file of an earlier version, which did not have a setting yet, was measured as by its default.
        defaults = settings_dict(tasks.find(first.task)()) if first.task in tasks.TASKS else {}
        a, b = defaults | first.recipe, defaults | other.recipe
        names = sorted(first.recipe.keys() | other.recipe.keys())
        if lines := [f"  {n}: {a.get(n)!r} and {b.get(n)!r}" for n in names if a.get(n) != b.get(n)]:
            title = f"{one} and {two} measured different recipes:"
            raise TpukitError("\n".join([title, *lines, "Measure one of them again."]))


if __name__ == "__main__":
    from tpukit.tools import measure  # whose classes and functions other processes can find

    measure.answer_request()
