"""The entries of the cache folder, which only this user may have written."""

import contextlib
import os
import stat
from pathlib import Path

from tpukit.host import files
from tpukit.host.errors import TpukitError, explained


def entry(name: str) -> Path:
    """Return the path of a file or folder in the cache folder. See `checked`."""
    return checked(files.cache_folder() / name)


def checked(path: Path) -> Path:
    """Return the path of a file or folder in the cache folder, which is made if needed. Raises TpukitError if
    it cannot be made, and if another user could have written what is read there."""
    with explained(f"{path.parent} cannot be written, so set TPUKIT_CACHE to another folder"):
        path.parent.mkdir(0o755, parents=True, exist_ok=True)  # whatever the umask is
        mode = path.parent.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:  # in a folder as /tmp nobody replaces another's files
        raise TpukitError(_open_to_all(path.parent))
    check_own(path)
    return path


def check_own(*paths: Path) -> None:
    """Raise TpukitError for a file or folder in the cache that another user than this one or root made or can
    write to. One that is not there is fine."""
    for path in paths:
        with contextlib.suppress(OSError):
            # A link is checked, and its target, too.
            owners = {path.lstat().st_uid, path.stat().st_uid} - {0, os.geteuid()}
            if owners:
                raise TpukitError(
                    f"{path} belongs to another user ({owners.pop()}), so it may hold anything: delete it, or"
                    " set TPUKIT_CACHE to a folder of your own"
                )
            if path.stat().st_mode & stat.S_IWOTH:
                raise TpukitError(_open_to_all(path))


def _open_to_all(path: Path) -> str:
    return (
        f"{path} can be written by every user, so it may hold anything: set TPUKIT_CACHE to a folder of your"
        f" own, or delete what is there and run `chmod o-w {path}`"
    )
