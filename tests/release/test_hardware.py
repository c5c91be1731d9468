"""Reports of hardware that strangers sent: which are taken, and what becomes of them on the pages."""

import json
import re
import shutil

import pytest

from release import hardware
from tests.conftest import ROOT, refuses
from tpukit.tools.doctor.hardware import CHECKS
from tpukit.tools.doctor.hardware.checks import FAIL, INFO, PASS, SKIP


def row(name, outcome, text="found", **numbers):
    return dict(name=name, outcome=outcome, text=text, numbers=numbers, seconds=1.5)


def report(**changes):
    given = dict(
        format=hardware.FORMAT,
        tpukit="1.0",
        date="2026-12-01",
        rehearsal=False,
        host="colab",
        accelerator="tpu",
        backend="torch_xla",
        chip="TPU v5e",
        chips=1,
        python="3.12.1",
        versions=dict(torch="2.9.0+cpu", torch_xla="2.9.0", libtpu="0.0.21.1"),
        variables={},
        checks=[row("step", PASS, fp32=1e-7), row("all_reduce", SKIP, "one chip"), row("speed", INFO, "9")],
    )
    return given | changes


@pytest.fixture
def root(tmp_path):
    """A copy of the pages, without reports."""
    for name, _ in hardware.PAGES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "docs/hardware").mkdir()
    (tmp_path / "tpukit/devices").mkdir(parents=True)
    return tmp_path


def put(root, name, content):
    path = root / "docs/hardware" / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_the_pages_and_seen_json_of_the_repository_are_what_its_reports_make_of_them(root):
    for path in (ROOT / "docs/hardware").glob("*.json"):
        shutil.copy(path, root / "docs/hardware")
    hardware.renew(root)
    for name in (*(name for name, _ in hardware.PAGES), "tpukit/devices/seen.json"):
        assert (root / name).read_text() == (ROOT / name).read_text(), "python -m release.hardware"
    for name in ("docs/STATUS.md", "docs/STATUS.zh-CN.md"):
        assert (ROOT / name).read_text().count("<!-- hardware") == 2
    assert hardware.renew(root) == []


def test_every_check_has_its_words_in_both_languages():
    assert hardware.ROWS.keys() == CHECKS.keys()
    for words in hardware.ROWS.values():
        assert re.search(r"[\u4e00-\u9fff]", words[0]) and words[0].endswith("。")
        assert re.search(r"[\u4e00-\u9fff]", words[2])


def test_without_reports_nobody_has_run_it(root):
    hardware.renew(root)
    assert "nobody has run tpukit" in (root / "docs/STATUS.md").read_text()
    assert "还没有人" in (root / "docs/STATUS.zh-CN.md").read_text()
    assert json.loads((root / "tpukit/devices/seen.json").read_text()) == []


def test_a_report_turns_not_seen_into_seen_with_versions_and_date(root):
    put(root, "b.json", report())
    gpu = report(accelerator="cuda", backend=None, chip="Tesla T4", chips=2, date="2026-12-03")
    gpu |= dict(
        versions=dict(torch="2.11.0+cu128"),
        checks=[row("step", FAIL, "fp32 9.9e-01"), row("of_tomorrow", PASS)],  # by a newer version
    )
    put(root, "a.json", gpu)
    assert len(hardware.renew(root)) >= 3 and hardware.renew(root) == []
    english, chinese = ((root / f"docs/STATUS{z}.md").read_text() for z in ("", ".zh-CN"))
    assert "nobody has run tpukit" not in english and "还没有人在 TPU 芯片" not in chinese
    assert "of_tomorrow" not in english and "on a TPU chip yet" in hardware.sentence([gpu], 0)
    assert re.search(
        r"1 x TPU v5e \(torch 2.9.0\+cpu, torch\\_xla 2.9.0, 2026-12-01, 1 of 1 checks passed\);", english
    )
    assert "2 x Tesla T4 (torch 2.11.0+cu128, 2026-12-03, 1 of 2 checks passed)" in english
    [step] = [line for line in english.splitlines() if "(`step`)" in line]
    assert step.index("TPU v5e") < step.index("Tesla T4")  # by date
    assert "2026-12-01: holds" in step and "**does not hold**: fp32 9\\.9e\\-01" in step
    [step] = [line for line in chinese.splitlines() if "(`step`)" in line]
    assert "2026-12-01: 成立" in step and "**不成立**" in step
    [reduced] = [line for line in english.splitlines() if "(`all_reduce`)" in line]
    assert "| not seen |" in reduced  # skipped there
    seen = json.loads((root / "tpukit/devices/seen.json").read_text())
    assert seen == [dict(chip="TPU v5e", torch="2.9", torch_xla="2.9", passed=["step"])]


