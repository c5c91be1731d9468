"""`make executed`: copies of the notebooks with their outputs, to look at before one runs anything.

Each is executed on this machine's CPU with small settings, where no dataset is given on synthetic data; its
pictures are made small, and what it says of this machine's folders and names is replaced. The copies are
written to dist/executed/, those of `KEPT` to docs/executed/ too."""

import argparse
import base64
import io
import json
import os
import re
import socket
import sys
import tempfile
import time
from pathlib import Path

import nbformat
import numpy as np
import papermill
from PIL import Image

import tpukit

ROOT = Path(__file__).parent.parent
# The CPU XLA device, which compiles as a TPU does; as in the Makefile, with less optimisation.
CHEAP = "--xla_llvm_disable_expensive_passes=true --xla_backend_optimization_level=0"
XLA = dict(PJRT_DEVICE="CPU", XLA_FLAGS=CHEAP)
# Of 32 images a batch of 16 would be two steps an epoch, and learn nothing.
INFRARED = dict(EPOCHS=12, WARM_EPOCH=2, IMAGE_SIZE=64, BATCH_SIZE=4)
# Notebook -> (settings, environment); the others run as they are.
SMALL = {
    "colab_tpu_setup": (INFRARED, XLA),
    "kaggle_tpu_v5e": (INFRARED | dict(EPOCHS=4, CORES=2), XLA),
    "colab_setup": (INFRARED, {}),
    "segment_your_own": (dict(IMAGE_SIZE=64, EPOCHS=12), {}),
    "kaggle_cdeit_tpu": (dict(SAMPLES=200, EPOCHS=2, CORES=1), {}),
    "hardware_comparison": (dict(IMAGE_SIZE=64, STEPS=5, BATCH_SIZES="4"), {}),
}
KEPT = ("mnist_quickstart", "finetune_images", "colab_tpu_setup", "segment_your_own")
LARGEST = 150_000  # bytes of a copy
WIDTHS = (760, 640, 520, 420, 340)  # pixels of its pictures: the first one that makes it small enough
HOME = "~"  # in place of this machine's folders


