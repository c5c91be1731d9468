"""The code cells of a notebook as one module, so that a name from the first cell means the same in the
last."""

import json
import math
import re
import secrets

from tpukit.tools.migrate.findings import OLD_VARIABLES
from tpukit.tools.migrate.source import parse

OTHER_LANGUAGE = re.compile(r"\s*%%(?!time\b|timeit\b|capture\b|prun\b)")
SHELL_CELL = re.compile(r"\s*%%(bash|sh|script)\b")
MAGIC = re.compile(r"[!%]|[\w.*]*\?{1,2}\s*$|\?{1,2}[\w.*]+\s*$")
AUTOMAGIC = re.compile(r"(pip3?|conda|mamba|cd|ls)\s+\S")  # IPython takes these without %
ASSIGNED_MAGIC = re.compile(r"([\w.,\[\]'\" ]+=)\s*([!%].*)", re.DOTALL)
# A shell's command that changes packages, and those whose versions the image has matched to one another.
INSTALL = re.compile(r"\b(pip[\d.]*|conda|mamba)\s(.*\s)?((un)?install|remove)\s+(?P<packages>.*)")
MATCHED = re.compile(
    r"(py)?torch([\[=<>~!@ ].*)?|(torch[-_]xla|libtpu)\b.*|.*/(torch|torch_xla|libtpu)-.*\.whl"
    r"|[${]+(py)?torch(_xla)?(_\w+)?}?",
    re.IGNORECASE,
)
ENVIRONMENT = re.compile(r"%(?:set_)?env\s+(\w+)")


class Notebook:
    """code: of all cells, as Python; what only IPython understands is a comment there, and comes back in
    `with_code`.

    magics: (line in `code`, text) of commands for IPython or a shell. unreadable: (cell, line, column) in
    cells that are not Python. Raises ValueError where the text is not a notebook."""

    def __init__(self, text: str):
        try:
            self.notebook = json.loads(text, parse_float=_finite)
            self.cells = {n: c for n, c in enumerate(self.notebook["cells"], 1) if c["cell_type"] == "code"}
            sources = {n: "".join(cell["source"]) for n, cell in self.cells.items()}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        token = secrets.token_hex(4)  # so that no line of the notebook looks like one of these
        self.cell_mark, self.hidden_mark = f"# cell {token} ", f"# hidden {token} "
        self.text, self.lines, self.starts = text, [], []
        self.magics, self.unreadable = [], []
        for number, source in sources.items():
            self.lines.append(f"{self.cell_mark}{number}")
            self.starts.append((len(self.lines), number))
            self._add(number, source)
        self.code = "".join(f"{line}\n" for line in self.lines)

    def _add(self, number, source):
        start, is_python = len(self.lines), not OTHER_LANGUAGE.match(source)
        if is_python and _syntax_error(source) is None:
            self.lines += source.split("\n")
            return
        for line in re.split(r"(?<!\\)\n", source):  # with those that a backslash joins to it
            bare = line.strip()
            assigned = ASSIGNED_MAGIC.match(bare)
            is_automagic = AUTOMAGIC.match(bare) and _syntax_error(bare)
            if is_python and not (assigned or MAGIC.match(bare) or is_automagic):
                self.lines += line.split("\n")
                continue
            if is_python or SHELL_CELL.match(source):
                command = assigned[2] if assigned else bare
                self.magics.append((len(self.lines) + 1, command.replace("\\\n", " ")))
            indent = line[: len(line) - len(line.lstrip())]
            self._hide(line, f"{indent}{assigned[1]} None  " if assigned else f"{indent}pass  " * is_python)
        error = _syntax_error("\n".join(self.lines[start:]))
        if error is not None:
            self.unreadable.append((number, error.lineno or 1, error.offset or 1))
            del self.lines[start:]
            self._hide(source)

    def _hide(self, lines, statement=""):
        """Put a statement, and comments, in the place of lines."""
        for line in lines.split("\n"):
            self.lines.append(f"{statement}{self.hidden_mark}{json.dumps(line)}")
            statement = ""

    def place(self, line: int) -> tuple[int, int]:
        """(cell, line in it) of a line of `code`."""
        start, cell = max(at for at in self.starts if at[0] < line)
        return cell, line - start

    def with_code(self, code: str) -> str:
        """The notebook's text with the cells of a changed `code`; as it was where nothing changed."""
        if code == self.code:
            return self.text
        for part in code.split(self.cell_mark)[1:]:
            number, *lines = part.removesuffix("\n").split("\n")
            hidden = [line.partition(self.hidden_mark) for line in lines]
            source = "\n".join(json.loads(text) if mark else line for line, mark, text in hidden)
            cell = self.cells[int(number)]
            if source != "".join(cell["source"]):
                cell["source"] = source.splitlines(True) if isinstance(cell["source"], list) else source
        indent = re.search(r'\n([ \t]+)"', self.text)
        # Half a character can only be written escaped.
        is_escaped = re.search(r"[\ud800-\udfff]", json.dumps(self.notebook, ensure_ascii=False)) is not None
        fixed = json.dumps(self.notebook, ensure_ascii=is_escaped, indent=indent[1] if indent else None)
        return fixed + "\n" * self.text.endswith("\n")


def check_magic(command: str):
    """Findings, from the rule on, of a command for IPython or a shell."""
    for part in re.split(r"[;&|]+\s", re.sub(r"(^|\s)#.*", "", command)):
        found = INSTALL.search(part)
        packages = found["packages"].split() if found and "echo " not in part else []
        if any(MATCHED.fullmatch(package.strip("'\"")) for package in packages):
            yield "install", f"`{command[:60]}`", False, ""
    variable = ENVIRONMENT.match(command)
    if variable and variable[1] in OLD_VARIABLES:
        yield "old-variable", variable[1], False, OLD_VARIABLES[variable[1]]


def _finite(text):
    """The number that JSON text stands for. Raises ValueError for one that could not be written again."""
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {text} is too large")
    return number


def _syntax_error(source):
    try:
        parse(source)
    except SyntaxError as error:
        return error
