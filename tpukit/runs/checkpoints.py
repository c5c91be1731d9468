"""`Checkpoints` of any training loop, in a folder and its backup. A `Run` keeps its own by them."""

import contextlib
import io
import json
import operator
import os
import pickle
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tpukit.host import files
from tpukit.host.errors import Damaged, TpukitError, unreadable
from tpukit.host.text import say
from tpukit.runs import manifest
from tpukit.runs.backup import MOUNT, Backup, Say
from tpukit.runs.tensors import explain_damage, load_tensors

if TYPE_CHECKING:
    from torch import Tensor

device_reads = 0  # by all saves of this process; `metrics_report` tells them from the user's
ID = "checkpoints/id.json"  # written if there is a backup, so that no other loop replaces it


class Checkpoints:
    """The newest two checkpoints of a training loop, in a folder and in a copy of it, on Drive for instance.

        saved = tpukit.Checkpoints("outputs/mine", backup=drive / "mine")
        state = saved.restore()
        saved.save({"model": model.state_dict(), "step": step}, step)

    With several ranks, let rank 0 save; ranks that save at once wait for each other. All may restore."""

    folder: Path
    """Folder of the checkpoints."""
    backup: Backup | None
    """Folder that gets a copy of each checkpoint."""
    spare: Backup | None
    """Folder in which a damaged checkpoint may be whole: the backup, or that of the run."""

    def __init__(self, folder: str | Path, backup: str | Path | None = None, *, say: Say = say):
        """Open the checkpoints of a folder. Nothing is read or written there yet.

        Args:
            folder: folder of the checkpoints, which need not exist.
            backup: folder that gets a copy of each checkpoint, and from which an empty one is restored.
            say: called with each line; prints it by default.

        Raises:
            TpukitError: if nothing can be written in the backup."""
        self.folder, self.say = files.local_path(folder, MOUNT), say
        self._knows_newest = False  # has restored or written a checkpoint
        self.backup = Backup(backup, [ID]) if backup else None
        self.spare = self.backup
        if self.backup:
            self.backup.check_writable()

    def __repr__(self) -> str:
        return f"Checkpoints({str(self.folder)!r})"

    def save(self, state: Any, step: int) -> None:
        """Write a checkpoint, whole or not at all, and copy it to the backup. A backup that fails is
        reported, and tried again by the next save.

        Args:
            state: pytree of tensors on any device, numbers and strings, such as a `state_dict()`.
            step: 0 or more. A later checkpoint of the same step takes the place of this one.

        Raises:
            TpukitError: if the disk is full (earlier checkpoints stay as they were); if the state holds
                anything else; if a later step is there that was not restored."""
        import torch
        from torch.utils._pytree import tree_map_only

        try:
            number = operator.index(step)
        except TypeError:
            number = -1
        if number < 0:
            raise TpukitError(f"step={step!r}: a checkpoint has a whole number of 0 or more as its step")
        state = tree_map_only(torch.Tensor, _on_cpu, state)
        _check_readable(tree_map_only(torch.Tensor, lambda tensor: None, state))
        with files.file_lock(self.folder):  # a loop may forget that only one of its ranks saves
            self._check_is_newest(number)
            manifest.put(self.folder, f"checkpoints/step-{number:08d}.pt", lambda file: _write(state, file))
            self._knows_newest = True
            if self.backup:
                if not files.exists(self.folder / ID):
                    files.write_atomic(self.folder / ID, json.dumps(dict(id=secrets.token_hex(8))))
                self.backup.update(self.folder, self.say)

    def _check_is_newest(self, step: int) -> None:
        """Raise TpukitError if a checkpoint of this step would take the place of later ones that nobody has
        read, as when a notebook's cell starts its loop again."""
        newest = max(manifest.steps_there(self.folder, self._read_manifest()).values(), default=0)
        if step < newest and not self._knows_newest:
            raise TpukitError(
                f"step {step} is before step {newest}, the newest checkpoint in {self.folder}, which was not"
                " restored: call restore() first and go on from there, or choose another folder"
            )

    def restore(self) -> Any:
        """Return the newest whole state, running no code from it.

        A damaged checkpoint is named, and renamed to NAME.damaged, so that it does not count as one of those
        that are kept. Its copy in the backup takes its place, or else the checkpoint before.

        Returns:
            The state, with its tensors on the CPU; None if there is none yet.

        Raises:
            TpukitError: if all checkpoints are damaged, if the backup belongs to another loop, or if it has a
                later state than this folder.
            Unreadable: if the disk cannot be read now. Nothing is changed."""
        if self.backup:
            with files.file_lock(self.folder):  # ranks share it
                if not manifest.steps(self._read_manifest()):
                    self._fetch(self.backup)
        state = self._read_newest()
        if self.backup:
            with files.file_lock(self.folder):  # no rank saves meanwhile
                self.backup.check(self.folder, self.backup.owner(self.folder))
        self._knows_newest = True
        return state

    def _read_newest(self) -> Any:
        """Return the newest whole state of this folder. See `restore`."""
        newest = next(iter(manifest.steps(self._read_manifest())), None)
        if newest is None:
            return None
        with contextlib.suppress(Damaged):
            return self._read(newest)
        with files.file_lock(self.folder):  # no rank saves meanwhile, and one of them sets it aside
            names = list(manifest.steps(self._read_manifest()))
            for name in names:
                try:
                    return self._read(name)
                except Damaged as error:
                    _set_aside(self.folder / name)
                    if self.spare and self.spare.bring_back(self.folder, name):
                        self.say(f"{error}; its copy in {self.spare} takes its place")
                        return self._read(name)
                    self.say(f"{error}; trying the previous checkpoint")
        if not names:
            raise unreadable(self.folder, "its checkpoints were there a moment ago")
        raise TpukitError(
            f"none of the {len(names)} checkpoints in {self.folder}/checkpoints is whole. Restore them from a"
            f" copy, or choose another folder to start again, with the backup of {self.folder} if it has one"
        )

    def _read(self, name: str) -> Any:
        """Return the state of one checkpoint. Raises Damaged."""
        path = self.folder / name
        data = manifest.read_whole(path, self._read_manifest().get(name, []))
        with explain_damage(path):
            return load_tensors(io.BytesIO(data))

    def _fetch(self, backup: Backup) -> None:
        """Copy what is whole in the backup to this folder, which has no checkpoints."""
        owner = backup.owner(backup.path)
        backup.check_owner(self.folder, backup.owner(self.folder) or owner)
        if owner:
            self.say(f"restoring {self.folder} from {backup}")
            backup.fetch(self.folder, self.say)

    def _read_manifest(self) -> manifest.Manifest:
        """Return the folder's manifest. Raises Damaged if it is gone, and the checkpoints are not."""
        listed, path = manifest.read(self.folder), self.folder / manifest.FILE
        if listed is None and files.names_in(path.parent, "step-*.pt"):
            raise Damaged(
                f"{path} is missing, but its checkpoints are there: put it back, or choose another folder"
            )
        return listed or {}


def _on_cpu(tensor: "Tensor") -> "Tensor":
    """Return a tensor on the CPU; a view without the rest of what it is a view of, which would be saved."""
    import torch

    global device_reads
    device_reads += tensor.device.type == "xla"
    tensor = tensor.detach().cpu()
    if tensor.layout != torch.strided or tensor.untyped_storage().nbytes() <= tensor.nbytes:
        return tensor
    return tensor.clone()


def _set_aside(damaged: Path) -> None:
    """Rename a damaged checkpoint, where the disk lets us: a Kaggle input is only read."""
    with contextlib.suppress(OSError):
        os.replace(damaged, f"{damaged}.damaged")


def _check_readable(values: Any) -> None:
    """Raise TpukitError for what could not be restored, because reading it could run code."""
    import torch

    file = io.BytesIO()
    try:
        torch.save(values, file)
        file.seek(0)
        load_tensors(file)
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
