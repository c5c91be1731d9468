"""Processes that the tools start: which tpukit they import, their variables, and what is said of one that
failed."""

import os

import pytest

import tpukit
from tpukit.tools.child import last_line, run_python

PRINT_TPUKIT = "import tpukit; print(tpukit.__file__)"


@pytest.mark.parametrize("given", ["", os.pathsep, "."])  # an empty part is the current folder
def test_a_child_imports_the_tpukit_of_its_parent_and_nothing_of_the_current_folder(
    given, tmp_path, monkeypatch
):
    (tmp_path / "tpukit.py").write_text("raise SystemExit('a stranger was run')")
    (tmp_path / "host.py").write_text("raise SystemExit('a stranger was run')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", given)
    # -S: without installed packages, an installed tpukit among them
    ran = run_python("-S", "-c", PRINT_TPUKIT)
    assert ran.stdout.strip() == tpukit.__file__, ran.stderr
    inside = run_python("-S", "-c", "import host", variables=dict(PYTHONPATH=None))
    assert "No module named 'host'" in last_line(inside)


def test_variables_are_set_and_removed(monkeypatch):
    monkeypatch.setenv("ONE", "1")
    ran = run_python(
        "-c", "import os; print(os.environ.get('ONE'), os.environ['TWO'])", variables=dict(ONE=None, TWO="2")
    )
    assert ran.stdout.split() == ["None", "2"]


def test_the_last_line_of_a_failed_process_is_its_error_or_its_exit_code():
    assert last_line(run_python("-c", "import sys; sys.exit('first\\nlast')")) == "last"
    assert "exit code 7" in last_line(run_python("-c", "raise SystemExit(7)"))
    assert run_python("-c", "print(input())", text="in\n").stdout == "in\n"
