"""The first cell of every notebook: which tpukit it takes, and whose it refuses."""

import os
import re
import subprocess
import sys

import nbformat
import pytest

from tests.conftest import ROOT


@pytest.fixture
def find_cell(tmp_path):
    """Runs that cell in tmp_path/content, or in `folder`, with a Kaggle below tmp_path. Returns its output,
    or its error.

    embedded: the folder that a built notebook unpacked its copy to. A fake pip only prints that it was
    called."""
    cell = nbformat.read(ROOT / "notebooks/mnist_quickstart.ipynb", 4).cells[2].source
    assert cell.count('"/kaggle/input') == 1
    cell = cell.replace('"/kaggle/input', f'"{tmp_path}/kaggle/input')
    pip = (
        "import subprocess\ndef run(command, check): print('asked:', *command[1:]); raise"
        " SystemExit\nsubprocess.run = run\n"
    )
    tell = "\nprint(os.environ['PYTHONPATH'].split(os.pathsep)[0] == sys.path[0])"

    def run(folder=tmp_path / "content", embedded=None, home="owner/name"):
        folder.mkdir(parents=True, exist_ok=True)
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        given = f"import pathlib; EMBEDDED = pathlib.Path({str(embedded)!r})\n" if embedded else ""
        # -S: without the packages that are installed here, which tpukit may be one of.
        command = [sys.executable, "-S", "-c", pip + given + cell.replace("TPUKIT_SOURCE", home) + tell]
        ran = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
        return ran.stdout.strip() or ran.stderr.strip().splitlines()[-1]

    return run


def place_tpukit(folder, layers=9):
    """A repository with a package tpukit/ of that many layers in it. Returns what the cell prints when it
    takes it."""
    (folder / "tpukit").mkdir(parents=True)
    (folder / "tpukit/__init__.py").write_text("__version__ = '7.0'\n")
    for number in range(layers):
        (folder / f"tpukit/layer{number}").mkdir()
        (folder / f"tpukit/layer{number}/__init__.py").touch()
    return f"tpukit 7.0 from {folder / 'tpukit'}\nTrue"


ASKED = re.compile(r"asked: -m pip install -q git\+https://github\.com/\S+")


@pytest.mark.parametrize("notebook", ["repository/notebooks", "repository/notebooks/zh-CN", "repository"])
def test_a_clone_around_the_notebook_comes_before_the_copy_inside_it_and_a_kaggle_input(
    notebook, find_cell, tmp_path
):
    assert ASKED.fullmatch(find_cell(tmp_path / notebook))
    clone = place_tpukit(tmp_path / "repository")
    place_tpukit(tmp_path / "kaggle/input/tpukit")
    place_tpukit(tmp_path / "embedded")
    assert find_cell(tmp_path / notebook, tmp_path / "embedded") == clone


def test_the_copy_inside_the_notebook_comes_before_a_kaggle_input(find_cell, tmp_path):
    from_input, embedded = place_tpukit(tmp_path / "kaggle/input/tpukit"), place_tpukit(tmp_path / "embedded")
    assert find_cell() == from_input and find_cell(embedded=tmp_path / "embedded") == embedded


def test_a_clone_in_the_current_folder_is_taken_and_a_folder_without_code_is_not(find_cell, tmp_path):
    (tmp_path / "content/tpukit/docs").mkdir(parents=True)
    assert ASKED.fullmatch(find_cell())
    assert place_tpukit(tmp_path / "content/tpukit") == find_cell()


def test_half_a_tpukit_is_left_aside_for_the_copy_and_refused_where_there_is_none(find_cell, tmp_path):
    place_tpukit(tmp_path / "content", layers=5)
    embedded = place_tpukit(tmp_path / "embedded")
    assert find_cell(embedded=tmp_path / "embedded") == embedded
    refused = find_cell()
    assert refused.startswith("ImportError") and str(tmp_path / "content/tpukit") in refused


@pytest.mark.skipif(
    not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give a folder to another user"
)
def test_another_users_tpukit_above_the_notebook_is_not_run(find_cell, tmp_path):
    place_tpukit(tmp_path)
    os.chown(tmp_path / "tpukit", 12345, 12345)
    assert find_cell().startswith("ImportError")
    embedded = place_tpukit(tmp_path / "embedded")
    assert find_cell(embedded=tmp_path / "embedded") == embedded


@pytest.mark.parametrize(
    "place", ["tpukit", "datasets/me/tpukit", "tpukit/tpukit-main", "datasets/me/tpukit/a/b"]
)
def test_a_kaggle_input_of_that_name_is_taken_whatever_its_nesting(place, find_cell, tmp_path):
    output = place_tpukit(tmp_path / "kaggle/input" / place)
    assert find_cell() == output


@pytest.mark.parametrize(
    "place",
    [
        "some-images",
        "some-images/tpukit",
        "datasets/a-stranger/images",
        "datasets/a-stranger/images/tpukit",
        ".",
    ],
)
def test_no_code_of_an_input_of_another_name_is_run(place, find_cell, tmp_path):
    place_tpukit(tmp_path / "kaggle/input" / place)
    assert ASKED.fullmatch(find_cell())


def test_where_nothing_is_published_yet_a_notebook_alone_says_what_to_build(find_cell):
    said = find_cell(home="not-filled-in")
    assert said.startswith("ImportError") and "make notebooks" in said and "dist/" in said
