"""The files that are checked: found, read and written in their own encodings."""

import difflib
import io
import os
import tokenize
from pathlib import Path

from tpukit.host.errors import TpukitError
from tpukit.host.files import copy_atomic, write_atomic
from tpukit.host.tables import printable

KINDS = (".py", ".ipynb")


def files_in(paths):
    """The files that some paths name; of folders the .py and .ipynb files in them. Raises TpukitError where there are none."""
    found = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = [p for p in sorted(path.rglob("*")) if p.suffix in KINDS and p.is_file()]
            found += [p for p in inside if not any(part.startswith(".") for part in p.relative_to(path).parts)]
        else:
            found.append(path)
    if not found:
        raise TpukitError(f"no .py or .ipynb files in {', '.join(map(str, paths)) or 'nothing'}")
    return found


def read(path):
    """A file's text with its line ends as they are.

    Raises TpukitError for a file that cannot be opened or is of another kind, UnicodeError, LookupError or SyntaxError for one
    that is not text.
    """
    path = Path(path)
    if path.suffix not in KINDS:
        raise TpukitError(f"{path} is neither a script nor a notebook: give .py or .ipynb files, or folders of them")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TpukitError(f"{path} cannot be read ({error.strerror}): give .py or .ipynb files, or folders of them") from error
    text = data.decode(_encoding(data))
    text.encode()  # some encodings give halves of characters
    return text


def write(path, fixed):
    """Replace a file by its fixed text, whole or not at all; its mode and encoding stay. Raises TpukitError."""
    path = Path(path).resolve()
    try:
        encoding, mode = _encoding(path.read_bytes()), path.stat().st_mode
        write_atomic(path, fixed.encode(encoding))
        os.chmod(path, mode & 0o7777)
    except OSError as error:
        raise TpukitError(f"{path} cannot be written ({error.strerror}): copy it to a folder of yours first") from error


def difference(path, fixed):
    """A unified diff of a file and its fixed text, to be shown."""
    lines = [text.splitlines(True) for text in (read(path), fixed)]
    return printable("".join(difflib.unified_diff(*lines, str(path), f"{path} (fixed)")))


def copy_example(folder):
    """Put a training script for a GPU into a folder, to try the rules on. Returns its path."""
    target = Path(folder) / "gpu_example.py"
    copy_atomic(Path(__file__).with_name("gpu_example.py"), target)
    return target


def _encoding(data):
    """UTF-8, or what a script's first lines name. Raises SyntaxError where that is nothing."""
    return tokenize.detect_encoding(io.BytesIO(data).readline)[0]
