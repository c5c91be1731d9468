"""`make executed`: the copies of some notebooks in docs/executed, with outputs, to look at before one runs
anything.

Each is executed on this machine's CPU with small settings on synthetic data; its pictures stay as they were
drawn, and this machine's folders get other names. tests/release/test_executed.py executes the copies again
and compares the outputs of the cells that are tagged."""

import base64
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat
import numpy as np
from PIL import Image

import tpukit

ROOT = Path(__file__).parent.parent
# Notebook -> its settings, with which the network learns its synthetic set in minutes. Of 32 infrared images
# a batch of 16 would be two steps an epoch, and learn nothing.
KEPT = {
    "mnist_quickstart": dict(ACCELERATOR="cpu"),
    "finetune_images": dict(ACCELERATOR="cpu", EPOCHS=12, IMAGE_SIZE=64, PRETRAINED="no"),
    "colab_tpu_setup": dict(ACCELERATOR="cpu", NETWORK="small", EPOCHS=8, WARM_EPOCH=4, BATCH_SIZE=4),
}
# Notebook -> (score, what its best epoch reaches at least, in percent). With less, nothing was learned.
LEAST = {
    "mnist_quickstart": ("accuracy", 95),
    "finetune_images": ("accuracy", 95),
    "colab_tpu_setup": ("iou", 30),
}
# In the source of a cell whose output is the machine's, random, mostly measured, or hidden but from nbval, or
# depends on which epoch was the best
VARIES = re.compile(r"env\.require|torch\.randn|show_report|show\(run\)|;$")
# What would make it the CPU XLA device, as the Makefile does (release/twins.py, too)
XLA = dict(
    PJRT_DEVICE="CPU", XLA_FLAGS="--xla_llvm_disable_expensive_passes=true --xla_backend_optimization_level=0"
)
MANY_GREYS = 64  # in a picture of infrared images, or of digits
SAME = 4  # levels of 256 between colours of a chart that become one: edges of lines and letters
# What no copy may hold -> what stands in its place. The longest first, because one may lie in another.
NAMES = {sys.prefix: "~/venv", str(ROOT): "~/tpukit", str(Path.home()): "~"}


def main():
    for name in sys.argv[1:] or KEPT:
        with tempfile.TemporaryDirectory() as folder:
            text = as_text(execute(name, folder), name, {os.path.realpath(folder): "~"} | NAMES)
        (ROOT / f"docs/executed/{name}.ipynb").write_text(text)
        print(f"{len(text.encode()) / 1e3:5.0f} kB  {name}", flush=True)


def environment() -> dict[str, str]:
    """Return the variables with which a notebook is executed: on the CPU, without the internet."""
    variables = {key: value for key, value in os.environ.items() if key not in XLA}
    return variables | dict(PYTHONPATH=str(ROOT), TPUKIT_OFFLINE="1")


def execute(name: str, folder: str):
    """Execute a notebook in a folder with its small settings on this machine's CPU, and return it."""
    source, done = Path(folder) / "source.ipynb", Path(folder) / "done.ipynb"
    notebook = nbformat.read(ROOT / f"notebooks/{name}.ipynb", 4)
    notebook.cells.append(check_of(name))
    nbformat.write(notebook, source)
    command = [sys.executable, "-m", "papermill", source, done, "-k", "python3", "--no-progress-bar"]
    for setting, value in KEPT[name].items():
        command += ["-p", setting, str(value)]
    subprocess.run(command, cwd=folder, env=environment(), check=True)
    return nbformat.read(done, 4)


def check_of(name: str):
    """Return the last cell of a copy, whose output has one figure that does not vary. All other scores do,
    with the rounding of the processor."""
    score, least = LEAST[name]
    source = (
        "# The figure that is checked when a copy is executed again: whether anything was learned.\n"
        f'best = max(record["scores"]["{score}"] for record in run.records("evaluation"))\n'
        f'print(f"{score} of the best epoch: at least {{min(100 * best, {least}):.0f}}%")'
    )
    return nbformat.v4.new_code_cell(source, id="learned")


