"""Copies of the notebooks with outputs: small, and without a word of the machine that made them."""

import base64
import io
import re

import nbformat
import numpy as np
import papermill
import pytest
from PIL import Image

from release import executed
from tests.conftest import ROOT

COPIES = sorted((ROOT / "docs/executed").glob("*.ipynb"))
FOLDERS = r"(?<![\w.~])/(?:home|root|tmp|work|mnt|Users|var|private)/"


def picture(side):
    noise = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)
    png = io.BytesIO()
    Image.fromarray(noise).save(png, "PNG")
    return base64.b64encode(png.getvalue()).decode()


def notebook(side=50):
    """As papermill leaves it, with a machine's names in every kind of output."""
    v4 = nbformat.v4
    path = "/srv/someone/session/outputs"
    html = {"text/html": f"<td>{path}</td>", "text/plain": path, "image/png": picture(side)}
    widget = {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}, "text/plain": "on box7: 3"}
    cell = v4.new_code_cell(f'OUTPUTS = "{path}"', metadata={"papermill": {"start": 1}, "tags": ["a"]})
    cell.outputs = [
        v4.new_output("stream", name="stdout", text=f"run: {path}\nboxes: box70\n"),
        v4.new_output("display_data", data=html),
        v4.new_output("display_data", data=widget),
    ]
    first = v4.new_markdown_cell("# Title\n\n![Alt](../docs/gallery/a.png)\n\nText.")
    return v4.new_notebook(cells=[first, cell], metadata={"papermill": {"input_path": path}})


NAMES = {"/srv/someone/session": "~", "/srv/someone": "~", "box7": "host"}


def test_a_copy_names_no_folder_host_or_user_and_keeps_its_words_and_pictures():
    text = executed.as_small_text(notebook(), "some", NAMES)
    assert "someone" not in text and "papermill" not in text and "widget" not in text
    book = nbformat.reads(text, 4)
    nbformat.validate(book)
    first, cell = book.cells
    assert cell.source == 'OUTPUTS = "~/outputs"' and cell.metadata == {"tags": ["a"]}
    stream, shown, widget = cell.outputs
    assert stream.text == "run: ~/outputs\nboxes: box70\n"  # a name within a word is another word
    assert widget.data == {"text/plain": "on host: 3"}
    assert Image.open(io.BytesIO(base64.b64decode(shown.data["image/png"]))).size == (50, 50)
    assert "![" not in first.source and "with outputs" in first.source and first.source.endswith("Text.")


def test_a_host_is_a_name_in_outputs_and_a_word_elsewhere():
    outputs = [{"data": {"image/png": "AA/vm/BB", "text/plain": "core 0 on vm"}}]
    book = {"source": "vm = 3", "outputs": outputs}
    assert executed.replaced(book, {"vm": "host"}) == {
        "source": "vm = 3",
        "outputs": [{"data": {"image/png": "AA/vm/BB", "text/plain": "core 0 on host"}}],
    }


def test_pictures_shrink_until_the_copy_is_small_enough():
    text = executed.as_small_text(notebook(side=900), "some", NAMES)
    assert len(text.encode()) <= executed.LARGEST
    [shown] = re.findall(r'"image/png": "([^"]+)"', text)
    assert Image.open(io.BytesIO(base64.b64decode(shown))).width < max(executed.WIDTHS)


def test_a_copy_that_stays_too_large_is_an_error():
    large = notebook()
    large.cells[1].outputs[0].text = "x" * executed.LARGEST
    with pytest.raises(ValueError, match="allowed"):
        executed.as_small_text(large, "some", NAMES)


@pytest.mark.parametrize("path", COPIES, ids=lambda path: path.stem)
def test_a_copy_in_docs_is_whole_small_and_names_no_machine(path):
    text = path.read_text()
    assert len(text.encode()) <= executed.LARGEST
    words = re.sub(r'"image/png": "[^"]+"', "", text)
    assert not re.findall(FOLDERS + r"[^\s\"']*", words)
    assert not [name for name in executed.names_of_this_machine() if "/" in name and name in words]
    book = nbformat.reads(text, 4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code" and cell.source.strip()]
    assert all(cell.execution_count for cell in code)
    assert not [o for cell in code for o in cell.outputs if o.output_type == "error"]


def test_the_copies_in_docs_are_those_that_are_kept_and_600_kb_together():
    assert [path.stem for path in COPIES] == sorted(executed.KEPT)
    assert sum(path.stat().st_size for path in COPIES) < 600_000


def test_every_notebook_that_has_small_settings_has_these_settings():
    for name, (parameters, _) in executed.SMALL.items():
        known = papermill.inspect_notebook(str(ROOT / f"notebooks/{name}.ipynb"))
        assert set(parameters) <= set(known), name
