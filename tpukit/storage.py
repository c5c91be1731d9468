"""Files that survive: whole-or-not-at-all writing, safe archives, Drive, and finding a dataset.

Touches no accelerator and imports no torch.
"""

import concurrent.futures
import contextlib
import errno
import getpass
import hashlib
import json
import os
import shutil
import tarfile
import tempfile
import zipfile
from pathlib import Path

import numpy as np

from tpukit import synthetic
from tpukit.errors import TpukitError

DRIVE_MOUNT = Path("/content/drive")
ARCHIVES = (".zip", ".tar.gz", ".tgz")
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


# Writing


@contextlib.contextmanager
def whole_file(path, *, durable=True):
    """Open `path` for binary writing so that it appears complete or not at all.

    The bytes go to a neighbour that takes the name only after it reached the disk, if it is to be `durable`. Raises TpukitError when the disk
    is full; whatever stood at `path` before stays.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
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
    with open(Path(tempfile.gettempdir()) / f"tpukit-{getpass.getuser()}-{digest}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the system takes it back when the process ends, however that happens
        yield


# Arrays that all processes of a host share


def mapped(name, key, make):
    """Arrays that are made once and mapped from a file: all processes of a host hold them once, and later sessions find them.

    name: of the file. key: what the arrays are made from (`content_key`, settings), for JSON; another key makes another file. make: () -> dict of numpy arrays. Returns a dict of read-only arrays. Where the file cannot be written they stay in
    this process's memory, and that is said.
    """
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:20]
    folder = cache_folder() / f"{name}-{digest}"
    arrays = None
    try:
        make_private(folder.parent)
        with locked(folder):
            if not (folder / "whole").exists():
                arrays = make()
                folder.mkdir(exist_ok=True)
                for part, value in arrays.items():
                    with whole_file(folder / f"{part}.npy") as file:
                        np.save(file, value, allow_pickle=False)
                write_whole(folder / "whole", "")
        return {part.stem: np.load(part, mmap_mode="r", allow_pickle=False) for part in folder.glob("*.npy")}
    except (OSError, TpukitError) as error:
        if arrays is None and isinstance(error, TpukitError):
            raise  # from `make`
        print(f"{folder} cannot be used ({error}): every process keeps its own copy of the data in memory")
        return make() if arrays is None else arrays


def cache_folder():
    """Where `mapped` keeps its files: TPUKIT_CACHE, or a folder of this user in the system's temporary one."""
    chosen = os.environ.get("TPUKIT_CACHE")
    return Path(chosen) if chosen else Path(tempfile.gettempdir()) / f"tpukit-{getpass.getuser()}"


def make_private(folder):
    """Make a folder that no other user can write in. Raises OSError where it is another user's, or cannot be made."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if hasattr(os, "getuid") and folder.stat().st_uid != os.getuid():
        raise OSError("it belongs to another user")


def content_key(*folders, like=("*",)):
    """SHA-256 over the names and contents of the files in some folders, as (part of) a key of `mapped`: copies of a set share its arrays.

    like: patterns of the names. The files are read once: what was found is kept until a path, a size or a time is another.
    """
    files = [path for folder in folders for pattern in like for path in sorted(folder.glob(pattern)) if path.is_file()]
    seen = [(str(path.resolve()), about.st_size, about.st_mtime_ns) for path in files for about in [path.stat()]]
    memo = cache_folder() / f"contents-{hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:20]}"
    with locked(memo):  # of several processes one reads
        with contextlib.suppress(OSError):
            return memo.read_text()
        with concurrent.futures.ThreadPoolExecutor() as pool:  # most of the time the disk, or Drive, is waited for
            found = [(path.name, digest) for path, digest in zip(files, pool.map(sha256, files))]
        digest = hashlib.sha256(json.dumps(found).encode()).hexdigest()
        with contextlib.suppress(OSError, TpukitError):  # then they are read again next time
            make_private(memo.parent)
            write_whole(memo, digest, durable=False)
    return digest


# Archives


def unpack(archive, target):
    """Unpack a .zip or .tar.gz so that `target` appears complete or not at all. Returns `target`.

    Raises TpukitError for a broken archive and for an entry that would land outside the target (absolute, `..`, a
    link, a device). A single top folder with the archive's own name is taken off.
    """
    archive, target = Path(archive), Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        if archive.name.lower().endswith(".zip"):
            _unpack_zip(archive, work / "all")
        else:
            with tarfile.open(archive) as tar:
                tar.extractall(work / "all", filter="data")
        inside = list((work / "all").iterdir())
        whole = inside[0] if len(inside) == 1 and inside[0].is_dir() else work / "all"
        os.replace(whole, target)
    except tarfile.FilterError as error:
        raise TpukitError(f"{archive} is not safe to unpack: {error}. Nothing was written.") from error
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            raise TpukitError(f"disk full while unpacking {archive} beside {target}; nothing was kept.") from error
        raise TpukitError(f"{archive} cannot be unpacked ({error}); copy or download it again.") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _unpack_zip(archive, folder):
    folder.mkdir(parents=True)
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
    with locked(folder):
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
        target = env.outputs / "datasets" / name
        with locked(target):
            if not target.exists():
                print(f"dataset {name}: unpacking {place}")
                unpack(place, target)
        place, why = target, f"{why}, unpacked from {place.name}"
    print(f"dataset {name}: {place} ({why})")
    return place
