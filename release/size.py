"""`make size`: how large the library and its pages are, beside their ends. tests/test_size.py fails where one
grows above it.

A library that calls itself thin has to stay so: an end only becomes smaller, but for what keeps a user's
results right. The tasks and tools have none: a user's format is no fight against a number."""

import ast
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIBRARY, README, PAGES = "tpukit/, in lines of code", "README, in words", "English pages, in words"
ENDS = {LIBRARY: 7_200, README: 750, PAGES: 25_000}


def lines_of_code(files: Iterable[Path]) -> int:
    """Return the number of lines that hold code: neither blank, nor a comment alone, nor a string alone, as a
    docstring or the text below a field is."""
    return sum(_lines_of_code(path.read_text(encoding="utf-8")) for path in files)


def _lines_of_code(source):
    texts = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            texts.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(number not in texts and line.strip()[:1] not in ("", "#") for number, line in lines)


def measure() -> dict[str, int]:
    """Return how large each part of `ENDS` is now."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    english = [path for path in pages if "zh-CN" not in path.name]
    return {
        LIBRARY: lines_of_code((ROOT / "tpukit").rglob("*.py")),
        README: len(pages[0].read_text().split()),
        PAGES: sum(len(path.read_text().split()) for path in english),
    }


if __name__ == "__main__":
    if folders := sys.argv[1:]:  # of other packages, to compare with
        for folder in folders:
            print(f"{lines_of_code(Path(folder).rglob('*.py')):7,}  {folder}")
    else:
        for part, size in measure().items():
            print(f"{part:25} {size:7,} of {ENDS[part]:7,}")
