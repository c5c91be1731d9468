"""The copy of a run in a storage, such as Drive: kept up to date, and restored from. Also runs in Kaggle's
inputs."""

import contextlib
import functools
import glob
import tempfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tpukit.host import files
from tpukit.host.environment import Environment
from tpukit.host.errors import Damaged, TpukitError
from tpukit.host.tables import printable
from tpukit.runs import checkpoints, weights
from tpukit.runs.checkpoints import Entry
from tpukit.runs.storage import Check, Storage

if TYPE_CHECKING:
    from tpukit.runs.run import Run
    from tpukit.training.task import Task

COPIED = ("config.json", "log.txt", "records.jsonl", "best.safetensors")  # and the checkpoints
OTHER_FOLDER = "choose another backup, or, to resume what was backed up, a run folder that does not exist yet"
LIST = f"checkpoints/{checkpoints.LIST}"


def _name(entry: Entry) -> str:
    return f"checkpoints/{entry['file']}"


def _checks(entries: Iterable[Entry]) -> dict[str, Check]:
    """What raises Damaged for a damaged file of a run, by its name. entries: of the list of checkpoints."""
    checks: dict[str, Check] = {name: lambda path: None for name in COPIED}
    checks["best.safetensors"] = weights.check_embedded_sha256
    return checks | {_name(entry): functools.partial(checkpoints.check, entry=entry) for entry in entries}


