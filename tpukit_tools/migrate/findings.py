"""A finding, the rules of rules.toml, and findings as text."""

import dataclasses
import os
import tomllib
from pathlib import Path

from tpukit.host.tables import Table
from tpukit.host.text import printable

TABLES = tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8"))
RULES = TABLES["rules"]  # name -> (level, message)


@dataclasses.dataclass(frozen=True, order=True)
class Finding:
    """One place that breaks a rule."""

    path: str
    """Path of the file."""
    cell: int
    """Its number among all cells of a notebook, from 1; 0 in a script."""
    line: int
    """From 1, in the script or the cell."""
    column: int
    """From 1."""
    rule: str
    found: str
    """The code that breaks the rule."""
    advice: str = ""
    """What to do, in place of the rule's message."""
    fixable: bool = False
    """True if the fixed text of the file has it fixed."""

    @property
    def level(self) -> str:
        return RULES[self.rule][0]

    @property
    def place(self) -> str:
        cell = f" cell {self.cell}" if self.cell else ""
        return f"{self.path}{cell}:{self.line}:{self.column}"

    @property
    def what_to_do(self) -> str:
        return self.advice or RULES[self.rule][1]

    def __str__(self):
        fix = " (--fix)" if self.fixable else ""
        return f"{self.place}: {self.level} [{self.rule}] {self.found}: {self.what_to_do}{fix}"


def as_text(findings: list[Finding]) -> str:
    """Return a line for each finding, and a summary."""
    return printable("\n".join([*map(str, findings), _summary(findings)]))


def as_table(findings: list[Finding]) -> Table:
    """Return the same as a table, for a notebook. One file is named in the title; of several each in the row
    of its first finding, by its path in the folder that holds all of them."""
    paths = sorted({finding.path for finding in findings})
    rows, file = [], ""
    for finding in findings:
        line = finding.place.removeprefix(finding.path).lstrip(": ")
        code, fix = finding.found.replace("`", ""), "--fix" if finding.fixable else ""
        row = (line, finding.level, code, finding.what_to_do, fix)
        if len(paths) > 1:
            shown = os.path.relpath(
                finding.path, os.path.commonpath(list(map(os.path.dirname, paths))) or "."
            )
            row = ("" if finding.path == file else shown, *row)
        rows.append(row)
        file = finding.path
    columns = ("file", "line", "level", "code", "what to do", "fix")
    title = f"{Path(paths[0]).name}: {_summary(findings)}" if len(paths) == 1 else _summary(findings)
    return Table(title, columns if len(paths) > 1 else columns[1:], rows)


def _summary(findings):
    if not findings:
        return "nothing found that will not work on a TPU"
    errors, fixable = sum(f.level == "error" for f in findings), sum(f.fixable for f in findings)
    return f"errors: {errors}, warnings: {len(findings) - errors}; --fix can repair {fixable}"
