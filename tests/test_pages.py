"""The texts of the pages: both languages agree, links lead somewhere, Chinese by the glossary, and what is
generated is up to date."""

import importlib
import json
import re
import shlex
import unicodedata
from types import SimpleNamespace

import pytest
from markdown_it import MarkdownIt

import tpukit
from benchmarks.hlo import V5E_BANDWIDTH
from release import site, troubleshooting
from tests.conftest import ROOT
from tpukit.devices.chips import CHIPS, V5E
from tpukit.host.known_errors import KNOWN_ERRORS
from tpukit.host.text import GIB
from tpukit_tools.doctor.hardware import CHECKS

GLOSSARY = ROOT / "docs/GLOSSARY.md"  # one page for both languages, for those who write pages
ENGLISH = sorted(
    [
        ROOT / "README.md",
        *(p for p in (ROOT / "docs").glob("*.md") if ".zh-CN" not in p.name and p != GLOSSARY),
    ]
)
# Pages that only developers read are in English alone.
FOR_DEVELOPERS = ("CONTRIBUTING.md", "MEASURED.md")
PAIRS = [
    (path, path.with_name(path.name.replace(".md", ".zh-CN.md")))
    for path in ENGLISH
    if path.name not in FOR_DEVELOPERS
]
CHINESE = [chinese for _, chinese in PAIRS]
PAGES = [*ENGLISH, *CHINESE]
# characters between which a line break would render as a blank
HAN = r"[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]"


COMMAND = r"(    )?(\w+=\S+ |timeout \S+ )*tpukit \w"
COLUMNS = 95  # of a code block that does not scroll on a page 830 pixels wide


def name(path):
    return str(path.relative_to(ROOT))


def commands(path):
    """The tpukit commands of a page's code blocks, without their comments, with what stands before them."""
    whole = path.read_text().replace("\\\n", " ")  # a backslash joins the next line
    lines = [line for line in whole.splitlines() if re.match(COMMAND, line)]
    return [shlex.join(shlex.split(line, comments=True)) for line in lines]


def headings(path):
    return [line for line in path.read_text().splitlines() if re.match(r"#+ ", line)]


def anchor(heading):
    return re.sub(r"[^\w\- ]", "", heading.lstrip("# ").lower()).replace(" ", "-")


@pytest.mark.parametrize("english, chinese", PAIRS, ids=[name(english) for english, _ in PAIRS])
def test_both_languages_are_there_lead_to_each_other_and_have_the_same_headings_and_commands(
    english, chinese
):
    for page, other in ((english, chinese), (chinese, english)):
        assert f"({other.name})" in "\n".join(page.read_text().splitlines()[:8])
    assert [h.split()[0] for h in headings(english)] == [h.split()[0] for h in headings(chinese)]
    assert commands(english) == commands(chinese)
    assert len(re.findall(r"[\u4e00-\u9fff]", chinese.read_text())) > 300


