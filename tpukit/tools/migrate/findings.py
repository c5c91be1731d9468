"""A finding, the rules of rules.toml, and findings as text."""

import dataclasses
import tomllib
from pathlib import Path

from tpukit.host.tables import printable

TABLES = tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8"))
RULES = TABLES["rules"]  # name -> (level, message)


@dataclasses.dataclass(frozen=True, order=True)
class Finding:
    """One place that breaks a rule.

    path: of the file. cell: its number among all cells of a notebook, from 1; 0 in a script. line, column:
    from 1, in the script or the cell. found: the code. advice: in place of the rule's message. fixable: the
    fixed text of the file has it fixed."""

    path: str
    cell: int
    line: int
    column: int
    rule: str
    found: str
    advice: str = ""
    fixable: bool = False

    @property
    def level(self) -> str:
        return RULES[self.rule][0]

    @property
    def place(self) -> str:
        cell = f" cell {self.cell}" if self.cell else ""
        return f"{self.path}{cell}:{self.line}:{self.column}"

    def __str__(self):
        what_to_do = self.advice or RULES[self.rule][1]
        fix = " (--fix)" if self.fixable else ""
        return f"{self.place}: {self.level} [{self.rule}] {self.found}: {what_to_do}{fix}"


def as_text(findings: list[Finding]) -> str:
    """Return a line for each finding, and a summary."""
    return printable("\n".join([*map(str, findings), _summary(findings)]))


def _summary(findings):
    if not findings:
        return "nothing found that will not work on a TPU"
    errors, fixable = sum(f.level == "error" for f in findings), sum(f.fixable for f in findings)
    slow = f"{len(findings) - errors} that will be slow or not what was meant"
    return f"{errors} that will not work on a TPU, {slow}; --fix fixes {fixable} of them"
