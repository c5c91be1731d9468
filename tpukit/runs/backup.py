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
from tpukit.runs.storage import Check, Folder, Remote, check_empty

if TYPE_CHECKING:
    from tpukit.runs.run import Run
    from tpukit.training.task import Task

COPIED = ("config.json", "log.txt", "records.jsonl", "best.safetensors")  # and the checkpoints
OTHER_FOLDER = "choose another backup, or, to resume what was backed up, a run folder that does not exist yet"
LIST = f"checkpoints/{checkpoints.LIST}"


def _check_of(name: str, entries: Iterable[Entry]) -> Check | None:
    """What raises Damaged for a damaged file of this name in a run; None if the name does not tell.

    entries: of the list of checkpoints."""
    if name == "best.safetensors":
        return weights.check_embedded_sha256
    listed = {f"checkpoints/{entry['file']}": entry for entry in entries}
    return functools.partial(checkpoints.check, entry=listed[name]) if name in listed else None


class Backup:
    """A copy of a run in a storage."""

    def __init__(self, storage: Folder | Remote):
        self.storage = storage
        self.failed = False
        self.copied: dict[str, tuple] = {}  # file name -> the version of the run's file that was copied last
        self.records = 0, 0  # bytes of the records that were copied last, and their CRC-32

    def __str__(self) -> str:
        return str(self.storage)

    def update(self, run: "Run") -> None:
        """Copy what changed. A failure is reported once and ends no training: Drive may be full or gone."""
        try:
            self._update(run)
        except (OSError, TpukitError) as error:
            self.copied.clear()
            if not self.failed:
                run.print(f"backup to {self} failed ({error}); the training continues in {run.path}")
            self.failed = True
        else:
            if self.failed:
                run.print(f"backup to {self} works again")
            self.failed = False

    def _update(self, run: "Run") -> None:
        """Each file is copied whole or not at all, the list of checkpoints last. A damaged file of the run
        replaces nothing."""
        self.check_run(run, run.config["id"])
        kept = run.checkpoints()
        if not self.storage.has("config.json"):
            self._copy(run, "config.json", kept)
            self._put_list([])
        for name in COPIED:
            if (run.path / name).exists():
                self._copy(run, name, kept)
        whole = []
        for entry in kept:
            name = f"checkpoints/{entry['file']}"
            if self._copy(run, name, kept) or self.take_back(run, name, kept):
                whole.append(entry)
        if not whole:
            raise Damaged(f"no checkpoint in {run.path} is whole")
        self._put_list(whole)

    def _copy(self, run: "Run", name: str, entries: Sequence[Entry]) -> bool:
        """Bring the copy of a file up to date. Returns False if the run's own is damaged, and says so."""
        path = run.path / name
        if not path.exists():
            run.print(f"{name} is missing in {run.path}")
            return False
        stat = path.stat()
        version = stat.st_ino, stat.st_mtime_ns, stat.st_size
        if self.copied.get(name) == version and self.storage.has(name):
            return True
        check = self._check_records if name == "records.jsonl" else _check_of(name, entries)
        try:
            self.storage.put(path, name, check)
        except Damaged:
            assert check is not None
            try:
                check(path)
            except Damaged as error:
                run.print(f"{name} in {run.path} is damaged ({error}): it is not copied to {self}")
                return False
            raise  # what arrived there is not what is here
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
        self.storage.check()

    def _check_records(self, path: Path) -> None:
        """Raise Damaged if records that were copied before have changed since: they only ever grow."""
        data = path.read_bytes()
        size, crc32 = self.records
        if zlib.crc32(data[:size]) != crc32:
            raise Damaged(f"one of its first {size} bytes has changed since they were copied")
        self.records = len(data), zlib.crc32(data)

    def take_back(self, run: "Run", name: str, entries: Iterable[Entry] = ()) -> bool:
        """Replace a damaged file of the run by its copy. Returns whether that is there, and whole."""
        if not self.storage.has(name):
            return False
        try:
            with self.storage.explained():
                self.storage.get(name, run.path / name, _check_of(name, entries))
        except Damaged:
            return False
        run.print(f"{name} in {run.path} was damaged: taken from {self}")
        return True

    def read(self, name: str) -> bytes | None:
        """The bytes of a copy; None if it is not there, or out of reach."""
        with tempfile.TemporaryDirectory(prefix="tpukit-") as folder:
            try:
                self.storage.get(name, Path(folder) / "copy")
                return (Path(folder) / "copy").read_bytes()
            except (OSError, TpukitError):
                return None

    def check_run(self, run: "Run", run_id: str) -> None:
        """Raise TpukitError if a run of this id cannot be backed up here: the disk is gone, or the storage
        holds another run, other files, or a later state of this run, which another session left."""
        self.storage.check()
        if not self.storage.has("config.json"):
            check_empty(self.storage)
            return
        copy, entries = self._open_copy(run)
        found = copy.config.get("id")
        if found != run_id:
            other = f"belongs to another run than {run.path} (id {found}, not {run_id})"
            raise TpukitError(f"the backup {self} {other}: {OTHER_FOLDER}")
        here = max((entry["step"] for entry in run.checkpoints()), default=0)
        ahead = (entry for entry in entries if entry["step"] > here)
        if whole := next(filter(self._is_whole, ahead), None):
            later = f"has step {whole['step']} of this run, but {run.path} has only step {here}"
            raise TpukitError(f"the backup {self} {later}: {OTHER_FOLDER}")

    def _open_copy(self, run: "Run") -> tuple["Run", list[Entry]]:
        """(the copy as a run for reading, entries of its checkpoints)."""
        copy = type(run)(self.storage.local_copy(("config.json", LIST)))
        copy.label = str(self)
        copy.check_links()
        return copy, copy.checkpoints() or checkpoints.entries_of(self.storage.names("checkpoints"))

    def _is_whole(self, entry: Entry) -> bool:
        """Whether a checkpoint of the copy is there, and whole."""
        name = f"checkpoints/{entry['file']}"
        with tempfile.TemporaryDirectory(prefix="tpukit-") as folder:
            try:
                self.storage.get(name, Path(folder) / "copy", _check_of(name, [entry]))
            except (Damaged, FileNotFoundError):
                return False
        return True

    def restore(self, run: "Run", task: "Task") -> None:
        """Restore a run of this task from its copy: what is whole there, and nothing else that lies there."""
        unfinished = run.path / ".restoring"  # the run's id; exists only if a kill cut this short
        if not unfinished.exists():
            check_empty(Folder(run.path))
        copy, entries = self._open_copy(run)
        run.check_links()
        copy.check_settings(task)
        if not entries and not checkpoints.has_list(copy.path / "checkpoints"):
            results = ("best.safetensors", "records.jsonl")
            run.refuse_results([name for name in results if self.storage.has(name)], str(self))
        print(printable(f"run: restoring {run.path} from {self}"))
        with files.explain_unwritable(run.path):
            run.path.mkdir(parents=True, exist_ok=True)
        with run.lock_to_open():
            if (run.path / "config.json").exists():  # another process has restored it meanwhile
                return
            run_id = str(copy.config.get("id"))
            if unfinished.exists() and unfinished.read_text(errors="replace") != run_id:
                raise TpukitError(
                    f"{run.path} has parts of another run than {run_id}: choose an empty folder"
                )
            files.write_atomic(unfinished, run_id)
            # The list after what it names; config.json last: it is what makes the folder a run.
            arrived = [e for e in entries if self._restore_file(run, f"checkpoints/{e['file']}", entries)]
            if entries and not arrived:
                raise TpukitError(f"none of the {len(entries)} checkpoints in {self} is whole: start anew")
            (run.path / "checkpoints").mkdir(exist_ok=True)
            checkpoints.write_list(run.path / "checkpoints", arrived)
            for name in reversed(COPIED):
                if self.storage.has(name):
                    self._restore_file(run, name, entries)
            unfinished.unlink(missing_ok=True)

    def _restore_file(self, run: "Run", name: str, entries: Iterable[Entry]) -> bool:
        """Restore a file. Returns whether it was whole; a damaged one is named and left out."""
        own = _check_of(name, entries)

        def check(path: Path) -> None:
            if own is not None:
                own(path)
            run.check_lock()  # copying may have taken long

        try:
            self.storage.get(name, run.path / name, check)
            return True
        except (Damaged, FileNotFoundError) as error:
            print(printable(f"run: {name} in {self} is damaged ({error}): it is left out"))
            return False


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