def figures(path):
    """The numbers of a page outside its code, as floats; those below 100 without a fraction may be words in
    one language."""
    code = r"```.*?```|^    .*?$|`[^`\n]*`|\]\([^)]*\)|^\[[\w-]+\]: .*?$"
    text = re.sub(code, " ", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = set()
    for number, unit in re.findall(r"(\d[\d,]*(?:\.\d+)*(?:e-?\d+)?)(?: ?(million|M\b|万|亿))?", text):
        if number.count(".") > 1:  # a version
            found.add(number)
            continue
        value = float(number.replace(",", "")) * {"million": 1e6, "M": 1e6, "万": 1e4, "亿": 1e8}.get(unit, 1)
        if value >= 100 or value % 1:
            found.add(float(f"{value:.9g}"))
    return found


PAIR_OF_OLD_WORDS = re.compile(r"(?P<word>.+?)(?: = (?P<chinese>.+))?")


def old_words():
    """[(word, as the Chinese pages put it)] of old_words.txt."""
    lines = (ROOT / "tests/old_words.txt").read_text().splitlines()
    found = [PAIR_OF_OLD_WORDS.fullmatch(line) for line in lines if not line.startswith("#")]
    return [(one["word"], one["chinese"] or one["word"]) for one in found if one]


OLD_WORDS = old_words()


@pytest.mark.parametrize("word, chinese", OLD_WORDS, ids=[word for word, _ in OLD_WORDS])
def test_a_word_of_the_old_guides_finds_its_line_in_both_languages(word, chinese):
    for pages, wanted in (ENGLISH, word), (CHINESE, chinese):
        for_users = [page for page in pages if page.name not in FOR_DEVELOPERS]
        assert any(wanted in line for page in for_users for line in page.read_text().splitlines()), wanted


def test_the_words_of_the_old_guides_are_all_there():
    assert len(OLD_WORDS) == len(dict(OLD_WORDS)) == 145


@pytest.mark.parametrize("readme", ["README.md", "README.zh-CN.md"])
def test_the_headless_line_of_the_readme_has_the_flags_of_the_makefile(readme):
    [flags] = re.findall(
        r'^XLA_CPU := (PJRT_DEVICE=CPU) (XLA_FLAGS=".*")$', (ROOT / "Makefile").read_text(), re.M
    )
    lines = [line.strip() for line in (ROOT / readme).read_text().splitlines()]
    [at] = [number for number, line in enumerate(lines) if " papermill " in line and "-p " in line]
    assert lines[at - 1] == f"export {flags[1]}" and lines[at].startswith(f"{flags[0]} papermill ")


@pytest.mark.parametrize("english, chinese", PAIRS, ids=[name(english) for english, _ in PAIRS])
def test_both_languages_state_the_same_figures(english, chinese):
    ours, theirs = figures(english), figures(chinese)
    assert ours == theirs, f"in English alone: {ours - theirs}; in Chinese alone: {theirs - ours}"


@pytest.mark.parametrize("path", CHINESE, ids=name)
def test_no_line_breaks_between_chinese_characters(path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    broken = re.findall(rf"^(?![#|]|    ).*{HAN}\n *{HAN}.*$", text, flags=re.MULTILINE)
    assert not broken


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_no_code_block_scrolls_on_github(path):
    tokens = MarkdownIt("commonmark").enable("table").parse(path.read_text())
    blocks = [token.content for token in tokens if token.type in ("fence", "code_block")]
    for line in "\n".join(blocks).splitlines():
        wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in line)
        assert len(line) + wide <= COLUMNS, line


def test_every_bold_word_is_bold_and_shows_no_asterisks():
    notebooks = [json.loads(path.read_text()) for path in (ROOT / "notebooks").rglob("*.ipynb")]
    cells = [cell for notebook in notebooks for cell in notebook["cells"]]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    for text in [*texts, *(path.read_text() for path in PAGES)]:
        blocks = [token.children or [] for token in MarkdownIt("commonmark").enable("table").parse(text)]
        shown = [part.content for parts in blocks for part in parts if part.type == "text"]
        # **Chinese that ends in a mark。**and goes on without a blank is not bold in Markdown
        assert not [words for words in shown if "**" in words]


def banned_words():
    """(words that Chinese pages may not use, the term to use) of every row of the glossary."""
    rows = [line.strip("|").split("|") for line in GLOSSARY.read_text().splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in row] for row in rows[2:]]
    return {word: row[1] for row in rows for word in row[3].split("、") if word}


@pytest.mark.parametrize("path", [*CHINESE, *sorted((ROOT / "notebooks/zh-CN").glob("*.ipynb"))], ids=name)
def test_a_chinese_page_uses_the_words_of_the_glossary(path):
    banned = banned_words()
    assert len(banned) > 10
    text = path.read_text()
    assert not {word: f"use {term}" for word, term in banned.items() if word in text}