@pytest.mark.parametrize("together, passed", [(PASS, ["step", "all_reduce"]), (FAIL, ["step"])])
def test_several_cores_are_spared_their_trial_where_a_training_on_all_of_them_was_right_too(together, passed):
    checks = [row("step", PASS), row("all_reduce", PASS), row("all_cores", together)]
    assert [entry["passed"] for entry in hardware.seen([report(checks=checks)])] == [passed]


HOSTILE = "<script>x</script> [a](http://b) **c** | `d` ![e](f) <!-- end of hardware table -->"


def test_the_text_of_a_stranger_is_text_on_the_page(root):
    put(root, "a.json", report(checks=[row("step", FAIL, HOSTILE)]))
    hardware.renew(root)
    page = (root / "docs/STATUS.md").read_text()
    [line] = [line for line in page.splitlines() if "(`step`)" in line]
    assert "<script" not in page and "](http" not in line and not re.search(r"(?<!\\)!\[e|(?<!\\)`d", line)
    assert len(re.findall(r"(?<!\\)\|", line)) == 4 and page.count("<!-- end of hardware table -->") == 1
    assert hardware.renew(root) == []


@pytest.mark.parametrize(
    "content, words",
    [
        (report(rehearsal=True), "rehearsal"),
        ({name: value for name, value in report().items() if name != "rehearsal"}, "rehearsal"),
        (report(accelerator="xla"), "accelerator"),
        (report(format="tpukit comparison 1"), "format"),
        (report(chip="TPU <b>v5e</b>"), "no name"),
        (report(chip="v5e\nx"), "no name"),
        (report(chip="x" * 200), "no name"),
        (report(date="2026-12-01 [x](y)"), "day"),
        (report(chips=True), "chips"),
        (report(chips=-1), "chips"),
        (report(host="my-laptop"), "host"),
        (report(versions=dict(torch="2.9", secret="1")), "other packages"),
        (report(versions=dict(torch=["2.9"])), "no version"),
        (report(python="www.example.org"), "no version"),
        (report(versions={}), "torch"),
        (report(checks=[]), "checks"),
        (report(checks=[row("step", "SEEN")]), "outcome"),
        (report(checks=[row("<b>", PASS)]), "name of a check"),
        (report(checks=[dict(outcome=PASS)]), "name of a check"),
        (report(checks=[row("step", PASS, fp32=10**400)]), "number"),
        (report(checks=[row("step", PASS, "x" * 501)]), "text"),
        (report(checks=[row("step", PASS, "\x1b[31mred")]), "text"),
        (report(checks=[row("step", PASS, "a\u202eb")]), "text"),
        (report(checks=[row("step", PASS, fp32="<b>")]), "number"),
        (report(checks=[row("step", PASS, fp32=True)]), "number"),
        (report(checks=["step"]), "outcome"),
        ([report()], "format"),
        ('{"format": NaN}', "NaN"),
        ("[" * 90_000, "hardware"),
        ("x" * 200_000, "200000 bytes"),
        ("not JSON", "hardware"),
    ],
)
def test_a_file_that_is_no_report_is_refused_by_name_and_no_page_changes(content, words, root):
    put(root, "0-good.json", report())
    put(root, "strange.json", content)
    before = {name: (root / name).read_text() for name, _ in hardware.PAGES}
    with refuses("strange.json", words):
        hardware.renew(root)
    assert before == {name: (root / name).read_text() for name, _ in hardware.PAGES}
