"""A run directory: settings, records, checkpoints, best weights. The only channel between a training and its reader.

config.json              workload, settings, and what a resumed run must agree with; the run's id
records.jsonl            one JSON object a line: kind, step, time, values, CRC-32
log.txt                  what was said, as plain lines
checkpoints/             step-N.pt (the newest two) and checkpoints.json, newest first, with SHA-256
best.safetensors         the weights of the best evaluation, with their SHA-256 in the metadata
pictures/, predictions/  what `show` drew, and what a test keeps of its predictions
trace/, step.hlo         what `tpukit report --trace` and `--hlo` saw
progress.json            where the training is now, for a progress bar
tensorboard/             the records' numbers for TensorBoard, where it is installed
cores/                   what each core of the last launch said: rank-NN.log, and its error or stacks where it failed
.lock                    host and pid of the process that trains here
"""

import contextlib
import dataclasses
import json
import math
import os
import re
import secrets
import time
import warnings
import zipfile
from pathlib import Path

from tpukit.host import environment, files
from tpukit.host.errors import TpukitError, first_line
from tpukit.host.tables import GIB, printable
from tpukit.runs import weights
from tpukit.runs.tensorboard import Events

KEEP = 2  # checkpoints: the newest, and the one before in case it is damaged
BACKED_UP = ("config.json", "log.txt", "records.jsonl", "best.safetensors")  # and the checkpoints
WORTH_A_WORD_S = 0.5  # a program of a few operations (fresh sums) compiles in milliseconds


def setting(default, *, free=False):
    """A dataclass field of a workload. free=True: a resumed run may change it, because it does not change the result."""
    return dataclasses.field(default=default, metadata={"free": free})


def settings(task):
    """The fields of a workload as a dict that JSON keeps unchanged."""
    values = {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}
    return json.loads(json.dumps(values, default=str))