@pytest.mark.parametrize("path", CHINESE, ids=name)
def test_links_of_a_chinese_page_lead_to_chinese_pages(path):
    own = path.name.replace(".zh-CN.md", ".md")
    targets = [
        target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+\.md[^)\s]*)\)", path.read_text())
    ]
    in_both = (".zh-CN.md", "GLOSSARY.md", "CHANGELOG.md", "SECURITY.md", *FOR_DEVELOPERS)
    wrong = [t for t in targets if "://" not in t and not t.endswith(in_both) and t != own]
    assert not wrong


@pytest.mark.parametrize("path", [*PAGES, GLOSSARY], ids=name)
def test_every_link_within_the_repository_leads_to_a_file_and_a_heading(path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", text):
        target = "".join(target)
        if "://" in target:
            assert target.startswith("https://"), target
            continue
        file, _, part = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        assert found.exists(), f"{target} in {path.name}"
        if part:
            assert part in map(anchor, headings(found)), f"{target} in {path.name}"


def test_troubleshooting_is_generated_from_the_known_errors_and_both_languages_have_their_texts():
    english, chinese = ROOT / "docs/TROUBLESHOOTING.md", ROOT / "docs/TROUBLESHOOTING.zh-CN.md"
    assert english.read_text() == troubleshooting.page(), (
        "python -m release.troubleshooting > docs/TROUBLESHOOTING.md"
    )
    for error in KNOWN_ERRORS.values():
        line = f"| {error.title} | " if error.harmless else f"## {error.title}\n"
        assert line in english.read_text() and line in chinese.read_text()
    assert headings(english)[1:-1] == headings(chinese)[1:-1]


def test_the_pages_say_what_the_hardware_reports_say_and_no_more():
    reports = [json.loads(path.read_text()) for path in (ROOT / "docs/hardware").glob("*.json")]
    measured = (ROOT / "docs/MEASURED.md").read_text()
    status = re.search(r"\*\*Status: .*\*\*", measured)[0]
    assert status in (ROOT / "README.md").read_text()
    for report in reports:
        # a report of older code has checks that are gone
        outcomes = [check["outcome"] for check in report["checks"] if check["name"] in CHECKS]
        passed, ran = outcomes.count("PASS"), outcomes.count("PASS") + outcomes.count("FAIL")
        torch = report["versions"]["torch"]
        for fact in (
            report["chip"],
            f"torch {torch}",
            f"code of {report['date']}",
            f"{passed} of {ran} checks passed",
        ):
            assert fact in status
    saw_tpu = any(report["accelerator"] == "tpu" for report in reports)
    assert ("nobody has run tpukit on a TPU chip yet" in status) != saw_tpu
    for name, check in CHECKS.items():
        seen = {(one["name"], one["outcome"]) for report in reports for one in report["checks"]}
        row = re.search(rf"^\| `{name}` \| (.*) \| (.*) \| (holds|no|–) \|$", measured, re.M)
        assert row[1] == check.__doc__
        assert ("not seen" in row[2]) == (not {(name, "PASS"), (name, "FAIL")} & seen)


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_make_run_and_make_test_stand_early_and_each_installs_what_it_needs(page):
    early = [line.split("#")[0].strip() for line in (ROOT / page).read_text().splitlines()[:35]]
    targets = dict(re.findall(r"^(\w+): (.*)$", (ROOT / "Makefile").read_text(), re.M))
    for target in ("run", "test"):
        assert f"make {target}" in early
        needed = targets[target]
        assert ".venv/installed" in (needed, targets.get(needed))


def test_the_site_has_every_page():
    listed = re.findall(r": (\S+\.md)$", (ROOT / "release/mkdocs.yml").read_text(), flags=re.MULTILINE)
    assert sorted(listed) == sorted(["api.md", *(path.name.replace("README", "index") for path in PAGES)])


@pytest.mark.parametrize("page, shown", [("TPU_GUIDE.md", "Start"), ("TPU_GUIDE.zh-CN.md", "中文")])
def test_the_bar_of_the_site_has_the_language_of_the_page(page, shown):
    titles = re.findall(
        r"^  - (.+?):", (ROOT / "release/mkdocs.yml").read_text().partition("\nnav:")[2], re.M
    )
    nav = SimpleNamespace(items=[SimpleNamespace(title=title) for title in titles], homepage="first")
    one = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    context = site.on_page_context(dict(nav=nav, other=1), page=one, config={}, nav=nav)
    listed = [item.title for item in context["nav"].items]
    assert shown in listed and len({"Start", "中文"} & set(listed)) == 1 == context["other"]
    assert [item.title for item in nav.items] == titles and context["nav"].homepage == "first"


def test_a_name_with_underscores_is_one_word_of_the_sites_search():
    [separator] = re.findall(r"separator: '(.+)'", (ROOT / "release/mkdocs.yml").read_text())
    for name in ("COLAB_TPU_ADDR", "metrics_report"):
        assert re.split(separator, f"set ({name}), or run") == ["set", name, "or", "run"]


def test_a_search_of_the_site_shows_first_what_an_old_name_is_today():
    boosts = {}
    for path in PAGES:
        page = SimpleNamespace(file=SimpleNamespace(src_uri=path.name), meta={})
        site.on_page_markdown(path.read_text(), page=page)
        boosts[path.name] = page.meta.get("search", {}).get("boost", 1)
    assert [name for name, boost in boosts.items() if boost > 1] == ["OLD_GUIDES.md", "OLD_GUIDES.zh-CN.md"]


def test_the_site_has_the_docstring_of_every_public_name():
    page = site.reference((ROOT / "tpukit/__init__.py").read_text())
    homes = {name: home for home, name in re.findall(r"^::: (\S+)\.(\w+)$", page, flags=re.M)}
    assert sorted(homes) == tpukit.__all__
    for name, home in homes.items():
        assert getattr(importlib.import_module(home), name) is getattr(tpukit, name)


@pytest.mark.parametrize("page", ["TRAINING.md", "TRAINING.zh-CN.md"])
def test_the_training_page_ends_with_a_line_for_each_name_of_tpukit(page):
    table = (ROOT / "docs" / page).read_text().rpartition("\n\n")[2]
    names = [row.split("`")[1] for row in table.splitlines()[2:]]
    assert sorted(names) == tpukit.__all__ and len(names) == len(set(names))


def planned():
    """The figures that pages may quote of the TPU compiler: {unit: values}, those of plan.json and of chips.
    Times are those of FLOP and of HBM bytes at the chip's full rates, of a step or of one of its samples."""
    found = {"GiB": [chip.hbm_bytes / GIB for chip in CHIPS], "GB": [], "ms": []}
    for plan in json.loads((ROOT / "benchmarks/plan.json").read_text())["plans"].values():
        if plan["fits"]:
            times = [plan["flops"] / V5E.flops * 1e3, plan["hbm_bytes"] / V5E_BANDWIDTH * 1e3]
            samples = plan["batch_size"] / int(plan["chip"].rpartition("-")[2])
            found["GiB"].append(plan["peak_bytes"] / GIB)
            found["GB"].append(plan["hbm_bytes"] / 1e9)
            found["ms"] += [*times, max(times) / samples]
    return found


def quoted(text):
    """(number, unit) in each sentence that speaks of the compiler's figures, or whose table does."""
    header = ""
    for line in text.splitlines():
        header = (header or line) if line.startswith("|") else ""
        for sentence in re.split(r"(?<=[.?!;]) |[。？！；()（）]", line):
            if re.search(r"\bHBM\b|\bpeak\b|plan\.json|峰值", header + sentence):
                units = sentence.replace("毫秒", "ms")
                yield from re.findall(r"(\d[\d,]*(?:\.\d+)?) ?(GiB|GB|ms)\b(?!/)", units)


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_what_a_page_says_of_the_tpu_compiler_is_in_plan_json(path):
    for number, unit in quoted(path.read_text()):
        unit_of_last_digit = 10.0 ** -len(number.partition(".")[2])
        errors = [abs(float(number.replace(",", "")) - value) for value in planned()[unit]]
        assert min(errors) <= 0.51 * unit_of_last_digit, f"{number} {unit} is not in plan.json"
