"""`Checkpoints` of any training loop, in a folder and its backup. A `Run` keeps its own by them."""

import io
import json
import pickle
import secrets
from pathlib import Path
from typing import Any, BinaryIO

from tpukit.host import files
from tpukit.host.errors import Damaged, TpukitError
from tpukit.host.tables import say
from tpukit.runs import manifest, weights
from tpukit.runs.backup import MOUNT, Backup, Say

ID = "checkpoints/id.json"  # of a loop that has a backup, so that no other loop replaces that


class Checkpoints:
    """The newest two checkpoints of a training loop, in a folder and in a copy of it, on Drive for instance.

        saved = tpukit.Checkpoints("outputs/mine", backup=drive / "mine")
        state = saved.restore()
        saved.save({"model": model.state_dict(), "step": step}, step)

    With several ranks, let rank 0 save; ranks that save at once wait for each other. All may restore."""

    def __init__(self, folder: str | Path, backup: str | Path | None = None, *, say: Say = say):
        """
        Args:
            backup: a folder that gets a copy of each checkpoint. A folder without checkpoints is restored
                from it.
            say: called with each line; prints it by default.

        Raises TpukitError for a backup in which nothing can be written."""
        self.folder, self.say = files.local_path(folder, MOUNT), say
        self.backup = Backup(backup, [ID]) if backup else None
        if self.backup:
            self.backup.check_writable()

    def __repr__(self) -> str:
        return f"Checkpoints({str(self.folder)!r})"

    def save(self, state: Any, step: int) -> None:
        """Write a checkpoint, whole or not at all, and copy it to the backup.

        Args:
            state: pytree of tensors on any device, numbers and strings, as of `state_dict()`.
            step: 0 or more. A later checkpoint of the same step takes the place of this one.

        Raises TpukitError for a full disk, which leaves the checkpoints before as they were, and for a state
        with anything else in it. A backup that fails is reported, and tried again by the next save."""
        import torch
        from torch.utils._pytree import tree_map_only

        if step < 0:
            raise TpukitError(f"step={step}: a checkpoint has a step of 0 or more")
        state = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), state)
        _check_readable(tree_map_only(torch.Tensor, lambda tensor: None, state))
        with files.file_lock(self.folder):  # a loop may forget that only one of its ranks saves
            self._read_manifest()  # refuses a folder whose manifest was deleted
            manifest.put(self.folder, f"checkpoints/step-{step:08d}.pt", lambda file: _write(state, file))
            if self.backup:
                if not (self.folder / ID).exists():
                    files.write_atomic(self.folder / ID, json.dumps(dict(id=secrets.token_hex(8))))
                self.backup.update(self.folder, self.say)

    def restore(self) -> Any:
        """Return the newest whole state, with its tensors on the CPU; None if there is none yet. No code is
        run from it. A damaged checkpoint is named, skipped, and taken out of the manifest, so that it does
        not count as one of those that are kept.

        Raises TpukitError if all are damaged, if the backup belongs to another loop, or if it has a later
        state than this folder has."""
        if self.backup:
            with files.file_lock(self.folder):  # ranks share it
                if not manifest.steps(self._read_manifest()):
                    self._fetch(self.backup)
        state = self._read_newest()
        if self.backup:
            with files.file_lock(self.folder):  # no rank saves meanwhile
                self.backup.check(self.folder, self.backup.owner(self.folder))
        return state

    def _read_newest(self) -> Any:
        """Return the newest whole state of this folder. See `restore`."""
        listed, damaged = self._read_manifest(), []
        for name in manifest.steps(listed):
            path = self.folder / name
            try:
                manifest.check(path, listed[name])
                with weights.explain_damage(path):
                    state = weights.load_tensors(path)
            except Damaged as error:
                self.say(f"{error}; trying the previous checkpoint")
                damaged.append(name)
                continue
            if damaged:
                whole = {name: digests for name, digests in listed.items() if name not in damaged}
                manifest.write(self.folder, whole)
            return state
        if damaged:
            raise TpukitError(
                f"none of the {len(damaged)} checkpoints in {self.folder}/checkpoints can be read. Restore"
                f" them from a copy, or delete the folder {self.folder} to start again, from its backup if it"
                " has one."
            )
        return None

    def _fetch(self, backup: Backup) -> None:
        """Copy what is whole in the backup to this folder, which has no checkpoints."""
        owner = backup.owner(backup.path)
        backup.check_owner(self.folder, backup.owner(self.folder) or owner)
        if owner:
            self.say(f"restoring {self.folder} from {backup}")
            backup.fetch(self.folder, self.say)

    def _read_manifest(self) -> manifest.Manifest:
        """Return the folder's manifest. Raises Damaged if it is gone, and the checkpoints are not."""
        listed = manifest.read(self.folder)
        if listed is None and any((self.folder / "checkpoints").glob("step-*.pt")):
            path = self.folder / manifest.FILE
            raise Damaged(
                f"{path} is missing, but its checkpoints are there: put it back, or choose another folder"
            )
        return listed or {}


def _check_readable(values: Any) -> None:
    """Raise TpukitError for what could not be restored, because reading it could run code."""
    import torch

    file = io.BytesIO()
    try:
        torch.save(values, file)
        file.seek(0)
        weights.load_tensors(file)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        raise TpukitError(
            f"a checkpoint holds tensors, numbers and strings, and this state holds more ({error}): give"
            " state_dict() of an object, float(x) or torch.as_tensor(x) of a number or an array of NumPy"
        ) from error


def _write(state: Any, file: BinaryIO) -> None:
    import torch

    try:
        torch.save(state, file)
    except RuntimeError as error:  # in which torch hides that the disk is full
        raise error.__context__ if isinstance(error.__context__, OSError) else error
