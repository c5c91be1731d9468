"""Write and read files so that a fault of the disk loses nothing; locks; the cache folder."""

import contextlib
import errno
import fnmatch
import hashlib
import os
import re
import secrets
import shutil
import socket
import stat
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterator
from pathlib import Path
from typing import BinaryIO

from tpukit.host.errors import TpukitError, reading, remount, unreadable
from tpukit.host.text import printable

if sys.platform != "win32":  # where commands that need no lock work
    import fcntl

DISK_GONE = {errno.EIO, errno.ENOTCONN, errno.ESTALE}
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextlib.contextmanager
def atomic_file(
    path: Path, *, durable: bool = True, check: Callable[[Path], None] | None = None
) -> Generator[BinaryIO]:
    """Open `path` for binary writing so that it appears complete or not at all.

    The bytes go to a temporary file next to it, which is renamed when it is complete and, if `durable`, on
    the disk. A file that it replaces passes its mode and owner on. check: called with the temporary file
    before; if it raises, `path` stays as it was. Raises TpukitError if the disk is full or cannot be written.
    """
    partial = partial_of(path)
    try:
        with explain_unwritable(path.parent):
            file = _create(partial, path)
        with explain_unwritable(path, only=DISK_FULL):
            try:
                yield file
                with explain_unwritable(path):
                    file.flush()
                    if durable:
                        os.fsync(file.fileno())
            finally:
                with explain_unwritable(path):
                    file.close()
            if check is not None:
                check(partial)
        with explain_unwritable(path.parent):
            os.replace(partial, path)
        if durable:
            sync_names(path.parent)
    finally:
        with contextlib.suppress(OSError):  # if the folder cannot be written there is none
            partial.unlink(missing_ok=True)


def _create(partial: Path, path: Path) -> BinaryIO:
    """Open a new file for writing, never through a link. If `path` is a file, its mode and owner are set
    before anything is in it that others may not read."""
    if path.is_symlink() or not path.is_file():
        return open(partial, "xb")
    file, old = open(partial, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)), path.stat()
    # Only root gives files away; Windows has no such calls.
    with contextlib.suppress(OSError, AttributeError):
        os.fchmod(file.fileno(), old.st_mode & 0o777)
        os.fchown(file.fileno(), old.st_uid, old.st_gid)
    return file


def remove_partials(folder: Path) -> None:
    """Remove what `atomic_file` left in a folder when its process was killed."""
    for partial in folder.glob(".*.partial"):
        if partial.is_file() and is_left(partial):
            partial.unlink(missing_ok=True)


# The temporary names of files and folders: .NAME.HOST.PID.TOKEN.partial, and .NAME.PID.partial as earlier
# versions named files. HOST and TOKEN have no dots.
PARTIAL = re.compile(r"\.(?P<name>.*)\.(?P<host>[^.]*)\.(?P<pid>\d+)\.(?!\d+\.)\w{8}\.partial", re.DOTALL)
OLD_PARTIAL = re.compile(r"\.(?P<name>.*)\.(?P<pid>\d+)\.partial", re.DOTALL)


def partial_of(path: Path) -> Path:
    """Return a name next to `path` for what is written there, which no other process or thread has."""
    token = f"p{secrets.token_hex(4)[1:]}"  # 8 characters, not all digits as in the pid of an old name
    return path.with_name(f".{_cut(path.name)}.{host_name()}.{os.getpid()}.{token}.partial")


def _cut(name: str) -> str:
    return os.fsencode(name)[:140].decode(errors="ignore")  # all parts of a name have 255 bytes


def host_name():
    return re.sub(r"[^\w-]", "-", socket.gethostname(), flags=re.ASCII)[:64]  # hosts may share a disk


def is_left(partial: Path, target: str = "") -> bool:
    """Return True if no process writes what has this temporary name any more. target: of a folder, its own
    name."""
    parts = PARTIAL.fullmatch(partial.name) or OLD_PARTIAL.fullmatch(partial.name)
    if not parts or target and parts["name"] != _cut(target):
        return False
    if parts.groupdict().get("host", host_name()) == host_name():
        return not _lives(int(parts["pid"]))
    # A file of a lost session, unchanged for a day; 0: a disk without times.
    with contextlib.suppress(OSError):
        return not target and 0 < partial.stat().st_mtime < time.time() - 24 * 3600
    return False


def _lives(pid: int) -> bool:
    """Return True if a process of this host is alive."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it is another user's
        pass
    return True


def sync_names(folder: Path) -> None:
    """Flush the entries of a folder to the disk, if the disk can do that."""
    with contextlib.suppress(OSError):  # some network disks cannot
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


@contextlib.contextmanager
def explain_unwritable(path: Path, *, only: Collection[int] = ()) -> Generator[None]:
    """Context manager: raise an OSError as a TpukitError with `path`, a folder or a file.

    only: the error numbers to explain, in code that does more than writing there; by default all."""
    try:
        yield
    except OSError as error:
        if only and error.errno not in only:
            raise
        reason = (error.strerror or str(error)).lower()
        if error.errno in DISK_FULL:
            free = shutil.disk_usage(path if path.is_dir() else path.parent).free
            reason += f", {free / 2**20:.0f} MiB free there; what was saved before is untouched"
        at = f": {error.filename}" if error.filename and str(error.filename) != str(path) else ""
        again = f"{remount(path)}, or " if error.errno in DISK_GONE else ""
        raise TpukitError(f"cannot write {path} ({reason}{at}): {again}choose another folder") from error


def local_path(path: str | Path, advice: str) -> Path:
    """Return the path, with a leading ~ as this user's home. Raises TpukitError with `advice` for an address
    such as s3://bucket/run, without showing it: it may hold a secret."""
    # pathlib makes s3:/ of s3://, and would write in a folder named "s3:".
    if match := re.match(r"([a-z][a-z0-9+.-]+):/", str(path), re.I):
        raise TpukitError(f"{match[1]}:// is an address and not a folder or a file of this machine: {advice}")
    return Path(os.path.expanduser(path))  # which leaves ~ where there is no home


