"""A copy of a folder's checkpoints in another folder (on Drive, in a mounted bucket), kept up to date and
restored from."""

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tpukit.host import environment, files
from tpukit.host.errors import Damaged, TpukitError, reading
from tpukit.runs import manifest

OTHER_FOLDER = "choose another backup, or, to resume the run in it, a folder that does not exist yet"
MOUNT = (
    "mount the bucket and give the folder where it is (gcsfuse, rclone mount), or copy the run there yourself"
    " (gcloud storage rsync, hf upload)"
)

Say = Callable[[str], None]  # prints a line


class Backup:
    """A copy of a folder's weights files, and of some others.

    names: of the others. The first is JSON with an id of what is backed up, and is copied before all else."""

    def __init__(self, path: str | Path, names: Sequence[str]):
        self.path = files.local_path(path, MOUNT).resolve()
        self.names = names
        # When Drive is lost, an empty folder stays where it was mounted.
        self.mount_point = next(filter(os.path.ismount, (self.path, *self.path.parents)))
        self.copied: dict[str, tuple[int, int, int]] = {}  # name -> version of the file that was copied last

    def __str__(self) -> str:
        return str(self.path)

    def check_writable(self) -> None:
        """Raise TpukitError, before a training run, if no copy can be kept here."""
        env = environment.detect()
        if env.drive and self.path.is_relative_to(env.drive.parent) and not env.has_drive:
            raise TpukitError(f"{self} is on Drive, which is not mounted: call tpukit.mount_drive first")
        with files.explain_unwritable(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.path).close()

    def owner(self, folder: Path) -> str | None:
        """Return the id of what is in a folder, None if it has none. Raises Damaged."""
        path = folder / self.names[0]
        advice = "copy it there from another copy of this folder, or choose another one"
        with reading(path, f"{path} is damaged ({advice})"):
            if not files.exists(path):
                return None
            return json.loads(files.read_bytes(path))["id"]

    def check_owner(self, folder: Path, owner: str | None) -> None:
        """Raise TpukitError if what has this id, in `folder`, cannot be backed up here: the disk is gone, or
        this is the folder itself, or holds the backup of another, or other files."""
        if self.path == folder.resolve():  # a copy would take the place of what is written meanwhile
            raise TpukitError(f"{folder} cannot be its own backup: choose another backup, or none")
        self._check_mounted()
        try:
            backed_up = self.owner(self.path)
        except Damaged:
            if not self._shares_weights(folder):
                raise
            self.copied.pop(self.names[0], None)  # so that it is written again
            return
        if backed_up is None:
            files.check_empty((self.path / self.names[0]).parent)
        elif backed_up != owner:
            other = f"belongs to another run than {folder} (id {backed_up}, not {owner})"
            raise TpukitError(f"the backup {self} {other}: {OTHER_FOLDER}")

    def _shares_weights(self, folder: Path) -> bool:
        """Return whether a weights file of `folder` is in the backup: then it is this folder's backup,
        whatever a disk has made of its id."""
        here, there = (manifest.read(place) or {} for place in (folder, self.path))
        digests = {digest for each in there.values() for digest in each}
        return any(digest in digests for each in here.values() for digest in each)

    def check(self, folder: Path, owner: str | None) -> None:
        """Raise TpukitError as `check_owner` does, and if another session has left a later state here."""
        self.check_owner(folder, owner)
        here = max(manifest.steps(manifest.read(folder) or {}).values(), default=0)
        listed = manifest.read(self.path) or {}
        for name, step in manifest.steps(listed).items():
            if step > here and manifest.is_whole(self.path / name, listed[name]):
                later = f"has step {step} of this run, but {folder} has only step {here}"
                raise TpukitError(f"the backup {self} {later}: {OTHER_FOLDER}")

    def _check_mounted(self) -> None:
        if not os.path.ismount(self.mount_point):
            raise TpukitError(f"nothing is mounted at {self.mount_point} any more")

    def update(self, folder: Path, say: Say) -> None:
        """Copy what changed. A failure is reported and does not end training: Drive may be full or gone."""
        try:
            self.copy(folder, say)
        except (OSError, TpukitError) as error:
            self.copied.clear()
            say(f"backup to {self} failed ({error}); training continues in {folder}")

    def copy(self, folder: Path, say: Say) -> None:
        """Copy what changed, each file whole or not at all, the manifest last. A damaged weights file is
        named and replaces nothing. Raises TpukitError or OSError if nothing can be backed up here."""
        self.check(folder, self.owner(folder))
        listed = manifest.read(folder) or {}
        kept = manifest.read(self.path)
        self._copy_file(folder, self.names[0])
        # Until a copy is complete, the file that it replaces is still here.
        both: manifest.Manifest = {}
        for name, digests in (kept or {}).items():
            new = [digest for digest in listed.get(name, []) if digest not in digests]
            both[name] = digests + new
        if both != kept:
            self._check_mounted()
            manifest.write(self.path, both)
        for name in self.names:
            if files.exists(folder / name):
                self._copy_file(folder, name)
        whole: manifest.Manifest = {}
        for name, digests in listed.items():
            if self._copy_whole(folder, name, digests, say):
                whole[name] = digests
            elif manifest.is_whole(self.path / name, both.get(name, [])):
                whole[name] = both[name]
        only_here = {name: digests for name, digests in both.items() if name not in listed}
        whole |= only_here
        if manifest.steps(listed) and not manifest.steps(whole):
            raise Damaged(f"no checkpoint in {folder} is intact")
        self._check_mounted()
        manifest.write_newest(self.path, whole)

    def _copy_file(self, folder: Path, name: str, check: Callable[[Path], None] | None = None) -> None:
        stat = (folder / name).stat()
        version = stat.st_ino, stat.st_mtime_ns, stat.st_size
        if self.copied.get(name) != version or not files.exists(self.path / name):
            self._check_mounted()  # copying takes long on Drive, which may go meanwhile
            files.copy_atomic(folder / name, self.path / name, check)
            self.copied[name] = version

    def _copy_whole(self, folder: Path, name: str, digests: list[str], say: Say) -> bool:
        """Bring the copy of a weights file up to date. Return False if it is gone, or its copy would be
        damaged, and say so."""
        try:
            self._copy_file(folder, name, lambda path: manifest.check(path, digests))
            return True
        except (Damaged, FileNotFoundError):
            say(f"{name} in {folder} is damaged or gone, or its copy is damaged: it is not copied to {self}")
            return False

    def fetch(self, folder: Path, say: Say) -> None:
        """Copy what is whole here to a folder without checkpoints, the manifest last. What is damaged is
        named and left out. Raises TpukitError if there are checkpoints here and none is whole."""
        listed = manifest.read(self.path) or {}
        manifest.write(folder, {})  # until the end: files without a manifest would mean that it was deleted
        for name in self.names:
            if files.exists(self.path / name):
                files.copy_atomic(self.path / name, folder / name)
        whole: manifest.Manifest = {}
        for name, digests in listed.items():
            if manifest.is_whole(self.path / name, digests):
                files.copy_atomic(self.path / name, folder / name)
                whole[name] = digests
            else:
                say(f"{name} in {self} is damaged: it is left out")
        if manifest.steps(listed) and not manifest.steps(whole):
            count = len(manifest.steps(listed))
            raise TpukitError(
                f"none of the {count} checkpoints in {self} is intact: start again without this backup"
            )
        manifest.write(folder, whole)

    def bring_back(self, folder: Path, name: str) -> bool:
        """Copy a weights file of `folder` that is damaged there from here. Return False if it is not whole
        here either."""
        if not manifest.is_whole(self.path / name, (manifest.read(folder) or {}).get(name, [])):
            return False
        files.copy_atomic(self.path / name, folder / name)
        return True
