"""Datasets: arrays that processes share, archives unpacked safely, Drive, and finding a set.

Touches no accelerator and imports no torch.
"""

import concurrent.futures
import contextlib
import glob
import hashlib
import json
import os
import shutil
import tarfile
import tempfile
import zipfile
from pathlib import Path

import numpy as np

from tpukit import files, synthetic
from tpukit.errors import TpukitError

ARCHIVES = (".zip", ".tar.gz", ".tgz")
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
        print(f"{folder} cannot be used ({error}): every process keeps its own copy of the data in memory")
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

    A single top folder is taken off, unless it is one of a dataset's own `PARTS`. Raises TpukitError for an archive that is
    damaged or packed in a way that is not known here, for an entry that would land outside the target (absolute, `..`, a
    link, a device), and where nothing can be written.
    """
    archive, target = Path(archive), Path(target)
    with files.whole_folder(target) as work:
        packed = Path(tempfile.mkdtemp(dir=work))  # of a random name, which nothing in the archive has
        try:
            if archive.name.lower().endswith(".zip"):
                _unpack_zip(archive, packed)
            else:
                with tarfile.open(archive) as tar:
                    tar.extractall(packed, filter="data")
        except TpukitError:
            raise
        except tarfile.FilterError as error:
            raise TpukitError(f"{archive} is not safe to unpack: {error}. Nothing was written.") from error
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


def _unpack_zip(archive, folder):
    with zipfile.ZipFile(archive) as packed:
        for entry in packed.infolist():
            name = entry.filename.replace("\\", "/")
            is_link = (entry.external_attr >> 16) & 0o170000 == 0o120000
            if name.startswith("/") or ".." in name.split("/") or ":" in name.split("/")[0] or is_link:
                raise TpukitError(f"{archive} is not safe to unpack: {entry.filename!r} leads outside. Nothing was written.")
        packed.extractall(folder)


def _archive_stem(path):
    for ending in ARCHIVES:
        if path.name.lower().endswith(ending):
            return path.name[: -len(ending)]
    return None


# Places


def mount_drive(env, mount=None):
    """Mount Google Drive on Colab and return its MyDrive folder; elsewhere say so and return None.

    mount: the function that mounts, `google.colab.drive.mount` unless given.
    """
    if env.host != "colab":
        print(f"Drive: only Colab can mount it; this is {env.host}, results stay in {env.outputs}.")
        return None
    if not env.drive.is_dir():
        if mount is None:
            from google.colab import drive

            mount = drive.mount
        try:
            mount(str(env.drive.parent))
        except Exception as error:  # the user closed the consent window, or the account has no Drive
            print(f"Drive: not mounted ({error}). Results stay in {env.outputs} and go with this session.")
            return None
    print(f"Drive: {env.drive}")
    return env.drive


def find_dataset(env, name, path=None, *, fallback=False, size=None):
    """Find a dataset's folder and print which one was taken and why.

    In this order: `path`; Drive (MyDrive/datasets/NAME); Kaggle inputs; ./datasets/NAME; a small synthetic set made on
    the spot (`size` images). Archives (.zip, .tar.gz) at these places are unpacked below `env.outputs`. A given `path`
    that does not exist raises TpukitError, unless `fallback=True` allows the other places, or `fallback` is a folder, which
    is then taken instead (and, where no path is given, before a synthetic set is made).
    """
    instead = Path(fallback) if isinstance(fallback, (str, Path)) else None
    if path:
        path = Path(path).expanduser()
        if path.exists():
            return _take(env, name, path, "the path that was given")
        if instead and instead.is_dir():
            return _take(env, name, instead, f"because {path} does not exist")
        if fallback is not True:
            raise TpukitError(
                f"dataset path {path} does not exist{f', nor does {instead}' if instead else ''}. Check its spelling (is Drive "
                "mounted?), leave the path empty to search the usual places, or allow a fallback."
            )
        print(f"dataset {name}: {path} does not exist, looking elsewhere as allowed")
    for place, why in _places(env, name):
        if place.exists():
            return _take(env, name, place, why)
    if instead and instead.is_dir():
        return _take(env, name, instead, f"found at ./{instead}")
    folder = env.outputs / "datasets" / f"{name}-synthetic"
    with files.locked(folder):
        folder = synthetic.make(name, folder, size=size)
    print(f"dataset {name}: {folder} (synthetic, because no real one was found on Drive, in Kaggle inputs or in ./datasets)")
    return folder


def _places(env, name):
    """(path, why) in the order of preference, archives beside folders."""
    if env.drive is not None:
        for ending in ("", *ARCHIVES):
            yield env.drive / "datasets" / f"{name}{ending}", "found on Drive"
    if env.host == "kaggle":
        for depth in ("*", "*/*", "*/*/*", "*/*/*/*"):  # Kaggle nests a dataset below its owner and lower-cases names
            for place in sorted(env.inputs.glob(depth)):
                if (_archive_stem(place) or place.name).lower() == name.lower():
                    yield place, "found in the Kaggle inputs"
    for ending in ("", *ARCHIVES):
        yield Path("datasets") / f"{name}{ending}", "found in ./datasets"


def _take(env, name, place, why):
    if place.is_file() and _archive_stem(place):
        archive, place = place, _unpacked(env.outputs / "datasets" / name, name, place)
        why = f"{why}, unpacked from {archive.name}"
    print(f"dataset {name}: {place} ({why})")
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
            print(f"dataset {name}: unpacking {archive}")
            unpack(archive, folder)
    return folder
