"""Unpack archives (.zip, .tar.gz) safely: the target folder appears complete or not at all."""

import contextlib
import math
import os
import shutil
import stat
import tarfile
import tempfile
import zipfile
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath

from tpukit.host import files
from tpukit.host.errors import TpukitError
from tpukit.host.tables import GIB

OF_MACOS = ("__MACOSX", ".DS_Store")  # next to the folder that was packed
BLOCK = 4096  # bytes; about what even an empty file takes on a disk
NAME_IS_UTF8 = 0x800  # a bit of an entry's flags
Entry = tuple[str, bool, int]  # name, True for a regular file or a folder, bytes


def unpack(archive: Path, target: Path, *, parts: Collection[str] = ()) -> Path:
    """Unpack a .zip or .tar.gz so that `target` appears complete or not at all. Returns `target`.

    A single top folder is stripped, unless it is one of `parts`. Raises TpukitError, before anything is
    unpacked, for links and devices, for a name that leads outside the target, and for more than the disk can
    hold; also for a damaged archive, an unknown format, and a folder that cannot be written."""
    with files.atomic_folder(target) as work:
        packed = Path(tempfile.mkdtemp(dir=work))  # a random name, which no entry of the archive has
        try:
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
        inside = [entry for entry in packed.iterdir() if entry.name not in OF_MACOS]
        alone = len(inside) == 1 and inside[0].is_dir() and inside[0].name.lower() not in parts
        for entry in (inside[0] if alone else packed).iterdir():
            os.replace(entry, work / entry.name)
        shutil.rmtree(packed)
    return target


def _extract(archive: Path, folder: Path) -> None:
    """Extract an archive into an empty folder, after checking all of its entries."""
    if archive.name.lower().endswith(".zip"):
        with zipfile.ZipFile(archive, metadata_encoding=_encoding_of_names(archive)) as opened:
            kinds = {entry: stat.S_IFMT(entry.external_attr >> 16) for entry in opened.infolist()}
            plain = (0, stat.S_IFREG, stat.S_IFDIR)  # 0 if the archive was made on Windows
            entries = [(entry.filename, kind in plain, entry.file_size) for entry, kind in kinds.items()]
            _check(archive, entries, folder)
            opened.extractall(folder)
        return
    with tarfile.open(archive) as opened:
        entries = ((entry.name, entry.isreg() or entry.isdir(), entry.size) for entry in opened)
        _check(archive, entries, folder)
        # tarfile takes a damaged header for the end. Reading on finds it, and gzip's checksum at the end.
        assert opened.fileobj is not None
        while rest := opened.fileobj.read(1 << 20):
            if rest.strip(b"\0"):
                raise tarfile.ReadError("a header in it is damaged")
        opened.extractall(folder, filter="data")


def _encoding_of_names(archive: Path) -> str | None:
    """Return the encoding of those names in a zip that do not say it, as macOS's (UTF-8) and a Chinese
    Windows's do not; None for zip's own, cp437, whose letters are no text in these two."""
    with zipfile.ZipFile(archive) as opened:
        names = [entry.filename for entry in opened.infolist() if not entry.flag_bits & NAME_IS_UTF8]
    for encoding in ("utf-8", "gb2312"):
        with contextlib.suppress(UnicodeDecodeError):
            "/".join(names).encode("cp437").decode(encoding)
            return encoding
    return None


def _check(archive: Path, entries: Iterable[Entry], folder: Path) -> None:
    """Raise TpukitError for an entry that is not safe to unpack, or for more than the disk can hold.

    The "data" filter of tarfile is not enough: it lets links pass and strips the `/` of an absolute name;
    zipfile drops `..` without a word."""
    needed, free = 0, shutil.disk_usage(folder).free
    for name, is_plain, size in entries:
        reason = ""
        if not is_plain or size < 0:
            reason = f"{name!r} is a link, a device or the like (tar: -h --hard-dereference)"
        elif name.startswith("/") or ".." in PurePosixPath(name).parts or "\\" in name:
            reason = f"{name!r} leads outside the target folder, or has a backslash: pack it anew"
        if reason:
            raise TpukitError(f"{archive} is not safe to unpack: {reason}. Nothing was unpacked.")
        needed += BLOCK * math.ceil(max(size, 1) / BLOCK)
        if needed > free:
            raise TpukitError(
                f"{archive} unpacked takes more than the {free / GIB:.2f} GiB free in {folder.parent}"
            )
