"""`make executed`: copies of the notebooks with their outputs, to look at before one runs anything.

Each is executed on this machine's CPU with small settings, where no dataset is given on synthetic data; its
pictures are made small, and what it says of this machine's folders is replaced. The copies are written to
dist/executed/, those of `KEPT` to docs/executed/ too, where tests/test_executed.py executes them again and
compares the outputs of the cells that are tagged."""

import argparse
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
import papermill
from PIL import Image

import tpukit

ROOT = Path(__file__).parent.parent
# Of 32 images a batch of 16 would be two steps an epoch, and learn nothing.
INFRARED = dict(EPOCHS=12, WARM_EPOCH=2, IMAGE_SIZE=64, BATCH_SIZE=4)
# Notebook -> its settings; the others run as they are.
SMALL = {
    "colab_tpu_setup": INFRARED,
    "kaggle_tpu_v5e": INFRARED | dict(EPOCHS=4, CORES=2),
    "colab_setup": INFRARED,
    "segment_your_own": dict(IMAGE_SIZE=64, EPOCHS=12),
    "kaggle_cdeit_tpu": dict(SAMPLES=200, EPOCHS=2, CORES=1),
    "hardware_comparison": dict(IMAGE_SIZE=64, STEPS=5, BATCH_SIZES="4"),
}
ON_XLA = ("colab_tpu_setup", "kaggle_tpu_v5e", "gpu_to_tpu_migration")
KEPT = ("mnist_quickstart", "finetune_images", "colab_tpu_setup")
# In the source of a cell whose output is the machine's, random or mostly measured times
VARIES = re.compile(r"env\.require|torch\.randn|show_report")
# The CPU XLA device, which compiles as a TPU does; as in the Makefile, with less optimisation.
XLA = dict(
    PJRT_DEVICE="CPU",
    XLA_FLAGS="--xla_llvm_disable_expensive_passes=true --xla_backend_optimization_level=0",
)
# What no copy may hold -> what stands in its place. The longest first, because one may lie in another.
NAMES = {sys.prefix: "~/venv", str(ROOT): "~/tpukit", str(Path.home()): "~"}
LARGEST = 150_000  # bytes of a copy
WIDTHS = (760, 640, 520, 420, 340)  # pixels of its pictures: the first one that makes it small enough


def main():
    known = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
    parser = argparse.ArgumentParser(
        prog="python -m release.executed", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)} (default: all)")
    parser.add_argument("--out", type=Path, default=ROOT / "dist/executed")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs/executed")
    given = parser.parse_args()
    if unknown := set(given.names) - set(known):
        sys.exit(f"no notebook {', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    for name in given.names or known:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            text = as_small_text(execute(name, folder), name, {os.path.realpath(folder): "~"} | NAMES)
        for folder in (given.out, given.docs) if name in KEPT else (given.out,):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.ipynb").write_text(text)
        took = time.perf_counter() - started
        print(f"{len(text.encode()) / 1e3:5.0f} kB  {name}, {took:.0f} s", flush=True)


def execute(name: str, folder: str):
    """Execute a notebook in a folder with its small settings on this machine's CPU, and return it."""
    source, done = ROOT / f"notebooks/{name}.ipynb", Path(folder) / "done.ipynb"
    environ = dict(os.environ, PYTHONPATH=str(ROOT), TPUKIT_OFFLINE="1") | (XLA if name in ON_XLA else {})
    settings = SMALL.get(name, {}) | ({} if name in ON_XLA else dict(ACCELERATOR="cpu"))
    command = [sys.executable, "-m", "papermill", source, done, "-k", "python3", "--no-progress-bar"]
    for setting in settings.keys() & papermill.inspect_notebook(str(source)).keys():
        command += ["-p", setting, str(settings[setting])]
    subprocess.run(command, cwd=folder, env=environ, check=True)
    return nbformat.read(done, 4)


def as_small_text(notebook, name: str, names: dict[str, str]) -> str:
    """Return the text of an executed notebook: pictures small, names replaced, nothing of papermill's
    metadata; the first cell says what it is. Raises ValueError where it stays larger than `LARGEST`.

    names: what no copy may hold -> what stands in its place."""
    kept = ("kernelspec", "language_info")
    notebook.metadata = {key: notebook.metadata[key] for key in kept if key in notebook.metadata}
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        if cell.get("outputs") and not VARIES.search(cell.source):
            tags = [*tags, "nbval-check-output"]
        cell.metadata = dict(tags=tags) if tags else {}
    notebook.cells[0].source = introduction(notebook.cells[0].source, name)
    for width in WIDTHS:
        text = json.dumps(with_pictures(notebook, width), indent=1, ensure_ascii=False) + "\n"
        for path, place in names.items():
            text = re.sub(rf"(?<![\w.-]){re.escape(path)}(?![\w-])", place, text)
        if len(text.encode()) <= LARGEST:
            return text
    raise ValueError(f"{name}: {len(text.encode())} bytes with its outputs, {LARGEST} are allowed")


def introduction(source: str, name: str) -> str:
    """Return the first cell of a copy: no picture, but what it is and where the notebook itself is."""
    title, _, rest = source.partition("\n")
    rest = re.sub(r"^!\[[^\]]*\]\([^)]*\)\n+", "", rest, flags=re.MULTILINE)
    note = (
        f"> A copy **with outputs**, executed on a CPU with small settings by tpukit {tpukit.__version__},"
        f" {time.strftime('%Y-%m')}; n = 1, and times are those of a shared machine. Scores on"
        f" synthetic data say nothing of real data. To run it, open `notebooks/{name}.ipynb`, or a badge."
    )
    return f"{title}\n\n{note}\n{rest}"


def with_pictures(notebook, width: int) -> dict:
    """Return the notebook as JSON, its pictures at most so wide, without what only a living page can show."""
    book = json.loads(json.dumps(notebook))
    for output in (output for cell in book["cells"] for output in cell.get("outputs", [])):
        output.get("metadata", {}).clear()
        data = output.get("data", {})
        for kind in [kind for kind in data if "widget" in kind or "javascript" in kind]:
            del data[kind]
        if "image/png" in data:
            picture = Image.open(io.BytesIO(base64.b64decode(data["image/png"])))
            picture.thumbnail((width, 10 * width))
            data["image/png"] = base64.b64encode(shrink(picture)).decode()
    return book


def shrink(picture) -> bytes:
    """Return a PIL image as a PNG of 48 colours, over white where it is transparent."""
    rgba = picture.convert("RGBA")
    rgb = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    out = io.BytesIO()
    # Maximum coverage keeps the few coloured pixels of a picture that is mostly grey.
    small = rgb.quantize(48, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    small.save(out, "PNG", optimize=True)
    return out.getvalue()


if __name__ == "__main__":
    main()
