"""The cells of a notebook as one module, so that a name from the first means the same in the last. A script
is one cell."""

import json
import re
import secrets

from tpukit_tools.migrate.findings import TABLES
from tpukit_tools.migrate.source import parse

OTHER_LANGUAGE = re.compile(r"\s*%%(?!(time|timeit|capture|prun)\b|writefile\s.*\.py\b)")
SHELL_CELL = re.compile(r"\s*%%(bash|sh|script)\b")
MAGIC = re.compile(r"[!%]|[\w.*]*\?{1,2}\s*$|\?{1,2}[\w.*]+\s*$")
LINES = re.compile(r"(?<!\\)\n")  # a backslash joins the next line


class Cells:
    """code: of all cells, as Python; what only IPython understands is a comment there, and comes back in
    `with_code`.

    findings: (line in `code`, column, rule, found, advice, fixable) of commands for IPython or a shell, and
    of cells that are not Python. Raises ValueError, KeyError or TypeError if a notebook is none."""

    def __init__(self, text: str, is_notebook: bool):
        self.text, self.notebook, self.cells = text, None, {}
        self.lines, self.starts, self.hidden, self.findings = [], {}, [], []
        token = secrets.token_hex(4)  # so that no line of the file looks like one of these
        self.cell_mark, self.hidden_mark = f"# cell {token} ", f"# hidden {token} "
        if not is_notebook:
            self._add(0, text)
        else:
            self.notebook = json.loads(text)
            self.cells = {n: c for n, c in enumerate(self.notebook["cells"], 1) if c["cell_type"] == "code"}
        for number, cell in self.cells.items():
            self.lines.append(f"{self.cell_mark}{number}")
            self._add(number, "".join(cell["source"]))
        self.code = "\n".join(self.lines)

    def _add(self, number, source):
        start = len(self.lines)
        self.starts[number] = start
        if number and OTHER_LANGUAGE.match(source):  # in a script, %%bash is just a line
            for line in LINES.split(source):
                if SHELL_CELL.match(source):
                    self._check_command(line.strip())
                self._hide(line)
        elif _syntax_error(source) is None:
            self.lines += source.split("\n")
        else:
            for line in LINES.split(source):
                self._add_line(line)
        error = _syntax_error("\n".join(self.lines[start:]))
        if error is not None:
            place = start + (error.lineno or 1), error.offset or 1
            self.findings.append((*place, "unreadable", f"not valid Python 3: {error.msg}", "", False))
            del self.lines[start:]
            self._hide(source)

    def _add_line(self, line):
        """Add a line of a cell that is not only Python."""
        if not MAGIC.match(line.strip()):
            self.lines += line.split("\n")
            return
        self._check_command(line.strip())
        indent = line[: len(line) - len(line.lstrip())]
        self._hide(line, f"{indent}pass  ")

    def _hide(self, lines, statement=""):
        """Put a statement, and comments, in the place of lines."""
        for line in lines.split("\n"):
            self.lines.append(f"{statement}{self.hidden_mark}{len(self.hidden)}")
            self.hidden.append(line)
            statement = ""

    def _check_command(self, command):
        """Check a command for IPython or a shell, which comes next in the code."""
        command = re.sub(r"(^|\s)#.*", "", command.replace("\\\n", " "))
        for entry in TABLES["patterns"]["commands"]:
            if any(re.search(entry["find"], part) for part in re.split(r"[;&|]+\s", command)):
                place = len(self.lines) + 1, 1
                self.findings.append(
                    (*place, entry["rule"], f"`{command[:60]}`", entry.get("advice", ""), False)
                )

    def place(self, line: int) -> tuple[int, int]:
        """Return (cell, line in it) of a line of `code`."""
        cell, start = max((one for one in self.starts.items() if one[1] < line), key=lambda one: one[1])
        return cell, line - start

    def with_code(self, code: str) -> str:
        """Return the file's text with a changed `code`; as it was if nothing changed."""
        if code == self.code:
            return self.text
        code = re.sub(rf".*{self.hidden_mark}(\d+)", lambda mark: self.hidden[int(mark[1])], code)
        if self.notebook is None:
            return code
        for part in code.split(self.cell_mark)[1:]:
            number, _, source = part.removesuffix("\n").partition("\n")
            cell = self.cells[int(number)]
            if source != "".join(cell["source"]):
                cell["source"] = source.splitlines(True) if isinstance(cell["source"], list) else source
        text = json.dumps(self.notebook, indent=1, ensure_ascii=False, allow_nan=False)
        return text + "\n"  # as Jupyter does


def _syntax_error(source):
    try:
        parse(source)
    except SyntaxError as error:
        return error
