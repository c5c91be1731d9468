"""A notebook of a user's: what of it is read, and what is refused."""

import json

import pytest

from tests.conftest import ROOT, refuses
from tpukit.tools import notebook


def written(folder, source, tags=("parameters",)):
    """The cells of a notebook of one code cell."""
    cell = dict(cell_type="code", metadata=dict(tags=list(tags)), outputs=[], source=source)
    path = folder / "a.ipynb"
    path.write_text(json.dumps(dict(cells=[cell], metadata={}, nbformat=4, nbformat_minor=5)))
    return notebook.read_cells(path)


def test_the_parameters_are_the_plain_values_that_the_tagged_cell_assigns(tmp_path):
    source = (
        "# @title Settings\nLR = 0.1  # @param\nNAME = ''\nON = True\nCROP = None\nSIZES = [1]\nopen('x')"
    )
    assert notebook.parameters(written(tmp_path, source)) == dict(LR=0.1, NAME="", ON=True, CROP=None)
    assert notebook.parameters(written(tmp_path, source, tags=["other"])) == {}


def test_every_setting_of_our_own_notebooks_can_be_given():
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = notebook.read_cells(path)
        [tagged] = [cell for cell in cells if "parameters" in cell["metadata"].get("tags", [])]
        assert len(notebook.parameters(cells)) == tagged["source"].count("# @param"), path


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"cells": 1}', '{"cells": [{}]}', '{"cells": [{"source": 1}]}']
)
def test_what_is_no_notebook_is_refused(tmp_path, text):
    (tmp_path / "a.ipynb").write_text(text)
    with refuses("a.ipynb"):
        notebook.read_cells(tmp_path / "a.ipynb")
    with refuses("b.ipynb"):
        notebook.read_cells(tmp_path / "b.ipynb")


def test_a_cell_of_parameters_with_a_magic_is_refused_in_a_sentence(tmp_path):
    with refuses("parameters"):
        notebook.parameters(written(tmp_path, "%pip install x\nLR = 1"))
