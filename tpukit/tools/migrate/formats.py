"""Findings as text, as a table, and for editors and workflows."""

import dataclasses
import json
import urllib.parse
from pathlib import Path

from tpukit import __version__
from tpukit.host.tables import Table, printable
from tpukit.tools.migrate.rules import RULES


def as_text(findings):
    """A line for each finding, and a summary."""
    lines = [f"{f.place}: {f.level} [{f.rule}] {f.message}{' (--fix)' if f.fixable else ''}" for f in findings]
    return printable("\n".join([*lines, _summary(findings)]))


def as_table(findings):
    """The findings as a table, for notebooks."""
    rows = []
    for f in findings:
        fix, place = "yes" if f.fixable else "", f.place.rpartition("/")[2]
        rows.append((place, f.level, f.rule, f.found.replace("`", ""), f.advice or RULES[f.rule].message, fix))
    return Table(_summary(findings), ("place", "level", "rule", "found", "what to do", "--fix"), rows)


def _summary(findings):
    if not findings:
        return "nothing found that will not work on a TPU"
    errors, fixable = sum(f.level == "error" for f in findings), sum(f.fixable for f in findings)
    slow = f"{len(findings) - errors} that will be slow or not what was meant"
    return f"{errors} that will not work on a TPU, {slow}; --fix fixes {fixable} of them"


def as_json(findings):
    rows = [dict(dataclasses.asdict(f), level=f.level, message=f.message) for f in findings]
    return json.dumps(rows, indent=1)


def as_github(findings):
    """Workflow commands that GitHub shows beside the lines of a pull request."""
    lines = []
    for f in findings:
        path = _escape(f.path).replace(",", "%2C")
        line, column, message = _location(f)
        lines.append(f"::{f.level} file={path},line={line},col={column},title=tpukit {f.rule}::{_escape(message)}")
    return "\n".join(lines)


def _escape(text):
    return printable(text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A"))


def _location(finding):
    """(line, column, message) for what does not know the cells of notebooks."""
    if finding.cell:
        return 1, 1, f"cell {finding.cell}, line {finding.line}: {finding.message}"
    return finding.line, finding.column, finding.message


def as_sarif(findings):
    """Static Analysis Results Interchange Format 2.1.0, for editors and code scanning."""
    rules = [
        dict(id=code, shortDescription=dict(text=rule.message), defaultConfiguration=dict(level=rule.level))
        for code, rule in RULES.items()
    ]
    results = []
    for f in findings:
        line, column, message = _location(f)
        uri = urllib.parse.quote(Path(f.path).as_posix())
        place = dict(artifactLocation=dict(uri=uri), region=dict(startLine=line, startColumn=column))
        location = dict(physicalLocation=place)
        results.append(dict(ruleId=f.rule, level=f.level, message=dict(text=message), locations=[location]))
    tool = dict(driver=dict(name="tpukit migrate", version=__version__, rules=rules))
    schema = "https://json.schemastore.org/sarif-2.1.0.json"
    return json.dumps({"$schema": schema, "version": "2.1.0", "runs": [dict(tool=tool, results=results)]}, indent=1)


FORMATS = dict(text=as_text, json=as_json, github=as_github, sarif=as_sarif)
