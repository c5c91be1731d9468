"""Keep two processes from training in one folder."""

import contextlib
import os
import sys
from collections.abc import Callable, Generator
from pathlib import Path

from tpukit.host.errors import TpukitError
from tpukit.host.files import DISK_FULL, explain_unwritable, overwrite, this_process

if sys.platform != "win32":
    import fcntl


@contextlib.contextmanager
def exclusive_lock(path: Path) -> Generator[Callable[[], None]]:
    """Context manager: lock the file `path` for this process alone, and write its pid and host into it.

    Raises TpukitError with pid and host of a process that holds the lock. A lock ends with its process,
    killed or not. Some shared disks (Drive) have no locks, or do not show them to other hosts: there the last
    process that came is the one that the file names. Yields a function, to be called before something is
    written, that raises TpukitError if this is no longer that process."""
    with explain_unwritable(path.parent):  # neither emptied nor opened through a link
        path.parent.mkdir(parents=True, exist_ok=True)
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    me = this_process()
    with os.fdopen(number, "r+b", buffering=0) as file:
        holder = file.read().decode(errors="replace")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TpukitError(
                f"{holder or 'another process'} is using {path.parent} (training or restoring): end it, or"
                " choose another folder"
            ) from None
        except OSError:  # a disk without locks
            pass

        def other_holder() -> str:
            try:  # by its name: the disk may have another file
                named = path.read_bytes().decode(errors="replace")
            except (OSError, MemoryError):  # says nothing about who trains
                return ""
            return "" if named == me else named

        def check() -> None:
            if other := other_holder():
                raise TpukitError(
                    f"{other} has started to train in {path.parent}, too: let one of the two go on, and"
                    " choose another folder for the other"
                )

        try:
            with explain_unwritable(path, only=DISK_FULL):
                overwrite(file, me)
            yield check
        finally:
            if me == this_process():  # and not one forked meanwhile, which shares the lock
                with contextlib.suppress(OSError):  # the disk may be gone, or have no locks
                    if not other_holder():
                        overwrite(file, "")
                    fcntl.flock(file, fcntl.LOCK_UN)  # a process forked meanwhile holds the open file too
