"""`make notebooks`: writes dist/, every notebook with the library inside, so that one file is enough.

    notebooks/NAME.ipynb        ->  dist/NAME.ipynb
    notebooks/zh-CN/NAME.ipynb  ->  dist/zh-CN/NAME.ipynb

A built notebook has one more cell, collapsed, before the cell that imports tpukit: an archive of tpukit/
(tar, xz, base85), the lines that check and unpack it, and the choice between it and a clone around the
notebook. (In notebooks/ a symbolic link to tpukit/ lets a clone's notebooks import it.) Notebooks on
impedance tomography carry the part of pyEIT that the simulator imports too, because neither Colab nor Kaggle
has it. Pictures of the notebook's texts become part of it. One source can be several files, which preselect
another accelerator. Building twice gives equal bytes."""

import argparse
import base64
import hashlib
import importlib.metadata
import io
import lzma
import re
import tarfile
from pathlib import Path

import nbformat

ROOT = Path(__file__).parent.parent
IMPORT_LINE = "\nimport tpukit\n"  # of a notebook's first code cell
LINE = 120  # columns of the archive's text
# Colab and Kaggle choose the accelerator by a file's metadata: notebook -> the same for a GPU
FOR_A_GPU = {"kaggle_cdeit_tpu": "kaggle_cdeit_gpu"}
GPU = {
    "accelerator": "GPU",
    "colab": {"gpuType": "T4", "provenance": []},
    "kaggle": {"accelerator": "nvidiaTeslaT4", "isInternetEnabled": True, "isGpuEnabled": True},
}
PYEIT_PARTS = ("pyeit/__init__.py", "pyeit/eit/", "pyeit/mesh/")

# The cell of a built notebook. It runs before tpukit can be imported: nothing but the standard library.
CELL = '''\
# @title The library, packed into this notebook
import base64, hashlib, io, os, sys, tarfile, tempfile
from pathlib import Path

SHA256 = "{sha256}"
ARCHIVE = """
{text}
"""
packed = base64.b85decode("".join(ARCHIVE.split()))
if hashlib.sha256(packed).hexdigest() != SHA256:
    raise RuntimeError("the copy of tpukit in this notebook is damaged: download the notebook again")
with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
    FILES = {{member.name: tar.extractfile(member).read() for member in tar}}

def holds_all(folder):  # these files, and no other that Python could import
    found = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {{path.relative_to(folder).as_posix(): path.read_bytes() for path in found}} == FILES

try:
    home = Path.home()
    cache = home / ".cache/tpukit"
    cache.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(dir=cache))  # readable by this user alone
    EMBEDDED = new.with_name(SHA256)
    if len({{path.stat().st_uid for path in (home, cache.parent, cache, new)}}) > 1:
        new.rmdir()
        raise OSError("a part of the path is another user's")
except (OSError, RuntimeError):  # no home, or none that this user alone can write: the copy may be another's
    EMBEDDED = new = Path(tempfile.mkdtemp(prefix="tpukit-"))
if new != EMBEDDED and holds_all(EMBEDDED) and EMBEDDED.stat().st_uid == new.stat().st_uid:
    new.rmdir()
else:
    for name, content in FILES.items():
        (new / name).parent.mkdir(parents=True, exist_ok=True)
        (new / name).write_bytes(content)
    try:
        new.rename(EMBEDDED)
    except OSError:  # a folder of that name with other files is not ours to replace
        EMBEDDED = new

here = Path.cwd()
near = [path / "tpukit" for path in (here, *here.parents[:3], here / "tpukit")]
layers = [name for name in FILES if name.endswith("/__init__.py") and name.count("/") < 3]
layers = [name for name in layers if name.startswith("tpukit/")]
clones = [  # around the notebook: whole, and not another user's
    path.parent for path in near
    if all((path.parent / name).exists() for name in layers) and path.stat().st_uid == here.stat().st_uid
]
TPUKIT = str([*clones, EMBEDDED][0])
sys.path.insert(0, TPUKIT)  # for this kernel, then for the cores and shells that it starts
paths = [TPUKIT, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
'''


