"""A run directory: settings, records, checkpoints, best weights. Training writes it; everything else only
reads it.

config.json              task, settings, and the run's id
records.jsonl            one JSON object per line: kind, step, time, values
log.txt                  what was printed, as plain lines
checkpoints/             step-N.pt, the newest two, and checkpoints.json, the SHA-256 of the weights files
best.safetensors         the weights of the best evaluation
pictures/, predictions/  what `show` drew, and what a test keeps of its predictions
progress.json            the step that the training run is at, for a progress bar
own/                     a user's own files, and what was predicted for them
cores/                   what each core of the last launch printed, and its error or stacks if it failed
.lock                    host and pid of the process that trains here
.launch.lock             host and pid of the process that launched the cores
"""

import contextlib
import json
import operator
import os
import secrets
import time
import warnings
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tpukit.host import environment, files
from tpukit.host.errors import Damaged, TpukitError, reading
from tpukit.host.folders import atomic_folder
from tpukit.host.text import fit_page, printable, say
from tpukit.runs import manifest, weights
from tpukit.runs.backup import MOUNT, Backup
from tpukit.runs.checkpoints import Checkpoints
from tpukit.runs.folder_lock import exclusive_lock
from tpukit.runs.inputs import find_in_inputs
from tpukit.runs.settings import (
    Described,
    Kind,
    check_settings,
    names_of_chosen,
    settings_dict,
    with_chosen,
)

if TYPE_CHECKING:
    from torch import Tensor


RETRY_AFTER_S = (0.0, 1.0, 2.0)  # after a disk refused records
COPIED = ("config.json", "log.txt", "records.jsonl")  # to a backup, besides the weights files


