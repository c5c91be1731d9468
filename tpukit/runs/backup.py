"""The copy of a run in a storage, such as Drive: kept up to date, and restored from. Also runs in Kaggle's
inputs."""

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


def _checks(entries: Iterable[Entry]) -> dict[str, Check]:
    """What raises Damaged for a damaged file of a run, by its name. entries: of the list of checkpoints."""
    named = {f"checkpoints/{e['file']}": functools.partial(checkpoints.check, entry=e) for e in entries}
    return {"best.safetensors": weights.check_embedded_sha256, **named}


class Backup:
    """A copy of a run in a folder, or at an address."""

    def __init__(self, place: str | Path):
        self.storage = Storage(place)
        self.failed = False
        # File name -> the version of the run's file that was copied last.
        self.copied: dict[str, tuple | None] = {}
        self.records = 0, 0  # bytes of the records that were copied last, and their CRC-32

    def __str__(self) -> str:
        return str(self.storage)

    def update(self, run: "Run") -> None:
        """Copy what changed. A failure is reported once and ends no training: Drive may be full or gone."""
        failure = ""
        try:
            self.copy(run)
        except (OSError, TpukitError) as error:
            self.copied.clear()
            failure = f"failed ({error}); the training continues in {run.path}"
        if bool(failure) != self.failed:
            run.print(f"backup to {self} {failure or 'works again'}")
        self.failed = bool(failure)

    def copy(self, run: "Run") -> None:
        """Copy what changed, each file whole or not at all, the list of checkpoints last. A damaged file of
        the run replaces nothing. Raises TpukitError or OSError where the run cannot be backed up here."""
        self.check_run(run, run.config["id"])
        kept = run.checkpoints()
        checks = _checks(kept) | {"records.jsonl": self._check_records}
        if not self.storage.has("config.json"):
            self._copy(run, "config.json")
            self._put_list([])
        for name in COPIED:
            if (run.path / name).exists():
                self._copy(run, name, checks.get(name))
        whole = []
        for entry in kept:
            name = f"checkpoints/{entry['file']}"
            if self._copy(run, name, checks[name]) or self.take_back(run, name, checks[name]):
                whole.append(entry)
        if not whole:
            raise Damaged(f"no checkpoint in {run.path} is whole")
        self._put_list(whole)

    def _copy(self, run: "Run", name: str, check: Check | None = None) -> bool:
        """Bring the copy of a file up to date. Returns False if the run's own is damaged, and says so."""
        path = run.path / name
        stat = path.stat() if path.exists() else None
        version = stat and (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if version and self.copied.get(name) == version and self.storage.has(name):
            return True
        try:
            if check is not None:
                check(path)
        except Damaged as error:
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

    def take_back(self, run: "Run", name: str, check: Check) -> bool:
        """Replace a damaged file of the run by its copy. Returns whether that is there, and whole."""
        try:
            self.storage.get(name, run.path / name, check)
        except Damaged:
            return False
        run.print(f"{name} in {run.path} was damaged: taken from {self}")
        return True

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
            if entry["step"] > here and self._is_whole(entry):
                later = f"has step {entry['step']} of this run, but {run.path} has only step {here}"
                raise TpukitError(f"the backup {self} {later}: {OTHER_FOLDER}")

    def _open_copy(self, run: "Run") -> tuple["Run", list[Entry]]:
        """(the copy as a run for reading, entries of its checkpoints)."""
        copy = type(run)(self.storage.local_copy(["config.json", LIST]))
        copy.label = str(self)
        copy.check_links()
        return copy, copy.checkpoints() or checkpoints.entries_of(self.storage.names("checkpoints"))

    def _is_whole(self, entry: Entry) -> bool:
        """Whether a checkpoint of the copy is there, and whole."""
        name = f"checkpoints/{entry['file']}"
        try:
            checkpoints.check(self.storage.local_copy([name]) / name, entry)
            return True
        except Damaged:
            return False

    def restore(self, run: "Run", task: "Task") -> None:
        """Restore a run of this task from its copy: what is whole there, and nothing else that lies there."""
        unfinished = run.path / ".restoring"  # the run's id; exists only if a kill cut this short
        if not unfinished.exists():
            Storage(run.path.absolute()).check_empty()
        copy, entries = self._open_copy(run)
        run.check_links()
        copy.check_settings(task)
        if not entries:
            copy.check_results(list(filter(self.storage.has, ("best.safetensors", "records.jsonl"))))
        print(printable(f"run: restoring {run.path} from {self}"))
        with run.lock_to_open():
            if (run.path / "config.json").exists():  # another process has restored it meanwhile
                return
            run_id = str(copy.config.get("id"))
            if unfinished.exists() and unfinished.read_text(errors="replace") != run_id:
                raise TpukitError(
                    f"{run.path} has parts of another run than {run_id}: choose an empty folder"
                )
            files.write_atomic(unfinished, run_id)
            checks = _checks(entries)
            # The list after what it names; config.json last: it is what makes the folder a run.
            arrived = [e for e in entries if self._restore_file(run, f"checkpoints/{e['file']}", checks)]
            if entries and not arrived:
                raise TpukitError(f"none of the {len(entries)} checkpoints in {self} is whole: start anew")
            (run.path / "checkpoints").mkdir(exist_ok=True)
            checkpoints.write_list(run.path / "checkpoints", arrived)
            for name in filter(self.storage.has, reversed(COPIED)):
                self._restore_file(run, name, checks)
            unfinished.unlink(missing_ok=True)

    def _restore_file(self, run: "Run", name: str, checks: dict[str, Check]) -> bool:
        """Restore a file. Returns whether it was whole; a damaged one is named and left out."""

        def check(path: Path) -> None:
            if name in checks:
                checks[name](path)
            run.check_lock()  # copying may have taken long

        try:
            self.storage.get(name, run.path / name, check)
            return True
        except Damaged as error:
            print(printable(f"run: {name} in {self} is damaged ({error}): it is left out"))
            return False


def find_in_inputs(env: Environment, name: str) -> Path | None:
    """Return the folder of the run `name` below the Kaggle inputs (the output of an earlier version of the
    notebook, or a copy), or None if there is none. Raises TpukitError for several."""
    if env.inputs is None or not name:
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
