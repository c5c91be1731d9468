"""Copies of the notebooks with outputs: small, silent about the machine that made them, and still true."""

import base64
import io
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import nbformat
import numpy as np
import papermill
import pytest
from PIL import Image

from release import executed, notebooks
from tests import warm
from tests.conftest import ROOT
from tpukit_tasks.mshnet import overlay

LARGEST = 1_000_000  # bytes of a copy
WIDTH = 1056  # pixels of a figure, as a notebook draws it
COPIES = sorted((ROOT / "docs/executed").glob("*.ipynb"))
FOLDERS = r"(?<![\w.~])/(?:home|root|tmp|work|mnt|Users|var|private)/"
NAMES = {"/srv/someone/session": "~", "/srv/someone": "~"}


def picture():
    """A picture in many colours, half of it transparent, as a figure is."""
    return base64.b64encode(as_png(noise())).decode()


def noise():
    pixels = np.random.default_rng(0).integers(0, 256, (50, 300, 4), np.uint8)
    pixels[25:, :, 3] = 0
    return pixels


def as_png(pixels):
    png = io.BytesIO()
    Image.fromarray(pixels).save(png, "PNG")
    return png.getvalue()


def pixels_of(png):
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGBA"))


def pictures_of(cell):
    shown = [output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]
    return [pixels_of(base64.b64decode(png)) for png in shown]


def notebook():
    """A notebook as papermill leaves it, with a machine's names in every kind of output."""
    v4 = nbformat.v4
    path = "/srv/someone/session/outputs"
    html = {"text/html": f"<td>{path}</td>", "text/plain": path, "image/png": picture()}
    widget = {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}, "text/plain": "0%"}
    cell = v4.new_code_cell("tpukit.show(task)", metadata={"papermill": {"start": 1}, "tags": ["a"]})
    cell.outputs = [
        v4.new_output("stream", name="stdout", text=f"run:\n{path}\n"),
        v4.new_output("display_data", data=html),
        v4.new_output("display_data", data=widget),
    ]
    first = v4.new_markdown_cell("# Title\n\n![Alt](../docs/gallery/a.png)\n\nText.")
    return v4.new_notebook(cells=[first, cell], metadata={"papermill": {"input_path": path}})


def test_a_copy_names_no_folder_of_its_machine_and_keeps_its_words_and_pictures():
    text = executed.as_text(notebook(), "some", NAMES)
    assert "someone" not in text and "papermill" not in text and "widget" not in text
    book = nbformat.reads(text, 4)
    nbformat.validate(book)
    first, cell = book.cells
    assert cell.metadata == {"tags": ["a", "nbval-check-output"]}
    stream, shown, widget = cell.outputs
    assert stream.text == "run:\n~/outputs\n" and widget.data == {"text/plain": "0%"}
    assert shown.data["text/html"] == "<td>~/outputs</td>"
    assert np.array_equal(pictures_of(cell)[0], noise())
    assert "![" not in first.source and "with outputs" in first.source and first.source.endswith("Text.")


def test_an_infrared_picture_stays_grey_keeps_its_marks_and_is_smaller():
    pixels = np.zeros((200, 700, 4), np.uint8)
    pixels[:100] = np.random.default_rng(0).integers(0, 256, (100, 700, 1))
    pixels[:100, :, 3] = 255
    marks = [(*overlay.HIT, 255), (*overlay.MISSED, 255), (*overlay.FALSE, 255), (120, 127, 137, 90)]
    for column, mark in enumerate(marks):
        pixels[:9, column] = mark
    packed = executed.pack(as_png(pixels))
    assert len(packed) < 0.5 * len(as_png(pixels))
    after = pixels_of(packed)
    assert np.abs(after.astype(int) - pixels).max() <= 2
    is_exact = (after == pixels).all(2)
    assert is_exact[100:].all() and is_exact[:9, : len(marks)].all()
    assert (after[9:100, :, :3] == after[9:100, :, :1]).all()


def test_a_chart_keeps_its_colours_and_its_clear_pixels_and_is_smaller():
    line, clear = np.array([213, 94, 0, 255]), np.zeros((90, 400, 4), np.uint8)
    pixels, edge = clear.copy(), np.random.default_rng(0).uniform(0, 255, (30, 400))
    pixels[:30] = line
    pixels[30:60] = np.dstack([np.broadcast_to(line[:3], (30, 400, 3)), edge])  # an edge: of any alpha
    packed = executed.pack(as_png(pixels))
    assert len(packed) < 0.7 * len(as_png(pixels))
    after = pixels_of(packed)
    assert (after[:30] == pixels[:30]).all() and (after[60:, :, 3] == 0).all()
    on_white = [a[..., :3] * (a[..., 3:] / 255) + 255 - a[..., 3:] for a in (after.astype(float), pixels)]
    assert np.abs(on_white[0] - on_white[1]).max() <= 2 * executed.SAME


