"""Archives (.zip, .tar.gz) unpacked whole or not at all, whoever packed them."""

import functools
import math
import os
import shutil
import stat
import tarfile
import tempfile
import zipfile
from pathlib import Path, PureWindowsPath

from tpukit.host import files
from tpukit.host.errors import TpukitError

ENDINGS = (".zip", ".tar.gz", ".tgz")
BLOCK = 4096  # bytes; what even an empty file takes on a disk, about
LONG_NAMES = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
DEEPEST = 100  # folders in one another; Python removes them by recursion
LONGEST_NAME = 1 << 20  # bytes, with what else such a header holds


def unpack(archive, target, *, parts=()):
    """Unpack a .zip or .tar.gz so that `target` appears complete or not at all. Returns `target`.

    A single top folder is taken off, unless it is one of `parts`. Raises TpukitError, before anything is
    unpacked, for an archive that holds more than regular files and folders (links, devices, sparse files), for a name that
    leads outside the target, and for more than the disk can hold; also for an archive that is damaged or packed in a way that
    is not known here, and where nothing can be written.
    """
    archive, target = Path(archive), Path(target)
    with files.atomic_folder(target) as work:
        packed = Path(tempfile.mkdtemp(dir=work))  # of a random name, which nothing in the archive has
        try:
            _check(archive, work)
            _extract(archive, packed)
        except TpukitError:
            raise
        except RuntimeError as error:  # a password is needed, or the way of compressing is not known
            raise TpukitError(
                f"{archive} cannot be unpacked ({error}): pack it again as a plain .zip or .tar.gz, without a password"
            ) from error
        except Exception as error:  # zipfile, tarfile and zlib raise many types for a damaged file
            if getattr(error, "errno", None) in files.DISK_FULL:
                raise
            raise TpukitError(f"{archive} cannot be unpacked ({error}); copy or download it again.") from error
        inside = list(packed.iterdir())
        alone = len(inside) == 1 and inside[0].is_dir() and inside[0].name.lower() not in parts
        for entry in (inside[0] if alone else packed).iterdir():
            os.replace(entry, work / entry.name)
        shutil.rmtree(packed)
    return target


def _check(archive, folder):
    """Raise TpukitError where an archive holds what `unpack` does not allow, or more than the disk of `folder` can take."""
    needed, free = 0, shutil.disk_usage(folder).free
    for name, size, _ in _entries(archive):
        _place(archive, name)
        needed += BLOCK * math.ceil(max(size or 0, 1) / BLOCK)
        if needed > free:
            raise TpukitError(
                f"{archive} does not fit: unpacked it takes more than the {free / 2**30:.2f} GiB that are free in "
                f"{folder.parent}. Free some space, or choose another output folder. Nothing was unpacked."
            )


def _extract(archive, folder):
    for name, size, opened in _entries(archive):
        place = folder / _place(archive, name)
        if size is None:
            place.mkdir(parents=True, exist_ok=True)
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        # The archive's own modes are left out. No more is read than `size`, whatever the packed data goes on to hold.
        with opened() as source, open(place, "wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)


def _place(archive, name):
    """Where an entry goes, relative to the target."""
    path = PureWindowsPath(name)  # the stricter kind: it knows drives, and both ways of parting folders
    if path.anchor or any(not part.strip(". ") for part in path.parts):  # Windows takes ".. " for ".."
        raise TpukitError(f"{archive} is not safe to unpack: {name!r} leads outside. Nothing was unpacked.")
    if len(path.parts) > DEEPEST:
        raise TpukitError(f"{archive} is not safe to unpack: it nests more than {DEEPEST} folders. Nothing was unpacked.")
    return Path(*path.parts)


def _entries(archive):
    """Yield (name, size or None for a folder, function that opens the file) for what an archive holds."""
    if archive.name.lower().endswith(".zip"):
        with zipfile.ZipFile(archive) as packed:
            for entry in packed.infolist():
                kind = stat.S_IFMT(entry.external_attr >> 16)  # 0 where the archive was made on Windows
                _refuse_unless(kind in (0, stat.S_IFREG, stat.S_IFDIR), archive, entry.filename)
                is_folder = kind == stat.S_IFDIR or entry.filename.endswith(("/", "\\"))
                yield entry.filename, None if is_folder else entry.file_size, functools.partial(packed.open, entry)
    else:
        with tarfile.open(archive, tarinfo=_TarHeader) as packed:
            for entry in packed:
                packed.members = []  # else it keeps all that it has read
                plain = (entry.isreg() or entry.isdir()) and not entry.issparse() and entry.size >= 0
                _refuse_unless(plain, archive, entry.name)
                yield entry.name, None if entry.isdir() else entry.size, functools.partial(packed.extractfile, entry)
            # tarfile takes a damaged header for the end. Reading on also compares gzip's checksum, which stands behind it all.
            while rest := packed.fileobj.read(1 << 20):
                if rest.strip(b"\0"):
                    raise tarfile.ReadError("a header in it is damaged")


def _refuse_unless(plain, archive, name):
    if not plain:
        raise TpukitError(
            f"{archive} is not safe to unpack: {name!r} is a link, a device or the like. Pack it again with regular files and "
            "folders alone (tar: -h --hard-dereference). Nothing was unpacked."
        )


class _TarHeader(tarfile.TarInfo):
    """A header of a .tar. tarfile reads those that hold a long name into memory whole, so they must be small."""

    def _proc_member(self, tar):  # which tarfile's source names as the method for subclasses to extend
        if self.size < 0 or (self.type in LONG_NAMES and self.size > LONGEST_NAME):
            raise tarfile.ReadError(f"a header of {self.size} bytes")
        return super()._proc_member(tar)


def stem(path):
    """The name of an archive without its ending, or None for what is no archive."""
    for ending in ENDINGS:
        if path.name.lower().endswith(ending):
            return path.name[: -len(ending)]
    return None
