"""The first cells of a notebook: which tpukit they take, and whose they leave aside."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from release import notebooks
from tests.conftest import ROOT
from tests.test_code import PACKAGES


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The code of a built notebook's first two cells: the archive, and the import."""
    folder = tmp_path_factory.mktemp("first-cell")
    notebook = nbformat.read(ROOT / "notebooks/mnist_quickstart.ipynb", 4)
    notebooks.embed(notebook, notebooks.archive_for(notebook), ROOT / "notebooks")
    nbformat.write(notebook, folder / "one.ipynb")
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return "\n".join(code[:2])


def run(code, folder, home=None):
    """What code prints that runs in a folder, as in a new kernel, or the last line of its error."""
    folder.mkdir(parents=True, exist_ok=True)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ |= dict(HOME=str(home)) if home else {}
    # -S: without the packages that are installed here, which tpukit may be one of.
    command = [sys.executable, "-S", "-"]
    pipes = dict(input=code, capture_output=True, text=True, timeout=120)
    ran = subprocess.run(command, cwd=folder, env=environ, **pipes)
    return ran.stdout.strip() or ran.stderr.strip().splitlines()[-1]


@pytest.fixture
def found_by(built, tmp_path):
    """Runs a built notebook in tmp_path/content, or in a folder. Returns the folder that has its tpukit, for
    this kernel and for what it starts."""
    tell = "\nprint(os.environ['PYTHONPATH'].split(os.pathsep)[0] == sys.path[0] == TPUKIT, TPUKIT)"

    def run_in(folder=tmp_path / "content"):
        printed, told = run(built + tell, folder, tmp_path / "home").splitlines()
        same, _, place = told.partition(" ")
        assert same == "True" and printed.endswith(f" from {place}/tpukit")
        return place

    return run_in


def place_tpukit(folder, without=None):
    """A repository of a tpukit that can be told from the real one. Returns the folder, as text."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tpukit/__init__.py").write_text("__version__ = '7.0'\n")
    if without:
        shutil.rmtree(folder / without)
    return str(folder)


@pytest.mark.parametrize("notebook", ["repository/notebooks", "repository/notebooks/zh-CN", "repository"])
def test_a_clone_around_a_built_notebook_comes_before_the_copy_inside_it(notebook, found_by, tmp_path):
    assert found_by(tmp_path / notebook).startswith(str(tmp_path / "home/.cache/tpukit"))
    clone = place_tpukit(tmp_path / "repository")
    assert found_by(tmp_path / notebook) == clone


def test_a_clone_in_the_current_folder_is_taken_and_a_folder_without_code_is_not(found_by, tmp_path):
    (tmp_path / "content/tpukit/docs").mkdir(parents=True)
    assert found_by().startswith(str(tmp_path / "home/.cache/tpukit"))
    clone = place_tpukit(tmp_path / "content/tpukit")
    assert found_by() == clone


@pytest.mark.parametrize(
    "without, taken", [("tpukit/reporting", False), ("tpukit_tools", False), ("tpukit_tasks/cdeit", True)]
)
def test_half_a_clone_is_left_aside_for_the_copy_and_one_without_a_task_is_taken(
    without, taken, found_by, tmp_path
):
    clone = place_tpukit(tmp_path / "content", without)
    assert (found_by() == clone) == taken


@pytest.mark.skipif(
    not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give a folder to another user"
)
@pytest.mark.parametrize("package", PACKAGES)
def test_another_users_tpukit_above_the_notebook_is_not_run(package, found_by, tmp_path):
    place_tpukit(tmp_path)
    os.chown(tmp_path / package, 12345, 12345)
    assert found_by().startswith(str(tmp_path / "home/.cache/tpukit"))


def test_no_code_of_a_kaggle_input_is_run_and_nothing_is_installed(built):
    code = built[built.index("packed = ") :]
    assert not [word for word in ("/kaggle", 'pip"', "subprocess", "urllib") if word in code]


# In a clone


IMPORT = nbformat.read(ROOT / "notebooks/mnist_quickstart.ipynb", 4).cells[2].source


@pytest.mark.parametrize("folder", [".", "notebooks", "notebooks/zh-CN"])
def test_a_clone_without_an_installation_imports_its_own_tpukit_where_papermill_and_jupyter_start_kernels(
    folder,
):
    program = f"{IMPORT}\nprint(tpukit.detect().host)"
    version, host = run(program, ROOT / folder).splitlines()
    taken = Path(version.partition(" from ")[2]).resolve()
    assert taken == ROOT.resolve() / "tpukit" and host in ("local", "colab", "kaggle", "tpu-vm")


def test_the_lines_around_the_import_which_a_traceback_shows_say_what_to_do_without_tpukit():
    before, _, _ = IMPORT.partition("import tpukit")
    assert "dist/" in before and "make notebooks" in before and "pip install git+" in before