def texts(content):
    """Every text of a JSON content but pictures."""
    if isinstance(content, dict):
        content = [value for key, value in content.items() if key != "image/png"]
    if isinstance(content, list):
        return [text for value in content for text in texts(value)]
    return [content] if isinstance(content, str) else []


@pytest.mark.parametrize("path", COPIES, ids=lambda path: path.stem)
def test_a_copy_in_docs_is_whole_small_and_names_no_machine(path):
    text = path.read_text()
    assert len(text.encode()) <= LARGEST
    book = nbformat.reads(text, 4)
    nbformat.validate(book)
    words = "\n".join(texts(book))
    assert not re.findall(FOLDERS + r"[^\s\"']*", words)
    code = [cell for cell in book.cells if cell.cell_type == "code" and cell.source.strip()]
    assert all(cell.execution_count for cell in code)
    assert not [o for cell in code for o in cell.outputs if o.output_type == "error"]
    score, least = executed.LEAST[path.stem]
    assert code[-1].source == executed.check_of(path.stem).source
    assert code[-1].outputs[0].text == f"{score} of the best epoch: at least {least}%\n"
    assert code[-1].metadata.tags == ["nbval-check-output"]
    pictures = [picture for cell in code for picture in pictures_of(cell)]
    assert len(pictures) >= 4
    for pixels in pictures:
        assert pixels.shape[1:] == (WIDTH, 4)
        assert (pixels[..., 3] == 0).mean() > 0.05  # without a background: no white box in the dark
    assert sum("nbval-check-output" in cell.metadata.get("tags", []) for cell in code) >= 0.4 * len(code)


def test_the_copies_in_docs_are_those_that_are_kept_with_settings_that_are_there():
    assert [path.stem for path in COPIES] == sorted(executed.KEPT) == sorted(executed.LEAST)
    for name, settings in executed.KEPT.items():
        known = papermill.inspect_notebook(str(ROOT / f"notebooks/{name}.ipynb"))
        assert set(settings) <= set(known), name


@pytest.fixture
def folder():
    """A folder with a short path, because tables break long ones."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def check_outputs(book, folder):
    """Execute a notebook in a folder, as nbval does, and compare the outputs of its tagged cells."""
    nbformat.write(book, folder / "copy.ipynb")
    command = [sys.executable, "-m", "pytest", "-q", "--nbval-lax", "copy.ipynb"]
    command += ["--nbval-kernel-name", warm.kernel(), "--nbval-kernel-startup-timeout", "300"]
    command += ["--nbval-sanitize-with", ROOT / "tests/nbval.cfg", "--nbval-cell-timeout", "500"]
    environ = executed.environment() | dict(HOME=str(folder / "home"))
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=550)


# Minutes: what an accuracy or a score takes that is worth showing
DEAR = dict(colab_tpu_setup=[pytest.mark.nightly], finetune_images=[pytest.mark.nightly, pytest.mark.long])


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=DEAR.get(path.stem, ()), id=path.stem) for path in COPIES]
)
def test_the_outputs_of_a_copy_come_out_again(path, folder):
    book = nbformat.read(path, 4)
    if path.stem == "mnist_quickstart":  # as it is built: with the library inside
        notebooks.embed(book, notebooks.archive_for(book), ROOT / "notebooks")
    ran = check_outputs(book, folder)
    assert ran.returncode == 0, ran.stdout
    assert (folder / "home/.cache/tpukit").exists() == (path.stem == "mnist_quickstart")


@pytest.mark.slow
@pytest.mark.parametrize(
    "printed, code", [("epoch 1: loss 0.3\n25 steps in 3.1 s\n", 0), ("24 steps in 3 s\n", 1)]
)
def test_an_output_that_no_longer_comes_out_is_red_unless_it_may_vary(printed, code, folder):
    source = "print('epoch 1: loss 0.4'); print('25 steps in 4.0 s')"
    cell = nbformat.v4.new_code_cell(source, execution_count=1, metadata=dict(tags=["nbval-check-output"]))
    cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=printed)]
    ran = check_outputs(nbformat.v4.new_notebook(cells=[cell]), folder)
    assert ran.returncode == code, ran.stdout


@pytest.mark.parametrize("name", executed.LEAST)
@pytest.mark.parametrize("reached, shown", [(0, 0), (30, 0), (-2, -2)])
def test_a_copy_whose_training_learns_nothing_prints_another_figure(name, reached, shown, capsys):
    """Which is red, as the test above shows."""
    score, least = executed.LEAST[name]
    records = [dict(scores={score: value / 100}) for value in (1, least + reached, 2)]
    exec(executed.check_of(name).source, dict(run=SimpleNamespace(records=lambda kind: records)))
    assert capsys.readouterr().out == f"{score} of the best epoch: at least {least + shown}%\n"
