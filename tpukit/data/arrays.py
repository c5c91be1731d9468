"""Arrays cached on disk and memory-mapped by all processes of a host. Imports no torch."""

import concurrent.futures
import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from tpukit.host import cache, files
from tpukit.host.errors import TpukitError, reading
from tpukit.host.folders import atomic_folder

Arrays = dict[str, np.ndarray]
PARTS = "whole.json"  # in the folder of `mapped`: the names of the arrays


def load(path: Path) -> Any:
    """Read an `NpzFile` or an array by `numpy.load`. Raises ValueError for pickled objects and for what has
    no such format, without numpy's advice to unpickle it: a pickle can run code."""
    try:
        return np.load(path, allow_pickle=False)
    except ValueError:
        raise ValueError("not an array that numpy saved without pickling") from None


def mapped(name: str, key: Any, make: Callable[[], Arrays]) -> Arrays:
    """Make arrays once, and return them memory-mapped from files, read-only, for all processes of a host and
    later sessions.

    key: what the arrays are made from (`content_key`, settings), for JSON; another key makes other files.
    make: () -> dict of numpy arrays. Raises TpukitError if the cache folder cannot be written, for files in
    it that are missing or cut short, and for what another user can write to."""
    folder = cache.entry(f"{name}-{digest(key)[:20]}")
    with files.file_lock(folder):
        if not files.exists(folder):
            arrays = make()
            with atomic_folder(folder) as work:
                for part, value in arrays.items():
                    np.save(work / f"{part}.npy", value, allow_pickle=False)
                (work / PARTS).write_text(json.dumps([*arrays]))
                for path in (work, *work.iterdir()):
                    path.chmod(path.stat().st_mode & ~stat.S_IWOTH)  # with a umask of 0, too
    with reading(folder, f"{folder} is damaged, so delete it", TpukitError):
        cache.check_own(folder, *folder.iterdir())
        parts = json.loads((folder / PARTS).read_bytes())
        return {part: np.load(folder / f"{part}.npy", mmap_mode="r", allow_pickle=False) for part in parts}


def content_key(paths: Iterable[Path]) -> str:
    """Return a SHA-256 over the names and contents of some files, as a key for `mapped`: copies share their
    arrays.

    The files are read once; the digest is cached until a path, a size or a time changes. Raises TpukitError
    for a file that cannot be read."""
    paths = [path for path in paths if path.is_file()]

    def read():
        with concurrent.futures.ThreadPoolExecutor() as pool:  # most of the time is waiting for the disk
            contents = list(zip([path.name for path in paths], pool.map(files.sha256, paths)))
        return dict(key=np.array(digest(contents)))

    return str(mapped("contents", state_of(paths), read)["key"])


def state_of(paths: Iterable[Path | str]) -> list[tuple[str, int, int]]:
    """Return (path, size, time of its last change) of those of some files that exist, as a key for `mapped`
    that reads none."""
    folders: dict[str, str] = {}
    states = []
    for path in map(str, paths):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = os.stat(path)
            if stat.S_ISREG(found.st_mode):
                states.append((resolve(path, folders), found.st_size, found.st_mtime_ns))
    return states


def digest(values: Any) -> str:
    """Return a SHA-256 over lists, dicts, numbers and texts, as 64 characters."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def resolve(path: str, folders: dict[str, str]) -> str:
    """Return a path without links, as `Path.resolve` does, in a fraction of its time for many files of a
    folder.

    Args:
        path: a file that may be missing.
        folders: the folders that earlier calls resolved; gets this one's.
    """
    folder, separator, name = path.rpartition(os.sep)
    if name in ("", ".", ".."):
        return str(Path(path).resolve())
    if folder not in folders:
        folders[folder] = os.path.join(Path(folder + separator).resolve(), "")
    try:
        is_link = stat.S_ISLNK(os.lstat(path).st_mode)
    except OSError:
        is_link = False
    return str(Path(path).resolve()) if is_link else folders[folder] + name
