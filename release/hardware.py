"""`python -m release.hardware`: renew README and docs/MEASURED.md by the reports in docs/hardware/."""

import json
import re
from pathlib import Path
from typing import Any

from tpukit.host.errors import TpukitError
from tpukit.tools.doctor.hardware import CHECKS, FAIL, FORMAT, PASS

HOLDS = {PASS: "holds", FAIL: "**does not hold**"}
ENGLISH = (
    "**Status: checked on {}{}.**",
    "{} of {} checks passed",
    "; nobody has run tpukit on a TPU chip yet",
)
CHINESE = ("**状态：检查过的硬件：{}{}。**", "{1} 项检查通过 {0} 项", "；还没有人在 TPU 芯片上运行过 tpukit")


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


def clean(fact: str) -> str:
    """Return a text of a stranger's report without marks of Markdown."""
    return re.sub(r"[^A-Za-z0-9 .,+/:-]", "", fact)


def sentence(reports: list[dict[str, Any]], words: tuple[str, str, str]) -> str:
    """Return the status sentence. words: ENGLISH or CHINESE."""
    whole, counted, no_tpu = words
    seen = []
    for report in reports:
        versions = [name for name in ("torch", "torch_xla", "torch_tpu") if name in report["versions"]]
        named = [f"{name.replace('_', '-')} {report['versions'][name]}" for name in versions]
        outcomes = [outcome for outcome in report["outcomes"].values() if outcome in HOLDS]
        facts = [*map(clean, [*named, report["date"]]), counted.format(outcomes.count(PASS), len(outcomes))]
        seen.append(f"{report['chips']} x {clean(report['chip'])} ({', '.join(facts)})")
    has_tpu = any(report["accelerator"] == "tpu" for report in reports)
    return whole.format("; ".join(seen), "" if has_tpu else no_tpu)


def table(reports: list[dict[str, Any]]) -> str:
    """Return the table of the reports: a row for each check."""
    lines = ["| check | what it assumes | seen on |", "|---|---|---|"]
    for name, check in CHECKS.items():
        tried = [report for report in reports if report["outcomes"].get(name) in HOLDS]
        cells = [f"{clean(report['chip'])}: {HOLDS[report['outcomes'][name]]}" for report in tried]
        lines.append(f"| `{name}` | {check.__doc__} | {'<br>'.join(cells) or 'not seen'} |")
    return "\n".join(lines)


def renew(root: Path) -> None:
    """Bring the pages below `root` up to date with its reports."""
    reports = sorted(map(read, (root / "docs/hardware").glob("*.json")), key=lambda report: report["date"])
    for page in (*root.glob("README*.md"), root / "docs/MEASURED.md"):
        words = CHINESE if ".zh-CN" in page.name else ENGLISH
        text = page.read_text()
        for mark, made in (("hardware", sentence(reports, words)), ("hardware table", table(reports))):
            between = rf"(<!-- {mark} -->\n).*(<!-- end of {mark} -->)"
            text = re.sub(between, rf"\g<1>{made}\n\g<2>", text, flags=re.DOTALL)
        page.write_text(text)


if __name__ == "__main__":
    renew(Path(__file__).parent.parent)
