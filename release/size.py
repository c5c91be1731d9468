"""`make size`: how many lines and statements each folder has, next to its budget.

A library that calls itself thin has to stay so: the budgets are held by tests/test_size.py.
"""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# All but the leaves and the command line
LIBRARY = ("host", "runs", "devices", "training", "launching", "reporting")
BUDGETS = {  # lines of Python files, blank ones and docstrings too
    "tpukit/host": 1_050,
    "tpukit/runs": 800,
    "tpukit/devices": 1_700,
    "tpukit/training": 1_500,
    "tpukit/launching": 620,
    "tpukit/reporting": 950,
    "tpukit/tasks": 3_700,
    "tpukit/tools": 2_600,
    "tpukit/cli": 480,
    "the library proper": 6_600,
    "tpukit": 13_500,
    "tests": 13_000,
    "files that the MNIST notebook imports": 44,
    "lines that the MNIST notebook imports": 5_500,
}
# What was above its budget when it was last counted: it may only become less.
REACHED = {
    "tpukit/host": 1_327,
    "tpukit/runs": 1_252,
    "tpukit/devices": 2_629,
    "tpukit/training": 2_136,
    "tpukit/launching": 783,
    "tpukit/reporting": 1_306,
    "tpukit/tasks": 6_133,
    "tpukit/tools": 5_218,
    "tpukit/cli": 1_151,
    "tpukit": 22_044,
    "tests": 25_107,
    "the library proper": 9_433,
    "files that the MNIST notebook imports": 60,
    "lines that the MNIST notebook imports": 8_188,
}
# Of tpukit, which the MNIST notebook uses.
FIRST_NAMES = "detect find_dataset MNIST Run launch train live show"


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def python_files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def statements(folder: str) -> int:
    """Statements below a folder, without the expressions that are docstrings."""
    nodes = (node for path in python_files(folder) for node in ast.walk(ast.parse(path.read_text())))
    return sum(isinstance(node, ast.stmt) and not _is_text(node) for node in nodes)


def imported_files() -> list[Path]:
    """The files of tpukit that Python has read after the names of the MNIST notebook were looked up."""
    program = (
        f"import sys, tpukit\nfor name in {FIRST_NAMES!r}.split(): getattr(tpukit, name)\n"
        "for name, module in sorted(sys.modules.items()):\n"
        "    if name.split('.')[0] == 'tpukit': print(module.__file__)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [Path(name) for name in ran.stdout.splitlines()]


def measure() -> dict[str, int]:
    """What each of `BUDGETS` is now."""
    found = {name: sum(map(lines, python_files(name))) for name in BUDGETS if (ROOT / name).is_dir()}
    found["the library proper"] = sum(found[f"tpukit/{name}"] for name in LIBRARY)
    imported = imported_files()
    found["files that the MNIST notebook imports"] = len(imported)
    found["lines that the MNIST notebook imports"] = sum(map(lines, imported))
    return found


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def main():
    print(f"{'':40} {'now':>8} {'budget':>8} {'statements':>11}")
    for name, now in measure().items():
        counted = f"{statements(name):11,}" if (ROOT / name).is_dir() else ""
        print(f"{name:40} {now:8,} {BUDGETS[name]:8,} {counted}")


if __name__ == "__main__":
    main()
