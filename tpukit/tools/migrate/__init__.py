"""`tpukit migrate`: what in PyTorch code will not work, or will be slow, on a TPU today; by line, each with its fix.

Reads scripts and notebooks with libcst, runs nothing, and needs neither torch nor a TPU. A rule speaks only where the code
itself shows the trouble; what cannot be seen in a file (the shapes of data, what an imported function does) is not guessed.
"""

import dataclasses
import difflib
import io
import json
import os
import tokenize
import urllib.parse
from pathlib import Path

from tpukit import __version__
from tpukit.host import files
from tpukit.host.errors import TpukitError
from tpukit.host.tables import Table, printable
from tpukit.tools.migrate import apart
from tpukit.tools.migrate.notebook import Notebook, installs

try:
    import libcst

    from tpukit.tools.migrate.rules import OLD_VARIABLES, RULES, Finder
except ImportError as error:
    raise TpukitError("`tpukit migrate` reads code with libcst, which is not installed: pip install libcst") from error


@dataclasses.dataclass(frozen=True, order=True)
class Finding:
    """One trouble. line, column: from 1, in the file or in the notebook's cell (counted from 1 among all cells; 0 in a script).
    fixable: the text that `examine` gives has it fixed."""

    path: str
    cell: int
    line: int
    column: int
    rule: str
    found: str
    fixable: bool = False
    advice: str = ""

    @property
    def level(self):
        return RULES[self.rule][0]

    @property
    def message(self):
        return f"{self.found}: {self.advice or RULES[self.rule][1]}"

    @property
    def place(self):
        return f"{self.path}{f' cell {self.cell}' if self.cell else ''}:{self.line}:{self.column}"


_reader = apart.Reader()  # for as long as this process lives: to start one for each file would take longer than to read it


def examine(path):
    """(findings, fixed text) of a .py or .ipynb file; what cannot be read as such is a finding too. Writes nothing.

    It is read in another process, with limits of time and memory. Raises TpukitError for a path that cannot be read, or is
    neither.
    """
    try:
        read = _reader.read(path)
    except apart.Unreadable as error:
        return [Finding(str(path), 0, 1, 1, "unreadable", str(error))], ""
    return [Finding(*values) for values in read["findings"]], read["fixed"]


def examine_here(path):
    """`examine`, in this process: a file can crash it."""
    path = Path(path)
    if path.suffix not in (".py", ".ipynb"):
        raise TpukitError(f"{path} is neither a script nor a notebook: give .py or .ipynb files, or folders of them")
    bad = lambda why, cell=0, line=1, column=1: Finding(str(path), cell, line, column, "unreadable", why)  # noqa: E731
    try:
        text = _read(path)
    except (UnicodeError, LookupError, SyntaxError):
        return [bad("no text in UTF-8, nor in the encoding that its first lines name")], ""
    if path.suffix == ".py":
        try:
            finder = Finder(text)
        except libcst.ParserSyntaxError as error:
            return [bad("no Python of today", 0, error.raw_line, error.raw_column + 1)], text
        return sorted({Finding(str(path), 0, *rest) for rest in finder.found}), finder.fixed()
    try:
        notebook = Notebook(text)
    except ValueError as error:
        return [bad(f"no notebook ({error})")], text
    finder = Finder(notebook.code)
    found = [(*notebook.place(line), *rest) for line, *rest in finder.found]
    found += [(*notebook.place(line), 1, "install", f"`{shown[:60]}`") for line, shown in notebook.shell if installs(shown)]
    found += [
        (*notebook.place(line), 1, "old-variable", name, False, OLD_VARIABLES[name])
        for line, name in notebook.variables
        if name in OLD_VARIABLES
    ]
    findings = {Finding(str(path), *rest) for rest in found} | {bad(why, *place) for *place, why in notebook.unreadable}
    return sorted(findings), notebook.rebuilt(finder.fixed())


def files_in(paths):
    """The files that some paths name; of folders the .py and .ipynb files in them. Raises TpukitError where there are none."""
    found = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = [p for p in sorted(path.rglob("*")) if p.suffix in (".py", ".ipynb") and p.is_file()]
            found += [p for p in inside if not any(part.startswith(".") for part in p.relative_to(path).parts)]
        else:
            found.append(path)
    if not found:
        raise TpukitError(f"no .py or .ipynb files in {', '.join(map(str, paths)) or 'nothing'}")
    return found


