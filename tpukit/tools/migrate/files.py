"""The files that are checked: found, parsed, and rewritten in their own encodings. Nothing in them is run."""

import contextlib
import difflib
import io
import itertools
import os
import tokenize
from collections.abc import Sequence
from pathlib import Path

from tpukit.host.errors import TpukitError, first_line
from tpukit.host.files import copy_atomic, explain_unwritable, write_atomic
from tpukit.host.tables import printable
from tpukit.tools.migrate.checker import Checker
from tpukit.tools.migrate.findings import Finding
from tpukit.tools.migrate.notebook import Notebook
from tpukit.tools.migrate.to_torch_tpu import check_for_torch_tpu

KINDS = (".py", ".ipynb")
LARGEST = 20 * 2**20  # bytes of a file
CHECKS = {"torch_xla": lambda code: Checker(code).report, "torch_tpu": check_for_torch_tpu}


def files_in(paths: Sequence[str | Path]) -> list[Path]:
    """The files that some paths name; of folders the .py and .ipynb files in them. Raises TpukitError for
    anything else."""
    found = []
    for path in map(Path, paths):
        if path.is_dir():
            below = [one for one in sorted(path.rglob("*")) if one.suffix in KINDS and one.is_file()]
            shown = [one for one in below if "/." not in f"/{one.relative_to(path)}"]
            # A link leads to a file that is listed anyway, or out of the folder: nothing there is rewritten.
            found += [one for one in shown if not one.is_symlink()]
        elif path.suffix in KINDS and path.is_file():
            found.append(path)
        else:
            raise TpukitError(f"{path} is neither an existing .py or .ipynb file nor a folder of them")
    if not found:
        names = ", ".join(map(str, paths))
        raise TpukitError(f"no .py or .ipynb files in [{names}]: name scripts, notebooks, or folders of them")
    return list(dict.fromkeys(found))


def examine(path: str | Path, to: str = "torch_xla") -> tuple[list[Finding], str]:
    """(findings, fixed text) of a .py or .ipynb file; one that cannot be read gives a finding, too. Writes
    nothing.

    to: "torch_xla", of code for GPUs or an old torch_xla; "torch_tpu", of code for torch_xla."""
    path, text = str(path), ""
    line = column = 1
    try:
        if not os.path.isfile(path) or os.path.getsize(path) > LARGEST:
            raise ValueError(f"not a file of at most {LARGEST // 2**20} MiB")
        text = read(path)
        if path.endswith(".ipynb"):
            notebook = Notebook(text)
            report = CHECKS[to](notebook.code)
            found: list[tuple] = [
                (*notebook.place(line), *rest) for line, *rest in [*report.findings, *notebook.findings]
            ]
            fixed = notebook.with_code(report.fixed())
        else:
            report = CHECKS[to](text)
            found, fixed = [(0, *one) for one in report.findings], report.fixed()
        return sorted({Finding(path, *one) for one in found}), fixed
    except SyntaxError as error:  # of its encoding, too
        reason, line, column = f"not valid Python 3: {error.msg}", error.lineno or 1, error.offset or 1
    except (RecursionError, MemoryError):
        reason = "nested too deeply"
    except Exception as error:  # whatever a strange file does costs its own finding alone
        reason = f"{type(error).__name__}: {first_line(error)}"
    return [Finding(path, 0, line, column, "unreadable", reason)], text


def read(path: str | Path) -> str:
    """A file's text with its line ends as they are. Raises UnicodeError, LookupError or SyntaxError where it
    is not text."""
    data = Path(path).read_bytes()
    return data.decode(_encoding(data))


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
    copies = (Path(f"{path}.orig{number}") for number in itertools.chain([""], itertools.count(2)))
    with explain_unwritable(path):
        data, mode = path.read_bytes(), path.stat().st_mode
        for copy in copies:
            with contextlib.suppress(FileExistsError), open(copy, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                break
        write_atomic(path, fixed.encode(_encoding(data)))
        os.chmod(path, mode & 0o7777)
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
