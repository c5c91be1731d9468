"""The copy of a run in another place, such as Drive: kept up to date, and restored from. Also runs in
Kaggle's inputs."""

import functools
import glob
import tempfile
import zlib
from pathlib import Path

from tpukit.host import files
from tpukit.host.errors import Damaged, TpukitError
from tpukit.host.tables import printable
from tpukit.runs import checkpoints, weights

COPIED = ("config.json", "log.txt", "records.jsonl", "best.safetensors")  # and the checkpoints


def check_of(name, entries):
    """What raises Damaged for a file of this name in a run that is not what was written; None where the name
    does not tell.

    entries: of the list of checkpoints."""
    if name == "best.safetensors":
        return weights.check_embedded_sha256
    listed = {f"checkpoints/{entry['file']}": entry for entry in entries}
    return functools.partial(checkpoints.check, entry=listed[name]) if name in listed else None


class Backup:
    """A copy of the run, updated at every checkpoint. place: the `Folder` or `Remote` of it. open_run: path
    -> `Run`."""

    def __init__(self, place, open_run):
        self.place, self.open_run = place, open_run
        self.failed = False
        self.copied = {}  # file name -> the version of the run's file that was copied last
        self.records = 0, 0  # bytes of the records that were copied last, and their CRC-32

    def __str__(self):
        return str(self.place)

    def update(self, run):
        """Copy what changed. A failure is reported once and ends no training: Drive may be full or gone."""
        try:
            self._update(run)
        except (OSError, TpukitError) as error:
            self.copied.clear()
            if not self.failed:
                run.print(
                    f"backup to {self} failed ({error}); the training continues, checkpoints stay in"
                    f" {run.path}"
                )
            self.failed = True
        else:
            if self.failed:
                run.print(f"backup to {self} works again")
            self.failed = False

    def _update(self, run):
        """Each file is copied whole or not at all, the list of checkpoints last. A damaged file of the run
        replaces nothing."""
        self.check_run(run, run.config["id"])
        kept = run.checkpoints()
        if not self.place.has("config.json"):
            self._copy(run, "config.json", None)
            self.place.put_list([])
        for name in COPIED:
            if (run.path / name).exists():
                self._copy(
                    run, name, self._check_records if name == "records.jsonl" else check_of(name, kept)
                )
        whole = []
        for entry in kept:
            name = f"checkpoints/{entry['file']}"
            check = check_of(name, kept)
            if self._copy(run, name, check) or self.take_back(run, name, check):
                whole.append(entry)
        if not whole:
            raise Damaged(f"no checkpoint in {run.path} is whole")
        self.place.put_list(whole)

    def _copy(self, run, name, check):
        """Bring the copy of a file up to date. Returns False where the run's own is damaged, which is
        printed."""
        path = run.path / name
        if not path.exists():
            run.print(f"{name} is missing in {run.path}")
            return False
        about = path.stat()
        version = about.st_ino, about.st_mtime_ns, about.st_size
        if self.copied.get(name) == version and self.place.has(name):
            return True
        try:
            self.place.put(path, name, check)
        except Damaged:
            try:
                check(path)
            except Damaged as error:
                run.print(f"{name} in {run.path} is damaged ({error}): it is not copied to {self}")
                return False
            raise  # what arrived there is not what is here
        self.copied[name] = version
        return True

    def _check_records(self, path):
        """Raise Damaged where records that were copied before have changed since: they only ever grow."""
        data = path.read_bytes()
        size, crc32 = self.records
        if zlib.crc32(data[:size]) != crc32:
            raise Damaged(f"one of its first {size} bytes has changed since they were copied")
        self.records = len(data), zlib.crc32(data)

    def take_back(self, run, name, check):
        """Replace a damaged file of the run by its copy. Returns whether that is there, and whole."""
        if not self.place.has(name):
            return False
        try:
            with self.place.explained():
                self.place.get(name, run.path / name, check)
        except Damaged:
            return False
        run.print(f"{name} in {run.path} was damaged: taken from {self}")
        return True

    def read(self, name):
        """The bytes of a copy; None where it is not there, or out of reach."""
        with tempfile.TemporaryDirectory(prefix="tpukit-") as folder:
            try:
                if not self.place.has(name):
                    return None
                self.place.get(name, Path(folder) / "copy")
                return (Path(folder) / "copy").read_bytes()
            except (OSError, TpukitError):
                return None

    def check_run(self, run, run_id):
        """Raise TpukitError where a run of this id cannot be backed up here: the disk is gone, or the folder
        holds another run, other files, or a later state of this run, which another session left."""
        self.place.check()
        copy = self.place.open_copy(self.open_run)
        if not self.place.has("config.json"):
            self.place.check_empty(copy)
            return
        copy.check_links()
        found = copy.config.get("id")
        if found != run_id:
            raise TpukitError(
                f"the backup {self} belongs to another run than {run.path} (id {found}, not {run_id}): choose"
                " another backup folder, or, to resume the run that was backed up, a run folder that does"
                " not exist yet"
            )
        here, there = (max((entry["step"] for entry in one.checkpoints()), default=0) for one in (run, copy))
        if there > here and (later := self._whole_after(here, copy.checkpoints())):
            raise TpukitError(
                f"the backup {self} has step {later} of this run, but {run.path} has only step {here}: choose"
                " another backup folder, or, to resume from the backup, a run folder that does not exist yet"
            )

    def _whole_after(self, step, entries):
        """The step of a whole checkpoint of the copy after this one, or None."""
        for entry in entries:
            name = f"checkpoints/{entry['file']}"
            if entry["step"] <= step or not self.place.has(name):
                continue
            with tempfile.TemporaryDirectory(prefix="tpukit-") as folder:
                try:
                    self.place.get(name, Path(folder) / "copy", check_of(name, entries))
                    return entry["step"]
                except Damaged:
                    pass
        return None