class Run:
    """One training run in one folder. `Run.open` starts or resumes it, `Run.find` opens it for reading."""

    path: Path
    """Folder of the run."""
    backup: Backup | None
    """Folder of its copy, if there is one."""
    task: Described | None = None
    """The task that it was opened with; a run that was only found has its name."""
    echo: bool = True
    """Print to the console, too."""
    is_launched: bool = False
    """True on a core of a launch, whose launching process passes signals on (`stop_requested`)."""
    _writes = True

    def __init__(self, path: str | Path, backup: str | Path | None = None):
        """Name the folder of a run, without reading it.

        Args:
            path: folder of the run.
            backup: folder of its copy, if there is one."""
        self.path = files.local_path(path, MOUNT)
        self.backup = Backup(backup, COPIED) if backup else None
        self._checkpoints = Checkpoints(self.path, say=self.print)
        self._checkpoints.spare = self.backup
        self._checkpoints.locks = False  # `lock` does
        self._check_lock: Callable[[], None] = lambda: None
        self._unwritten = ""  # records that the disk has refused so far
        self._has_log = True
        self._progress_at = 0.0

    def read_only(self) -> "Run":
        """Return the same run for a rank other than 0: it reads, but prints and writes nothing."""
        other = Run(self.path)
        other._writes = other.echo = False
        return other

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @classmethod
    def open(cls, path: str | Path, task: Described, *, backup: str | Path | None = None) -> "Run":
        """Start a run in a folder, or resume the one that is there. On Kaggle, a run of this name in the
        inputs (an earlier version's output) is copied here first.

        Args:
            path: folder of the run, which need not exist.
            task: the task to train. A resumed run must have the same settings, except for those that do not
                change the result (epochs, folders, workers); before the first step all may differ.
            backup: a folder (on Drive, say) that gets a copy at every checkpoint. If `path` is gone and the
                backup is there, the run is restored from it.

        Returns:
            The run, ready to train.

        Raises:
            TpukitError: if the folder holds a run of another task or of other settings, which are named;
                if it holds something else, or results without checkpoints; if the backup is of another
                run; while another process trains here."""
        from tpukit import __version__

        run = cls(path, backup)
        run.task = task
        if task.weights:
            weights.local(task.weights)  # refuses an address: config.json would keep a password that is in it
        config = run.path / "config.json"
        if run.backup:
            run.backup.check_writable()
            if not files.exists(config) and files.exists(run.backup.path / "config.json"):
                run._fetch(run.backup, task)
        if not files.exists(config) and (earlier := find_in_inputs(environment.detect(), run.path.name)):
            run._fetch(Backup(earlier, COPIED), task)
        run_id, chosen = secrets.token_hex(8), None
        if files.exists(config):
            run_id = run.config["id"]
            if run.checkpoints() or run._has_results():
                chosen = run.choose_settings(task)
                check_settings(run.path, run.config, chosen)
            run.check_results()
        else:
            files.check_empty(run.path)
        if run.backup:
            run.backup.check(run.path, run_id)
        if chosen is None:
            chosen = task.choose_settings(environment.detect())
        values: dict[str, Any] = dict(task=task.name, settings=settings_dict(chosen))
        values |= dict(chosen=names_of_chosen(task, chosen), tpukit=__version__, id=run_id)
        # So that charts name the scores of a task of the user's own, too.
        values |= dict(score=getattr(task, "score", None), score_names=getattr(task, "score_names", {}))
        with files.explain_unwritable(run.path):
            run.path.mkdir(parents=True, exist_ok=True)
        with run.lock(), files.explain_unwritable(run.path):
            files.write_atomic(config, json.dumps(values, indent=1))
            if manifest.read(run.path) is None:
                manifest.write(run.path, {})
        if run.backup:
            say(f"every checkpoint is copied to {run.backup}")
        return run

    def _fetch(self, copy: Backup, task: Described) -> None:
        """Make the run's folder from a copy, complete or not at all: what is whole there, and nothing
        else."""
        files.check_empty(self.path)
        copied = Run(copy.path)
        check_settings(copied.path, copied.config, copied.choose_settings(task))
        copied.check_results()
        say(f"restoring {self.path} from {copy}")
        with atomic_folder(self.path) as folder:
            copy.fetch(folder, say)

    def choose_settings(self, task: Kind) -> Kind:
        """Choose the settings of a task that depend on its data or on the machine.

        Args:
            task: a task, some of whose settings may be None.

        Returns:
            The task with all its settings: as they were when this run was opened, or else, and in a folder
            without a run, as the task chooses them now."""
        if files.exists(self.path / "config.json"):
            task = with_chosen(task, self.config)
        return task.choose_settings(environment.detect())

    @classmethod
    def find(cls, path: str | Path) -> "Run":
        """Open a run for reading.

        Args:
            path: folder of the run.

        Returns:
            The run.

        Raises:
            TpukitError: if there is none; it lists the runs in the folders below."""
        run = cls(path)
        if not files.exists(run.path / "config.json"):
            below = ", ".join(sorted(str(config.parent) for config in run.path.glob("*/config.json")))
            hint = f"; runs below it: {below}" if below else ""
            raise TpukitError(f"{path} is not a run directory (it has no config.json){hint}")
        return run

    @contextlib.contextmanager
    def lock(self) -> Generator[None]:
        """Context manager: keep other processes from training here. If the disk has no locks, a process that
        comes later ends this one's saving.

        Raises:
            TpukitError: if another process trains here; it gives the host and pid."""
        if not self._writes:
            yield
            return
        with exclusive_lock(self.path / ".lock") as self._check_lock:
            yield

    # What is in the folder

    @property
    def config(self) -> dict[str, Any]:
        """The task, settings and id that the run was opened with. Raises Damaged."""
        path, advice = self.path / "config.json", "copy it there from another copy of this run"
        with reading(path, f"{path} is damaged ({advice}, or choose another folder)"):
            values = json.loads(files.read_bytes(path))
            settings = dict(values["settings"])
            if not (isinstance(values["id"], str) and isinstance(values["task"], str)):
                raise ValueError("its task or id is not a text")
            return dict(values, settings=settings)

    def _has_results(self) -> bool:
        """Return whether the folder holds results of training steps, other than checkpoints."""
        trained = any(record["kind"] not in ("start", "compile") for record in self.records())
        return trained or files.exists(self.path / manifest.BEST)

    def check_results(self) -> None:
        """Check that no results would be replaced by a new training run.

        Raises:
            TpukitError: if there are results without checkpoints."""
        if manifest.read(self.path) is None and self._has_results():
            raise TpukitError(
                f"{self.path} holds results of training (best.safetensors, records.jsonl), but none of its"
                " checkpoints: put them back, or choose a new run folder (and another backup)"
            )

    # Printing and recording

    def print(self, text: Any) -> None:
        """Print a line and keep it in log.txt.

        Args:
            text: what to print; its control characters are escaped."""
        from tqdm import tqdm  # its write keeps a progress bar below the line

        text = printable(text)
        if self.echo:
            # The reader may be gone (`| head`), or the terminal (SIGHUP); the run continues.
            with contextlib.suppress(OSError):
                tqdm.write(fit_page(text))
        if self._writes and self._has_log:
            try:
                _append(self.path / "log.txt", f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n")
            except TpukitError as error:
                self._has_log = False  # first, because it is said by this function
                self.print(f"log.txt gets no more lines ({error}); training continues")

    def log(self, kind: str, step: int, **values: Any) -> None:
        """Append one record to records.jsonl. What the disk refuses is kept for the next call, and for the
        next checkpoint.

        Args:
            kind: kind of the record, such as "train" or "evaluation".
            step: steps taken so far.
            **values: what to record, as JSON has it. Floats that are not finite become null."""
        if not self._writes:
            return
        record = _finite(dict(kind=kind, step=step, time=round(time.time(), 3), **values))
        self._unwritten += json.dumps(record) + "\n"
        with contextlib.suppress(TpukitError):
            self._write_records()

    def _write_records(self) -> None:
        if self._unwritten:
            _append(self.path / "records.jsonl", self._unwritten)
            self._unwritten = ""

    def check_records(self) -> None:
        """Write the records that the disk has refused so far.

        Raises:
            TpukitError: if it still refuses them after a few seconds."""
        for pause_s in RETRY_AFTER_S:
            with contextlib.suppress(TpukitError):
                return self._write_records()
            time.sleep(pause_s)
        self._write_records()

    def records(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Return the records in the order of their steps; in the file an evaluation comes once it is scored,
        after some later steps. A damaged line, or a last one cut short by a kill, is left out with a warning.

        Args:
            kind: kind of the records to return; None: all.

        Returns:
            A dict for each record: kind, step, time (seconds since 1970), and its values."""
        path = self.path / "records.jsonl"
        records: list[dict[str, Any]] = []
        data = files.read_bytes(path) if files.exists(path) else b""
        for number, line in enumerate(data.splitlines(), 1):
            try:
                record = json.loads(line)
                if not all(0 <= record[name] < 2**53 for name in ("step", "time")):
                    raise ValueError
                if not isinstance(record["kind"], str):
                    raise ValueError
                if kind in (None, record["kind"]):
                    records.append(record)
            except (ValueError, KeyError, TypeError, RecursionError):
                warnings.warn(f"{path}: line {number} is damaged and left out", stacklevel=2)
        return sorted(records, key=operator.itemgetter("step"))

    def records_size(self) -> int:
        """Return the size of the records in bytes."""
        return files.size_of(self.path / "records.jsonl")

    def mark_records(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the records: dict(records_size: bytes in the file, unwritten:
        what the disk refused so far)."""
        return dict(records_size=self.records_size(), unwritten=self._unwritten)

    def _cut_records(self, size: int) -> None:
        """Cut the records back to their size at a checkpoint: the resumed run writes the rest again."""
        path, current = self.path / "records.jsonl", self.records_size()
        if current < size:
            self.print(f"{path}: {size - current} of {size} bytes are lost")
        if current > size:
            files.write_atomic(path, files.read_bytes(path)[:size])

    def write_progress(self, *, step: int, total: int, **values: Any) -> None:
        """Replace what `read_progress` returns, at most twice a second and at the end. If the disk refuses
        it, a progress bar stands still.

        Args:
            step: steps taken so far.
            total: steps in all.
            **values: what else to show, as JSON has it."""
        now = time.monotonic()
        if self._writes and (step == total or now - self._progress_at > 0.5):
            self._progress_at = now
            text = json.dumps(_finite(dict(step=step, total=total, **values)))
            with contextlib.suppress(OSError, TpukitError):
                files.write_atomic(self.path / "progress.json", text, durable=False)

    def read_progress(self) -> dict[str, Any]:
        """Return what `write_progress` last wrote, or {}."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            progress = json.loads((self.path / "progress.json").read_bytes())
            if isinstance(progress, dict):
                return cast(dict[str, Any], progress)
        return {}

    def stop_requested(self) -> int | None:
        """Return the signal that the notebook's process passes on to its cores through the run directory."""
        with contextlib.suppress(OSError, ValueError):  # else the next call finds it
            return int((self.path / "cores" / "stop").read_text())
        return None

    # Weights

    def checkpoints(self) -> list[dict[str, Any]]:
        """Return the checkpoints as dict(file: name, step), the newest first."""
        listed = manifest.steps_there(self.path, manifest.read(self.path) or {})
        return [dict(file=Path(name).name, step=step) for name, step in listed.items()]

    def save(self, state: Any, step: int, records: dict[str, Any] | None = None) -> None:
        """Write a checkpoint, whole or not at all, and update the backup.

        Args:
            state: pytree of tensors, numbers and strings.
            step: steps taken so far.
            records: what `mark_records` returned when the state was that; by default what it returns now.

        Raises:
            TpukitError: if another process has started to train here."""
        self._check_lock()
        records = records or self.mark_records()
        # A checkpoint reaches the disk after what it counts on.
        if files.exists(self.path / "records.jsonl"):
            files.sync(self.path / "records.jsonl")
        with contextlib.suppress(TpukitError):  # nothing counts on the log
            files.sync(self.path / "log.txt")
        self._checkpoints.save(dict(records, state=state), step)
        self.update_backup()

    def update_backup(self) -> None:
        """Copy what changed to the backup, if there is one."""
        if self.backup:
            self.backup.update(self.path, self.print)

    def restore(self) -> Any:
        """Return the newest whole state, and cut the records back to it.

        Returns:
            The state, as of `Checkpoints.restore`; None if the run has none yet.

        Raises:
            TpukitError: as `Checkpoints.restore`; also for results without checkpoints."""
        self.check_results()
        saved = self._checkpoints.restore()
        self._cut_records(saved["records_size"] if saved else 0)
        self._unwritten = saved.get("unwritten", "") if saved else ""
        self._write_records()
        return saved["state"] if saved else None

    def has_whole_best(self) -> bool:
        """Return whether the run has best weights. Damaged ones are named, and brought back from the
        backup."""
        path = self.path / manifest.BEST
        if not files.exists(path) and manifest.BEST not in (manifest.read(self.path) or {}):
            return False
        try:
            manifest.read_best(path)
            return True
        except Damaged as error:
            if self.backup and self.backup.bring_back(self.path, manifest.BEST):
                self.print(f"{error}; its copy in {self.backup} takes its place")
                return True
            self.print(f"{error}; the next evaluation's weights will replace it")
            return False

    def best(self) -> Path:
        """Return the file of the best weights.

        Raises:
            TpukitError: if the run has none yet."""
        path = self.path / manifest.BEST
        if not files.exists(path):
            raise TpukitError(f"{self.path} has no best weights yet: the first evaluation saves them")
        return path

    def save_best(self, tensors: "Mapping[str, Tensor]", **values: Any) -> None:
        """Write the best weights as best.safetensors.

        Args:
            tensors: CPU tensors by name.
            **values: metadata of the file; each is kept as a string."""
        blocks = weights.serialize(tensors, {name: str(value) for name, value in values.items()})
        manifest.put(self.path, manifest.BEST, lambda file: [file.write(block) for block in blocks])


def _append(path: Path, text: str) -> None:
    """Append lines to a file, all or none, on a new line if a kill cut the last one short. Raises TpukitError
    if it cannot be written."""
    with files.explain_unwritable(path), open(path, "a+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(-1, os.SEEK_END)
            text = text if file.read(1) == b"\n" else f"\n{text}"
        data = memoryview(text.encode(errors="backslashreplace"))  # names of files need not be UTF-8
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(size)
            raise


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Return values as JSON gives them back, with None for floats that are not finite."""
    return json.loads(json.dumps(values), parse_constant=lambda name: None)
