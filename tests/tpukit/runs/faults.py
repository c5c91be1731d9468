"""A disk that fails: the n-th call that reads, or that writes, below some folders raises an error in this
process. Of the calls of Python alone; tpukit reads and writes the files of runs by these."""

import builtins
import contextlib
import errno
import io
import os

import pytest

READ_ERRORS = (errno.EIO, errno.ENOTCONN, errno.EMFILE, errno.ENOMEM, "short")
WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ENOTCONN, errno.EMFILE, "half")
READS = {"open", "read", "stat", "list"}
WRITES = {"open to write", "write", "fsync", "replace", "unlink", "mkdir"}
# What cannot fail in that way
IMPOSSIBLE = {
    "short": READS - {"read"},
    "half": WRITES - {"write"},
    errno.EMFILE: (READS | WRITES) - {"open", "open to write", "list"},
}


class Faults:
    """Counts the calls of some kinds (READS or WRITES), and lets one or all from then on fail.

    at: the number of the first that fails, from 1; None for none. once: whether it is the only one. name:
    part of the paths that count; by default all. calls: (kind, path) of those counted so far. failed: those
    of them that failed."""

    def __init__(self, folders, kinds, at=None, error=errno.EIO, once=True, name=""):
        self.folders, self.kinds, self.name = [os.path.realpath(folder) for folder in folders], kinds, name
        self.at, self.error, self.once = at, error, once
        self.calls, self.failed = [], []

    def watches(self, path):
        if not isinstance(path, (str, os.PathLike)):
            return False
        path = os.path.abspath(path)
        return any(path == folder or path.startswith(f"{folder}/") for folder in self.folders)

    def fails(self, kind, path):
        """Count a call, and return whether it is to fail."""
        if kind not in self.kinds or self.name not in str(path):
            return False
        self.calls.append((kind, str(path)))
        number = len(self.calls)
        if self.at is None or number < self.at or self.once and number > self.at:
            return False
        if kind in IMPOSSIBLE.get(self.error, ()):
            return False
        self.failed.append((kind, str(path)))
        return True

    def call(self, kind, path):
        if self.watches(path) and self.fails(kind, path):
            self.give(path, kind)

    def give(self, path, kind=""):
        if self.error == errno.ENOMEM and kind == "read":
            raise MemoryError
        number = self.error if isinstance(self.error, int) else errno.EIO
        raise OSError(number, os.strerror(number), str(path))


class FaultyFile(io.FileIO):
    """faults: the `Faults` that decide."""

    faults: Faults

    def readinto(self, buffer):
        if not self.faults.fails("read", self.name):
            return super().readinto(buffer)
        if self.faults.error != "short":
            self.faults.give(self.name, "read")
        return super().readinto(memoryview(buffer)[: len(buffer) // 2]) if self.tell() == 0 else 0

    def readall(self):
        if not self.faults.fails("read", self.name):
            return super().readall()
        if self.faults.error != "short":
            self.faults.give(self.name, "read")
        data = super().readall()
        return data[: len(data) // 2]

    def write(self, data):
        if not self.faults.fails("write", self.name):
            return super().write(data)
        super().write(bytes(data)[: len(data) // 2])
        self.faults.give(self.name)


@contextlib.contextmanager
def failing_disk(folders, kinds, **how):
    """Context manager: a disk with `Faults`, which it yields."""
    faults, whole_open = Faults(folders, kinds, **how), io.open

    def opening(path, mode="r", buffering=-1, encoding=None, errors=None, newline=None, **more):
        if more or not faults.watches(path):
            return whole_open(path, mode, buffering, encoding, errors, newline, **more)
        faults.call("open" if mode.strip("bt") in ("r", "") else "open to write", path)
        raw = FaultyFile(path, mode.replace("b", "").replace("t", ""))
        raw.faults = faults
        if buffering == 0:
            return raw
        kind = (
            io.BufferedRandom if "+" in mode else io.BufferedReader if raw.readable() else io.BufferedWriter
        )
        return kind(raw) if "b" in mode else io.TextIOWrapper(kind(raw), encoding, errors, newline)

    def watched(kind, function, which=0):
        def call(*arguments, **options):
            path = arguments[which] if len(arguments) > which else "."
            faults.call(kind, path)
            return function(*arguments, **options)

        return call

    def fsync(number, function=os.fsync):
        faults.call("fsync", os.readlink(f"/proc/self/fd/{number}"))
        return function(number)

    def os_open(path, flags, *arguments, function=os.open, **options):
        faults.call("open to write" if flags & (os.O_WRONLY | os.O_RDWR) else "open", path)
        return function(path, flags, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "open", opening)
        patch.setattr(io, "open", opening)
        patch.setattr(os, "fsync", fsync)
        patch.setattr(os, "open", os_open)
        kinds = dict(stat="stat", listdir="list", scandir="list", unlink="unlink", mkdir="mkdir")
        for name, kind in kinds.items():
            patch.setattr(os, name, watched(kind, getattr(os, name)))
        patch.setattr(os, "replace", watched("replace", os.replace, which=1))
        yield faults
