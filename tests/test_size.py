"""A library that calls itself thin stays so: the ends of release/size.py."""

import re

import pytest

from release import size
from tests.conftest import ROOT

SOURCE = '''"""A docstring
of two lines."""

# a comment
import os  # counts


class Kind:
    name: str
    """Text below a field."""

    def method(self):
        """A docstring."""
        return (
            # a comment

            os.sep
        )
'''


def test_no_part_is_larger_than_its_end():
    measured = size.measure()
    assert measured.keys() == size.ENDS.keys() and min(measured.values()) > 500
    grown = {part: now for part, now in measured.items() if now > size.ENDS[part]}
    assert not grown


def test_a_line_of_code_is_neither_blank_nor_a_comment_nor_a_docstring(tmp_path):
    (tmp_path / "one.py").write_text(SOURCE)
    assert size.lines_of_code(tmp_path.rglob("*.py")) == 7


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_the_readme_has_the_size_of_the_library_as_it_is(page):
    [told] = re.findall(r"([\d,]+) (?:lines of code|行代码)", (ROOT / page).read_text())
    assert int(told.replace(",", "")) == pytest.approx(size.measure()[size.LIBRARY], rel=0.02)
