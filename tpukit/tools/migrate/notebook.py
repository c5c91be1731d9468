"""The code cells of a notebook as one module, so that a name from the first cell means the same in the
last."""

import json
import math
import re
import secrets

from tpukit.tools.migrate.source import parse

OTHER_LANGUAGE = re.compile(r"\s*%%(?!time\b|timeit\b|capture\b|prun\b)")
SHELL_CELL = re.compile(r"\s*%%(bash|sh|script)\b")
MAGIC = re.compile(r"[!%]|[\w.*]*\?{1,2}\s*$|\?{1,2}[\w.*]+\s*$")
AUTOMAGIC = re.compile(r"(pip3?|conda|mamba|cd|ls)\s+\S")  # IPython takes these without %
ASSIGNED_MAGIC = re.compile(r"([\w.,\[\]'\" ]+=)\s*([!%].*)", re.DOTALL)


class Notebook:
    """code: of all cells, as Python; what only IPython understands is a comment there, and comes back in
    `with_code`.

    magics: (line in `code`, text) of commands for IPython or a shell. unreadable: (cell, line, column) in
    cells that are not Python. Raises ValueError where the text is not a notebook."""

    def __init__(self, text):
        try:
            self.notebook = json.loads(text, parse_float=_finite)
            self.cells = {n: c for n, c in enumerate(self.notebook["cells"], 1) if c["cell_type"] == "code"}
            sources = {n: "".join(cell["source"]) for n, cell in self.cells.items()}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        token = secrets.token_hex(4)  # so that no line of the notebook looks like one of these
        self.cell_mark, self.hidden_mark = f"# cell {token} ", f"# hidden {token} "
        self.text, self.lines, self.hidden = text, [], []
        self.magics, self.unreadable, self.starts = [], [], []
        for number, source in sources.items():
            self._add(number, source)
        self.code = "".join(f"{line}\n" for line in self.lines)

    def _add(self, number, source):
        self.lines.append(f"{self.cell_mark}{number}")
        start = len(self.lines)
        self.starts.append((start, number))
        if OTHER_LANGUAGE.match(source):
            for line in _logical_lines(source):
                if SHELL_CELL.match(source):
                    self.magics.append((len(self.lines) + 1, line.replace("\\\n", " ")))
                self._hide(line)
            return
        if _syntax_error(source) is None:
            self.lines += source.split("\n")
            return
        for line in _logical_lines(source):
            self._add_line(line)
        error = _syntax_error("\n".join(self.lines[start:]))
        if error is not None:
            self.unreadable.append((number, error.lineno or 1, error.offset or 1))
            del self.lines[start:]
            self._hide(source)

    def _add_line(self, line):
        """A line of Python, or of IPython, with those that a backslash joins to it."""
        bare = line.strip()
        indent = line[: len(line) - len(line.lstrip())]
        assigned = ASSIGNED_MAGIC.match(bare)
        if not assigned and not MAGIC.match(bare) and not (AUTOMAGIC.match(bare) and _syntax_error(bare)):
            self.lines += line.split("\n")
            return
        command = assigned[2] if assigned else bare
        self.magics.append((len(self.lines) + 1, command.replace("\\\n", " ")))
        self._hide(line, before=f"{indent}{assigned[1]} None  " if assigned else f"{indent}pass  ")

    def _hide(self, lines, before=""):
        """Put comments in the place of lines."""
        for line in lines.split("\n"):
            self.lines.append(f"{before}{self.hidden_mark}{len(self.hidden)}")
            self.hidden.append(line)
            before = ""

    def place(self, line):
        """(cell, line in it) of a line of `code`."""
        start, cell = max(at for at in self.starts if at[0] < line)
        return cell, line - start

    def with_code(self, code):
        """The notebook's text with the cells of a changed `code`; as it was where nothing changed."""
        if code == self.code:
            return self.text
        for part in code.split(self.cell_mark)[1:]:
            number, *lines = part.removesuffix("\n").split("\n")
            for at, line in enumerate(lines):
                if self.hidden_mark in line:
                    lines[at] = self.hidden[int(line.split(self.hidden_mark)[1])]
            cell, source = self.cells[int(number)], "\n".join(lines)
            if source != "".join(cell["source"]):
                cell["source"] = source.splitlines(True) if isinstance(cell["source"], list) else source
        indented = re.search(r'\n([ \t]+)"', self.text)
        indent = indented[1] if indented else None
        end = "\n" if self.text.endswith("\n") else ""
        fixed = json.dumps(self.notebook, ensure_ascii=False, indent=indent)
        if re.search(r"[\ud800-\udfff]", fixed):  # half a character, which can only be written escaped
            fixed = json.dumps(self.notebook, indent=indent)
        return fixed + end


def _finite(text):
    """The number that JSON text stands for. Raises ValueError for one that could not be written again."""
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {text} is too large")
    return number


def _logical_lines(source):
    """The lines of a cell, each with those that a backslash at its end joins to it."""
    return re.split(r"(?<!\\)\n", source)


def _syntax_error(source):
    try:
        parse(source)
    except SyntaxError as error:
        return error
