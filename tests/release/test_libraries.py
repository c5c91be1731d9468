"""The picture of one loop in four libraries says what the table beside it says, and nothing else."""

import re

import pytest

from release import libraries

PROMISES = [["averages", "yes", "no"], ["shares", "by hand", "TPU: no"]]
TABLE = [["", "plain 1.0", "tpukit"], ["lines changed; with a resume", "15, 28", "10, 14"], *PROMISES]


@pytest.mark.parametrize("page, picture", libraries.PAGES.items())
def test_the_picture_of_a_page_is_that_of_its_table(page, picture):
    drawn = libraries.draw(libraries.table_of(libraries.DOCS / page), libraries.LEGEND[picture])
    assert (libraries.DOCS / picture).read_text() == drawn, "python -m release.libraries"
    assert f"]({picture})" in (libraries.DOCS / page).read_text()
    assert len(drawn.encode()) < 8_000 and "prefers-color-scheme: dark" in drawn


def test_bars_are_as_high_as_the_lines_and_dots_as_full_as_the_words():
    drawn = libraries.draw(TABLE, ("yes", "in part", "no"))
    heights = [float(height) for height in re.findall(r'<rect .* height="([\d.]+)"', drawn)]
    assert [round(28 * height / libraries.BARS) for height in heights] == [15, 13, 10, 4]
    assert sum(heights[:2]) == pytest.approx(libraries.BARS, abs=0.2)
    dots = [line.count("<path") for line in drawn.splitlines() if line.startswith("<circle")]
    assert dots == [2, 0, 0, 1] + [2, 1, 0]  # and the legend's


def test_a_page_without_the_table_is_an_error(tmp_path):
    (tmp_path / "page.md").write_text("| a | b |\n")
    with pytest.raises(AssertionError, match="no table"):
        libraries.table_of(tmp_path / "page.md")
