"""A run directory: settings, records, checkpoints, best weights. The only channel between a training and its readers.

config.json              workload, settings, and the run's id
records.jsonl            one JSON object per line: kind, step, time, values, CRC-32
log.txt                  what was printed, as plain lines
checkpoints/             step-N.pt (the newest two) and checkpoints.json, newest first, with SHA-256
best.safetensors         the weights of the best evaluation, with their SHA-256 in the metadata
pictures/, predictions/  what `show` drew, and what a test keeps of its predictions
trace/, step.hlo         written by `tpukit report --trace` and `--hlo`
progress.json            where the training is now, for a progress bar
own/                     a user's own files, and what was predicted for them
tensorboard/             the records' numbers for TensorBoard, where it is installed
cores/                   the output of each core of the last launch: rank-NN.log, and its error or stacks where it failed;
                         stop, while the notebook's process stops them
.lock                    host and pid of the process that trains here
.launch-HOST.lock        host and pid of the process that launched the cores of that host
.restoring               only while the run is being restored from a backup
"""

import contextlib
import dataclasses
import json
import math
import operator
import os
import secrets
import time
import warnings
from pathlib import Path

from tpukit.host import environment, files
from tpukit.host.errors import TpukitError, first_line
from tpukit.host.tables import printable
from tpukit.runs import checkpoints, weights
from tpukit.runs.backup import Backup, restore_from_backup
from tpukit.runs.places import open_place
from tpukit.runs.tensorboard import EventFile


def setting(default, *, free=False):
    """A dataclass field of a workload. free=True: a resumed run may change it, because it does not change the result."""
    return dataclasses.field(default=default, metadata={"free": free})


def settings_dict(task):
    """The settings of a workload as a dict that JSON keeps unchanged."""
    return _plain({field.name: getattr(task, field.name) for field in dataclasses.fields(task)})


def _plain(value):
    """As JSON gives it back."""
    return json.loads(json.dumps(value, default=str))