def difference(path, fixed):
    """A unified diff of a file and its fixed text, to be shown."""
    lines = [text.splitlines(True) for text in (_read(Path(path)), fixed)]
    return printable("".join(difflib.unified_diff(*lines, str(path), f"{path} (fixed)")))


def write(path, fixed):
    """Replace a file by its fixed text, whole or not at all; its mode and encoding stay. Raises TpukitError."""
    path = Path(path).resolve()
    try:
        encoding, mode = _encoding(path.read_bytes()), path.stat().st_mode
        files.write_atomic(path, fixed.encode(encoding))
        os.chmod(path, mode & 0o7777)
    except OSError as error:
        raise TpukitError(f"{path} cannot be written ({error.strerror}): copy it to a folder of yours first") from error


def copy_example(folder):
    """Put a training script for a GPU into a folder, to try all this on. Returns its path."""
    target = Path(folder) / "gpu_example.py"
    files.copy_atomic(Path(__file__).with_name("gpu_example.py"), target)
    return target


def _read(path):
    """A file's text with the ends of its lines as they are. Raises UnicodeError, LookupError or SyntaxError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TpukitError(f"{path} cannot be read ({error.strerror}): give .py or .ipynb files, or folders of them") from error
    text = data.decode(_encoding(data))
    text.encode()  # some encodings give halves of characters
    return text


def _encoding(data):
    """UTF-8, with its mark where it has one, or what a script's first lines name. Raises SyntaxError where that is nothing."""
    return tokenize.detect_encoding(io.BytesIO(data).readline)[0]


# Saying it


def as_text(findings):
    """One line for each finding, errors and warnings alike, and a summary."""
    lines = [f"{f.place}: {f.level} [{f.rule}] {f.message}{' (--fix)' if f.fixable else ''}" for f in findings]
    return printable("\n".join([*lines, _summary(findings)]))


def _summary(findings):
    if not findings:
        return "nothing found that will not work on a TPU"
    errors, fixable = sum(f.level == "error" for f in findings), sum(f.fixable for f in findings)
    slow = f"{len(findings) - errors} that will be slow or not what was meant"
    return f"{errors} that will not work on a TPU, {slow}; --fix fixes {fixable} of them"


def as_table(findings):
    """The findings as a table, for notebooks."""
    rows = [
        (f.place.rpartition("/")[2], f.level, f.rule, f.found.replace("`", ""), f.advice or RULES[f.rule][1], "yes" * f.fixable)
        for f in findings
    ]
    return Table(_summary(findings), ("place", "level", "rule", "found", "what to do", "--fix"), rows)


def as_json(findings):
    return json.dumps([dict(dataclasses.asdict(f), level=f.level, message=f.message) for f in findings], indent=1)


def as_github(findings):
    """Workflow commands that GitHub shows beside the lines of a pull request."""
    escape = lambda text: printable(text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A"))  # noqa: E731
    where = lambda f: f"cell {f.cell}, line {f.line}: " if f.cell else ""  # noqa: E731
    return "\n".join(
        f"::{f.level} file={escape(f.path).replace(',', '%2C')},line={1 if f.cell else f.line},col={f.column},"
        f"title=tpukit {f.rule}::{escape(where(f) + f.message)}"
        for f in findings
    )


def as_sarif(findings):
    """Static Analysis Results Interchange Format 2.1.0, for editors and code scanning."""
    rules = [
        dict(id=name, shortDescription=dict(text=fix), defaultConfiguration=dict(level=level))
        for name, (level, fix) in RULES.items()
    ]
    results = []
    for f in findings:
        region = dict(startLine=1 if f.cell else f.line, startColumn=1 if f.cell else f.column)
        place = dict(artifactLocation=dict(uri=urllib.parse.quote(Path(f.path).as_posix())), region=region)
        text = f"cell {f.cell}, line {f.line}: {f.message}" if f.cell else f.message
        results.append(dict(ruleId=f.rule, level=f.level, message=dict(text=text), locations=[dict(physicalLocation=place)]))
    tool = dict(driver=dict(name="tpukit migrate", version=__version__, rules=rules))
    schema = "https://json.schemastore.org/sarif-2.1.0.json"
    return json.dumps({"$schema": schema, "version": "2.1.0", "runs": [dict(tool=tool, results=results)]}, indent=1)


FORMATS = dict(text=as_text, json=as_json, github=as_github, sarif=as_sarif)