def as_text(notebook, name: str, names: dict[str, str]) -> str:
    """Return the text of an executed notebook: names replaced, nothing of papermill's metadata; the first
    cell says what it is. names: what no copy may hold -> what stands in its place."""
    kept = ("kernelspec", "language_info")
    notebook.metadata = {key: notebook.metadata[key] for key in kept if key in notebook.metadata}
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        if cell.get("outputs") and not VARIES.search(cell.source):
            tags = [*tags, "nbval-check-output"]
        cell.metadata = dict(tags=tags) if tags else {}
        for output in cell.get("outputs", []):
            simplify(output)
    notebook.cells[0].source = introduction(notebook.cells[0].source, name)
    return json.dumps(rename(notebook, names), indent=0, ensure_ascii=False) + "\n"


def introduction(source: str, name: str) -> str:
    """Return the first cell of a copy: no picture, but what it is and where the notebook itself is."""
    title, _, rest = source.partition("\n")
    rest = re.sub(r"^!\[[^\]]*\]\([^)]*\)\n+", "", rest, flags=re.MULTILINE)
    note = (
        f"> A copy **with outputs**, executed on a CPU with small settings by tpukit"
        f" {tpukit.__version__}, {time.strftime('%Y-%m')}; n = 1, and times are those of a shared machine."
        f" Scores on synthetic data say nothing about real data. To run it, open"
        f" `notebooks/{name}.ipynb`, or a badge."
    )
    return f"{title}\n\n{note}\n{rest}"


def simplify(output):
    """Leave out of an output what only a living page can show, and pack its picture."""
    output.get("metadata", {}).clear()
    data = output.get("data", {})
    for kind in [kind for kind in data if "widget" in kind or "javascript" in kind]:
        del data[kind]
    if "image/png" in data:
        data["image/png"] = base64.b64encode(pack(base64.b64decode(data["image/png"]))).decode()


def pack(png: bytes) -> bytes:
    """Return a PNG file as a smaller one, with a palette. In a picture of many greys each grey is off by two
    levels of 256 at most, in a chart each colour by `SAME`; one of more colours stays as it is. Clear pixels
    stay clear."""
    picture, packed, options = Image.open(io.BytesIO(png)), io.BytesIO(), {}
    pixels = np.asarray(picture.convert("RGBA"))
    found = np.unique(pixels.reshape(-1, 4), axis=0, return_inverse=True, return_counts=True)
    colours, places, counts = found
    is_grey = (colours[:, :3] == colours[:, :1]).all(1) & (colours[:, 3] == 255)
    if is_grey.sum() > MANY_GREYS:
        greys = np.linspace(0, 255, 64).round()[:, None] * (1, 1, 1, 0) + (0, 0, 0, 255)
        others = colours[~is_grey][counts[~is_grey].argsort()[::-1][:192]]
        palette = np.concatenate([greys, others]).astype(np.uint8)
    else:
        palette = distinct(colours[counts.argsort()[::-1]])
    if len(palette) <= 256:
        distances = np.square(seen(colours)[:, None] - seen(palette)).sum(2)
        nearest = distances.argmin(1).astype(np.uint8)
        picture = Image.fromarray(nearest[places.reshape(pixels.shape[:2])], "P")
        picture.putpalette(palette[:, :3].tobytes())
        options = dict(transparency=palette[:, 3].tobytes())
    picture.save(packed, "PNG", optimize=True, **options)
    return packed.getvalue()


def seen(colours: np.ndarray) -> np.ndarray:
    """Return colours (N, 4) as they look on black, (N, 4): of a clear one, only that it is clear."""
    return np.column_stack([colours[:, :3] * (colours[:, 3:] / 255), colours[:, 3]])


def distinct(colours: np.ndarray) -> np.ndarray:
    """Return those of the colours (N, 4), the first ones preferred, that differ from each other by more than
    `SAME`; 257 if there are more than 256."""
    left, chosen = seen(colours), []
    while len(left) and len(chosen) < 257:
        chosen.append(colours[0])
        differs = np.abs(left - left[0]).max(1) > SAME
        left, colours = left[differs], colours[differs]
    return np.array(chosen)


def rename(content, names: dict[str, str]):
    """Return the content of a JSON file with other names for this machine's folders in its texts."""
    if isinstance(content, dict):
        return {key: rename(value, names) for key, value in content.items()}
    if isinstance(content, list):
        return [rename(value, names) for value in content]
    if isinstance(content, str):
        for path, place in names.items():
            content = re.sub(rf"(?<![\w.-]){re.escape(path)}(?![\w-])", place, content)
    return content


if __name__ == "__main__":
    main()
