"""`make size`: how large the library and its pages are, beside their ends. tests/test_size.py fails where one
grows above it.

A library that calls itself thin has to stay so: an end only becomes smaller, but for files that move in and
for what keeps a user's results right. Tasks, tools and tests have none: a user's format is no fight against a
number."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
GUESTS = ("tasks", "tools", "cli")  # of tpukit/, which are not the library
LIBRARY, PAGES = "the library, in lines", "English pages, in words"
ENDS = {LIBRARY: 8_860, PAGES: 25_000}


def measure() -> dict[str, int]:
    """Return how large each part of `ENDS` is now. Lines: blank ones and docstrings too."""
    library = ROOT / "tpukit"
    files = [path for path in library.rglob("*.py") if path.relative_to(library).parts[0] not in GUESTS]
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    english = [path for path in pages if "zh-CN" not in path.name]
    return {
        LIBRARY: sum(len(path.read_text().splitlines()) for path in files),
        PAGES: sum(len(path.read_text().split()) for path in english),
    }


if __name__ == "__main__":
    for part, size in measure().items():
        print(f"{part:25} {size:7,} of {ENDS[part]:7,}")
