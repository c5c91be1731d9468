"""A run directory: settings, records, checkpoints, best weights. The only channel between a training and its
readers.

config.json              task, settings, and the run's id
records.jsonl            one JSON object per line: kind, step, time, values, CRC-32
log.txt                  what was printed, as plain lines
checkpoints/             step-N.pt (the newest two) and checkpoints.json, newest first, with SHA-256
best.safetensors         the weights of the best evaluation, with their SHA-256 in the metadata
pictures/, predictions/  what `show` drew, and what a test keeps of its predictions
trace/                   written by `tpukit report --trace`
progress.json            where the training is now, for a progress bar
own/                     a user's own files, and what was predicted for them
tensorboard/             the records' numbers for TensorBoard, if it is installed
cores/                   what each core of the last launch printed, and its error or stacks if it failed
.lock                    host and pid of the process that trains here
.launch-HOST.lock        host and pid of the process that launched the cores of that host
.restoring               its id, only while the run is being restored from a backup
.test                    marks a folder without a run, in which foreign weights were tested
"""

import contextlib
import dataclasses
import functools
import json
import operator
import secrets
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpukit.host import environment, files
from tpukit.host.errors import Damaged, TpukitError
from tpukit.host.tables import printable
from tpukit.runs import checkpoints, weights
from tpukit.runs.backup import Backup, find_in_inputs
from tpukit.runs.checkpoints import Entry
from tpukit.runs.storage import Check, Storage
from tpukit.runs.tensorboard import EventFile

if TYPE_CHECKING:
    from torch import Tensor

    from tpukit.training.task import Task


def setting(default: Any, *, free: bool = False) -> Any:
    """A dataclass field of a task. free=True: a resumed run may change it, because it does not change the
    result."""
    return dataclasses.field(default=default, metadata={"free": free})


class Fitted(int):
    """The value of a setting that was left None: a task chose it for the dataset in `dataset_dir`, and
    chooses anew for another. A run stores the number."""

    dataset_dir: Path | None = None


def settings_dict(task: "Task") -> dict[str, Any]:
    """The settings of a task as a dict that JSON keeps unchanged."""
    return _plain({field.name: getattr(task, field.name) for field in dataclasses.fields(task)})


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    return json.loads(json.dumps(value, default=str))


