"""The code cells of a notebook as one module, so that a name from the first cell means the same in the last."""

import ast
import json
import re
import secrets
import shlex
import textwrap
import warnings

ENV = re.compile(r"\s*%(?:set_)?env\s+(\w+)")
OTHER_LANGUAGE = re.compile(r"\s*%%(?!time\b|timeit\b|capture\b|prun\b)")
SHELL = re.compile(r"\s*(!|%%(bash|sh|script)\b|%(pip|conda|sx|system)\b)")
HELP = re.compile(r"\?{0,2}[\w.*]+\?{0,2}\s*$")
ASSIGNED = re.compile(r"([\w.,\[\]'\" ]+=)\s*([!%].*)")
BARE = re.compile(r"(pip3?|conda|mamba|cd|ls)\s+\S")  # IPython takes these without %
# What replaces the image's torch, and how pip is called.
IMAGES_OWN = re.compile(
    r"(py)?torch(\[.*|[=<>~!;@ ].*)?|(torch[-_]xla|libtpu|cloud[-_]tpu[-_]client)\b.*|.*/(torch|torch_xla|libtpu)-[^/]*\.whl.*",
    re.IGNORECASE,
)
PIP = re.compile(r"(.*/)?(pip[\d.]*|conda|mamba)")


def installs(line):
    """Whether a shell's line installs torch, torch_xla or libtpu, in the place of those that fit one another."""
    try:
        words = shlex.shlex(line.strip().lstrip("!%"), posix=True, punctuation_chars=";&|")
        words.whitespace_split = True
        words = list(words)
    except ValueError:  # half a quotation
        words = line.strip().lstrip("!%").split()
    commands = [[]]
    for word in words:
        commands.append([]) if not word.strip(";&|") else commands[-1].append(word)
    for command in commands:
        if any(word.endswith("pytorch-xla-env-setup.py") for word in command) and "python" in command[0]:
            return True
        at = command.index("install") if "install" in command else 0
        if command[:1] != ["echo"] and any(map(PIP.fullmatch, command[:at])) and any(map(IMAGES_OWN.fullmatch, command[at:])):
            return True
    return False


class Notebook:
    """code: of all cells. cells: (number among all cells, source) of those with code. shell, variables: (line in `code`,
    text) of what a shell runs and of variables that magics set. unreadable: (cell, line in it, column, message) of cells that
    are no Python.

    What only IPython understands is put away in comments, and comes back in `rebuilt`. Raises ValueError where it is no
    notebook.
    """

    def __init__(self, text):
        try:
            self.notebook = json.loads(text)
            self.parts = [(n, c) for n, c in enumerate(self.notebook["cells"], 1) if c["cell_type"] == "code"]
            self.cells = [(n, "".join(cell["source"])) for n, cell in self.parts]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        token = secrets.token_hex(4)  # so that no line of the notebook is one of ours
        self.mark, self.away = f"# cell {token} ", f"# away {token} "
        self.text, self.lines, self.starts, self.indents = text, [], [], {}
        self.shell, self.variables, self.unreadable = [], [], []
        for number, source in self.cells:
            self._add(number, source)
        self.code = "".join(f"{line}\n" for line in self.lines)

    def _add(self, number, source):
        self.lines.append(f"{self.mark}{number}")
        start = len(self.lines)
        self.starts.append((start, number))
        plain = textwrap.dedent(source)
        first = next((line for line in source.split("\n") if line.strip()), "")
        self.indents[number] = first[: len(first) - len(first.lstrip())] if plain != source else ""
        if OTHER_LANGUAGE.match(source):
            if SHELL.match(source):
                self._note(source.split("\n"), start + 1)
            lines = [self.away + line for line in source.split("\n")]
            self.indents[number] = ""
        elif _trouble(plain) is None:
            lines = plain.split("\n")
        else:
            lines = self._without_magics(plain.split("\n"), start + 1)
            trouble = _trouble("\n".join(lines))
            if trouble is not None:
                self.unreadable.append((number, trouble.lineno or 1, trouble.offset or 1, trouble.msg))
                lines = [self.away + line for line in plain.split("\n")]
        self.lines += lines

    def _without_magics(self, lines, start):
        made, goes_on = [], False
        for line in lines:
            bare = line.lstrip()
            indent = line[: len(line) - len(bare)]
            at = len(made)
            if goes_on:
                made.append(f"{self.away}{line}")
                goes_on = line.endswith("\\")
                continue
            assigned = ASSIGNED.match(bare)
            if bare[:1] in ("!", "%") or "?" in bare and HELP.match(bare) or BARE.match(bare) and _trouble(bare) is not None:
                made.append(f"{indent}pass  {self.away}{bare}")
            elif assigned:
                made.append(f"{indent}{assigned[1]} None  {self.away}{bare}")
            else:
                made.append(line)
                continue
            goes_on = line.endswith("\\")
            if SHELL.match(command := assigned[2] if assigned else bare) or BARE.match(command):
                self._note([command, *lines[at + 1 :]], start + at, only_first=True)
            if variable := ENV.match(line):
                self.variables.append((start + at, variable[1]))
        return made

    def _note(self, lines, start, only_first=False):
        """Put a shell's lines into `shell`, each with those that a backslash joins to it."""
        whole, first = "", start
        for at, line in enumerate(lines, start):
            first = first if whole else at
            whole += line.removesuffix("\\").strip() + " "
            if not line.endswith("\\") or at == start + len(lines) - 1:
                self.shell.append((first, whole.strip()))
                whole = ""
                if only_first:
                    return

    def place(self, line):
        """(cell, line in it) of a line of `code`."""
        start, cell = max(at for at in self.starts if at[0] < line)
        return cell, line - start

    def rebuilt(self, code):
        """The notebook's text with the cells of a changed `code`; as it was where nothing changed."""
        sources = {}
        for line in code.split("\n")[:-1]:
            if line.startswith(self.mark):
                cell = int(line[len(self.mark) :])
                lines = sources[cell] = []
                continue
            if line.startswith(self.away):
                line = line[len(self.away) :]
            elif self.away in line:
                before, away = line.split(self.away, 1)
                line = before[: len(before) - len(before.lstrip())] + away
            lines.append(self.indents[cell] + line if line.strip() else line)
        changed = False
        for (number, cell), (_, source) in zip(self.parts, self.cells):
            fixed = "\n".join(sources[number])
            if fixed != source and textwrap.dedent(fixed) != textwrap.dedent(source):
                cell["source"] = fixed.splitlines(True) if isinstance(cell["source"], list) else fixed
                changed = True
        if not changed:
            return self.text
        indent = re.search(r'\n([ \t]+)"', self.text)
        end = "\n" if self.text.endswith("\n") else ""
        return json.dumps(self.notebook, indent=indent[1] if indent else None, ensure_ascii=False) + end


def _trouble(source):
    """The SyntaxError of a cell, or None. Cells may await at the top."""
    try:
        with warnings.catch_warnings():  # of a cell's odd escapes
            warnings.simplefilter("ignore")
            compile(source, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)
    except (SyntaxError, ValueError) as error:
        return error if isinstance(error, SyntaxError) else SyntaxError(str(error))
    return None
