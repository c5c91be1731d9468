"""`make size`: how large each part is, beside its end. tests/test_size.py fails where one grows above it.

A library that calls itself thin has to stay so: an end only becomes smaller, but for files that move in and
for what keeps data from being read wrongly in silence."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENDS = {  # lines of Python files, blank ones and docstrings too; of pages, words
    "tpukit/tasks": 7_037,
    "tpukit/tools": 3_372,
    "tpukit/cli": 449,
    "tpukit": 19_145,
    "release": 755,
    "benchmarks": 1_134,
    "tests": 18_067,
    "English pages": 24_646,
    "the imports of the MNIST notebook": 6_921,
}
MNIST_IMPORTS = """
import sys, tpukit
for name in "detect find_dataset MNIST Run launch train live show".split():
    getattr(tpukit, name)
print(*(module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "tpukit"))
"""


def measure() -> dict[str, int]:
    """Return how large each part of `ENDS` is now."""
    now = {name: lines_of((ROOT / name).rglob("*.py")) for name in ENDS if (ROOT / name).is_dir()}
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    english = [path for path in pages if "zh-CN" not in path.name]
    now["English pages"] = sum(len(path.read_text().split()) for path in english)
    command = [sys.executable, "-c", MNIST_IMPORTS]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    now["the imports of the MNIST notebook"] = lines_of(map(Path, ran.stdout.split()))
    return now


def lines_of(paths) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


if __name__ == "__main__":
    for part, size in measure().items():
        print(f"{part:35} {size:7,} of {ENDS[part]:7,}")