class Run:
    """One training run in one folder. Use `Run.open`."""

    prints = True
    """Whether `print` prints; a launched core does not, its notebook reads log.txt."""
    _writes = True
    _events = None

    def __init__(self, path, backup=None):
        self.path = Path(path)
        self.backup = Path(backup).resolve() if backup else None
        # Where its disk is mounted: when Drive goes, a bare folder of that name stays.
        self._mount = next(filter(os.path.ismount, (self.backup, *self.backup.parents))) if backup else None
        self._backup_works = True
        self._progress_at = 0.0

    def read_only(self):
        """The same run for a rank that is not 0: it reads, and what it says or writes is dropped."""
        other = Run(self.path)
        other._writes = other.prints = False
        return other

    def __repr__(self):
        return f"Run({str(self.path)!r})"

    @classmethod
    def open(cls, path, task, *, backup=None, earlier=None):
        """Start a run in the folder `path`, or go on with the one that is there.

        backup: a folder (on Drive, say) that gets a copy at every checkpoint; when `path` is gone and the backup is
        there, the run comes back from it. earlier: such a folder that is only read (`find_run` finds one on Kaggle).
        Raises TpukitError if the folder holds a run of another workload or of other settings, naming them; settings that do
        not change the result (epochs, folders, workers) may differ. So it does if the folder holds something else, or the
        backup another run.
        """
        run = cls(path, backup)
        if environment.rank() != 0:
            return run.read_only()  # rank 0 speaks and writes for all
        if run.path.exists() and not run.path.is_dir():
            raise TpukitError(f"{run.path} is a file; a run needs a folder of its own")
        config = run.path / "config.json"
        if run.backup:
            with files.explain_unwritable(run.backup):
                run._check_backup_is_mounted()
                if not config.exists() and (run.backup / "config.json").exists():
                    run._bring_back(task)
        if earlier and not config.exists():
            cls(path, earlier)._bring_back(task)
        with files.explain_unwritable(run.path):
            run.path.mkdir(parents=True, exist_ok=True)
        _refuse_links(run.path)
        if config.exists():
            run._check(task)
            run_id = run.config.get("id")  # runs of earlier versions have none
        else:
            _refuse_foreign(run.path)
            run_id = secrets.token_hex(8)
        if run.backup:
            with files.explain_unwritable(run.backup):
                run._check_backup(run_id)
                if (run.backup / "config.json").exists():
                    cls(run.backup)._check(task)
        files.write_atomic(config, json.dumps(files.with_crc32(_config(task) | (dict(id=run_id) if run_id else {})), indent=1))
        with files.explain_unwritable(run.path):
            (run.path / "checkpoints").mkdir(exist_ok=True)
        return run

    @classmethod
    def find(cls, path, *, trained=True):
        """Open a run for reading. Raises TpukitError if there is none. trained=False: a folder for the test of weights from
        elsewhere, made where there is none, will do."""
        if not trained and not (Path(path) / "config.json").is_file():
            with files.explain_unwritable(Path(path)):
                Path(path).mkdir(parents=True, exist_ok=True)
            if not os.path.lexists(Path(path) / "log.txt"):
                _refuse_foreign(Path(path))
        elif not (Path(path) / "config.json").is_file():
            near = sorted(p.parent for p in Path(path).glob("*/config.json")) if Path(path).is_dir() else []
            hint = f"; runs below it: {', '.join(map(str, near))}" if near else ""
            raise TpukitError(f"{path} is not a run directory (it has no config.json){hint}")
        _refuse_links(Path(path))
        return cls(path)

    def lock(self):
        """Within it, no other process trains in this folder. Raises TpukitError with the host and pid of one that does."""
        if not self._writes:
            return contextlib.nullcontext()
        return files.exclusive_lock(self.path / ".lock", signs=[self.path / "progress.json"])

    @property
    def config(self):
        """dict(workload, settings, id) that the run was opened with. Raises TpukitError where the file is damaged."""
        try:
            found = files.parse_with_crc32((self.path / "config.json").read_bytes())
            return dict(found, workload=found["workload"], settings=dict(found["settings"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TpukitError(f"{self.path}/config.json is damaged ({error}); choose another run folder") from error

    def _check(self, task):
        old, new = self.config, _config(task)
        if old["workload"] != new["workload"]:
            raise TpukitError(
                f"{self.path} holds a run of {old['workload']}, the task is {new['workload']}: choose another run folder"
            )
        fixed = [f.name for f in dataclasses.fields(task) if not f.metadata.get("free")]
        differing = [name for name in fixed if old["settings"].get(name) != new["settings"][name]]
        if differing:
            lines = [f"  {n}: the run has {old['settings'].get(n)!r}, the task {new['settings'][n]!r}" for n in differing]
            raise TpukitError(
                f"{self.path} holds a run with other settings:\n" + "\n".join(lines) + "\n"
                "Set them back to go on with it, or choose another run folder."
            )

    # Saying and recording

    def print(self, text):
        """Print a line and keep it in log.txt."""
        from tqdm import tqdm  # its write keeps a progress bar below the line

        if self.prints:
            # Whoever read along may be gone (`| head`); the run goes on, and so does log.txt.
            with contextlib.suppress(BrokenPipeError):
                tqdm.write(printable(text))
        if not self._writes:
            return
        files.append(self.path / "log.txt", f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n")

    def log(self, kind, step, **values):
        """Append one record. Floats that are not finite are kept as null, because JSON has no such numbers."""
        if not self._writes:
            return
        record = dict(kind=kind, step=step, time=round(time.time(), 3), **values)
        files.append(self.path / "records.jsonl", json.dumps(files.with_crc32(_finite(record))) + "\n")
        if kind == "start":
            self._events = Events(self.path / "tensorboard")
            for old in self.records():
                self._events.scalars(old["step"], old["time"], _scalars(old))
        elif self._events is not None:
            self._events.scalars(step, record["time"], _scalars(_finite(record)))

    def close(self):
        """Give the files back that stay open while a training writes."""
        if self._events is not None:
            self._events.close()
            self._events = None

    def write_progress(self, *, step, total, **values):
        """Replace what `read_progress` returns, at most twice a second and at the end: what a progress bar shows."""
        now = time.monotonic()
        if self._writes and (step == total or now - self._progress_at > 0.5):
            self._progress_at = now
            files.write_atomic(
                self.path / "progress.json",
                json.dumps(files.with_crc32(_finite(dict(step=step, total=total, **values)))),
                durable=False,
            )

    def read_progress(self):
        """What `write_progress` last said, or {}."""
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

    def records(self, kind=None):
        """The records, oldest first. A damaged line, or a last one cut short by a kill, is named and left out."""
        path = self.path / "records.jsonl"
        records = []
        for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else [], 1):
            try:
                record = files.parse_with_crc32(line)
                whole = isinstance(record["kind"], str) and all(0 <= record[n] < 2**53 for n in ("step", "time"))
            except (ValueError, KeyError, TypeError):
                whole = False
            if whole:
                records.append(record)
            else:
                warnings.warn(f"{path}: line {number} is damaged and left out", stacklevel=2)
        return [r for r in records if kind is None or r["kind"] == kind]

    def _records_size(self):
        path = self.path / "records.jsonl"
        return path.stat().st_size if path.exists() else 0

    def _forget_records_after(self, size):
        """Cut the records back to what they were at a checkpoint: the resumed run writes the rest again."""
        if self._records_size() > size:
            files.write_atomic(self.path / "records.jsonl", (self.path / "records.jsonl").read_bytes()[:size])

    # Checkpoints

    def save(self, state, step):
        """Write a checkpoint, whole or not at all. state: nest of CPU tensors, numbers and strings."""
        import torch

        path = self.path / "checkpoints" / _file_of(step)
        with files.atomic_file(path) as file:
            try:
                torch.save(dict(records_size=self._records_size(), state=state), file)
            except RuntimeError as error:  # in which torch hides that the disk is full
                raise error.__context__ if isinstance(error.__context__, OSError) else error
        old = [c for c in self.checkpoints() if c["file"] != path.name]
        kept = [dict(file=path.name, step=step, sha256=files.sha256(path)), *old][:KEEP]
        self._write_checkpoint_list(kept)
        self._back_up()

    def checkpoints(self):
        """list of dict(file, step, sha256), newest first. Where the list is damaged: of the files, with None for SHA-256."""
        folder = self.path / "checkpoints"
        try:
            found = json.loads((folder / "checkpoints.json").read_bytes())
            if found and all(c["file"] == _file_of(c["step"]) and "sha256" in c for c in found):
                return found
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            pass
        return [dict(file=_file_of(step), step=step, sha256=None) for step in sorted(_steps_in(folder), reverse=True)]

    def _write_checkpoint_list(self, kept):
        folder = self.path / "checkpoints"
        files.write_atomic(folder / "checkpoints.json", json.dumps(kept, indent=1))
        for step in _steps_in(folder) - {c["step"] for c in kept}:
            (folder / _file_of(step)).unlink()
        files.remove_partials(folder)
        files.remove_partials(self.path)

    def restore(self):
        """The newest whole checkpoint's state, or None where the run has none. A damaged one is named and passed over."""
        found = self.checkpoints()
        for checkpoint in found:
            saved, why = self._read_checkpoint(checkpoint)
            if saved is not None:
                self._forget_records_after(saved["records_size"])
                return saved["state"]
            self.print(f"checkpoint {checkpoint['file']} is damaged ({why}); going back to the one before")
        if found:
            raise TpukitError(
                f"none of the {len(found)} checkpoints in {self.path}/checkpoints can be read. Delete the folder "
                f"{self.path} to start anew, or bring the checkpoints back from a copy."
            )
        self._forget_records_after(0)
        return None

    def _read_checkpoint(self, checkpoint):
        """(state, None), or (None, why it cannot be used)."""
        path = self.path / "checkpoints" / checkpoint["file"]
        try:
            if checkpoint["sha256"]:
                if files.sha256(path) != checkpoint["sha256"]:
                    return None, f"its {path.stat().st_size} bytes do not match the recorded SHA-256"
            else:
                with zipfile.ZipFile(path) as parts:  # torch writes their CRC-32, and does not look at it
                    if part := parts.testzip():
                        return None, f"{part} in it does not match its CRC-32"
            saved = weights.unpickle(path)
            return dict(records_size=saved["records_size"], state=saved["state"]), None
        except TpukitError:
            raise
        except Exception as error:  # torch and zipfile raise many types for a damaged file; each means the same here
            return None, first_line(error)

    def save_best(self, tensors, **values):
        """Write the best weights as best.safetensors. tensors: name -> CPU tensor. values: kept as its metadata."""
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        data = weights.serialize(contiguous, {name: str(value) for name, value in values.items()})
        files.write_atomic(self.path / "best.safetensors", data)

    # The copy on Drive

    def _back_up(self):
        """Copy what changed to the backup folder, each file whole or not at all, the list of checkpoints last."""
        if not self.backup:
            return
        try:
            self._check_backup(self.config.get("id"))
            there, kept = Run(self.backup), self.checkpoints()
            for name in BACKED_UP:
                if (self.path / name).exists() and not _same(self.path / name, self.backup / name):
                    self._copy(name)
            copied = there.checkpoints()  # as listed there when they were copied: Drive need not be read
            for checkpoint in kept:
                name = f"checkpoints/{checkpoint['file']}"
                source, target = self.path / name, self.backup / name
                listed = checkpoint["sha256"] and checkpoint in copied
                if not (listed and target.exists() and target.stat().st_size == source.stat().st_size):
                    self._copy(name)
            self._check_mount()
            there._write_checkpoint_list(kept)
            self._check_mount()
        except (OSError, TpukitError) as error:  # Drive may be full or gone; the training goes on without it
            if self._backup_works:
                self.print(f"backup to {self.backup} failed ({error}); training goes on, checkpoints stay in {self.path}")
            self._backup_works = False
        else:
            if not self._backup_works:
                self.print(f"backup to {self.backup} works again")
            self._backup_works = True

    def _copy(self, name):
        self._check_mount()
        files.copy_atomic(self.path / name, self.backup / name)

    def _check_mount(self):
        """Raise TpukitError where the disk of the backup is gone: what is written then lands on the bare mount point."""
        if not os.path.ismount(self._mount):
            raise TpukitError(f"nothing is mounted at {self._mount} any more")

    def _check_backup_is_mounted(self):
        """Raise TpukitError where the backup is to lie on Colab's Drive, and that is not mounted."""
        drive = environment.detect().drive
        if drive is not None and self.backup.is_relative_to(drive.parent) and not drive.is_dir():
            raise TpukitError(
                f"the backup {self.backup} is on Drive, which is not mounted: mount it (tpukit.mount_drive) first"
            )

    def _check_backup(self, run_id):
        """Raise TpukitError where the run of this id cannot be backed up: the disk is gone, or it holds another run, something
        else, or a later state of this run, which another session brought there."""
        self._check_mount()
        there = Run(self.backup)
        if not (there.path / "config.json").exists():
            _refuse_foreign(there.path)
            return
        _refuse_links(there.path)
        found = there.config.get("id")
        # Runs of earlier versions have no id; the time in its first record tells one from another.
        if found != run_id or (found is None and len({r[0]["time"] for r in (self.records(), there.records()) if r}) == 2):
            raise TpukitError(
                f"the backup {self.backup} is of another run than {self.path} (id {found}, not {run_id}). To go on with the "
                f"one that was backed up, choose a run folder that does not exist yet; to keep the one in {self.path}, choose "
                "another backup folder"
            )
        here, newest = (max((c["step"] for c in run.checkpoints()), default=0) for run in (self, there))
        if newest > here:
            raise TpukitError(
                f"the backup {self.backup} has step {newest} of this run, {self.path} only step {here}. To go on from the "
                "backup, choose a run folder that does not exist yet; to go on from here, choose another backup folder"
            )

    def _bring_back(self, task):
        """Copy what the backup of a run of this task holds, and nothing else that lies there."""
        coming = self.path / ".coming-back"  # here only if a kill cut this short
        if not coming.exists():
            _refuse_foreign(self.path)
        _refuse_links(self.backup)
        _refuse_links(self.path)
        Run(self.backup)._check(task)
        print(printable(f"run: {self.path} is not here, bringing it back from {self.backup}"))
        checkpoints = [f"checkpoints/{c['file']}" for c in Run(self.backup).checkpoints()]
        with files.explain_unwritable(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            coming.touch()
        # config.json last: it is what makes the folder a run
        for name in (*checkpoints, "checkpoints/checkpoints.json", *reversed(BACKED_UP)):
            if (self.backup / name).is_file():
                files.copy_atomic(self.backup / name, self.path / name)
        coming.unlink()


def _refuse_foreign(folder):
    """Raise TpukitError where a folder without a run holds anything else, which could be taken for a part of the run."""
    found = sorted(path.name for path in folder.glob("*") if not path.name.startswith("."))
    # Under torchrun the other processes of the same training may have come first.
    if "cores" in found and all(re.fullmatch(r"rank-\d+\.stacks", path.name) for path in folder.glob("cores/*")):
        found.remove("cores")
    if found:
        raise TpukitError(
            f"{folder} is not empty and holds no run (it has {', '.join(found[:3])}{', ...' if found[3:] else ''}, but no "
            "config.json): choose a new or an empty folder"
        )


def _refuse_links(folder):
    """Raise TpukitError where a link could lead what is written or deleted in a run's folder to another place."""
    if link := next((path for path in folder.rglob("*") if path.is_symlink()), None):
        raise TpukitError(f"{link} is a symbolic link, and a run holds plain files only: remove it, or choose another folder")


def _file_of(step):
    return f"step-{step:08d}.pt"


def _steps_in(folder):
    """Steps of the checkpoints in a folder; files of other names are not tpukit's."""
    found = (re.fullmatch(r"step-([0-9]{8}|[1-9][0-9]{8,})\.pt", path.name) for path in folder.glob("step-*.pt"))
    return {int(name[1]) for name in found if name}


def _same(source, target):
    """Whether a file of a run and its copy hold the same. Of the weights their SHA-256 says so, without reading them."""
    if not target.exists() or source.stat().st_size != target.stat().st_size:
        return False
    if source.suffix == ".safetensors":
        return weights.seal(source) is not None and weights.seal(source) == weights.seal(target)
    return source.read_bytes() == target.read_bytes()


def _config(task):
    from tpukit import __version__

    return dict(workload=task.name, settings=settings(task), tpukit=__version__)


def _scalars(record):
    """The numbers of a record, under the names that TensorBoard groups by: those of training intervals and evaluations."""
    found = {}
    with contextlib.suppress(KeyError, TypeError, AttributeError, ValueError):  # of a damaged record, what is there
        if record["kind"] == "evaluation":
            found = {f"scores/{name}": value for name, value in record["scores"].items()}
        elif record["kind"] == "train":
            speed = record["speed"]
            found |= {"loss": record["loss"], "gradient norm": record["grad_norm"]}
            found |= {"speed/samples a second": speed["images_per_s"]}
            found |= {"speed/waiting for data": speed["wait_s"] / max(speed["seconds"], 1e-9)}
            found |= {f"memory/device {n}, GiB": peak / GIB for n, (peak, _) in enumerate(speed["memory"])}
    return {name: value for name, value in found.items() if isinstance(value, (int, float)) and abs(value) < 2**127}


def _finite(value):
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, (list, tuple)) else value
