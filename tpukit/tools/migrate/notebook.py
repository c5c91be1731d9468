"""The code cells of a notebook as one module, so that a name from the first cell means the same in the
last."""

import json
import re
import secrets
from typing import Any

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
    r"(?i)(py)?torch([\[=<>~!@ ].*)?|(torch[-_]xla|libtpu)\b.*|.*/(torch|torch_xla|libtpu)-.*\.whl"
    r"|[${]+(py)?torch(_xla)?(_\w+)?}?"
)
ENVIRONMENT = re.compile(r"%(?:set_)?env\s+(\w+)")


class Notebook:
    """code: of all cells, as Python; what only IPython understands is a comment there, and comes back in
    `with_code`.

    findings: (line in `code`, column, rule, found, fixable, advice) of commands for IPython or a shell, and
    of cells that are not Python. Raises ValueError, KeyError or TypeError where it is not a notebook."""

    def __init__(self, text: str):
        self.notebook = json.loads(text)
        self.cells = {n: c for n, c in enumerate(self.notebook["cells"], 1) if c["cell_type"] == "code"}
        token = secrets.token_hex(4)  # so that no line of the notebook looks like one of these
        self.cell_mark, self.hidden_mark = f"# cell {token} ", f"# hidden {token} "
        self.text, self.lines, self.starts = text, [], []
        self.findings = []
        for number, cell in self.cells.items():
            self.lines.append(f"{self.cell_mark}{number}")
            self.starts.append((len(self.lines), number))
            self._add("".join(cell["source"]))
        self.code = "".join(f"{line}\n" for line in self.lines)

    def _add(self, source):
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
                found = check_magic(command.replace("\\\n", " "))
                self.findings += [(len(self.lines) + 1, 1, *one) for one in found]
            indent = line[: len(line) - len(line.lstrip())]
            self._hide(line, f"{indent}{assigned[1]} None  " if assigned else f"{indent}pass  " * is_python)
        error = _syntax_error("\n".join(self.lines[start:]))
        if error is not None:
            place = start + (error.lineno or 1), error.offset or 1
            self.findings.append((*place, "unreadable", f"not valid Python 3: {error.msg}", False, ""))
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
        style: Any = dict(indent=indent[1] if indent else None, allow_nan=False)  # 1e999 cannot be written
        fixed = json.dumps(self.notebook, ensure_ascii=False, **style)
        if re.search(r"[\ud800-\udfff]", fixed):  # half a character, which can only be written escaped
            fixed = json.dumps(self.notebook, **style)
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


def _syntax_error(source):
    try:
        parse(source)
    except SyntaxError as error:
        return error
