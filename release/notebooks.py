"""`make notebooks`: writes dist/, every notebook with the library inside, so that one file is enough.

    notebooks/NAME.ipynb        ->  dist/NAME.ipynb
    notebooks/zh-CN/NAME.ipynb  ->  dist/zh-CN/NAME.ipynb

A built notebook has one more cell, collapsed, before the cell that finds tpukit: an archive of tpukit/ (tar,
xz, base85) and the lines that check and unpack it. Notebooks on impedance tomography carry the part of pyEIT
that the simulator imports too, because neither Colab nor Kaggle has it. Pictures of the notebook's texts
become part of it. Building twice gives equal bytes."""

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
FIND_CELL = "# @title tpukit: "  # how the cell that finds tpukit begins
LINE = 120  # columns of the archive's text
PYEIT_PARTS = ("pyeit/__init__.py", "pyeit/eit/", "pyeit/mesh/")

# The cell of a built notebook. It runs before tpukit can be imported: nothing but the standard library.
CELL = '''\
# @title The library, packed into this notebook
import base64, hashlib, io, tarfile, tempfile
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
        notebook = nbformat.read(source, 4)
        needs_pyeit = any("tpukit.simulate" in cell.source for cell in notebook.cells)
        embed(notebook, with_pyeit if needs_pyeit else without, source.parent)
        target = out / source.relative_to(ROOT / "notebooks")
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
    """Put the archive before the cell that finds tpukit, and the pictures of its texts, relative to `folder`,
    into them."""
    [number] = [
        n
        for n, cell in enumerate(notebook.cells)
        if cell.cell_type == "code" and cell.source.startswith(FIND_CELL)
    ]
    text = base64.b85encode(archive).decode()
    lines = "\n".join(text[start : start + LINE] for start in range(0, len(text), LINE))
    source = CELL.format(sha256=hashlib.sha256(archive).hexdigest(), text=lines).rstrip()
    # Colab, Kaggle, JupyterLab
    hidden = {"cellView": "form", "_kg_hide-input": True, "jupyter": {"source_hidden": True}}
    notebook.cells[number].metadata |= hidden
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
