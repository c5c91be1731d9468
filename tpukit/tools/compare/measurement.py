"""What one machine measured of one recipe: a small JSON file, and the name of its hardware."""

import dataclasses
import datetime
import json
import math
import re
import tempfile
from pathlib import Path

from tpukit import __version__
from tpukit.devices.chips import CHIPS, find_chip
from tpukit.host import files
from tpukit.host.errors import TpukitError
from tpukit.host.tables import GIB, Table
from tpukit.runs.run import settings_dict
from tpukit.tasks.datasets import SYNTHETIC_NOTE

FORMAT = "tpukit comparison 1"
PLACE_OF_HOST = {"colab": "Colab", "kaggle": "Kaggle", "tpu-vm": "Google Cloud", "local": "local"}
NOT_THE_RECIPE = ("batch_size", "precision", "seed", "weights")
ENGINE = dict(torch_compile="no", channels_last="auto", cuda_graph=True, data_on="auto")  # with the defaults
ROW = dict.fromkeys(("first_step_s", "start_s", "step_ms", "step_ms_low", "step_ms_high", "wait_ms"), float)
ROW |= dict.fromkeys(("batch_size", "timed_steps", "compiled_late", "memory_bytes"), int) | dict(
    memory_of=str
)
POSITIVE = ("batch_size", "step_ms", "timed_steps", "chips", "cores", "processes", "samples")
LIMIT = 2.0**63  # no number of a measurement reaches it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one machine measured of one recipe: the content of a JSON file."""

    tpukit: str
    date: str
    hardware: str  # as in the price table: "TPU v5e", "T4", "CPU" ...
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
    engine: dict = dataclasses.field(
        default_factory=dict
    )  # the settings that decide how fast the same work is done
    samples: int
    synthetic: bool
    rows: list  # a dict for each batch size
    file: str = dataclasses.field(default="", compare=False)  # where it was read from

    @property
    def label(self):
        """What tables and plots call it."""
        name = "CPU XLA device" if self.accelerator == "xla" else self.hardware
        return ", ".join(
            [f"{name} x {self.cores}" if self.cores > 1 else name, *_describe_engine(self.engine)]
        )

    @property
    def fitting(self):
        return [row for row in self.rows if row["fits"]]

    def table(self):
        """Every batch size, as a Table."""
        rows, conditions = [], ""
        for row in self.rows:
            if not row["fits"]:
                rows.append((row["batch_size"], "", "does not fit", row["why"], *[""] * 6))
                continue
            conditions = f"; n = {row['timed_steps']} steps; memory: {row['memory_of']}"
            rows.append(
                (
                    row["batch_size"],
                    f"{row['first_step_s']:.1f}",
                    f"{row['step_ms']:.4g}",
                    f"{row['step_ms_low']:.4g} to {row['step_ms_high']:.4g}",
                    f"{1e3 / row['step_ms']:.3g}",
                    f"{row['wait_ms'] / row['step_ms']:.0%}",
                    f"{rate(row):.4g}",
                    f"{epoch_seconds(row['step_ms'] / 1e3, row['batch_size'], self.samples):.4g}",
                    f"{row['memory_bytes'] / GIB:.2f}",
                    row["compiled_late"],
                )
            )
        columns = ["batch", "first step, s", "ms per step", "range", "steps/s", "data wait", "images/s"]
        columns += [f"epoch of {self.samples}, s", "peak GiB", "compiled late"]
        title = f"{self.task} on {self.label}, {self.precision}: measured {self.date}{conditions}"
        return Table(title, columns, rows)

    def write(self, path):
        """Save as JSON, atomically."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = dict(format=FORMAT, **dataclasses.asdict(self))
        del content["file"]
        files.write_atomic(path, json.dumps(content, indent=1) + "\n")

    @classmethod
    def read(cls, path):
        """Read a file that `write` wrote, here or elsewhere. Raises TpukitError that names what is wrong with
        it."""
        try:
            content = json.loads(Path(path).read_text())
        except OSError as error:
            raise TpukitError(f"{path} cannot be read: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            raise TpukitError(f"{path} is damaged, or not JSON: {error}") from error
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise TpukitError(
                f"{path} is not a measurement by `tpukit compare`: its format is not {FORMAT!r}"
            )
        types = {field.name: field.type for field in dataclasses.fields(cls) if field.name != "file"}
        content = _check(path, dict(engine={}) | content, types)
        for number, row in enumerate(content["rows"]):
            where = f"{path}, rows[{number}]"
            if not isinstance(row, dict):
                raise TpukitError(f"{where} is damaged: it is not an object")
            _check(where, row, dict(fits=bool))
            _check(where, row, ROW if row["fits"] else dict(batch_size=int, why=str))
        return cls(**content, file=str(path))


def _check(where, content, types):
    """The values of these names. Raises TpukitError where one is missing, of another type, or an impossible
    number."""
    for name, kind in types.items():
        if name not in content:
            raise TpukitError(f"{where} is damaged: it has no {name}")
        value = content[name]
        if kind in (int, float):  # NaN is neither below nor above a limit
            right = type(value) in (int, kind) and 0 <= value < LIMIT and (value > 0 or name not in POSITIVE)
        else:
            right = type(value) is kind
        if not right:
            raise TpukitError(f"{where} is damaged: {name} is {value!r:.60}")
    return {name: content[name] for name in types}


def build_measurement(task, env, result, rows):
    """The `Measurement` of a task. result: what `measure` returned for one of the rows."""
    free = {field.name for field in dataclasses.fields(task) if field.metadata.get("free")}
    return Measurement(
        tpukit=__version__,
        date=datetime.date.today().isoformat(),
        hardware=hardware_of(env),
        chips=_count_chips(env, result["cores"]),
        accelerator=env.accelerator,
        place=_place_of(env),
        device=env.device_name,
        python=env.python,
        versions=env.versions,
        task=task.name,
        recipe={
            name: value
            for name, value in settings_dict(task).items()
            if name not in NOT_THE_RECIPE and name not in free
        },
        engine={name: getattr(task, name) for name in ENGINE},
        synthetic=bool(task.dataset_dir) and _is_synthetic(Path(task.dataset_dir)),
        rows=rows,
        **{name: result[name] for name in ("cores", "processes", "precision", "samples")},
    )


def hardware_of(env):
    """What the price table calls the accelerator of an environment."""
    if env.accelerator in ("cpu", "xla"):
        return "CPU"
    if env.accelerator == "tpu":
        chip = find_chip(env.device_name)
        return chip.name if chip else "TPU"
    name = env.device_name.split(",")[0]
    card = re.search(
        r"\bRTX (PRO )?\w+( Ti)?( SUPER)?|\b[A-Z]{1,2}\d+(?=\b|-|[A-Z])", name
    )  # RTX 3060 Ti; A100-SXM4-40GB
    return card[0] if card else name


def file_for(folder, task, env, cores=None):
    """The file of a measurement of this machine: its name says task, hardware, place and engine, without the
    defaults."""
    hardware = hardware_of(env) + (" XLA" if env.accelerator == "xla" else "")
    count = cores or default_cores(env)
    parts = [
        task.name,
        hardware,
        f"x{count}" if count > 1 else "",
        "" if _place_of(env) == "local" else _place_of(env),
    ]
    parts += _describe_engine({name: getattr(task, name) for name in ENGINE})
    name = "-".join(part for part in parts if part)
    return Path(folder) / f"{re.sub(r'[^a-z0-9]+', '-', name.lower())}.json"


def default_cores(env):
    return env.cores if env.accelerator in ("tpu", "cuda") else 1


def check_out(path):
    """`check_writable` for a measurement, which may replace an earlier one and no other file."""
    if Path(path).is_file():
        try:
            Measurement.read(path)
        except TpukitError as error:
            raise TpukitError(
                f"{path} would be replaced, and is no measurement: choose another place ({error})"
            ) from error
    check_writable(path)


def check_writable(path):
    """Make the folder of a file that is to be written. Raises TpukitError where it cannot be written."""
    path = Path(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise TpukitError(
            f"{path} cannot be written ({error.strerror or error}): choose another place"
        ) from error


def rate(row):
    """Images per second."""
    return 1e3 * row["batch_size"] / row["step_ms"]


def epoch_seconds(step_s, batch_size, images):
    return images // batch_size * step_s  # a ragged tail is dropped


def _count_chips(env, cores):
    """How many chips or cards the price table counts for these cores."""
    if env.accelerator not in ("tpu", "cuda"):
        return 1
    cores_per_chip = next((chip.devices for chip in CHIPS if chip.name == hardware_of(env)), 1)
    return math.ceil(cores / cores_per_chip)


def _place_of(env):
    if env.accelerator == "tpu" and env.host == "local":
        return PLACE_OF_HOST["tpu-vm"]  # nobody has a TPU at home, so this one is rented
    return PLACE_OF_HOST[env.host]


def _describe_engine(engine):
    """The settings that are not the defaults."""
    return [f"{name}={engine[name]}" for name in ENGINE if engine.get(name, ENGINE[name]) != ENGINE[name]]


def _is_synthetic(folder):
    note = folder / "README.txt"
    return note.is_file() and note.read_text(errors="replace") == SYNTHETIC_NOTE