def main():
    parser = argparse.ArgumentParser(
        prog="python -m release.notebooks", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder to write to (default: dist)")
    for path in build(parser.parse_args().out):
        print(f"{path.stat().st_size / 1e3:6.0f} kB  {path}")


def build(out):
    """Build every notebook into the folder `out`. Returns the paths written."""
    with_pyeit = library(pyeit_files())
    without = library()
    written = []
    for source in sorted((ROOT / "notebooks").glob("**/*.ipynb")):
        text = source.read_text()
        archive = with_pyeit if "tpukit.simulate" in text else without
        books = {source.name: nbformat.reads(text, 4)}
        if other := FOR_A_GPU.get(source.stem):
            own_links = text.replace(f"{source.name})", f"{other}.ipynb)")
            books[f"{other}.ipynb"] = nbformat.reads(own_links, 4)
            books[f"{other}.ipynb"].metadata |= GPU
        for name, notebook in books.items():
            embed(notebook, archive, source.parent)
            target = out / source.parent.relative_to(ROOT / "notebooks") / name
            target.parent.mkdir(parents=True, exist_ok=True)
            nbformat.write(notebook, target)
            written.append(target)
    return written


def library(others=None):
    """tpukit/, its licence and docs/sky/ as the bytes of a tar.xz archive.

    others: dict of more files, name -> content."""
    kinds = (".py", ".csv", ".json", ".toml", ".txt")
    paths = [path for path in (ROOT / "tpukit").rglob("*") if path.suffix in kinds]
    files = {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in paths}
    files["tpukit/LICENSE"] = (ROOT / "LICENSE").read_bytes()
    for path in (ROOT / "docs/sky").glob("*.yaml"):  # which the notebook on renting shows and starts
        files[path.relative_to(ROOT).as_posix()] = path.read_bytes()
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in sorted({**files, **(others or {})}.items()):
            member = tarfile.TarInfo(name)  # neither time nor owner: equal files give equal bytes
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return lzma.compress(raw.getvalue(), preset=9 | lzma.PRESET_EXTREME)


def pyeit_files():
    """The part of the installed pyEIT that the simulator imports, with its licence (BSD): name -> content."""
    found = {path.as_posix(): path for path in importlib.metadata.distribution("pyeit").files}
    code = {name: path.locate().read_bytes() for name, path in found.items() if name.startswith(PYEIT_PARTS)}
    code = {name: content for name, content in code.items() if name.endswith(".py")}
    # Not every installation has the file, so a copy of it lies here.
    return code | {"pyeit/LICENSE.txt": Path(__file__).with_name("pyeit-LICENSE.txt").read_bytes()}


def embed(notebook, archive, folder):
    """Put the archive before the cell that imports tpukit, and the pictures of the texts, relative to
    `folder`, into them."""
    [number] = [n for n, cell in enumerate(notebook.cells) if IMPORT_LINE in f"\n{cell.source}\n"]
    text = base64.b85encode(archive).decode()
    lines = "\n".join(text[start : start + LINE] for start in range(0, len(text), LINE))
    source = CELL.format(sha256=hashlib.sha256(archive).hexdigest(), text=lines).rstrip()
    # Colab, Kaggle, JupyterLab
    hidden = {"cellView": "form", "_kg_hide-input": True, "jupyter": {"source_hidden": True}}
    metadata = dict(hidden, tags=["tpukit-archive"])
    notebook.cells.insert(number, nbformat.v4.new_code_cell(source, id="tpukit-archive", metadata=metadata))
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(
                r"(?<=\]\()[^):]+\.png(?=\))", lambda found: _as_data(folder / found[0]), cell.source
            )


def _as_data(picture):
    return "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()


if __name__ == "__main__":
    main()
