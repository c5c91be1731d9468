"""`python -m release.hardware`: what was seen on which hardware, from the reports in docs/hardware/.

It renews the status sentence of README and docs/STATUS and the table in docs/hardware/README.md, each between
its markers; and tpukit/devices/seen.json, which spares a training what a report has tried."""

import json
import re
from pathlib import Path
from typing import Any, Literal

from tpukit.host.environment import release
from tpukit.host.errors import TpukitError
from tpukit.host.json_types import has_type
from tpukit.tools.doctor.hardware import CHECKS, FAIL, FORMAT, PASS

ROOT = Path(__file__).parent.parent
KINDS = dict(format=Literal[FORMAT], rehearsal=Literal[False], versions=dict[str, str], checks=list[dict])
# What a training tries by itself where it is not in seen.json (`devices/trial.py`): the checks that show it
TRIED = {"step": {"step"}, "all_reduce": {"all_cores"}, "attention": {"attention_kernels"}}
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
    if wrong := [name for name, kind in KINDS.items() if not has_type(report, {name: kind})]:
        raise TpukitError(
            f"{path.name} is no report of `tpukit doctor --hardware`: see its {', '.join(wrong)}"
        )
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
        outcomes = [outcome for outcome in report["outcomes"].values() if outcome in (PASS, FAIL)]
        places.append(place(report, counted.format(outcomes.count(PASS), len(outcomes))))
    has_tpu = any(report["accelerator"] == "tpu" for report in reports)
    return whole.format("; ".join(places), "" if has_tpu else no_tpu)


def table(reports: list[dict[str, Any]]) -> str:
    """Return the table of the reports: a row for each check."""
    holds = {PASS: "holds", FAIL: "**does not hold**"}
    lines = ["| check | what it assumes | seen on |", "|---|---|---|"]
    for name, check in CHECKS.items():
        tried = [report for report in reports if report["outcomes"].get(name) in holds]
        cells = [f"{place(report)}: {holds[report['outcomes'][name]]}" for report in tried]
        lines.append(f"| `{name}` | {check.__doc__} | {'<br>'.join(cells) or 'not seen'} |")
    return "\n".join(lines)


def seen(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what passed where, for seen.json."""
    entries = []
    for report in reports:
        held = {name for name, outcome in report["outcomes"].items() if outcome == PASS}
        passed = [name for name, checks in TRIED.items() if checks <= held]
        versions = dict(torch=_minor(report, "torch"), torch_xla=None)
        if report.get("backend") == "torch_xla":
            versions["torch_xla"] = _minor(report, "torch_xla")
        if passed:
            entries.append(dict(chip=report["chip"], **versions, passed=passed))
    return entries


def _minor(report, package):
    return ".".join(map(str, release(report["versions"][package])))


def renew(root: Path = ROOT) -> None:
    """Bring the pages and seen.json below `root` up to date with its reports."""
    reports = [read(path) for path in (root / "docs/hardware").glob("*.json")]
    reports.sort(key=lambda report: report["date"])
    texts = {root / "docs/hardware/README.md": table(reports)}
    for page in (*root.glob("README*.md"), *root.glob("docs/STATUS*.md")):
        texts[page] = sentence(reports, CHINESE if ".zh-CN" in page.name else ENGLISH)
    for page, text in texts.items():
        between = r"(<!-- hardware -->\n).*(\n<!-- end of hardware -->)"
        texts[page] = re.sub(between, rf"\g<1>{text}\g<2>", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    texts[root / "tpukit/devices/seen.json"] = json.dumps(seen(reports)) + "\n"
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    renew()
