"""`make gallery DATA=folder`: runs notebooks on this machine's CPU and keeps a small picture of what each
shows.

    docs/gallery/NAME.png    the output of one cell, as a browser shows it, at most 800 pixels wide

DATA holds IRSTD-1k/ and mnist/; without it the synthetic sets are taken. It needs Chromium. Training takes
minutes; docs/NOTEBOOKS.md says what was trained."""

import argparse
import io
import os
import shutil
import sys
import tempfile
from pathlib import Path

import nbformat
import numpy as np
import papermill
from nbconvert import HTMLExporter

ROOT = Path(__file__).parent.parent
WIDTH = 800  # pixels
COLOURS = 128  # and as many greys

# Name of the picture -> (notebook, the cell whose output it shows, parameters, name of the dataset below
# DATA, caption).
PICTURES = {
    "mnist": ("mnist_quickstart", "tpukit.show_predictions", dict(EPOCHS=2), "mnist", "two epochs of MNIST"),
    "mshnet": (
        "colab_setup", "tpukit.show_predictions", dict(IMAGE_SIZE=128, EPOCHS=4, WARM_EPOCH=1), "IRSTD-1k",
        "four epochs of IRSTD-1k at 128 pixels, not the 400 at 256 of the paper",
    ),
    "cdeit": (
        "kaggle_cdeit_tpu", "tpukit.show_predictions", dict(SAMPLES=1000, EPOCHS=8, CORES=1), None,
        "eight epochs of 1,000 simulated tanks, 5.5 million parameters",
    ),
    "images": (
        "finetune_images", "tpukit.show(run)", dict(IMAGE_SIZE=64, EPOCHS=40, LR=0.001), None,
        "forty epochs of a resnet18 from random weights on 360 drawn shapes of 64 pixels",
    ),
    "migration": ("gpu_to_tpu_migration", "migrate.as_table", {}, "mnist", "the notebook's example script"),
    "comparison": (
        "hardware_comparison", "measure.compare([]", dict(IMAGE_SIZE=64, STEPS=5, BATCH_SIZES="4"), None,
        "what guides on the web publish of MSHNet, by hardware",
    ),
    "cloud": ("cloud_tpu_vm", "per_hour", {}, None, "list prices"),
}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(prog="python -m release.gallery", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"which pictures (default: all of {', '.join(PICTURES)})"
    )
    parser.add_argument("--data", type=Path, help="folder that holds IRSTD-1k/ and mnist/")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/gallery")
    given = parser.parse_args()
    if unknown := set(given.names) - set(PICTURES):
        sys.exit(f"no picture {', '.join(sorted(unknown))}: choose from {', '.join(PICTURES)}")
    given.out.mkdir(parents=True, exist_ok=True)
    for name in given.names or PICTURES:
        notebook, cell, parameters, dataset, caption = PICTURES[name]
        if dataset:
            parameters = dict(
                parameters, DATASET_DIR=str(given.data.resolve() / dataset) if given.data else ""
            )
        picture = shrink(photograph(execute(notebook, parameters), cell))
        (given.out / f"{name}.png").write_bytes(picture)
        print(f"{len(picture) / 1e3:5.0f} kB  {given.out / name}.png: {caption}")


def execute(notebook, parameters):
    """Run a notebook in a temporary folder on this machine's CPU. Returns it with its outputs."""
    with tempfile.TemporaryDirectory() as folder:
        done = Path(folder) / "done.ipynb"
        source = ROOT / f"notebooks/{notebook}.ipynb"
        names = papermill.inspect_notebook(str(source))
        wanted = dict(ACCELERATOR="cpu", OUTPUTS=folder) | parameters
        os.environ["PYTHONPATH"] = str(ROOT)  # the library of this tree, from a temporary folder
        papermill.execute_notebook(
            str(source), str(done), {name: value for name, value in wanted.items() if name in names},
            cwd=folder, kernel_name="python3", progress_bar=False,
        )  # fmt: skip
        return nbformat.read(done, 4)


def photograph(notebook, text):
    """The output of the cell that holds a text, as PNG, in headless Chromium."""
    from playwright.sync_api import sync_playwright

    [number] = [
        n for n, cell in enumerate(notebook.cells) if cell.cell_type == "code" and text in cell.source
    ]
    notebook.cells = [notebook.cells[number]]
    page_html, _ = HTMLExporter().from_notebook_node(notebook)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport=dict(width=1100, height=1400), device_scale_factor=1)
        page.set_content(page_html)
        images, outputs = page.locator(".jp-OutputArea-child img"), page.locator(".jp-OutputArea-child")
        shot = (images if images.count() else outputs).last.screenshot()
        browser.close()
    return shot


def shrink(png):
    """A PNG of at most WIDTH pixels, with as many greys as colours, of some tens of kilobytes."""
    from PIL import Image

    picture = Image.open(io.BytesIO(png)).convert("RGB")
    picture.thumbnail((WIDTH, WIDTH))
    # Greys and colours apart: else the few coloured pixels of a picture that is mostly grey lose their
    # colour.
    pixels = np.asarray(picture).reshape(-1, 3)
    coloured = pixels[np.ptp(pixels, axis=1) > 12]
    greys = np.repeat(np.linspace(0, 255, 256 - COLOURS).astype(np.uint8), 3).tolist()
    colours = (
        Image.fromarray(coloured[None]).quantize(COLOURS).getpalette()[: 3 * COLOURS] if len(coloured) else []
    )
    palette = Image.new("P", (1, 1))
    palette.putpalette(greys + colours)
    out = io.BytesIO()
    picture.quantize(palette=palette, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return out.getvalue()


if __name__ == "__main__":
    main()
