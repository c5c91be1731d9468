"""Datasets: arrays that processes share, archives unpacked safely, Drive, and finding a set.

Touches no accelerator and imports no torch.
"""

import concurrent.futures
import contextlib
import functools
import glob
import hashlib
import json
import math
import os
import shutil
import stat
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path, PureWindowsPath

import numpy as np

from tpukit import files, synthetic
from tpukit.errors import TpukitError
from tpukit.tables import printable

ARCHIVES = (".zip", ".tar.gz", ".tgz")
BLOCK = 4096  # bytes; what even an empty file takes on a disk, about
LONG_NAMES = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
DEEPEST = 100  # folders in one another; Python removes them by recursion
LONGEST_NAME = 1 << 20  # bytes, with what else such a header holds
# What datasets call their own parts. Such a folder stays where it is, even if it is all that an archive holds.
PARTS = {
    *("train", "test", "valid", "val", "data2017", "test2017", "data2023", "test2023"),
    *("images", "masks", "img_idx", "50_50", "idx_427", "idx_320", "raw"),
}


# Arrays that all processes of a host share


def mapped(name, key, make):
    """Arrays that are made once and mapped from a file: all processes of a host hold them once, and later sessions find them.

    name: of the file. key: what the arrays are made from (`content_key`, settings), for JSON; another key makes another file.
    make: () -> dict of numpy arrays. Returns a dict of read-only arrays. Where the file cannot be written they stay in this
    process's memory, and that is said.
    """
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:20]
    folder = files.cache_folder() / f"{name}-{digest}"
    arrays = None
    try:
        files.make_private(folder.parent)
        with files.locked(folder):
            if not (folder / "whole").exists():
                arrays = make()
                folder.mkdir(exist_ok=True)
                for part, value in arrays.items():
                    with files.whole_file(folder / f"{part}.npy") as file:
                        np.save(file, value, allow_pickle=False)
                files.write_whole(folder / "whole", "")
        return {part.stem: np.load(part, mmap_mode="r", allow_pickle=False) for part in folder.glob("*.npy")}
    except (OSError, TpukitError) as error:
        if arrays is None and isinstance(error, TpukitError):
            raise  # from `make`
        print(printable(f"{folder} cannot be used ({error}): every process keeps its own copy of the data in memory"))
        return make() if arrays is None else arrays


def content_key(*folders, like=("*",)):
    """SHA-256 over the names and contents of the files in some folders, as (part of) a key of `mapped`.

    Copies of a set so share its arrays. like: patterns of the names. The files are read once: what was found is kept until a
    path, a size or a time is another.
    """
    paths = [path for folder in folders for pattern in like for path in sorted(folder.glob(pattern)) if path.is_file()]
    seen = [(str(path.resolve()), about.st_size, about.st_mtime_ns) for path in paths for about in [path.stat()]]
    memo = files.cache_folder() / f"contents-{hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:20]}"
    with files.locked(memo):  # of several processes one reads
        with contextlib.suppress(OSError):
            files.make_private(memo.parent)  # what another user put there is not believed
            return memo.read_text()
        with concurrent.futures.ThreadPoolExecutor() as pool:  # most of the time the disk, or Drive, is waited for
            found = [(path.name, digest) for path, digest in zip(paths, pool.map(files.sha256, paths))]
        digest = hashlib.sha256(json.dumps(found).encode()).hexdigest()
        with contextlib.suppress(OSError, TpukitError):  # then they are read again next time
            files.make_private(memo.parent)
            files.write_whole(memo, digest, durable=False)
    return digest


# Archives


def unpack(archive, target):
    """Unpack a .zip or .tar.gz so that `target` appears complete or not at all. Returns `target`.

    A single top folder is taken off, unless it is one of a dataset's own `PARTS`. Raises TpukitError, before anything is
    unpacked, for an archive that holds more than regular files and folders (links, devices, sparse files), for a name that
    leads outside the target, and for more than the disk can hold; also for an archive that is damaged or packed in a way that
    is not known here, and where nothing can be written.
    """
    archive, target = Path(archive), Path(target)
    with files.whole_folder(target) as work:
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
        alone = len(inside) == 1 and inside[0].is_dir() and inside[0].name.lower() not in PARTS
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


def _archive_stem(path):
    for ending in ARCHIVES:
        if path.name.lower().endswith(ending):
            return path.name[: -len(ending)]
    return None


# Places


_asked = set()  # the Drives that this process asked for: a refusal is an answer


def mount_drive(env, mount=None):
    """Mount Google Drive on Colab and return its MyDrive folder; elsewhere say so and return None.

    mount: the function that mounts, `google.colab.drive.mount` unless given. It asks for the user's consent, and waits for it.
    """
    if env.host != "colab":
        print(f"Drive: only Colab can mount it; this is {env.host}, results stay in {env.outputs}.")
        return None
    if not env.drive.is_dir():
        _asked.add(env.drive)
        try:
            if mount is None:
                from google.colab import drive

                mount = drive.mount
            mount(str(env.drive.parent))
        except Exception as error:  # the user closed the consent window, or the account has no Drive
            print(f"Drive: not mounted ({error}). Results stay in {env.outputs} and go with this session.")
            return None
    print(f"Drive: {env.drive}")
    return env.drive