def check_empty(folder: Path) -> None:
    """Raise TpukitError if a folder holds files but no run: they could be mistaken for parts of one."""
    if visible := names_in(folder, "[!.]*"):
        has = printable(", ".join(visible[:3]))
        raise TpukitError(f"{folder} is not empty and holds no run (it has {has}): choose an empty folder")


def write_atomic(path: Path, data: str | bytes, *, durable: bool = True) -> None:
    """Write bytes or str to `path`, whole or not at all."""
    if isinstance(data, str):
        data = data.encode(errors="backslashreplace")  # names of files need not be UTF-8
    with atomic_file(path, durable=durable) as file:
        file.write(data)


def copy_atomic(source: Path, target: Path, check: Callable[[Path], None] | None = None) -> None:
    """Copy one file, whole or not at all. check: see `atomic_file`. Raises TpukitError for a copy that is
    shorter than what was read, too."""

    def check_copy(copy: Path) -> None:
        with explain_unwritable(target):
            if (size := copy.stat().st_size) != copied:
                raise OSError(errno.EIO, f"{size} of {copied} bytes arrived")
        if check is not None:
            check(copy)

    with explain_unwritable(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(target, check=check_copy) as file:
        copied = 0
        for block in blocks(source):
            with explain_unwritable(target):
                copied += file.write(block)


def sync(path: Path) -> None:
    """Flush a file that was appended to, and its name, to the disk."""
    with explain_unwritable(path), open(path, "rb") as file:
        os.fsync(file.fileno())
    sync_names(path.parent)


def sha256(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file. Raises what `blocks` does."""
    digest = hashlib.sha256()
    for block in blocks(path):
        digest.update(block)
    return digest.hexdigest()


def read_bytes(path: Path) -> bytes:
    """Return the content of a file. Raises what `blocks` does."""
    return b"".join(blocks(path, None))


def blocks(path: Path, size: int | None = 1 << 20) -> Iterator[bytes]:
    """Generate the content of a file, in blocks of `size` bytes or in one. Raises Damaged if it is missing,
    Unreadable for an error of the disk and for less than the file has."""
    with reading(path, f"{path} is damaged"), open(path, "rb") as file:
        has, came = os.fstat(file.fileno()).st_size, 0
        while block := file.read(-1 if size is None else size):
            came += len(block)
            yield block
        if came < has:  # a log may grow meanwhile
            raise unreadable(path, f"{came} of its {has} bytes came")


def exists(path: Path) -> bool:
    """Return whether there is a file or a folder. Raises Unreadable if the disk does not tell."""
    return _stat(path) is not None


def is_folder(path: Path) -> bool:
    """Return whether there is a folder. Raises Unreadable if the disk does not tell."""
    found = _stat(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def size_of(path: Path) -> int:
    """Return the size of a file in bytes, 0 if it is missing. Raises Unreadable if the disk does not tell."""
    found = _stat(path)
    return found.st_size if found else 0


def _stat(path: Path) -> os.stat_result | None:
    with reading(path, f"{path} is not there"):
        try:
            return path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None


def names_in(folder: Path, pattern: str) -> list[str]:
    """Return the names in a folder that match a pattern, sorted; [] if there is no folder. Raises Unreadable
    if the disk does not tell, where `Path.glob` would find nothing."""
    with reading(folder, f"{folder} is not a folder", TpukitError):
        return sorted(fnmatch.filter(os.listdir(folder), pattern)) if exists(folder) else []


# Locks


def this_process() -> str:
    """Return what names this process in a lock: its pid and host."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def overwrite(file: BinaryIO, text: str) -> None:
    """Replace the content of an open file."""
    file.seek(0)
    file.truncate()
    file.write(text.encode())


@contextlib.contextmanager
def file_lock(path: Path) -> Generator[None]:
    """Context manager: wait until no other process of this user and host holds the lock of `path`, as long as
    that one works (`wait_for`).

    The lock is in the cache folder, because `path` may be on a read-only disk. Without a cache folder there
    is no lock, and writing is still atomic."""
    name, file = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:20], None
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, TpukitError):
            cache = cache_folder()
            cache.mkdir(0o755, parents=True, exist_ok=True)
            number = os.open(cache / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            file = held.enter_context(os.fdopen(number, "r+b", buffering=0))
        if file:
            with contextlib.suppress(OSError):  # a disk without locks, or a full one
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    from tpukit.host.waiting import wait_for  # here: seldom needed

                    wait_for(file, path)
                held.callback(fcntl.flock, file, fcntl.LOCK_UN)  # a process forked meanwhile has it open
                overwrite(file, this_process())
        yield


# The cache folder


def cache_folder() -> Path:
    """Return the folder that later sessions reuse: TPUKIT_CACHE, by default ~/.cache/tpukit. Raises
    TpukitError if this user has no home."""
    try:
        chosen = os.environ.get("TPUKIT_CACHE") or Path.home() / ".cache" / "tpukit"
    except RuntimeError as error:
        raise TpukitError("this user has no home, in which a cache could be: set TPUKIT_CACHE") from error
    return Path(chosen).resolve()
