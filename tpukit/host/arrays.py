"""Arrays that all processes of a host share, and that later sessions find again. Imports no torch."""

import concurrent.futures
import contextlib
import hashlib
import json

import numpy as np

from tpukit.host import files
from tpukit.host.errors import TpukitError
from tpukit.host.tables import printable


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
        with files.file_lock(folder):
            if not (folder / "whole").exists():
                arrays = make()
                folder.mkdir(exist_ok=True)
                for part, value in arrays.items():
                    with files.atomic_file(folder / f"{part}.npy") as file:
                        np.save(file, value, allow_pickle=False)
                files.write_atomic(folder / "whole", "")
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
    with files.file_lock(memo):  # of several processes one reads
        with contextlib.suppress(OSError):
            files.make_private(memo.parent)  # what another user put there is not believed
            return memo.read_text()
        with concurrent.futures.ThreadPoolExecutor() as pool:  # most of the time the disk, or Drive, is waited for
            found = [(path.name, digest) for path, digest in zip(paths, pool.map(files.sha256, paths))]
        digest = hashlib.sha256(json.dumps(found).encode()).hexdigest()
        with contextlib.suppress(OSError, TpukitError):  # then they are read again next time
            files.make_private(memo.parent)
            files.write_atomic(memo, digest, durable=False)
    return digest