def find_dataset(env, name, path=None, *, fallback=False, size=None):
    """Find a dataset's folder and print which one was taken and why.

    In this order: `path`; Drive (MyDrive/datasets/NAME); Kaggle inputs; ./datasets/NAME; on Colab a Drive that is not mounted
    yet, for which the user is asked once; a small synthetic set made on the spot (`size` images). Archives (.zip, .tar.gz) at
    these places are unpacked below `env.outputs`. A given `path` that does not exist raises TpukitError, unless
    `fallback=True` allows the other places, or `fallback` is a folder, which is then taken instead (and, where no path is
    given, before Drive is asked for). So does a name that no workload has, where no place holds it.
    """
    instead = Path(fallback) if isinstance(fallback, (str, Path)) else None
    if path:
        path = Path(path).expanduser()
        if env.drive and env.drive.parent in path.parents:
            _ask_for_drive(env)
        if path.exists():
            return _take(env, name, path, "the path that was given")
        if instead and instead.is_dir():
            return _take(env, name, instead, f"because {path} does not exist")
        if fallback is not True:
            raise TpukitError(
                f"dataset path {path} does not exist{f', nor does {instead}' if instead else ''}. Check its spelling (is Drive "
                "mounted?), leave the path empty to search the usual places, or allow a fallback."
            )
        print(printable(f"dataset {name}: {path} does not exist, looking elsewhere as allowed"))
    for place, why in _places(env, name, instead):
        if place.exists():
            return _take(env, name, place, why)
    folder = env.outputs / "datasets" / f"{name}-synthetic"
    with files.locked(folder):
        folder = synthetic.make(name, folder, size=size)
    unseen = "; Drive is not mounted" if env.drive and not env.drive.is_dir() else ""
    why = f"because no real one was found on Drive, in Kaggle inputs or in ./datasets{unseen}"
    print(printable(f"dataset {name}: {folder} (synthetic, {why})"))
    return folder


def find_run(env, name):
    """The folder of the run `name` below the Kaggle inputs, for `Run.open(..., earlier=...)`; None where there is none, or the
    outputs hold the run already.

    It lies there when the output of an earlier version of the notebook, or a copy of the run, was added as an input. Raises
    TpukitError where several inputs hold one.
    """
    if env.inputs is None or not name or (env.outputs / name / "config.json").is_file():
        return None
    below = [f"{'*/' * depth}{glob.escape(name)}" for depth in range(5)]  # notebooks/OWNER/NOTEBOOK/outputs/NAME is the deepest
    found = [place for pattern in below for place in sorted(env.inputs.glob(pattern)) if _is_run(place)]
    if len(found) > 1:
        raise TpukitError(f"{len(found)} inputs hold a run {name}: {', '.join(map(str, found))}. Remove all but one of them")
    return found[0] if found else None


def _is_run(folder):
    return (folder / "config.json").is_file() and (folder / "checkpoints").is_dir()


def _places(env, name, instead):
    """(path, why) in the order of preference, archives beside folders. Who reads on to the end is asked for Drive."""
    on_drive = [env.drive / "datasets" / f"{name}{ending}" for ending in ("", *ARCHIVES)] if env.drive else []
    yield from ((place, "found on Drive") for place in on_drive)
    if env.host == "kaggle":
        for depth in ("*", "*/*", "*/*/*", "*/*/*/*"):  # Kaggle nests a dataset below its owner and lower-cases names
            for place in sorted(env.inputs.glob(depth)):
                # A run of this name (`tpukit train mnist` makes one) comes with an earlier version's output.
                if (_archive_stem(place) or place.name).lower() == name.lower() and not _is_run(place):
                    yield place, "found in the Kaggle inputs"
    for ending in ("", *ARCHIVES):
        yield Path("datasets") / f"{name}{ending}", "found in ./datasets"
    if instead and instead.is_dir():
        yield instead, f"found at ./{instead}"
    if on_drive and _ask_for_drive(env):
        yield from ((place, "found on Drive") for place in on_drive)


def _ask_for_drive(env):
    """Mount a Drive that is not mounted, if its user was not asked before and can answer. Returns whether it is there now."""
    if env.drive.is_dir() or env.drive in _asked or not _user_can_answer():
        return False
    print("Drive: the dataset may be there, so Colab asks whether to mount it")
    return mount_drive(env) is not None


def _user_can_answer():
    """Whether this is a notebook whose page can ask its user something. Without one Colab's mount waits for ever, or fails."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(getattr(shell, "kernel", None), "_allow_stdin", False)  # what the page said, sending the cell


def _take(env, name, place, why):
    if place.is_file() and _archive_stem(place):
        archive, place = place, _unpacked(env.outputs / "datasets" / name, name, place)
        why = f"{why}, unpacked from {archive.name}"
    print(printable(f"dataset {name}: {place} ({why})"))
    return place


def _unpacked(folder, name, archive):
    """`folder` with what an archive holds, unpacked now or before; where another archive's is there, a folder beside it."""
    try:
        content = content_key(archive.parent, like=(glob.escape(archive.name),))
    except OSError as error:
        raise TpukitError(f"{archive} cannot be read ({error.strerror}); copy or download it again") from error
    whose = folder.with_name(f".{folder.name}.archive")  # the content that `folder` was unpacked from
    with files.locked(folder):
        if not folder.exists():
            with files.unwritable_explained(folder.parent):
                folder.parent.mkdir(parents=True, exist_ok=True)
                files.write_whole(whose, content)
        elif not whose.exists() or whose.read_text() != content:
            folder = folder.with_name(f"{folder.name}-{content[:8]}")
        if not folder.exists():
            print(printable(f"dataset {name}: unpacking {archive}"))
            unpack(archive, folder)
    return folder