class Run:
    """One training run in one folder. Use `Run.open`."""

    echo = True
    """Whether `print` prints to the console too. Not in a launched core: the launching process prints what log.txt gets."""
    is_launched = False
    """Whether this is a core of a launch, whose launching process passes signals on through `stop_requested`."""
    _writes = True
    _events = None

    def __init__(self, path, backup=None):
        self.path = Path(path)
        self.label = str(path)  # how errors call it
        self.backup = Backup(open_place(backup), Run) if backup else None
        self._progress_at = 0.0

    def read_only(self):
        """The same run for a rank that is not 0: it reads, and drops what it is given to print or write."""
        other = Run(self.path)
        other._writes = other.echo = False
        return other

    def __repr__(self):
        return f"Run({str(self.path)!r})"

    @classmethod
    def open(cls, path, task, *, backup=None, earlier=None):
        """Start a run in the folder `path`, or resume the one that is there.

        backup: a folder (on Drive, say) or an address (s3://, gs://, hf://) that gets a copy at every checkpoint; when `path`
        is gone and the backup is there, the run is restored from it. earlier: such a place that is only read (`find_run` finds
        one on Kaggle).
        Raises TpukitError if the folder holds a run of another workload or of other settings, naming them; settings that do
        not change the result (epochs, folders, workers) may differ. It also raises if the folder holds something else, or the
        backup another run.
        """
        from tpukit import __version__

        run = cls(path, backup)
        if environment.rank() != 0:
            return run.read_only()  # rank 0 prints and writes for all
        config = run.path / "config.json"
        if backup:
            with run.backup.place.explained():
                run.backup.place.check_before_training()
                if not config.exists() and run.backup.place.has("config.json"):
                    restore_from_backup(run, run.backup.place, task, cls)
        if earlier and not config.exists():
            restore_from_backup(run, open_place(earlier), task, cls)
        run.check_links()
        run_id = secrets.token_hex(8)
        if config.exists():
            run.check_settings(task)
            run_id = run.config.get("id", run_id)  # runs of earlier versions have none
        else:
            run.check_empty()
        if backup:
            with run.backup.place.explained():
                run.backup.check_run(run, run_id)
        values = dict(workload=task.name, settings=settings_dict(task), tpukit=__version__, id=run_id)
        with files.explain_unwritable(run.path):
            run.path.mkdir(parents=True, exist_ok=True)
            files.write_atomic(config, json.dumps(files.with_crc32(values), indent=1))
            (run.path / "checkpoints").mkdir(exist_ok=True)
        return run

    @classmethod
    def find(cls, path, *, trained=True):
        """Open a run for reading; raises TpukitError if there is none. trained=False: also an empty folder, created if missing,
        in which foreign weights are tested."""
        run = cls(path)
        if not (run.path / "config.json").is_file():
            if trained:
                below = ", ".join(sorted(str(config.parent) for config in run.path.glob("*/config.json")))
                hint = f"; runs below it: {below}" if below else ""
                raise TpukitError(f"{path} is not a run directory (it has no config.json){hint}")
            with files.explain_unwritable(run.path):
                run.path.mkdir(parents=True, exist_ok=True)
            if not os.path.lexists(run.path / "log.txt"):
                run.check_empty()
        run.check_links()
        return run

    def lock(self):
        """Context manager: keep other processes from training here. Raises TpukitError with host and pid of one that does."""
        if not self._writes:
            return contextlib.nullcontext()
        return files.exclusive_lock(self.path / ".lock", signs=[self.path / "progress.json"])

    # What is in the folder

    @property
    def config(self):
        """dict(workload, settings, id) that the run was opened with. Raises TpukitError where the file is damaged."""
        try:
            found = files.parse_with_crc32((self.path / "config.json").read_bytes())
            return dict(found, workload=found["workload"], settings=dict(found["settings"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TpukitError(f"{self.label}/config.json is damaged ({error}); choose another run folder") from error

    def check_settings(self, task):
        """Raise TpukitError where this is a run of another workload, or of settings that would change its result."""
        config, new = self.config, settings_dict(task)
        if (found := config["workload"]) != task.name:
            raise TpukitError(f"{self.label} holds a run of {found}, not of {task.name}: choose another run folder")
        old = config["settings"]
        fields = [field for field in dataclasses.fields(task) if not field.metadata.get("free")]
        # A run of an earlier version, which did not have a setting yet, trained as by its default.
        old = {field.name: _plain(field.default) for field in fields} | old
        changed = [field.name for field in fields if old[field.name] != new[field.name]]
        if changed:
            lines = [f"  {name}: the run has {old[name]!r}, the task {new[name]!r}" for name in changed]
            raise TpukitError(
                f"{self.label} holds a run with other settings:\n" + "\n".join(lines) + "\n"
                "Set them back to resume it, or choose another run folder."
            )

    def check_empty(self):
        """Raise TpukitError where a folder without a run holds anything else, which could be taken for a part of the run."""
        found = sorted(path.name for path in self.path.glob("*") if not path.name.startswith("."))
        if found:
            has = ", ".join(found[:3])
            raise TpukitError(f"{self.path} is not empty and holds no run (it has {has}): choose a new or an empty folder")

    def check_links(self):
        """Raise TpukitError where a symbolic link could lead what is written or deleted here to another place."""
        if link := next((path for path in self.path.rglob("*") if path.is_symlink()), None):
            raise TpukitError(f"{link} is a symbolic link, which a run may not hold: remove it, or choose another folder")

    # Printing and recording

    def print(self, text):
        """Print a line and keep it in log.txt."""
        from tqdm import tqdm  # its write keeps a progress bar below the line

        text = printable(text)
        if self.echo:
            with contextlib.suppress(BrokenPipeError):  # the reader may be gone (`| head`); the run continues
                tqdm.write(text)
        if self._writes:
            files.append(self.path / "log.txt", f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n")

    def log(self, kind, step, **values):
        """Append one record. Floats that are not finite are kept as null, because JSON has no such numbers."""
        if not self._writes:
            return
        record = _finite(dict(kind=kind, step=step, time=round(time.time(), 3), **values))
        files.append(self.path / "records.jsonl", json.dumps(files.with_crc32(record)) + "\n")
        if kind == "start":
            self._events = EventFile(self.path / "tensorboard")
            for old in self.records():
                self._events.write(old)
        elif self._events is not None:
            self._events.write(record)

    def close(self):
        """Close the file that stays open while a training writes."""
        if self._events is not None:
            self._events.close()
            self._events = None

    def records(self, kind=None):
        """The records in the order of their steps; in the file an evaluation comes once it is scored, after some later steps. A
        damaged line, or a last one cut short by a kill, is left out with a warning."""
        path, records = self.path / "records.jsonl", []
        for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else [], 1):
            try:
                record = files.parse_with_crc32(line)
                valid = isinstance(record["kind"], str) and all(0 <= record[name] < 2**53 for name in ("step", "time"))
            except (ValueError, KeyError, TypeError):
                valid = False
            if valid:
                records.append(record)
            else:
                warnings.warn(f"{path}: line {number} is damaged and left out", stacklevel=2)
        found = [record for record in records if kind is None or record["kind"] == kind]
        return sorted(found, key=operator.itemgetter("step"))

    def records_size(self):
        """Bytes of the records."""
        path = self.path / "records.jsonl"
        return path.stat().st_size if path.exists() else 0

    def _truncate_records(self, size):
        """Cut the records back to what they were at a checkpoint: the resumed run writes the rest again."""
        if self.records_size() > size:
            files.write_atomic(self.path / "records.jsonl", (self.path / "records.jsonl").read_bytes()[:size])

    def write_progress(self, *, step, total, **values):
        """Replace what `read_progress` returns, at most twice a second and at the end: what a progress bar shows."""
        now = time.monotonic()
        if self._writes and (step == total or now - self._progress_at > 0.5):
            self._progress_at = now
            text = json.dumps(files.with_crc32(_finite(dict(step=step, total=total, **values))))
            files.write_atomic(self.path / "progress.json", text, durable=False)

    def read_progress(self):
        """What `write_progress` last wrote, or {}."""
        try:
            return files.parse_with_crc32((self.path / "progress.json").read_bytes())
        except (FileNotFoundError, ValueError):
            return {}

    def stop_requested(self):
        """The signal that the notebook's process passes on to its cores through the run directory, or None."""
        try:
            return int((self.path / "cores" / "stop").read_text())
        except (FileNotFoundError, ValueError):
            return None

    # Weights

    def checkpoints(self):
        """list of dict(file, step, sha256), newest first."""
        return checkpoints.read_list(self.path / "checkpoints")

    def save(self, state, step, records_size=None):
        """Write a checkpoint, whole or not at all, and update the backup. state: nest of CPU tensors, numbers and strings.

        records_size: bytes of the records that belong to this state; by default all that are there."""
        size = self.records_size() if records_size is None else records_size
        checkpoints.save(self.path / "checkpoints", dict(records_size=size, state=state), step)
        if self.backup:
            self.backup.update(self)

    def restore(self):
        """The newest intact checkpoint's state, or None where the run has none. A damaged one is named and skipped."""
        found = self.checkpoints()
        for entry in found:
            try:
                saved = checkpoints.load(self.path / "checkpoints", entry)
            except TpukitError:
                raise
            except Exception as error:  # torch and zipfile raise many types for a damaged file
                self.print(f"checkpoint {entry['file']} is damaged ({first_line(error)}); trying the previous one")
                continue
            self._truncate_records(saved["records_size"])
            return saved["state"]
        if found:
            raise TpukitError(
                f"none of the {len(found)} checkpoints in {self.path}/checkpoints can be read. Restore them from a copy, or "
                f"delete the folder {self.path} to start again."
            )
        self._truncate_records(0)
        return None

    def best(self):
        """The file of the best weights. Raises TpukitError where the run has none yet."""
        path = self.path / "best.safetensors"
        if not path.is_file():
            raise TpukitError(f"{self.path} has no best weights yet: the first evaluation saves them")
        return path

    def save_best(self, tensors, **values):
        """Write the best weights as best.safetensors. tensors: name -> CPU tensor. values: kept as its metadata."""
        data = weights.serialize(tensors, {name: str(value) for name, value in values.items()})
        files.write_atomic(self.path / "best.safetensors", data)


def _finite(value):
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, (list, tuple)) else value
