"""Files and folders that appear whole or not at all, and what guards their writing."""

import contextlib
import errno
import getpass
import hashlib
import os
import platform
import re
import shutil
import tempfile
from pathlib import Path

from tpukit.errors import TpukitError

DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextlib.contextmanager
def whole_file(path, *, durable=True):
    """Open `path` for binary writing so that it appears complete or not at all.

    The bytes go to a neighbour that takes the name only after it reached the disk, if it is to be `durable`. Raises
    TpukitError when the disk is full; whatever stood at `path` before stays.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")  # another process may be at the same file
    try:
        with full_disk_explained(path):
            with open(partial, "wb") as file:
                yield file
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_folder(folder):
    """Yield an empty folder that takes the name `folder` when what fills it is done; before that nothing is seen there.

    Folders above it are made; what a process that was killed left half filled is removed. Raises TpukitError where it cannot be
    written, or the disk is full.
    """
    folder = Path(folder)
    ours = f".{folder.name}.{platform.node()}."  # a disk may be shared by hosts
    with unwritable_explained(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        for left in folder.parent.iterdir():
            made = re.fullmatch(re.escape(ours) + r"(\d+)\.\w{8}\.partial", left.name)
            if made and left.is_dir() and not left.is_symlink() and not _lives(int(made[1])):
                shutil.rmtree(left, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=f"{ours}{os.getpid()}.", suffix=".partial", dir=folder.parent))
    try:
        with full_disk_explained(folder):
            yield work
        with unwritable_explained(folder.parent):
            os.chmod(work, 0o755)  # a temporary folder is closed to all others
            os.replace(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _lives(pid):
    """Whether a process of this host lives, as far as can be told."""
    if os.name != "posix":  # elsewhere signal 0 is not a question
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # another user's; no number of a process
        pass
    return True


@contextlib.contextmanager
def full_disk_explained(path):
    """Within it, a full disk met while writing `path` is raised as a TpukitError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        free = shutil.disk_usage(path.parent).free
        raise TpukitError(
            f"cannot write {path}: {error.strerror.lower()} ({free / 2**20:.0f} MiB are free there). "
            "Free some space, or choose another output folder; everything saved before is untouched."
        ) from error


@contextlib.contextmanager
def unwritable_explained(folder):
    """Within it, an OSError met while making or filling `folder` is raised as a TpukitError that says what to do.

    Put only what writes there within it: it takes every OSError for one of writing.
    """
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        at = f": {error.filename}" if error.filename and str(error.filename) != str(folder) else ""
        raise TpukitError(f"cannot write in {folder} ({reason}{at}): choose another folder") from error


def append(path, text):
    """Append text to a file. Raises TpukitError when the disk is full."""
    with full_disk_explained(path), open(path, "a") as file:
        file.write(text)


def write_whole(path, data, *, durable=True):
    """Write bytes or str to `path`, whole or not at all."""
    with whole_file(path, durable=durable) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def copy_whole(source, target):
    """Copy one file, whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(source, "rb") as from_file, whole_file(target) as to_file:
        shutil.copyfileobj(from_file, to_file, 1 << 20)


def sha256(path):
    """Hexadecimal SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def locked(path):
    """Within it, no other process of this host is in a `locked` of the same path. Waits for the other."""
    try:
        import fcntl
    except ImportError:  # Windows, where nothing here starts several processes
        yield
        return
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:20]
    with open(Path(tempfile.gettempdir()) / f"tpukit-{user()}-{digest}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the system takes it back when the process ends, however that happens
        yield


def cache_folder():
    """Where later sessions find what was made once: TPUKIT_CACHE, or a folder of this user in the system's temporary one."""
    chosen = os.environ.get("TPUKIT_CACHE")
    return Path(chosen) if chosen else Path(tempfile.gettempdir()) / f"tpukit-{user()}"


def make_private(folder):
    """Make a folder that no other user can write in. Raises OSError where it is another user's, or cannot be made."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if hasattr(os, "getuid") and folder.stat().st_uid != os.getuid():
        raise OSError("it belongs to another user")


def user():
    """This user's name, or number: in a container a user may have no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # OSError from Python 3.13 on
        return str(os.getuid())
