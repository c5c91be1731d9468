"""What tasks share of users' data: names of splits, and files of Hugging Face datasets on disk."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tpukit.host.errors import TpukitError, first_line

SPLITS = {  # names of folders, of files and in a column of splits, in lower case
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
ENDINGS = (".parquet", ".arrow")  # of the second, `save_to_disk` writes streams


def find_files(place: Path, endings: tuple[str, ...]) -> list[tuple[Path, str | None]]:
    """(file, its split: train, val, test or None) of a file, or of all below a folder, sorted, by what their
    paths say, as train/data-00000-of-00001.arrow and data/test-00000-of-00001.parquet do. Without those that
    are hidden, and those of the Hugging Face library's own cache."""
    found = []
    for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
        if path.suffix in endings and path.is_file() and not path.name.startswith((".", "cache-")):
            parts = path.relative_to(place if place.is_dir() else place.parent).parts
            words = (re.split("[-_.]", part.lower())[0] for part in parts)
            found.append((path, next((SPLITS[word] for word in words if word in SPLITS), None)))
    return found


@contextlib.contextmanager
def reading(path: Path) -> Iterator[Any]:
    """Context manager: pyarrow, to read a file by. Raises TpukitError where it is missing or too old, and for
    a damaged file."""
    try:
        import pyarrow.parquet

        version = pyarrow.__version__
    except ImportError:
        version = "0 (none)"
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < (14, 0, 1):
        raise TpukitError(
            f"{path}: reading it needs pyarrow 14.0.1 or newer (pip install -U pyarrow), and {version} is"
            " installed; an older one can run code from a table (CVE-2023-47248)"
        )
    try:
        yield pyarrow
    except (pyarrow.ArrowException, OSError) as error:
        raise TpukitError(f"{path} is damaged ({first_line(error)}); copy or download it again") from error
