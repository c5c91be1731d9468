"""Reports of hardware that strangers sent: which are taken, and what becomes of them on the pages."""

import json
import re
import shutil

import pytest

from release import hardware
from tests.conftest import ROOT, refuses
from tpukit.tools.doctor.hardware import FAIL, PASS, SKIP

PAGES = ("README.md", "README.zh-CN.md", "docs/MEASURED.md")


def report(outcomes, **changes):
    given = dict(
        format=hardware.FORMAT,
        date="2026-12-01",
        rehearsal=False,
        accelerator="tpu",
        backend="torch_xla",
        chip="TPU v5e",
        chips=1,
        versions=dict(torch="2.9.0+cpu", torch_xla="2.9.0", libtpu="0.0.21.1"),
        checks=[dict(name=name, outcome=outcome) for name, outcome in outcomes.items()],
    )
    return given | changes


@pytest.fixture
def renewed(tmp_path):
    """A function: the pages of these reports, by name."""

    def renew(*reports):
        for name in PAGES:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
        for number, one in enumerate(reports):
            (tmp_path / "docs/hardware").mkdir(exist_ok=True)
            (tmp_path / f"docs/hardware/{number}.json").write_text(json.dumps(one))
        hardware.renew(tmp_path)
        return {name: (tmp_path / name).read_text() for name in PAGES}

    return renew


def test_the_pages_of_the_repository_are_what_its_reports_make_of_them(renewed):
    reports = [json.loads(path.read_text()) for path in (ROOT / "docs/hardware").glob("*.json")]
    for name, text in renewed(*reports).items():
        assert text == (ROOT / name).read_text(), "python -m release.hardware"
        assert text.count("<!-- hardware -->") == 1


def test_a_report_turns_not_seen_into_seen_with_versions_and_date(renewed):
    tpu = report({"step": PASS, "all_reduce": SKIP, "of_tomorrow": PASS})
    gpu = report(
        {"step": FAIL}, accelerator="cuda", backend=None, chip="Tesla T4", chips=2, date="2026-11-03"
    )
    texts = renewed(tpu, gpu)
    assert (
        "1 x TPU v5e (torch 2.9.0+cpu, torch-xla 2.9.0, 2026-12-01, 2 of 2 checks passed)"
        in texts["README.md"]
    )
    assert "nobody has run" not in texts["README.md"] and "还没有人" not in texts["README.zh-CN.md"]
    rows = {row.split("`")[1]: row for row in texts[PAGES[-1]].splitlines() if row.startswith("| `")}
    assert re.search(r"Tesla T4: \*\*does not hold\*\*<br>TPU v5e: holds", rows["step"])  # by date
    assert "| not seen |" in rows["all_reduce"] and "of_tomorrow" not in rows
    assert "on a TPU chip yet" in renewed(gpu, gpu)["README.md"]


def test_what_a_stranger_calls_a_chip_is_text_on_the_page(renewed):
    hostile = "<script>x</script> [a](http://b) **c** | `d` <!-- end of hardware -->"
    page = renewed(report({"step": PASS}, chip=hostile))["docs/MEASURED.md"]
    assert "scriptx/script" in page and not re.search(r"<script|\]\(http://b|\*\*c|`d`", page)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(rehearsal=True), "rehearsal"),
        (dict(format="tpukit comparison 1"), "format"),
        (dict(versions=["torch"]), "versions"),
        (dict(checks=["step"]), "checks"),
    ],
)
def test_a_file_that_is_no_report_is_refused_by_what_is_wrong_in_it(changes, words, renewed):
    with refuses("0.json", words):
        renewed(report({"step": PASS}, **changes))
