"""Arrays that all processes of a host share, and that later sessions find again. Imports no torch."""

import concurrent.futures
import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tpukit.host import files
from tpukit.host.errors import TpukitError
from tpukit.host.tables import printable

Arrays = dict[str, np.ndarray]
WHOLE = "whole.json"  # in the folder of `mapped` once all is there: the fingerprint of every array


def load(path: Path) -> Any:
    """An `NpzFile` or an array, by `numpy.load`. Raises ValueError for pickled objects and for what has no
    such format, without numpy's advice to unpickle it: a pickle can run code."""
    try:
        return np.load(path, allow_pickle=False)
    except ValueError:
        raise ValueError("not an array that numpy saved without pickling") from None


def mapped(name: str, key: Any, make: Callable[[], Arrays]) -> Arrays:
    """Arrays that are made once and memory-mapped from files, shared by all processes of a host and by later
    sessions.

    key: what the arrays are made from (`content_key`, settings), for JSON; another key makes other files.
    make: () -> dict of numpy arrays. Returns a dict of read-only arrays. Files that are missing or damaged
    are made again; where they cannot be written each process keeps its own copy."""
    folder = files.cache_folder() / f"{name}-{digest(key)[:20]}"
    arrays = None
    try:
        files.make_private(folder.parent)
        with files.file_lock(folder):
            parts = _whole_parts(folder)
            if parts is None:
                arrays = make()
                folder.mkdir(exist_ok=True)
                for part, value in arrays.items():
                    with files.atomic_file(folder / f"{part}.npy") as file:
                        np.save(file, value, allow_pickle=False)
                parts = {part: _fingerprint(folder / f"{part}.npy") for part in arrays}
                files.write_atomic(folder / WHOLE, json.dumps(parts))
        return {part: np.load(folder / f"{part}.npy", mmap_mode="r", allow_pickle=False) for part in parts}
    except (OSError, TpukitError) as error:
        if arrays is None and isinstance(error, TpukitError):
            raise  # from `make`
        print(printable(f"{folder} cannot be used ({error}): every process keeps its own copy in memory"))
        return make() if arrays is None else arrays


def _whole_parts(folder: Path) -> dict[str, Any] | None:
    """The fingerprints of the arrays that `mapped` wrote to a folder; None if one is missing or damaged."""
    try:
        parts = json.loads((folder / WHOLE).read_bytes())
        same = all(_fingerprint(folder / f"{part}.npy") == expected for part, expected in parts.items())
    except (OSError, ValueError, AttributeError):
        return None
    return parts if same else None


def _fingerprint(path: Path) -> list[Any]:
    """[size, SHA-256 of the first MiB] of a file: labels are whole in there, images would take long."""
    with open(path, "rb") as file:
        return [path.stat().st_size, hashlib.sha256(file.read(2**20)).hexdigest()]


def content_key(*folders: Path, like: Sequence[str] = ("*",)) -> str:
    """SHA-256 over the names and contents of the files in some folders, as a key for `mapped`: copies share
    their arrays.

    like: patterns of the names. The files are read once; the digest is cached until a path, a size or a time
    changes. Raises TpukitError for a file that cannot be read."""
    matching = (path for folder in folders for pattern in like for path in sorted(folder.glob(pattern)))
    paths = [path for path in matching if path.is_file()]
    stats = [path.stat() for path in paths]
    state = [(str(path.resolve()), stat.st_size, stat.st_mtime_ns) for path, stat in zip(paths, stats)]
    cached = files.cache_folder() / f"contents-{digest(state)[:20]}"
    with files.file_lock(cached):  # one of several processes reads
        with contextlib.suppress(OSError):
            files.make_private(cached.parent)  # what another user put there is not trusted
            return cached.read_text()
        with concurrent.futures.ThreadPoolExecutor() as pool:  # most of the time is waiting for the disk
            contents = list(zip([path.name for path in paths], pool.map(_sha256, paths)))
        key = digest(contents)
        with contextlib.suppress(OSError, TpukitError):  # then they are read again next time
            files.make_private(cached.parent)
            files.write_atomic(cached, key, durable=False)
    return key


def _sha256(path):
    try:
        return files.sha256(path)
    except OSError as error:
        raise TpukitError(f"{path} cannot be read ({error.strerror}): copy or download it again") from error


def digest(values: Any) -> str:
    """SHA-256 over lists, dicts, numbers and texts, as 64 characters."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()