class Backup:
    """A copy of a run in a folder, or at an address."""

    def __init__(self, place: str | Path):
        self.storage = Storage(place)
        self.failed = False
        self.copied: dict[str, tuple] = {}  # file name -> version of the run's file that was copied last
        self.records = 0, 0  # bytes of the records that were copied last, and their CRC-32

    def __str__(self) -> str:
        return str(self.storage)

    def update(self, run: "Run") -> None:
        """Copy what changed. A failure is reported once and ends no training: Drive may be full or gone."""
        failure = ""
        try:
            self._update(run)
        except (OSError, TpukitError) as error:
            self.copied.clear()
            failure = f"failed ({error}); the training continues in {run.path}"
        if bool(failure) != self.failed:
            run.print(f"backup to {self} {failure or 'works again'}")
        self.failed = bool(failure)

    def _update(self, run: "Run") -> None:
        """Each file is copied whole or not at all, the list of checkpoints last. A damaged file of the run
        replaces nothing."""
        self.check_run(run, run.config["id"])
        kept = run.checkpoints()
        checks = _checks(kept) | {"records.jsonl": self._check_records}
        if not self.storage.has("config.json"):
            self._copy(run, "config.json", checks["config.json"])
            self._put_list([])
        for name in COPIED:
            if (run.path / name).exists():
                self._copy(run, name, checks[name])
        whole = []
        for entry in kept:
            name, check = _name(entry), checks[_name(entry)]
            if self._copy(run, name, check) or self.take(run, name, check):
                whole.append(entry)
        if not whole:
            raise Damaged(f"no checkpoint in {run.path} is whole")
        self._put_list(whole)

    def _copy(self, run: "Run", name: str, check: Check) -> bool:
        """Bring the copy of a file up to date. Returns False if the run's own is damaged, and says so."""
        path = run.path / name
        try:
            stat = path.stat()
            version = stat.st_ino, stat.st_mtime_ns, stat.st_size
            if self.copied.get(name) == version and self.storage.has(name):
                return True
            check(path)
        except (FileNotFoundError, Damaged) as error:
            run.print(f"{name} in {run.path} is damaged ({error}): it is not copied to {self}")
            return False
        self.storage.put(path, name, check)
        self.copied[name] = version
        return True

    def _put_list(self, entries: Sequence[Entry]) -> None:
        """Write the list of checkpoints, and remove those that are no longer in it."""
        with tempfile.TemporaryDirectory(prefix="tpukit-") as folder:
            written = Path(folder) / checkpoints.LIST
            written.write_text(checkpoints.list_text(entries))
            self.storage.put(written, LIST)
        kept = {entry["file"] for entry in entries}
        for name in set(self.storage.names("checkpoints")) - kept:
            if checkpoints.step_of(name) is not None:  # files of other names are not tpukit's
                self.storage.remove(f"checkpoints/{name}")
        self.storage.check_mounted()

    def _check_records(self, path: Path) -> None:
        """Raise Damaged if records that were copied before have changed since: they only ever grow."""
        data = path.read_bytes()
        size, crc32 = self.records
        if zlib.crc32(data[:size]) != crc32:
            raise Damaged(f"one of its first {size} bytes has changed since they were copied")
        self.records = len(data), zlib.crc32(data)

    def take(self, run: "Run", name: str, check: Check) -> bool:
        """Replace a file of the run by its copy, if that is whole. Returns whether it is; if not, says so."""
        try:
            self.storage.get(name, run.path / name, check)
            return True
        except Damaged as error:
            run.print(f"{name} in {self} is damaged or missing ({error}): it is not taken from there")
            return False

    def check_run(self, run: "Run", run_id: str) -> None:
        """Raise TpukitError if a run of this id cannot be backed up here: the disk is gone, or the storage
        holds another run, other files, or a later state of this run, which another session left."""
        self.storage.check_mounted()
        if not self.storage.has("config.json"):
            self.storage.check_empty()
            return
        copy, entries = self._open_copy(run)
        found = copy.config.get("id")
        if found != run_id:
            other = f"belongs to another run than {run.path} (id {found}, not {run_id})"
            raise TpukitError(f"the backup {self} {other}: {OTHER_FOLDER}")
        here = max((entry["step"] for entry in run.checkpoints()), default=0)
        for entry in entries:
            if entry["step"] > here:
                with contextlib.suppress(Damaged):
                    name = _name(entry)
                    checkpoints.check(self.storage.local_copy([name]) / name, entry)
                    later = f"has step {entry['step']} of this run, but {run.path} has only step {here}"
                    raise TpukitError(f"the backup {self} {later}: {OTHER_FOLDER}")

    def _open_copy(self, run: "Run") -> tuple["Run", list[Entry]]:
        """(the copy as a run for reading, entries of its checkpoints)."""
        copy = type(run)(self.storage.local_copy(["config.json", LIST]))
        copy.label = str(self)
        copy.check_links()
        return copy, copy.checkpoints() or checkpoints.entries_of(self.storage.names("checkpoints"))

    def restore(self, run: "Run", task: "Task") -> None:
        """Restore a run of this task from its copy: what is whole there, and nothing else that lies there.
        The run's folder appears with all of it or not at all."""
        Storage(run.path.absolute()).check_empty()
        copy, entries = self._open_copy(run)
        copy.check_settings(task)
        print(printable(f"run: restoring {run.path} from {self}"))
        if run.path.exists():
            with run.lock():  # raises where another process has the folder
                for left in (run.path / ".lock", *run.path.glob(".launch-*.lock")):
                    left.unlink()
        checks = _checks(entries)
        with files.atomic_folder(run.path.resolve()) as folder:
            restored = type(run)(folder)
            restored.label = str(self)
            for name in filter(self.storage.has, COPIED):
                self.take(restored, name, checks[name])
            arrived = [entry for entry in entries if self.take(restored, _name(entry), checks[_name(entry)])]
            if entries and not arrived:
                raise TpukitError(f"none of the {len(entries)} checkpoints in {self} is whole: start anew")
            (folder / "checkpoints").mkdir(exist_ok=True)
            if entries or checkpoints.read_list(copy.path / "checkpoints") is not None:
                checkpoints.write_list(folder / "checkpoints", arrived)
            restored.check_results()


def find_run(env: Environment, name: str) -> Path | None:
    """The folder of the run `name` below the Kaggle inputs (the output of an earlier version of the notebook,
    or a copy), for `Run.open(..., earlier=...)`; None if there is none, or the outputs already hold the run.
    Raises TpukitError for several."""
    if env.inputs is None or not name or (env.outputs / name / "config.json").is_file():
        return None
    # The deepest: notebooks/OWNER/NOTEBOOK/outputs/.
    patterns = [f"{'*/' * depth}{glob.escape(name)}" for depth in range(5)]
    found = [folder for pattern in patterns for folder in sorted(env.inputs.glob(pattern)) if is_run(folder)]
    if len(found) > 1:
        raise TpukitError(
            f"{len(found)} inputs hold a run named {name}: {', '.join(map(str, found))}. Remove all but one"
        )
    return found[0] if found else None


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run of tpukit."""
    return (folder / "config.json").is_file() and (folder / "checkpoints").is_dir()
