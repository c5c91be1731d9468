"""`Checkpoints` of any training loop, in a folder and its backup. A `Run` keeps its own by them."""

import atexit
import contextlib
import io
import json
import operator
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Never

from tpukit.host import files
from tpukit.host.errors import Damaged, TpukitError, unreadable
from tpukit.host.text import say
from tpukit.runs import manifest
from tpukit.runs.backup import MOUNT, Backup, Say
from tpukit.runs.folder_lock import exclusive_lock
from tpukit.runs.tensors import explain_damage, load_tensors, plain

ID = "checkpoints/id.json"  # written if there is a backup, so that no other loop replaces it


class Checkpoints:
    """The newest two checkpoints of a training loop, in a folder and in a copy of it, on Drive for instance.

        saved = tpukit.Checkpoints("outputs/mine", backup=drive / "mine")
        done = saved.restore_into(model=model, optimizer=optimizer, random=tpukit.core()) or 0
        saved.save(done + 1)

    Or with the state in hand: `state = saved.restore()`, and `saved.save(state, step)` on rank 0 alone; ranks
    that save at once wait for each other. All ranks restore.

    A folder belongs to one loop at a time: from its first `restore_into` or `save` to the end of its process,
    other processes are refused. `restore` only reads."""

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
        self._states: dict[str, Any] = {}  # name -> `state_dict` of an object of `restore_into`
        self._step: int | None = None  # of the checkpoint that was read last
        self.locks = True
        self.backup = Backup(backup, [ID]) if backup else None
        self.spare = self.backup
        if self.backup:
            self.backup.check_writable()

    def __repr__(self) -> str:
        return f"Checkpoints({str(self.folder)!r})"

    def save(self, state: Any = None, step: int | None = None) -> None:
        """Write a checkpoint, whole or not at all, and copy it to the backup. A backup that fails is
        reported, and tried again by the next save.

        `save(step)` saves the objects of `restore_into`: all ranks call it, and rank 0 writes.

        Args:
            state: lists, tuples and dicts of tensors on any device, NumPy's arrays, numbers and strings, such
                as a `state_dict()`.
            step: 0 or more. A later checkpoint of the same step takes the place of this one.

        Raises:
            TpukitError: if the disk is full (earlier checkpoints stay as they were); if the state holds
                anything else, which is named; if a later step is there that was not restored; while another
                process trains here."""
        if step is None:
            state, step = None, state
        number = -1
        with contextlib.suppress(TypeError):
            number = operator.index(step)  # pyright: ignore[reportArgumentType]
        if number < 0:
            raise TpukitError(f"step={step!r}: a checkpoint has a whole number of 0 or more as its step")
        if state is None:
            if not self._states:
                raise TpukitError(
                    "save(step) needs restore_into(model=model, ...) before; or save(state, step)"
                )
            # Any of these may wait for all ranks.
            state = {name: state_dict() for name, state_dict in self._states.items()}
            if not _is_first_rank():
                return
        state = plain(state, "state", _refuse)
        self._hold_lock()
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

    def restore_into(self, **objects: Any) -> int | None:
        """Load the newest whole state into objects, and remember them for `save(step)`.

        A resume is exact if these are all that changes from step to step, the last `random=tpukit.core()`,
        the random states of all cores. What is left is the place of a data loader within an epoch.

        Args:
            **objects: what has `state_dict()` and `load_state_dict()`, by its name in the checkpoint.

        Returns:
            The step that was saved; None if there is no checkpoint yet.

        Raises:
            TpukitError: as `restore`; if the checkpoint lacks one of the names; while another process trains
                here.
            Unreadable: if the disk cannot be read now. Nothing is changed."""
        self._states = {name: each.state_dict for name, each in objects.items()}
        loaders = {name: each.load_state_dict for name, each in objects.items()}
        if not files.exists(self.folder) or os.access(self.folder, os.W_OK):  # a Kaggle input is only read
            self._hold_lock()
        state = self.restore()
        if state is None:
            return None
        for name, load in loaders.items():
            if name not in state:
                raise TpukitError(
                    f"step {self._step} in {self.folder} was saved without {name!r}: leave it out"
                )
            load(state[name])
        return self._step

    def _hold_lock(self) -> None:
        """Keep other processes' loops out of the folder as long as this process lasts, and those forked from
        it. Raises TpukitError if one is in it. All ranks are one loop, in the name of the first."""
        if self.locks and _is_first_rank():
            place = self.folder.resolve()
            if place not in _locks:
                lock = exclusive_lock(place / ".lock")
                _locks[place] = lock, lock.__enter__()
            _locks[place][1]()

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
        self._step = manifest.step_of(name)
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
        if listed is None and (names := files.names_in(path.parent, "[!.]*")):
            raise Damaged(
                f"{path} is missing, but {names[0]} is there: put the list back, or choose another folder if"
                " another program wrote these files"
            )
        return listed or {}


# Of this process: folder -> (its lock, which ends if it is collected; function that raises if it is lost)
_locks: dict[Path, tuple[Any, Callable[[], None]]] = {}
atexit.register(_locks.clear)


def _is_first_rank() -> bool:
    """Return whether this process is the first of its process group, or has none."""
    import torch.distributed as dist

    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def _refuse(value: Any, key: str, kind: str) -> Never:
    raise TpukitError(
        f"{key} is {kind}, and a checkpoint holds tensors, numbers and strings, arrays of numbers, and lists,"
        " tuples and dicts of these: give state_dict() of an object"
    )


def _set_aside(damaged: Path) -> None:
    """Rename a damaged checkpoint, where the disk lets us: a Kaggle input is only read."""
    with contextlib.suppress(OSError):
        os.replace(damaged, f"{damaged}.damaged")


def _write(state: Any, file: BinaryIO) -> None:
    import torch

    try:
        torch.save(state, file)
    except RuntimeError as error:  # in which torch hides that the disk is full
        raise error.__context__ if isinstance(error.__context__, OSError) else error
