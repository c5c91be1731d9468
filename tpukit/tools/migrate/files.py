"""The files that are checked: found, parsed, and rewritten in their own encodings. Nothing in them is run."""

import contextlib
import difflib
import io
import itertools
import os
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

from tpukit.host.errors import TpukitError, first_line
from tpukit.host.files import copy_atomic, write_atomic
from tpukit.host.tables import printable
from tpukit.tools.migrate.checker import check_for_torch_xla
from tpukit.tools.migrate.findings import Finding
from tpukit.tools.migrate.notebook import Notebook, check_magic
from tpukit.tools.migrate.to_torch_tpu import check_for_torch_tpu

KINDS = (".py", ".ipynb")
LARGEST = 20 * 2**20  # bytes of a file
CHECKS = {"torch_xla": check_for_torch_xla, "torch_tpu": check_for_torch_tpu}


def files_in(paths: Sequence[str | Path]) -> list[Path]:
    """The files that some paths name; of folders the .py and .ipynb files in them. Raises TpukitError for
    anything else."""
    found = []
    for path in map(Path, paths):
        if path.is_dir():
            found += _files_below(path)
        elif path.suffix in KINDS and path.is_file():
            found.append(path)
        else:
            raise TpukitError(f"{path} is neither an existing .py or .ipynb file nor a folder of them")
    if not found:
        named = f"no .py or .ipynb files in {', '.join(map(str, paths))}"
        raise TpukitError(named if paths else "name scripts, notebooks, or folders of them")
    return list(dict.fromkeys(found))


def _files_below(folder: Path) -> Iterator[Path]:
    """A link leads to a file that is listed anyway, or out of the folder, where nothing may be rewritten."""
    for path in sorted(folder.rglob("*")):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.suffix in KINDS and path.is_file() and not path.is_symlink() and not is_hidden:
            yield path


def examine(path: str | Path, to: str = "torch_xla") -> tuple[list[Finding], str]:
    """(findings, fixed text) of a .py or .ipynb file; one that cannot be read gives a finding, too. Writes
    nothing.

    to: "torch_xla", of code for GPUs or an old torch_xla; "torch_tpu", of code for torch_xla."""
    path = str(path)
    try:
        if not os.path.isfile(path) or os.path.getsize(path) > LARGEST:
            return [unreadable(path, f"not a file of at most {LARGEST // 2**20} MiB")], ""
        check = _check_notebook if path.endswith(".ipynb") else _check_script
        findings, fixed = check(path, read(path), CHECKS[to])
        return sorted(set(findings)), fixed
    except (UnicodeError, LookupError, SyntaxError):
        reason = "not text in UTF-8, nor in the encoding that its first lines name"
    except (RecursionError, MemoryError):
        reason = "nested too deeply"
    except Exception as error:  # whatever a strange file does costs its own finding alone
        reason = f"{type(error).__name__}: {first_line(error)}"
    return [unreadable(path, reason)], ""


def _check_script(path, text, check):
    try:
        report = check(text)
    except SyntaxError as error:
        return [unreadable(path, "not valid Python 3", 0, error.lineno or 1, error.offset or 1)], text
    return [Finding(path, 0, *found) for found in report.findings], report.fixed()


def _check_notebook(path, text, check):
    try:
        notebook = Notebook(text)
    except ValueError as error:
        return [unreadable(path, f"not a notebook ({error})")], text
    report = check(notebook.code)
    magics = [(line, 1, *found) for line, command in notebook.magics for found in check_magic(command)]
    findings = [Finding(path, *notebook.place(line), *rest) for line, *rest in [*report.findings, *magics]]
    findings += [unreadable(path, "not valid Python 3", *place) for place in notebook.unreadable]
    return findings, notebook.with_code(report.fixed())


def unreadable(path: str, reason: str, cell: int = 0, line: int = 1, column: int = 1) -> Finding:
    return Finding(path, cell, line, column, "unreadable", reason)


def read(path: str | Path) -> str:
    """A file's text with its line ends as they are. Raises UnicodeError, LookupError or SyntaxError where it
    is not text."""
    data = Path(path).read_bytes()
    text = data.decode(_encoding(data))
    text.encode()  # some encodings give halves of characters
    return text


def _encoding(data):
    """UTF-8, or what a script's first lines name. Raises SyntaxError where that is nothing."""
    return tokenize.detect_encoding(io.BytesIO(data).readline)[0]


def contents(paths: Sequence[Path]) -> dict[Path, bytes]:
    """path -> bytes of the files that can be read."""
    found = {}
    for path in paths:
        with contextlib.suppress(OSError):
            found[path] = Path(path).read_bytes()
    return found


def write(path: str | Path, fixed: str) -> Path:
    """Replace a file by its fixed text, whole or not at all; its mode and encoding stay. Returns the path of
    a copy of the file as it was, beside it: NAME.orig, or NAME.orig2 and so on where there is one. Raises
    TpukitError."""
    path = Path(path).resolve()
    try:
        data, mode = path.read_bytes(), path.stat().st_mode
        copy = _write_copy(path, data)
        write_atomic(path, fixed.encode(_encoding(data)))
        os.chmod(path, mode & 0o7777)
    except OSError as error:
        raise TpukitError(
            f"{path} cannot be written ({error.strerror}): copy it to a folder of yours first"
        ) from error
    return copy


def _write_copy(path, data):
    """Write bytes to a new file beside `path`. Returns its path."""
    numbers = itertools.chain([""], itertools.count(2))
    while True:
        copy = Path(f"{path}.orig{next(numbers)}")
        with contextlib.suppress(FileExistsError), open(copy, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            return copy


def difference(path: str | Path, fixed: str) -> str:
    """A unified diff of a file and its fixed text, to be shown."""
    before, after = read(path).splitlines(True), fixed.splitlines(True)
    return printable("".join(difflib.unified_diff(before, after, str(path), f"{path} (fixed)")))


def copy_example(folder: str | Path) -> Path:
    """Put a training script for a GPU into a folder, to try the rules on. Returns its path."""
    target = Path(folder) / "gpu_example.py"
    copy_atomic(Path(__file__).with_name("gpu_example.txt"), target)
    return target
