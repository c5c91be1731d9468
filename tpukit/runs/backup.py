"""A copy of a run in another folder (on Drive, in a mounted bucket), kept up to date and restored from; and
runs in Kaggle's inputs."""

import glob
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tpukit.host import environment, files
from tpukit.host.environment import Environment
from tpukit.host.errors import Damaged, TpukitError
from tpukit.host.tables import printable
from tpukit.runs import checkpoints

if TYPE_CHECKING:
    from tpukit.runs.run import Run
    from tpukit.training.task import Task

COPIED = ("config.json", "log.txt", "records.jsonl")  # and the weights files
OTHER_FOLDER = "choose another backup, or, to resume what was backed up, a run folder that does not exist yet"
MOUNT = (
    "mount the bucket and give the folder where it is (gcsfuse, rclone mount), or copy the run there yourself"
    " (gcloud storage rsync, hf upload)"
)


class Backup:
    """A copy of a run in a folder."""

    def __init__(self, path: str | Path):
        self.path = files.local_path(path, MOUNT).resolve()
        # When Drive is lost, an empty folder stays where it was mounted.
        self.mount_point = next(filter(os.path.ismount, (self.path, *self.path.parents)))
        self.failed = False
        self.copied: dict[str, tuple] = {}  # name -> version of the run's file that was copied last

    def __str__(self) -> str:
        return str(self.path)

    def check_writable(self) -> None:
        """Raise TpukitError, before a training, if no copy can be kept here."""
        drive = environment.detect().drive
        if drive is not None and self.path.is_relative_to(drive.parent) and not drive.is_dir():
            raise TpukitError(f"{self} is on Drive, which is not mounted: call tpukit.mount_drive first")
        with files.explain_unwritable(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.path).close()

    def check_run(self, run: "Run", run_id: str) -> None:
        """Raise TpukitError if a run of this id cannot be backed up here: the disk is gone, or the folder
        holds another run, other files, or a later state of this run, which another session left."""
        self._check_mounted()
        if not (self.path / "config.json").is_file():
            files.check_empty(self.path)
            return
        if (found := type(run)(self.path).config.get("id")) != run_id:
            other = f"belongs to another run than {run.path} (id {found}, not {run_id})"
            raise TpukitError(f"the backup {self} {other}: {OTHER_FOLDER}")
        here = max((entry["step"] for entry in run.checkpoints()), default=0)
        listed = checkpoints.read_list(self.path) or {}
        for name, step in checkpoints.steps(listed).items():
            if step > here and checkpoints.is_whole(self.path / name, listed[name]):
                later = f"has step {step} of this run, but {run.path} has only step {here}"
                raise TpukitError(f"the backup {self} {later}: {OTHER_FOLDER}")

    def _check_mounted(self) -> None:
        if not os.path.ismount(self.mount_point):
            raise TpukitError(f"nothing is mounted at {self.mount_point} any more")

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
        """Copy what changed, each file whole or not at all, the list of weights files last. A damaged one is
        named and replaces nothing. Raises TpukitError or OSError if the run cannot be backed up here."""
        self.check_run(run, run.config["id"])
        listed = checkpoints.read_list(run.path) or {}
        kept = checkpoints.read_list(self.path)
        self._copy_file(run, "config.json")
        # Until its copy takes its place, a file here is the one of before.
        both = {}
        for name, digests in (kept or {}).items():
            new = [digest for digest in listed.get(name, []) if digest not in digests]
            both[name] = digests + new
        if both != kept:
            self._check_mounted()
            checkpoints.write_list(self.path, both)
        for name in COPIED:
            if (run.path / name).exists():
                self._copy_file(run, name)
        whole = {}
        for name, digests in listed.items():
            if self._copy_whole(run, name, digests):
                whole[name] = digests
            elif checkpoints.is_whole(self.path / name, both.get(name, [])):
                whole[name] = both[name]
        if checkpoints.steps(listed) and not checkpoints.steps(whole):
            raise Damaged(f"no checkpoint in {run.path} is whole")
        self._check_mounted()
        checkpoints.write_list(self.path, whole)

    def _copy_file(self, run: "Run", name: str, check: Callable[[Path], None] | None = None) -> None:
        stat = (run.path / name).stat()
        version = stat.st_ino, stat.st_mtime_ns, stat.st_size
        if self.copied.get(name) != version or not (self.path / name).exists():
            self._check_mounted()  # copying takes long on Drive, which may go meanwhile
            files.copy_atomic(run.path / name, self.path / name, check)
            self.copied[name] = version

    def _copy_whole(self, run: "Run", name: str, digests: list[str]) -> bool:
        """Bring the copy of a weights file up to date. Return False if it would be damaged, and say so."""
        try:
            self._copy_file(run, name, lambda path: checkpoints.check(path, digests))
            return True
        except Damaged:
            run.print(f"{name} in {run.path} is damaged, or its copy is: {self} does not take it")
            return False

    def restore(self, run: "Run", task: "Task") -> None:
        """Make the run's folder from its copy, complete or not at all: what is whole there, and nothing
        else."""
        files.check_empty(run.path)
        copy = type(run)(self.path)
        copy.check_settings(task)
        copy.check_results()
        listed = checkpoints.read_list(self.path) or {}
        print(printable(f"run: restoring {run.path} from {self}"))
        with files.atomic_folder(run.path) as folder:
            whole = {name: digests for name, digests in listed.items() if self._fetch(folder, name, digests)}
            if checkpoints.steps(listed) and not checkpoints.steps(whole):
                count = len(checkpoints.steps(listed))
                raise TpukitError(
                    f"none of the {count} checkpoints in {self} is whole: start anew without it"
                )
            checkpoints.write_list(folder, whole)
            for name in COPIED:
                if (self.path / name).exists():
                    files.copy_atomic(self.path / name, folder / name)

    def _fetch(self, folder: Path, name: str, digests: list[str]) -> bool:
        """Copy a weights file. Return False if it is damaged, and say so."""
        if not checkpoints.is_whole(self.path / name, digests):
            print(printable(f"run: {name} in {self} is damaged: it is left out"))
            return False
        files.copy_atomic(self.path / name, folder / name)
        return True


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
