"""The files that are checked: found, examined and rewritten. Nothing in them is run."""

import contextlib
import dataclasses
import difflib
import itertools
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tpukit.host.errors import TpukitError, first_line
from tpukit.host.files import atomic_file, copy_atomic, explain_unwritable, write_atomic
from tpukit.host.text import printable
from tpukit_tools.migrate.cells import Cells
from tpukit_tools.migrate.checker import Checker
from tpukit_tools.migrate.findings import Finding

KINDS = (".py", ".ipynb")
IMPORTS = re.compile(rb"^[\s\"]*(?:from\s+\.+\s+import|from|import)\s+\.*([A-Za-z_][\w.]*)", re.MULTILINE)


def files_in(paths: Sequence[str | Path]) -> list[Path]:
    """Return the files that paths name, of folders those in them. Raises TpukitError for anything else."""
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
        within = f" in {', '.join(map(str, paths))}" if paths else ""
        raise TpukitError(f"no .py or .ipynb files{within}: name scripts, notebooks, or folders of them")
    return list(dict.fromkeys(found))


def imported_beside(paths: Sequence[Path]) -> list[Path]:
    """Return the files that these import from their own folders, and that are none of these."""
    known, found = {path.resolve() for path in paths}, []
    for path in paths:
        with contextlib.suppress(OSError):  # whoever examines it says so
            for name in IMPORTS.findall(path.read_bytes()):
                module = path.parent.joinpath(*filter(None, name.decode().split(".")))
                files = (one for one in (module.with_suffix(".py"), module / "__init__.py") if one.is_file())
                found += [one for one in files if one.resolve() not in known]
    return list(dict.fromkeys(found))


@dataclasses.dataclass
class Examined:
    """A file: its bytes as they were read, those with what is safe to fix fixed, and what was found in it."""

    path: Path
    data: bytes
    fixed: bytes
    findings: list[Finding]

    def difference(self) -> str:
        """Return a unified diff of the file and its fixed text, to be shown."""
        before, after = (data.decode().splitlines(True) for data in (self.data, self.fixed))
        return printable("".join(difflib.unified_diff(before, after, str(self.path), f"{self.path} (fixed)")))

    def write(self) -> Path | None:
        """Replace the file by its fixed text, whole or not at all. Return the path of a copy of the file as
        it was, next to it: NAME.orig, or NAME.orig2 and so on if there is one. All have the file's mode and
        owner. Return None for a file that was saved by others since it was read; it stays as it is. Raise
        TpukitError if it cannot be written."""
        path = self.path.resolve()
        copies = (Path(f"{path}.orig{number}") for number in itertools.chain([""], itertools.count(2)))
        copy = next(one for one in copies if not one.exists())

        def check_unedited(_):
            if path.read_bytes() != self.data:
                raise _Edited

        with explain_unwritable(path):
            copy.touch(0o600, exist_ok=False)
            try:
                if sys.platform != "win32":
                    with contextlib.suppress(OSError):  # only root gives files away
                        shutil.chown(copy, path.stat().st_uid, path.stat().st_gid)
                shutil.copymode(path, copy)
                write_atomic(copy, self.data)
                with atomic_file(path, check=check_unedited) as file:
                    file.write(self.fixed)
            except Exception as error:  # before the file was replaced
                copy.unlink(missing_ok=True)
                if isinstance(error, _Edited):
                    return None
                raise
        return copy


class _Edited(Exception):
    """A file is not as it was read."""


def examine(path: str | Path) -> Examined:
    """Check a .py or .ipynb file for a TPU. Writes nothing. What cannot be read gives a finding, too."""
    path, data = Path(path), b""
    try:
        data = path.read_bytes()
        cells = Cells(data.decode(), path.suffix == ".ipynb")
        checker = Checker(cells.code)
        found: list[tuple] = [
            (*cells.place(line), *rest) for line, *rest in [*checker.findings, *cells.findings]
        ]
        fixed = cells.with_code(checker.fixed).encode()
    except Exception as error:  # whatever a strange file does costs its own finding alone
        found, fixed = [(0, 1, 1, "unreadable", f"{type(error).__name__}: {first_line(error)}")], data
    return Examined(path, data, fixed, sorted({Finding(str(path), *one) for one in found}))


def copy_example(folder: str | Path) -> Path:
    """Put a training script for a GPU into a folder, to try the rules on. Return its path."""
    target = Path(folder) / "gpu_example.py"
    copy_atomic(Path(__file__).with_name("gpu_example.txt"), target)
    return target
