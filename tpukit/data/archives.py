"""Unpack a .zip so that the target folder appears complete or not at all."""

import collections
import contextlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Collection
from pathlib import Path, PurePosixPath, PureWindowsPath

from tpukit.host import files
from tpukit.host.errors import TpukitError, as_unreadable
from tpukit.host.folders import atomic_folder

OF_MACOS = ("__MACOSX", ".DS_Store")  # next to the folder that was packed
NAME_IS_UTF8 = 0x800  # a bit of an entry's flags


def unpack(archive: Path, target: Path, *, parts: Collection[str] = ()) -> Path:
    """Unpack a .zip so that `target` appears complete or not at all. Returns `target`.

    A single top folder is stripped, unless it is one of `parts`. zipfile makes no links. Raises TpukitError
    for a damaged archive, for another format, for a name that leads outside (`../a`, `/a`), for two of one
    name, for more than the disk has room for, and for a folder that cannot be written."""
    with atomic_folder(target) as work:
        packed = Path(tempfile.mkdtemp(dir=work))  # a random name, which no entry of the archive has
        try:
            with zipfile.ZipFile(archive, metadata_encoding=_encoding_of_names(archive)) as opened:
                paths = {name: PureWindowsPath(name) for name in opened.namelist()}  # knows / and \ alike
                if outside := [name for name, path in paths.items() if path.root or ".." in path.parts]:
                    raise ValueError(f"{len(outside)} of its names lead outside, as {outside[0]!r}")
                entries = [entry for entry in opened.infolist() if not entry.is_dir()]
                landing = collections.Counter(str(PurePosixPath(entry.filename)) for entry in entries)
                if twice := [name for name, times in landing.items() if times > 1]:
                    raise ValueError(f"{len(twice)} of its names are there twice, as {twice[0]!r}")
                # zipfile writes no more of an entry than its size says.
                _check_room(archive, sum(entry.file_size for entry in entries), target.parent)
                opened.extractall(packed)
        except TpukitError:
            raise
        except Exception as error:  # zipfile and zlib raise many types
            if getattr(error, "errno", None) in files.DISK_FULL:
                raise
            if of_disk := as_unreadable(error, archive):
                raise of_disk from error
            raise TpukitError(
                f"{archive} cannot be unpacked ({error}): copy or download it again if it is damaged, or"
                " unpack it yourself and give its folder"
            ) from error
        inside = [entry for entry in packed.iterdir() if entry.name not in OF_MACOS]
        alone = len(inside) == 1 and inside[0].is_dir() and inside[0].name.lower() not in parts
        for entry in (inside[0] if alone else packed).iterdir():
            os.replace(entry, work / entry.name)
        shutil.rmtree(packed)
    return target


def _check_room(archive, size, folder):
    """Raise TpukitError if the disk of a folder has not this many bytes free."""
    free = shutil.disk_usage(folder).free
    if size > free:
        raise TpukitError(
            f"{archive} cannot be unpacked: its files have {size / 2**20:.0f} MiB, and {free / 2**20:.0f} MiB"
            f" are free in {folder}: make room there, or unpack it on another disk and give its folder"
        )


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
