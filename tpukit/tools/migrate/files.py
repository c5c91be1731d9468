"""The files that are checked: found, checked in a process of their own, and rewritten in their own
encodings."""

import contextlib
import difflib
import io
import itertools
import json
import os
import signal
import tokenize
from pathlib import Path

from tpukit.host.errors import TpukitError
from tpukit.host.files import copy_atomic, write_atomic
from tpukit.host.tables import printable
from tpukit.tools.child import run_python
from tpukit.tools.migrate.rules import Finding

KINDS = (".py", ".ipynb")
TIME_LIMIT_S = 60  # for one file; one of 3500 lines takes about 10


def files_in(paths):
    """The files that some paths name; of folders the .py and .ipynb files in them. Raises TpukitError for
    anything else."""
    found = []
    for path in map(Path, paths):
        if path.is_dir():
            # A link leads to a file that is listed anyway, or out of the folder, where nothing may be
            # rewritten.
            inside = [
                p for p in sorted(path.rglob("*")) if p.suffix in KINDS and p.is_file() and not p.is_symlink()
            ]
            found += [
                p for p in inside if not any(part.startswith(".") for part in p.relative_to(path).parts)
            ]
        elif path.suffix in KINDS and path.is_file():
            found.append(path)
        else:
            raise TpukitError(f"{path} is neither an existing .py or .ipynb file nor a folder of them")
    if not paths:
        raise TpukitError("name scripts, notebooks, or folders of them")
    if not found:
        raise TpukitError(f"no .py or .ipynb files in {', '.join(map(str, paths))}")
    return list(dict.fromkeys(found))


def examine(path, to="torch_xla"):
    """(findings, fixed text) of a .py or .ipynb file; one that cannot be read gives a finding, too. Writes
    nothing.

    to: "torch_xla", of code for GPUs or an old torch_xla; "torch_tpu", of code for torch_xla."""
    return next(examine_all([path], to))


def examine_all(paths, to="torch_xla"):
    """Yield what `examine` returns of each file. One process checks them; where a file ends it, another
    checks the rest."""
    rest = list(map(str, paths))
    while rest:
        ran = run_python("-m", "tpukit.tools.migrate", TIME_LIMIT_S, to, text=json.dumps(rest))
        for line in ran.stdout.splitlines():
            answer = json.loads(line)
            yield [Finding(**finding) for finding in answer["findings"]], answer["fixed"]
            rest.pop(0)
        if rest:
            yield [Finding(rest.pop(0), 0, 1, 1, "unreadable", _describe_end(ran.returncode))], ""


def _describe_end(code):
    cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"not read within {TIME_LIMIT_S} s" if cause == "SIGALRM" else f"it crashes the parser ({cause})"


def read(path):
    """A file's text with its line ends as they are. Raises UnicodeError, LookupError or SyntaxError where it
    is not text."""
    data = Path(path).read_bytes()
    text = data.decode(_encoding(data))
    text.encode()  # some encodings give halves of characters
    return text


def contents(paths):
    """path -> bytes of the files that can be read."""
    found = {}
    for path in paths:
        with contextlib.suppress(OSError):
            found[path] = Path(path).read_bytes()
    return found


def write(path, fixed):
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
    for number in itertools.count(1):
        copy = path.with_name(f"{path.name}.orig{number if number > 1 else ''}")
        with contextlib.suppress(FileExistsError), open(copy, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            return copy


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
