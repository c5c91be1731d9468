"""What one machine measured of one recipe: a small JSON file, and the name of its hardware."""

import dataclasses
import datetime
import json
import math
import re
import tempfile
from pathlib import Path

from tpukit import __version__
from tpukit.host import files
from tpukit.host.errors import TpukitError
from tpukit.host.tables import GIB, Table
from tpukit.runs.run import settings_dict
from tpukit.workloads.datasets import SYNTHETIC_NOTE

FORMAT = "tpukit comparison 1"
PLACE_OF_HOST = {"colab": "Colab", "kaggle": "Kaggle", "tpu-vm": "Google Cloud", "local": "local"}
TWO_CORES_A_CHIP = ("TPU v2", "TPU v3")  # which are counted by cores here, and by chips in the table of prices
NOT_THE_RECIPE = ("batch_size", "precision", "seed", "weights")
ENGINE = ("torch_compile", "channels_last", "data_on")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one machine measured of one recipe: the content of a JSON file. `rows`: a dict for each batch size."""

    tpukit: str
    date: str
    hardware: str
    """as in the table of prices: "TPU v5e", "T4", "CPU" ..."""
    chips: int
    accelerator: str
    place: str
    device: str
    cores: int
    processes: int
    precision: str
    python: str
    versions: dict
    workload: str
    recipe: dict
    """the settings that decide the work of a step; only files that agree in them can be compared"""
    engine: dict = dataclasses.field(default_factory=dict)
    """the settings that decide how fast the same work is done, `ENGINE`; empty in files that were written before they were
    kept"""
    samples: int
    synthetic: bool
    """whether the images were made up"""
    rows: list
    file: str = dataclasses.field(default="", compare=False)
    """where it was read from; not written down"""

    @property
    def label(self):
        """What tables and plots call it."""
        name = "CPU XLA device" if self.accelerator == "xla" else self.hardware
        return ", ".join([f"{name} x {self.cores}" if self.cores > 1 else name, *_describe(self.engine)])

    @property
    def fitting(self):
        return [row for row in self.rows if row["fits"]]

    def table(self):
        """Every batch size, as a Table."""
        rows = [
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
            if row["fits"]
            else (row["batch_size"], "", "does not fit", row["why"], *[""] * 6)
            for row in self.rows
        ]
        columns = ("batch", "first step, s", "ms a step", "range", "steps/s", "data wait", "images/s")
        columns += (f"epoch of {self.samples}, s", "peak GiB", "compiled late")
        of = next((f"; n = {row['timed_steps']} steps; memory: {row['memory_of']}" for row in self.fitting), "")
        return Table(f"{self.workload} on {self.label}, {self.precision}: measured {self.date}{of}", columns, rows)

    def write(self, path):
        """Save as JSON, whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = dict(format=FORMAT, **dataclasses.asdict(self))
        del kept["file"]
        files.write_atomic(path, json.dumps(kept, indent=1) + "\n")

    @classmethod
    def read(cls, path):
        """Read a file that `write` wrote, here or elsewhere. Raises TpukitError that names what is wrong with it."""
        try:
            found = json.loads(Path(path).read_text(), parse_constant=lambda name: name)  # NaN is no number here
        except OSError as error:
            raise TpukitError(f"{path} cannot be read: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            raise TpukitError(f"{path} is damaged, or no JSON: {error}") from error
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise TpukitError(f"{path} is no measurement of `tpukit compare`: its format is not {FORMAT!r}")
        found.setdefault("engine", {})
        values = {f.name: _checked(path, found, f.name, f.type) for f in dataclasses.fields(cls) if f.name != "file"}
        for number, row in enumerate(values["rows"]):
            where = f"{path}, rows[{number}]"
            if not isinstance(row, dict):
                raise TpukitError(f"{where} is no object")
            kinds = ROW if _checked(where, row, "fits", bool) else dict(batch_size=int, why=str)
            for name, kind in kinds.items():
                _checked(where, row, name, kind)
        for name in ("chips", "cores", "processes", "samples"):
            if values[name] < 1:
                raise TpukitError(f"{path}: {name} is {values[name]}; it has to be 1 or more")
        return cls(**values, file=str(path))


ROW = dict.fromkeys(("first_step_s", "start_s", "step_ms", "step_ms_low", "step_ms_high", "wait_ms"), float)
ROW |= dict.fromkeys(("batch_size", "timed_steps", "compiled_late", "memory_bytes"), int) | dict(memory_of=str)
LARGEST = 2.0**63  # no number of a measurement is; neither is NaN below it
POSITIVE = ("batch_size", "step_ms", "step_ms_low", "step_ms_high", "timed_steps")


def _checked(where, found, name, kind):
    if name not in found:
        raise TpukitError(f"{where} is damaged: it has no {name}")
    value = found[name]
    right = isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool))
    if kind in (int, float) and right:
        right = 0 <= value < LARGEST and (value > 0 or name not in POSITIVE)
    if not right:
        raise TpukitError(f"{where} is damaged: {name} is {value!r:.60}")
    return value


