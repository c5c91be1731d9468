"""Write files and folders atomically; locks; the cache folder."""

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
import socket
import stat
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import BinaryIO

from tpukit.host.errors import TpukitError, explained
from tpukit.host.tables import printable, say

if sys.platform != "win32":  # where commands that need no lock work
    import fcntl

DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
POLL_S = 0.1  # between two attempts to get a lock
SAY_AFTER_S = 5.0  # of waiting for a lock, who holds it
GIVE_UP_AFTER_S = 60.0  # in which the holder of a lock did nothing


@contextlib.contextmanager
def atomic_file(
    path: Path, *, durable: bool = True, check: Callable[[Path], None] | None = None
) -> Iterator[BinaryIO]:
    """Open `path` for binary writing so that it appears complete or not at all.

    The bytes go to a temporary file next to it, which is renamed when it is complete and, if `durable`, on
    the disk. A file that it replaces passes its mode and owner on. check: called with the temporary file
    before; if it raises, `path` stays as it was. Raises TpukitError if the disk is full or cannot be written.
    """
    partial = _partial_of(path)
    try:
        with explain_unwritable(path, only=DISK_FULL):
            with explain_unwritable(path.parent):
                file = _create(partial, path)
            with file:
                yield file
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            if check is not None:
                check(partial)
            with explain_unwritable(path.parent):
                os.replace(partial, path)
            if durable:
                _sync_names(path.parent)
    finally:
        with contextlib.suppress(OSError):  # if the folder cannot be written there is none
            partial.unlink(missing_ok=True)


def _create(partial: Path, path: Path) -> BinaryIO:
    """Open a new file for writing, never through a link. It has the mode and owner of `path`, if that is a
    file, before anything is in it that others may not read."""
    old = path.lstat() if os.path.lexists(path) else None
    if old is None or not stat.S_ISREG(old.st_mode) or sys.platform == "win32":
        return open(partial, "xb")
    file = open(partial, "xb", opener=lambda name, flags: os.open(name, flags, 0o600))
    with contextlib.suppress(OSError):  # only root gives files away, and some disks have one owner and mode
        os.fchown(file.fileno(), old.st_uid, old.st_gid)
    with contextlib.suppress(OSError):
        os.fchmod(file.fileno(), old.st_mode & 0o777)
    return file


def remove_partials(folder: Path) -> None:
    """Remove what `atomic_file` left in a folder when its process was killed."""
    for partial in folder.glob(".*.partial"):
        if partial.is_file() and _is_left(partial):
            partial.unlink(missing_ok=True)


# The temporary names of files and folders: .NAME.HOST.PID.TOKEN.partial; of files of earlier versions
# .NAME.PID.partial. NAME is cut, because 255 bytes are all that a disk takes; HOST and TOKEN have no dots.
NAME_BYTES = 140
PARTIAL = re.compile(r"\.(?P<name>.*)\.(?P<host>[^.]*)\.(?P<pid>\d+)\.(?!\d+\.)\w{8}\.partial", re.DOTALL)
OLD_PARTIAL = re.compile(r"\.(?P<name>.+)\.(?P<pid>\d+)\.partial", re.DOTALL)
STALE_S = 24 * 3600  # after which another host does not write to a file any more, as a lost session's


def _partial_of(path: Path) -> Path:
    """Return a name next to `path` for what is written there, which no other process or thread has."""
    token = f"p{secrets.token_hex(4)[1:]}"  # 8 characters, not all digits as in the pid of an old name
    return path.with_name(f".{_cut(path.name)}.{_host()}.{os.getpid()}.{token}.partial")


def _cut(name):
    return os.fsencode(name)[:NAME_BYTES].decode(errors="ignore")  # no half of a character


def _host():
    """This host in a temporary name: hosts may share a disk."""
    return re.sub(r"[^\w-]", "-", socket.gethostname(), flags=re.ASCII)[:64]


