"""What a finding is; the rules, which rules.toml lists; and findings as text, as a table and as JSON."""

import dataclasses
import json
import tomllib
from pathlib import Path

from tpukit.host import environment
from tpukit.host.tables import Table, printable

TABLES = tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8"))
RULES = TABLES["rules"]  # name -> (level, message)
OLD_VARIABLES = {
    name: f"{why}. Instead: {instead}" for name, (why, instead) in environment.OLD_VARIABLES.items()
}


@dataclasses.dataclass(frozen=True, order=True)
class Finding:
    """One place that breaks a rule. line, column: from 1, in the file or in the notebook's cell. cell: its
    number among all cells, from 1; 0 in a script. advice: instead of the rule's message. fixable: the fixed
    text of the file has it fixed."""

    path: str
    cell: int
    line: int
    column: int
    rule: str
    found: str
    fixable: bool = False
    advice: str = ""

    @property
    def level(self) -> str:
        return RULES[self.rule][0]

    @property
    def what_to_do(self) -> str:
        return self.advice or RULES[self.rule][1]

    @property
    def place(self) -> str:
        cell = f" cell {self.cell}" if self.cell else ""
        return f"{self.path}{cell}:{self.line}:{self.column}"

    def __str__(self):
        fix = " (--fix)" if self.fixable else ""
        return f"{self.place}: {self.level} [{self.rule}] {self.found}: {self.what_to_do}{fix}"


def as_text(findings: list[Finding]) -> str:
    """A line for each finding, and a summary."""
    return printable("\n".join([*map(str, findings), _summary(findings)]))


def as_table(findings: list[Finding]) -> Table:
    """The findings as a table, for notebooks."""
    rows = []
    for f in findings:
        place, fix = f.place.rpartition("/")[2], "yes" if f.fixable else ""
        rows.append((place, f.level, f.rule, f.found.replace("`", ""), f.what_to_do, fix))
    return Table(_summary(findings), ("place", "level", "rule", "found", "what to do", "--fix"), rows)


def as_json(findings: list[Finding]) -> str:
    return json.dumps([vars(f) | {"level": f.level, "advice": f.what_to_do} for f in findings], indent=1)


def _summary(findings):
    if not findings:
        return "nothing found that will not work on a TPU"
    errors, fixable = sum(f.level == "error" for f in findings), sum(f.fixable for f in findings)
    slow = f"{len(findings) - errors} that will be slow or not what was meant"
    return f"{errors} that will not work on a TPU, {slow}; --fix fixes {fixable} of them"


FORMATS = dict(text=as_text, json=as_json)