def measurement_of(task, env, about, rows):
    fields = {f.name: f for f in dataclasses.fields(task)}
    recipe = {n: v for n, v in settings_dict(task).items() if n not in NOT_THE_RECIPE and not fields[n].metadata.get("free")}
    return Measurement(
        tpukit=__version__,
        date=datetime.date.today().isoformat(),
        hardware=hardware_of(env),
        chips=_chips(env, about["cores"]),
        accelerator=env.accelerator,
        place=_place(env),
        device=env.device_name,
        cores=about["cores"],
        processes=about["processes"],
        precision=about["precision"],
        python=env.python,
        versions=env.versions,
        workload=task.name,
        recipe=recipe,
        engine={name: getattr(task, name) for name in ENGINE},
        samples=about["samples"],
        synthetic=_is_made_up(Path(task.dataset_dir)),
        rows=rows,
    )


def _describe(engine):
    """What of an engine is not as it is by default, in words."""
    words = [str(engine["torch_compile"])] if engine.get("torch_compile", "no") != "no" else []
    words += ["channels last"] if engine.get("channels_last") else []
    return words + ([f"data on {engine['data_on']}"] if engine.get("data_on", "auto") != "auto" else [])


def _is_made_up(folder):
    note = folder / "README.txt"
    return note.is_file() and note.read_text(errors="replace") == SYNTHETIC_NOTE


def _chips(env, cores):
    """How many chips or cards the table of prices counts for so many cores."""
    if env.accelerator not in ("tpu", "cuda"):
        return 1
    return math.ceil(cores / 2) if hardware_of(env) in TWO_CORES_A_CHIP else cores


def _place(env):
    # Nobody has a TPU at home: one that is neither Colab's nor Kaggle's is rented, whether or not the host says so.
    return PLACE_OF_HOST["tpu-vm" if env.accelerator == "tpu" and env.host == "local" else env.host]


def check_writable(path):
    """Make the folder of a file that is to be written. Raises TpukitError where it cannot be."""
    path = Path(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise TpukitError(f"{path} cannot be written ({error.strerror or error}): choose another place") from error


def hardware_of(env):
    """What the table of prices calls the accelerator of an environment."""
    if env.accelerator in ("cpu", "xla"):
        return "CPU"
    name = env.device_name
    if env.accelerator == "tpu":
        generation = re.match(r"v(\d+)(litepod|e|p)?", name)
        return f"TPU v{generation[1]}{(generation[2] or '').replace('litepod', 'e')}" if generation else "TPU"
    name = name.split(",")[0]
    card = re.search(r"\b(RTX (?:PRO )?\w+(?: Ti)?(?: SUPER)?)|\b([A-Z]{1,2}\d+)(?=\b|-|[A-Z])", name)
    return next(part for part in card.groups() if part) if card else name


def file_for(folder, task, env, cores=None):
    """Where a measurement of this machine is kept in a folder: the name says workload, hardware and, where they are not the
    usual ones, place and engine."""
    name = f"{task.name}-{hardware_of(env)}{'-xla' if env.accelerator == 'xla' else ''}"
    count = cores or (env.cores if env.accelerator in ("tpu", "cuda") else 1)
    name += f"{f'-x{count}' if count > 1 else ''}{'' if _place(env) == 'local' else f'-{_place(env)}'}"
    name = "-".join([name, *_describe({name: getattr(task, name) for name in ENGINE})])
    return Path(folder) / f"{re.sub(r'[^a-z0-9]+', '-', name.lower())}.json"


def rate(row):
    """Images a second."""
    return 1e3 * row["batch_size"] / row["step_ms"]


def epoch_seconds(step_s, batch_size, images):
    return images // batch_size * step_s  # a ragged tail is dropped
