"""Write folders so that they appear complete or not at all."""

import contextlib
import os
import shutil
from collections.abc import Generator
from pathlib import Path

from tpukit.host.files import DISK_FULL, explain_unwritable, is_left, partial_of, sync_names


@contextlib.contextmanager
def atomic_folder(folder: str | Path) -> Generator[Path]:
    """Yield an empty folder, renamed to `folder` when the block ends without an error.

    Parent folders are created; what killed processes left is removed. Raises TpukitError if the disk is full
    or cannot be written."""
    folder = Path(folder)
    with explain_unwritable(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        for left in folder.parent.iterdir():
            if is_left(left, folder.name):
                shutil.rmtree(left, ignore_errors=True)  # leaves files and links alone
        work = partial_of(folder)
        work.mkdir()  # not tempfile.mkdtemp, which ignores the user's umask
    try:
        with explain_unwritable(folder, only=DISK_FULL):
            yield work
        with explain_unwritable(folder):
            os.replace(work, folder)
        sync_names(folder.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)