def _is_left(partial: Path, target: str = "") -> bool:
    """Return True if no process writes what has this temporary name any more. target: only for this name."""
    parts = PARTIAL.fullmatch(partial.name) or OLD_PARTIAL.fullmatch(partial.name)
    if not parts or target and parts["name"] != _cut(target):
        return False
    if parts.groupdict().get("host", _host()) == _host():
        return not _lives(int(parts["pid"]))
    with contextlib.suppress(OSError):  # another process may be faster
        return partial.is_file() and 0 < partial.stat().st_mtime < time.time() - STALE_S  # 0: no times there
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


def _sync_names(folder: Path) -> None:
    """Flush the entries of a folder to the disk, if the disk can do that."""
    with contextlib.suppress(OSError):  # some network disks cannot
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


@contextlib.contextmanager
def atomic_folder(folder: str | Path) -> Iterator[Path]:
    """Yield an empty folder, renamed to `folder` when the block ends without an error.

    Parent folders are created; what killed processes left is removed. Raises TpukitError if the disk is full
    or cannot be written."""
    folder = Path(folder)
    with explain_unwritable(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        for left in folder.parent.iterdir():
            if _is_left(left, folder.name):
                shutil.rmtree(left, ignore_errors=True)  # which removes neither a file nor a link
        work = _partial_of(folder)
        work.mkdir()  # not tempfile.mkdtemp, which ignores the user's umask
    try:
        with explain_unwritable(folder, only=DISK_FULL):
            yield work
        with explain_unwritable(folder):
            os.replace(work, folder)
        _sync_names(folder.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def explain_unwritable(path: Path, *, only: Collection[int] = ()) -> Iterator[None]:
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
        raise TpukitError(f"cannot write {path} ({reason}{at}): choose another folder") from error


def local_path(path: str | Path, advice: str) -> Path:
    """Return the path. Raises TpukitError with `advice` for an address such as s3://bucket/run, without
    showing it: it may hold a secret."""
    # pathlib makes s3:/ of s3://, and would write in a folder named "s3:".
    if match := re.match(r"([a-z][a-z0-9+.-]+):/", str(path), re.I):
        raise TpukitError(f"{match[1]}:// is an address and not a folder or a file of this machine: {advice}")
    return Path(path)


def check_empty(folder: Path) -> None:
    """Raise TpukitError if a folder holds files but no run: they could be mistaken for parts of one."""
    with explain_unwritable(folder):
        names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    if visible := [name for name in names if not name.startswith(".")]:
        has = printable(", ".join(visible[:3]))
        raise TpukitError(f"{folder} is not empty and holds no run (it has {has}): choose an empty folder")


def write_atomic(path: Path, data: str | bytes, *, durable: bool = True) -> None:
    """Write bytes or str to `path`, whole or not at all."""
    if isinstance(data, str):
        data = data.encode(errors="backslashreplace")  # names of files need not be UTF-8
    with atomic_file(path, durable=durable) as file:
        file.write(data)


def copy_atomic(source: Path, target: Path, check: Callable[[Path], None] | None = None) -> None:
    """Copy one file, whole or not at all. check: see `atomic_file`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(source, "rb") as from_file, atomic_file(target, check=check) as to_file:
        shutil.copyfileobj(from_file, to_file, 1 << 20)


def sync(path: Path) -> None:
    """Flush a file that was appended to, and its name, to the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    _sync_names(path.parent)


def sha256(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Locks


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Context manager: wait until no other process of this user and host holds the lock of `path`.

    Says which process it waits for, and raises TpukitError once that process did nothing for GIVE_UP_AFTER_S
    seconds, because it is stopped, for instance. The lock is in the cache folder, because `path` may be on a
    read-only disk. Without a cache folder there is no lock, and writing is still atomic."""
    name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:20]
    file = None
    with contextlib.suppress(OSError, TpukitError):
        lock = own_entry(cache_folder() / f"{name}.lock")
        number = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        file = os.fdopen(number, "r+b", buffering=0)
    with file or contextlib.nullcontext():
        if file:
            _wait_for(file, path)
            with contextlib.suppress(OSError):  # the disk may be full
                _overwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
        try:
            yield
        finally:
            if file:
                with contextlib.suppress(OSError):
                    _overwrite(file, b"")
                    fcntl.flock(file, fcntl.LOCK_UN)  # a process forked meanwhile has the file open


def _wait_for(file: BinaryIO, path: Path) -> None:
    """Wait for the lock of an open file, in which its holder is named. See `file_lock`."""
    waited = idle = 0.0  # not by a clock, which goes on while this process is stopped
    before = said = None
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        except OSError:  # a disk without locks
            return None
        file.seek(0)
        holder = file.read(300).decode(errors="replace")
        named = re.fullmatch(r"process (\d+) on (.*)", holder, re.DOTALL)
        work = _work_of(int(named[1])) if named and named[2] == socket.gethostname() else 0.0
        idle, before = (idle, before) if work == before else (0.0, work)
        if waited >= SAY_AFTER_S and not said:
            say(said := f"waiting for {holder or 'another process'}, which is using {path}")
        if idle >= GIVE_UP_AFTER_S:
            raise TpukitError(
                f"{holder or 'another process'} is using {path}, and did nothing for {idle:.0f} s: if it is"
                " stopped, continue it (`fg`) or end it; then start again"
            )
        time.sleep(POLL_S)
        waited, idle = waited + POLL_S, idle + POLL_S


def _work_of(pid: int) -> float:
    """Return a number that changes while a process or one that it started works: ticks of the CPU, or the
    time while it waits for a disk. 0 if /proc does not tell."""
    work = 0.0
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError, ValueError):  # it may end meanwhile
            state, *values = (thread / "stat").read_text().rpartition(")")[2].split()
            if state == "D":
                return time.monotonic()
            work += int(values[10]) + int(values[11])
            work += sum(map(_work_of, map(int, (thread / "children").read_text().split())))
    return work


@contextlib.contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Context manager: lock the file `path` for this process alone, and write its pid and host into it.

    Raises TpukitError with pid and host of a process that holds the lock. A lock ends with its process,
    killed or not. Some shared disks (Drive) have no locks, or do not show them to other hosts: there two
    hosts do not keep each other out."""
    with explain_unwritable(path.parent):  # neither emptied nor opened through a link
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
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
        try:
            with explain_unwritable(path, only=DISK_FULL):
                _overwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
            yield
        finally:
            with contextlib.suppress(OSError):  # the disk may be gone, or have no locks
                _overwrite(file, b"")
                fcntl.flock(file, fcntl.LOCK_UN)  # a process forked meanwhile holds the open file too


def _overwrite(file: BinaryIO, data: bytes) -> None:
    file.seek(0)
    file.truncate()
    file.write(data)


# The cache folder


def cache_folder() -> Path:
    """Return the folder that later sessions reuse: TPUKIT_CACHE, by default ~/.cache/tpukit. Raises
    TpukitError if this user has no home."""
    try:
        chosen = os.environ.get("TPUKIT_CACHE") or Path.home() / ".cache" / "tpukit"
    except RuntimeError as error:
        raise TpukitError("this user has no home, in which a cache could be: set TPUKIT_CACHE") from error
    return Path(chosen).resolve()


def own_entry(path: Path) -> Path:
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
            owners = {path.lstat().st_uid, path.stat().st_uid} - {
                0,
                os.geteuid(),
            }  # of a link, and its target
            if owners:
                raise TpukitError(
                    f"{path} belongs to another user ({owners.pop()}), so it may hold anything: delete it, or"
                    " set TPUKIT_CACHE to a folder of your own"
                )
            if path.stat().st_mode & stat.S_IWOTH:
                raise TpukitError(_open_to_all(path))


def _open_to_all(path):
    return (
        f"{path} can be written by every user, so it may hold anything: set TPUKIT_CACHE to a folder of your"
        f" own, or delete what is there and run `chmod o-w {path}`"
    )