def restore_from_backup(run, place, task, open_run):
    """Restore a run of this task from its copy at a place: what is whole there, and nothing else that lies
    there."""
    unfinished = run.path / ".restoring"  # the run's id; exists only if a kill cut this short
    if not unfinished.exists():
        run.check_empty()
    copy = place.open_copy(open_run)
    copy.check_links()
    run.check_links()
    copy.check_settings(task)
    entries = copy.checkpoints()
    if not checkpoints.has_list(copy.path / "checkpoints") and not entries:
        run.refuse_results([name for name in ("best.safetensors", "records.jsonl") if place.has(name)], place)
    print(printable(f"run: restoring {run.path} from {place}"))
    with files.explain_unwritable(run.path):
        run.path.mkdir(parents=True, exist_ok=True)
    with run.lock_to_open():
        if (run.path / "config.json").exists():  # another process has restored it meanwhile
            return
        _check_unfinished(unfinished, str(copy.config.get("id")))
        # The list after what it names; config.json last: it is what makes the folder a run.
        arrived = [entry for entry in entries if _get(run, place, f"checkpoints/{entry['file']}", entries)]
        if entries and not arrived:
            raise TpukitError(
                f"none of the {len(entries)} checkpoints in {place} is whole: choose a new run folder and"
                " backup"
            )
        (run.path / "checkpoints").mkdir(exist_ok=True)
        checkpoints.write_list(run.path / "checkpoints", arrived)
        for name in reversed(COPIED):
            if place.has(name):
                _get(run, place, name, entries)
        unfinished.unlink(missing_ok=True)


def _check_unfinished(path, run_id):
    """Write the id of the run that is being restored. Raises TpukitError where parts of another one were
    left."""
    if path.exists() and path.read_text(errors="replace") != run_id:
        raise TpukitError(
            f"{path.parent} holds an unfinished restore of another run than the one with the id {run_id}:"
            " choose a new or an empty folder"
        )
    files.write_atomic(path, run_id)


def _get(run, place, name, entries):
    """Restore a file. Returns whether it was whole; a damaged one is named and left out."""
    own = check_of(name, entries)

    def check(path):
        if own is not None:
            own(path)
        run.check_lock()  # copying may have taken long

    try:
        place.get(name, run.path / name, check)
        return True
    except (Damaged, FileNotFoundError) as error:
        print(printable(f"run: {name} in {place} is damaged ({error}): it is left out"))
        return False


def find_run(env, name):
    """The folder of the run `name` below the Kaggle inputs (the output of an earlier version of the notebook,
    or a copy), for `Run.open(..., earlier=...)`; None where there is none, or the outputs already hold the
    run. Raises TpukitError for several."""
    if env.inputs is None or not name or (env.outputs / name / "config.json").is_file():
        return None
    patterns = [
        f"{'*/' * depth}{glob.escape(name)}" for depth in range(5)
    ]  # the deepest: notebooks/OWNER/NOTEBOOK/outputs/
    found = [place for pattern in patterns for place in sorted(env.inputs.glob(pattern)) if is_run(place)]
    if len(found) > 1:
        raise TpukitError(
            f"{len(found)} inputs hold a run named {name}: {', '.join(map(str, found))}. Remove all but one"
        )
    return found[0] if found else None


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run of tpukit."""
    return (folder / "config.json").is_file() and (folder / "checkpoints").is_dir()