def main():
    parser = argparse.ArgumentParser(
        prog="python -m release.executed", description=__doc__.partition("\n")[0]
    )
    known = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"which notebooks (default: all of {', '.join(known)})"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist/executed")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs/executed")
    given = parser.parse_args()
    if unknown := set(given.names) - set(known):
        sys.exit(f"no notebook {', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    for name in given.names or known:
        started = time.perf_counter()
        text = copy(name)
        for folder in (given.out, given.docs) if name in KEPT else (given.out,):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.ipynb").write_text(text)
        took = time.perf_counter() - started
        print(f"{len(text.encode()) / 1e3:5.0f} kB  {name}, {took:.0f} s", flush=True)


def copy(name: str) -> str:
    """A notebook, executed with its small settings, as the text of a file."""
    parameters, environment = SMALL.get(name, ({}, {}))
    before = {key: os.environ.pop(key, None) for key in ("PJRT_DEVICE", "XLA_FLAGS")}
    with tempfile.TemporaryDirectory() as folder:
        try:
            os.environ.update(environment)
            notebook = execute(name, parameters, folder)
        finally:
            for key, value in before.items():
                os.environ.pop(key, None)
                os.environ.update({} if value is None else {key: value})
        names = {folder: HOME, os.path.realpath(folder): HOME}
        return as_small_text(notebook, name, names | names_of_this_machine())


def execute(name: str, parameters: dict, folder: str):
    """Run a notebook in a folder on this machine's CPU, or its CPU XLA device where PJRT_DEVICE says so.
    Returns it with its outputs."""
    source = ROOT / f"notebooks/{name}.ipynb"
    done = Path(folder) / "done.ipynb"
    wanted = dict(OUTPUTS=str(folder)) | parameters
    if not os.environ.get("PJRT_DEVICE"):
        wanted["ACCELERATOR"] = "cpu"
    known = papermill.inspect_notebook(str(source))
    os.environ["PYTHONPATH"] = str(ROOT)  # the library of this tree, from another folder
    papermill.execute_notebook(
        str(source), str(done), {key: value for key, value in wanted.items() if key in known},
        cwd=str(folder), kernel_name="python3", progress_bar=False,
    )  # fmt: skip
    return nbformat.read(done, 4)


def names_of_this_machine() -> dict[str, str]:
    """What no copy may hold -> what stands in its place: this clone, the interpreter, the home folder with
    its user's name, the folder of temporary files, and the host. The longest first, because one may lie in
    another."""
    paths = {
        str(ROOT): "~/tpukit",
        sys.prefix: "~/venv",
        sys.base_prefix: "/usr",
        str(Path.home()): HOME,
        tempfile.gettempdir(): "~/tmp",
    }
    found = {path: place for path, place in paths.items() if path not in ("/", "/usr")}
    found |= {socket.gethostname(): "host"}
    return dict(sorted(found.items(), key=lambda pair: -len(pair[0])))


def as_small_text(notebook, name: str, names: dict[str, str]) -> str:
    """The text of an executed notebook: pictures small, names replaced, nothing of papermill's metadata; the
    first cell says what it is. Raises ValueError where it stays larger than `LARGEST`."""
    notebook.metadata = {
        key: notebook.metadata[key] for key in ("kernelspec", "language_info") if key in notebook.metadata
    }
    for cell in notebook.cells:
        cell.metadata = {"tags": cell.metadata["tags"]} if cell.metadata.get("tags") else {}
    notebook.cells[0].source = introduction(notebook.cells[0].source, name)
    for width in WIDTHS:
        text = json.dumps(replaced(with_pictures(notebook, width), names), indent=1, ensure_ascii=False)
        if len(text.encode()) <= LARGEST:
            return text + "\n"
    raise ValueError(f"{name}: {len(text.encode())} bytes with its outputs, {LARGEST} are allowed")


def introduction(source: str, name: str) -> str:
    """The first cell of a copy: without the picture, with what it is and where the notebook itself is."""
    title, _, rest = source.partition("\n")
    rest = re.sub(r"^!\[[^\]]*\]\([^)]*\)\n+", "", rest, flags=re.MULTILINE)
    month = time.strftime("%Y-%m")
    note = (
        f"> A copy **with outputs**, executed on a CPU with small settings by tpukit {tpukit.__version__},"
        f" {month}; n = 1, and times are those of a shared machine. Scores on synthetic data say nothing of"
        f" real data. To run it, open the notebook itself: `notebooks/{name}.ipynb`, or a badge."
    )
    return f"{title}\n\n{note}\n{rest}"


def with_pictures(notebook, width: int) -> dict:
    """The notebook as JSON with its pictures at most so wide, without what only a living page can show."""
    book = json.loads(json.dumps(notebook))
    for output in (output for cell in book["cells"] for output in cell.get("outputs", [])):
        output.get("metadata", {}).clear()
        data = output.get("data", {})
        for kind in [kind for kind in data if "widget" in kind or "javascript" in kind]:
            del data[kind]
        if "image/png" in data:
            picture = Image.open(io.BytesIO(base64.b64decode(data["image/png"])))
            picture.thumbnail((width, 10 * width))
            data["image/png"] = base64.b64encode(shrink(picture, colours=24)).decode()
    return book


def replaced(value, names: dict[str, str], is_output: bool = False):
    """A JSON value with every name in its texts replaced, where it is a whole word or begins a path; those
    that are no paths in outputs alone, because in code they may be words. Pictures stay as they are."""
    if isinstance(value, dict):
        return {
            key: one if key == "image/png" else replaced(one, names, is_output or key == "outputs")
            for key, one in value.items()
        }
    if isinstance(value, list):
        return [replaced(one, names, is_output) for one in value]
    if isinstance(value, str):
        for name, place in names.items():
            if is_output or "/" in name:
                value = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", place, value)
    return value


def shrink(picture, colours: int) -> bytes:
    """A PIL image as a PNG of so many colours and as many greys, over white where it is transparent."""
    rgba = picture.convert("RGBA")
    picture = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    # Greys and colours apart: else the few coloured pixels of a picture that is mostly grey lose their
    # colour.
    pixels = np.asarray(picture).reshape(-1, 3)
    coloured = pixels[np.ptp(pixels, axis=1) > 12]
    entries = np.repeat(np.linspace(0, 255, colours).astype(np.uint8), 3).tolist()
    if len(coloured):
        entries += Image.fromarray(coloured[None]).quantize(colours).getpalette()[: 3 * colours]
    palette = Image.new("P", (1, 1))
    palette.putpalette(entries)
    out = io.BytesIO()
    picture.quantize(palette=palette, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return out.getvalue()


if __name__ == "__main__":
    main()