class Run:
    """One training run in one folder. Use `Run.open`."""

    echo = True  # print to the console too; a launched core does not: its launching process shows log.txt
    is_launched = False  # a core of a launch, whose launching process passes signals on (`stop_requested`)
    _writes = True
    _events = None
    _check_lock = None

    def __init__(self, path: str | Path, backup: str | Path | None = None):
        if "\0" in str(path):
            raise TpukitError(f"a run's folder cannot be named {str(path)!r}: give a path without NUL")
        self.path = Path(path)
        self.label = str(path)  # its name in errors
        self.backup = Backup(backup) if backup else None
        self._progress_at = 0.0

    def read_only(self) -> "Run":
        """The same run for a rank that is not 0: it reads, and drops what it is given to print or write."""
        other = Run(self.path)
        other._writes = other.echo = False
        return other

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @classmethod
    def open(
        cls,
        path: str | Path,
        task: "Task",
        *,
        backup: str | Path | None = None,
    ) -> "Run":
        """Start a run in the folder `path`, or resume the one that is there. On Kaggle, a run of this name in
        the inputs (an earlier version's output) is copied here first.

        Args:
            backup: a folder (on Drive, say) or an address (s3://, gs://, hf://) that gets a copy at every
                checkpoint; when `path` is gone and the backup is there, the run is restored from it.

        Raises TpukitError for a run of another task or of other settings, naming them; settings that do not
        change the result (epochs, folders, workers) may differ, and all of them before the first step was
        trained. Also for a folder that holds something else, or results without checkpoints, for a backup of
        another run, and while another process trains here."""
        from tpukit import __version__

        run = cls(path, backup)
        if task.weights:
            weights.local(task.weights)  # refuses an address: config.json would hold a password that is in it
        if environment.rank() != 0:
            return run.read_only()  # rank 0 prints and writes for all
        config = run.path / "config.json"
        if run.backup:
            run.backup.storage.check_before_training()
            if not config.exists() and run.backup.storage.has("config.json"):
                run.backup.restore(run, task)
        if not config.exists() and (earlier := find_in_inputs(environment.detect(), run.path.name)):
            Backup(earlier).restore(run, task)
        run.check_links()
        run_id = secrets.token_hex(8)
        try:
            Storage(run.path.absolute()).check_empty()
        except TpukitError:
            if not config.exists():  # asked last, because another host of a slice may open the run now
                raise
            run_id = run.config.get("id", run_id)  # runs of earlier versions have none
            if run.checkpoints() or run._results():
                run.check_settings(task)
            run.check_results()
        if run.backup:
            run.backup.check_run(run, run_id)
        values = dict(task=task.name, settings=settings_dict(task), tpukit=__version__, id=run_id)
        with run.lock_to_open(), files.explain_unwritable(run.path):
            files.write_atomic(config, json.dumps(files.with_crc32(values), indent=1))
            (run.path / "checkpoints").mkdir(exist_ok=True)
            if not run.checkpoints() and checkpoints.read_list(run.path / "checkpoints") is None:
                checkpoints.write_list(run.path / "checkpoints", [])
        if run.backup:
            print(printable(f"run: every checkpoint is copied to {run.backup}"))
        return run

    @classmethod
    def find(cls, path: str | Path, *, trained: bool = True) -> "Run":
        """Open a run for reading; raises TpukitError if there is none. trained=False: also an empty folder,
        created if missing, in which foreign weights are tested."""
        run = cls(path)
        if not (run.path / "config.json").is_file():
            if trained:
                below = ", ".join(sorted(str(config.parent) for config in run.path.glob("*/config.json")))
                hint = f"; runs below it: {below}" if below else ""
                raise TpukitError(f"{path} is not a run directory (it has no config.json){hint}")
            marker = run.path / ".test"
            if not marker.exists():
                Storage(run.path.absolute()).check_empty()
            with files.explain_unwritable(run.path):
                run.path.mkdir(parents=True, exist_ok=True)
                marker.touch()
        run.check_links()
        return run

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Context manager: keep other processes from training here. Raises TpukitError with host and pid of
        one that does; so does, within it, whatever writes results after another process took the lock."""
        if not self._writes:
            yield
            return
        with files.exclusive_lock(self.path / ".lock", signs=[self.path / "progress.json"]) as check:
            self._check_lock = check
            try:
                yield
            finally:
                self._check_lock = None

    def lock_to_open(self) -> contextlib.AbstractContextManager[None]:
        """`lock`, for what opens or restores the run, and makes its folder. None on a TPU VM: the hosts of a
        slice may share the folder, and each opens the run."""
        with files.explain_unwritable(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        return contextlib.nullcontext() if environment.detect().host == "tpu-vm" else self.lock()

    def check_lock(self) -> None:
        """Raise TpukitError if another process has taken the lock that this one holds."""
        if self._check_lock is not None:
            self._check_lock()

    # What is in the folder

    @property
    def config(self) -> dict[str, Any]:
        """task, settings and id that the run was opened with. Raises TpukitError if the file is damaged."""
        try:
            found = files.parse_with_crc32((self.path / "config.json").read_bytes())
            # Runs of earlier versions call the task a workload.
            name = found["workload"] if "workload" in found else found["task"]
            return dict(found, task=name, settings=dict(found["settings"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TpukitError(
                f"{self.label}/config.json is damaged ({error}): copy it there from another copy of this run,"
                " or choose another folder"
            ) from error

    def check_settings(self, task: "Task") -> None:
        """Raise TpukitError for a run of another task, or of settings that would change its result."""
        config, new = self.config, settings_dict(task)
        if config["task"] != task.name:
            raise TpukitError(
                f"{self.label} holds a run of {config['task']}, not {task.name}: choose another"
            )
        fields = [field for field in dataclasses.fields(task) if not field.metadata.get("free")]
        # A run of an earlier version, which did not have a setting yet, trained as by its default.
        old = {field.name: _plain(field.default) for field in fields} | config["settings"]
        if weights.is_address(old["weights"]):  # which earlier versions read
            old["weights"] = new["weights"]
        changed = [field.name for field in fields if old[field.name] != new[field.name]]
        known = {field.name for field in dataclasses.fields(task)}
        gone = [name for name, value in config["settings"].items() if value and name not in known]
        if changed or gone:
            lines = [f"  {name}: the run has {old[name]!r}, the task {new[name]!r}" for name in changed]
            lines += [f"  {name}: the run has {old[name]!r}, this version no such setting" for name in gone]
            advice = "Set them back to resume it, or choose another run folder."
            if any(isinstance(getattr(task, name), Fitted) for name in changed):
                found = "the dataset, and the pretrained weights that were found"
                advice = f"Some were chosen for {found}, which have changed since. {advice}"
            raise TpukitError("\n".join([f"{self.label} holds a run with other settings:", *lines, advice]))

    def _results(self) -> list[str]:
        """Names of the files that hold results of training steps, other than checkpoints."""
        found = [name for name in ("best.safetensors",) if (self.path / name).exists()]
        if any(record["kind"] not in ("start", "compile") for record in self.records()):
            found.append("records.jsonl")
        return found

    def check_results(self, names: Iterable[str] | None = None) -> None:
        """Raise TpukitError for results without checkpoints, which a new training would replace. names: files
        that hold results, if they lie elsewhere."""
        if self.checkpoints() or checkpoints.read_list(self.path / "checkpoints") is not None:
            return
        if names := self._results() if names is None else names:
            raise TpukitError(
                f"{self.label} holds {' and '.join(names)} of a training, but none of its checkpoints: put"
                " them back, or choose a new run folder (and another backup)"
            )

    def check_links(self) -> None:
        """Raise TpukitError for a symbolic link: it could lead elsewhere what is written or deleted here."""
        if link := next((path for path in self.path.rglob("*") if path.is_symlink()), None):
            raise TpukitError(f"{link} is a symbolic link, which no run may hold: choose another folder")

    # Printing and recording

    def print(self, text: Any) -> None:
        """Print a line and keep it in log.txt."""
        from tqdm import tqdm  # its write keeps a progress bar below the line

        text = printable(text)
        if self.echo:
            with contextlib.suppress(BrokenPipeError):  # the reader may be gone (`| head`); the run continues
                tqdm.write(text)
        if self._writes:
            files.append(self.path / "log.txt", f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n")

    def log(self, kind: str, step: int, **values: Any) -> None:
        """Append one record. Floats that are not finite become null: JSON has no such numbers."""
        if not self._writes:
            return
        self.check_lock()
        record = _finite(dict(kind=kind, step=step, time=round(time.time(), 3), **values))
        files.append(self.path / "records.jsonl", json.dumps(files.with_crc32(record)) + "\n")
        if kind == "start":
            self._events = EventFile(self.path / "tensorboard")
            for old in self.records():
                self._events.write(old)
        elif self._events is not None:
            self._events.write(record)

    def records(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The records in the order of their steps; in the file an evaluation comes once it is scored, after
        some later steps. A damaged line, or a last one cut short by a kill, is left out with a warning."""
        path, records = self.path / "records.jsonl", []
        for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else [], 1):
            if record := _parse_record(line):
                records.append(record)
            else:
                warnings.warn(f"{path}: line {number} is damaged and left out", stacklevel=2)
        found = [record for record in records if kind is None or record["kind"] == kind]
        return sorted(found, key=operator.itemgetter("step"))

    def records_size(self) -> int:
        """Bytes of the records."""
        path = self.path / "records.jsonl"
        return path.stat().st_size if path.exists() else 0

    def _restore_records(self, size: int) -> None:
        """Cut the records back to what they were at a checkpoint: the resumed run writes the rest again.
        Those of the backup, if whole, replace damaged ones."""
        path = self.path / "records.jsonl"

        def check(file: Path) -> None:
            kept = file.read_bytes()[:size] if file.exists() else b""
            damaged = sum(not _parse_record(line) for line in kept.splitlines())
            if damaged or len(kept) < size:
                lost = (
                    f"{damaged} damaged lines are left out, and {size - len(kept)} of {size} bytes are lost"
                )
                raise Damaged(f"{path}: {lost}")

        try:
            self._mend(path.name, check)
        except Damaged as error:
            self.print(error)
        if self.backup:
            self.backup.records = 0, 0
        if self.records_size() > size:
            files.write_atomic(path, path.read_bytes()[:size])

    def write_progress(self, *, step: int, total: int, **values: Any) -> None:
        """Replace what `read_progress` returns, at most twice a second and at the end."""
        now = time.monotonic()
        if self._writes and (step == total or now - self._progress_at > 0.5):
            self._progress_at = now
            text = json.dumps(files.with_crc32(_finite(dict(step=step, total=total, **values))))
            files.write_atomic(self.path / "progress.json", text, durable=False)

    def read_progress(self) -> dict[str, Any]:
        """What `write_progress` last wrote, or {}."""
        try:
            return files.parse_with_crc32((self.path / "progress.json").read_bytes())
        except (FileNotFoundError, ValueError):
            return {}

    def stop_requested(self) -> int | None:
        """The signal that the notebook's process passes on to its cores through the run directory."""
        try:
            return int((self.path / "cores" / "stop").read_text())
        except (FileNotFoundError, ValueError):
            return None

    # Weights

    def checkpoints(self) -> list[Entry]:
        """dict(file, step, sha256) of each, newest first."""
        return checkpoints.entries(self.path / "checkpoints")

    def save(self, state: Any, step: int, records_size: int | None = None) -> None:
        """Write a checkpoint, whole or not at all, and update the backup.

        Args:
            state: pytree of CPU tensors, numbers and strings.
            records_size: bytes of the records that belong to this state; by default all that are there.
        """
        self.check_lock()
        size = self.records_size() if records_size is None else records_size
        for name in ("records.jsonl", "log.txt"):  # a checkpoint reaches the disk after what it counts on
            if (self.path / name).exists():
                files.sync(self.path / name)
        checkpoints.save(self.path / "checkpoints", dict(records_size=size, state=state), step)
        self.update_backup()

    def update_backup(self) -> None:
        """Copy what changed to the backup, if there is one."""
        if self.backup:
            self.backup.update(self)

    def restore(self) -> Any:
        """The newest intact checkpoint's state, or None if the run has none. A damaged one is taken from the
        backup, or else named, skipped, and taken off the list, so that it does not count as one of those that
        are kept."""
        self.check_results()
        found = self.checkpoints()
        for number, entry in enumerate(found):
            name = f"checkpoints/{entry['file']}"
            try:
                self._mend(name, functools.partial(checkpoints.check, entry=entry))
                saved = checkpoints.load(self.path / name)
            except Damaged as error:
                self.print(f"checkpoint {entry['file']} is damaged ({error}); trying the previous one")
                continue
            if number:
                path = self.path / "checkpoints" / checkpoints.LIST
                files.write_atomic(path, checkpoints.list_text(found[number:]))
            self._restore_records(saved["records_size"])
            return saved["state"]
        if found:
            raise TpukitError(
                f"none of the {len(found)} checkpoints in {self.path}/checkpoints can be read. Restore them"
                f" from a copy, or delete the folder {self.path} to start again."
            )
        self._restore_records(0)
        return None

    def _mend(self, name: str, check: Check) -> bool:
        """Replace a damaged file by the backup's. Returns whether it was damaged; raises Damaged if it still
        is."""
        try:
            check(self.path / name)
            return False
        except Damaged:
            if self.backup and self.backup.take_back(self, name, check):
                return True
            raise

    def mend_best(self) -> dict[str, str] | None:
        """None if best.safetensors is whole. Otherwise the metadata of the backup's, which takes its place;
        {} without one."""
        path = self.path / "best.safetensors"
        try:
            was_damaged = self._mend(path.name, weights.check_embedded_sha256)
        except Damaged as error:
            self.print(f"{path.name} is damaged ({error}): the weights of the next evaluation take its place")
            return {}
        return weights.metadata(path) if was_damaged else None

    def best(self) -> Path:
        """The file of the best weights. Raises TpukitError if the run has none yet."""
        path = self.path / "best.safetensors"
        if not path.is_file():
            raise TpukitError(f"{self.path} has no best weights yet: the first evaluation saves them")
        return path

    def save_best(self, tensors: "Mapping[str, Tensor]", **values: Any) -> None:
        """Write the best weights, CPU tensors by name, as best.safetensors. values: kept as its metadata."""
        self.check_lock()
        data = weights.serialize(tensors, {name: str(value) for name, value in values.items()})
        files.write_atomic(self.path / "best.safetensors", data)


def _parse_record(line: bytes) -> dict[str, Any] | None:
    """The record on a line, None for a damaged one."""
    try:
        record = files.parse_with_crc32(line)
        numbers = record["step"], record["time"]
        is_valid = isinstance(record["kind"], str) and all(0 <= number < 2**53 for number in numbers)
    except (ValueError, KeyError, TypeError):
        return None
    return record if is_valid else None


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives them back, with None for floats that are not finite."""
    return json.loads(json.dumps(values), parse_constant=lambda name: None)
