"""Archives (.zip, .tar.gz) from anywhere: nothing is written outside a target that is complete or absent."""

import functools
import math
import os
import shutil
import stat
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path, PureWindowsPath

from tpukit.host import files
from tpukit.host.errors import TpukitError
from tpukit.host.tables import GIB

ENDINGS = (".zip", ".tar.gz", ".tgz")
BLOCK = 4096  # bytes; about what even an empty file takes on a disk
# types of headers that hold a long name, of GNU, POSIX and Solaris
LONG_NAMES = (b"L", b"K", b"x", b"g", b"X")
MAX_DEPTH = 100  # nested folders; Python removes them by recursion
MAX_NAME = 1 << 20  # bytes of a header that holds a long name


def unpack(archive: Path, target: Path, *, parts: Collection[str] = ()) -> Path:
    """Unpack a .zip or .tar.gz so that `target` appears complete or not at all. Returns `target`.

    A single top folder is stripped, unless it is one of `parts`. Raises TpukitError, before anything is
    unpacked, for links, devices and sparse files, for a name that leads outside the target, and for more than
    the disk can hold; also for a damaged archive, an unknown format, and a folder that cannot be written.

    Not by the filters of tarfile: they let links pass, strip the `/` of an absolute name and read a long name
    into memory; zipfile drops `..` without a word."""
    with files.atomic_folder(target) as work:
        packed = Path(tempfile.mkdtemp(dir=work))  # a random name, which no entry of the archive has
        try:
            _check_size(archive, work)
            _extract(archive, packed)
        except TpukitError:
            raise
        except Exception as error:  # zipfile, tarfile and zlib raise many types
            if getattr(error, "errno", None) in files.DISK_FULL:
                raise
            raise TpukitError(
                f"{archive} cannot be unpacked ({error}): copy or download it again if it is damaged; pack it"
                " again without a password or an unknown compression, as a plain .zip or .tar.gz"
            ) from error
        inside = list(packed.iterdir())
        alone = len(inside) == 1 and inside[0].is_dir() and inside[0].name.lower() not in parts
        for entry in (inside[0] if alone else packed).iterdir():
            os.replace(entry, work / entry.name)
        shutil.rmtree(packed)
    return target


def _check_size(archive: Path, folder: Path) -> None:
    """Raise TpukitError if an archive holds what `_entries` refuses, or more than the disk can hold."""
    needed, free = 0, shutil.disk_usage(folder).free
    for _, size, _ in _entries(archive):
        needed += BLOCK * math.ceil(max(size or 0, 1) / BLOCK)
        if needed > free:
            raise TpukitError(
                f"{archive} unpacked takes more than the {free / GIB:.2f} GiB free in {folder.parent}"
            )


def _extract(archive: Path, folder: Path) -> None:
    for name, size, opened in _entries(archive):
        path = folder / name
        (path if size is None else path.parent).mkdir(parents=True, exist_ok=True)
        # The archive's own modes are ignored. No more than `size` is read, however much the packed data hold.
        if size is not None:
            with opened() as source, open(path, "wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)


def _entries(archive: Path) -> Iterator[tuple[Path, int | None, Callable]]:
    """Yield (path relative to the target, size or None for a folder, function that opens it) of all entries.
    Raises TpukitError for one that is no regular file or folder, or leads outside the target."""
    if archive.name.lower().endswith(".zip"):
        with zipfile.ZipFile(archive) as packed:
            for entry in packed.infolist():
                kind = stat.S_IFMT(entry.external_attr >> 16)  # 0 if the archive was made on Windows
                is_plain = kind in (0, stat.S_IFREG, stat.S_IFDIR)
                is_folder = kind == stat.S_IFDIR or entry.filename.endswith(("/", "\\"))
                path = _checked_path(archive, entry.filename, is_plain)
                yield path, None if is_folder else entry.file_size, functools.partial(packed.open, entry)
    else:
        with tarfile.open(archive, tarinfo=_TarHeader) as packed:
            for entry in packed:
                # Else it keeps every header in memory.
                packed.members = []  # pyright: ignore[reportAttributeAccessIssue] (not in typeshed)
                is_plain = (entry.isreg() or entry.isdir()) and not entry.issparse() and entry.size >= 0
                path, opened = _checked_path(archive, entry.name, is_plain), packed.extractfile
                yield path, None if entry.isdir() else entry.size, functools.partial(opened, entry)
            # tarfile takes a damaged header for the end. Reading on finds it, and gzip's checksum at the end.
            assert packed.fileobj is not None
            while rest := packed.fileobj.read(1 << 20):
                if rest.strip(b"\0"):
                    raise tarfile.ReadError("a header in it is damaged")


def _checked_path(archive: Path, name: str, is_plain: bool) -> Path:
    path = PureWindowsPath(name)  # stricter than POSIX: it knows drives, and both separators
    reason = ""
    if not is_plain:
        reason = f"{name!r} is a link, a device or the like (tar: -h --hard-dereference)"
    elif path.anchor or any(not part.strip(". ") for part in path.parts):  # Windows takes ".. " for ".."
        reason = f"{name!r} leads outside the target folder"
    elif len(path.parts) > MAX_DEPTH:
        reason = f"it nests more than {MAX_DEPTH} folders"
    if reason:
        raise TpukitError(f"{archive} is not safe to unpack: {reason}. Nothing was unpacked.")
    return Path(*path.parts)


class _TarHeader(tarfile.TarInfo):
    """A header of a .tar. tarfile reads one with a long name into memory whole, so its size is limited."""

    def _proc_member(self, tar):  # the method that tarfile means subclasses to extend
        if self.size < 0 or (self.type in LONG_NAMES and self.size > MAX_NAME):
            raise tarfile.ReadError(f"a header of {self.size} bytes")
        return super()._proc_member(tar)  # pyright: ignore[reportAttributeAccessIssue] (not in typeshed)


def stem(path: Path) -> str | None:
    """The name of an archive without its ending, or None if it is not an archive."""
    for ending in ENDINGS:
        if path.name.lower().endswith(ending):
            return path.name[: -len(ending)]
    return None
