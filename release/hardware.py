"""`python -m release.hardware`: renew what README, STATUS and docs/hardware/README.md say of the reports in
docs/hardware/."""

import json
import re
from pathlib import Path
from typing import Any

from tpukit.host.errors import TpukitError
from tpukit.tools.doctor.hardware import CHECKS, FAIL, FORMAT, PASS

HOLDS = {PASS: "holds", FAIL: "**does not hold**"}
ENGLISH = (
    "**Status: each figure on this page names its hardware; checked on {}{}.**",
    "{} of {} checks passed",
    "; nobody has run tpukit on a TPU chip yet",
)
CHINESE = (
    "**状态：本页每个数字都注明所用的硬件；检查过的硬件：{}{}。**",
    "{1} 项检查通过 {0} 项",
    "；还没有人在 TPU 芯片上运行过 tpukit",
)


def read(path: Path) -> dict[str, Any]:
    """Return a report. Raises TpukitError, naming the file and what is wrong in it."""
    report = json.loads(path.read_text(encoding="utf-8"))
    versions, checks = report.get("versions"), report.get("checks")
    is_right = dict(
        format=report.get("format") == FORMAT,
        rehearsal=report.get("rehearsal") is False,
        versions=isinstance(versions, dict) and all(isinstance(one, str) for one in versions.values()),
        checks=isinstance(checks, list) and all(isinstance(row, dict) for row in checks),
    )
    if wrong := [name for name, is_right in is_right.items() if not is_right]:
        raise TpukitError(f"{path.name} is no report of `tpukit doctor --hardware`: see its {wrong}")
    return report | dict(outcomes={row.get("name"): row.get("outcome") for row in report["checks"]})


def place(report: dict[str, Any], *more: str) -> str:
    """Return the hardware, versions and day of a stranger's report, without marks of Markdown."""
    versions = [name for name in ("torch", "torch_xla", "torch_tpu") if name in report["versions"]]
    named = [f"{name.replace('_', '-')} {report['versions'][name]}" for name in versions]
    facts = [re.sub(r"[^A-Za-z0-9 .,+/:-]", "", fact) for fact in (report["chip"], *named, report["date"])]
    return f"{report['chips']} x {facts[0]} ({', '.join([*facts[1:], *more])})"


def sentence(reports: list[dict[str, Any]], words: tuple[str, str, str]) -> str:
    """Return the status sentence. words: ENGLISH or CHINESE."""
    whole, counted, no_tpu = words
    places = []
    for report in reports:
        outcomes = [outcome for outcome in report["outcomes"].values() if outcome in HOLDS]
        places.append(place(report, counted.format(outcomes.count(PASS), len(outcomes))))
    has_tpu = any(report["accelerator"] == "tpu" for report in reports)
    return whole.format("; ".join(places), "" if has_tpu else no_tpu)


def table(reports: list[dict[str, Any]]) -> str:
    """Return the table of the reports: a row for each check."""
    lines = ["| check | what it assumes | seen on |", "|---|---|---|"]
    for name, check in CHECKS.items():
        tried = [report for report in reports if report["outcomes"].get(name) in HOLDS]
        cells = [f"{place(report)}: {HOLDS[report['outcomes'][name]]}" for report in tried]
        lines.append(f"| `{name}` | {check.__doc__} | {'<br>'.join(cells) or 'not seen'} |")
    return "\n".join(lines)


def renew(root: Path) -> None:
    """Bring the pages below `root` up to date with its reports."""
    reports = sorted(map(read, (root / "docs/hardware").glob("*.json")), key=lambda report: report["date"])
    pages = [*root.glob("README*.md"), *root.glob("docs/STATUS*.md"), root / "docs/hardware/README.md"]
    for page in pages:
        words = CHINESE if ".zh-CN" in page.name else ENGLISH
        text = table(reports) if page.parent.name == "hardware" else sentence(reports, words)
        between = r"(<!-- hardware -->\n).*(\n<!-- end of hardware -->)"
        page.write_text(re.sub(between, rf"\g<1>{text}\g<2>", page.read_text(), flags=re.DOTALL))


if __name__ == "__main__":
    renew(Path(__file__).parent.parent)
