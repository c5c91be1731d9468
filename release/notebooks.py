"""`make notebooks`: writes dist/, every notebook with the library inside, so that one file is enough.

    notebooks/NAME.ipynb        ->  dist/NAME.ipynb, dist/NAME/kernel-metadata.json
    notebooks/zh-CN/NAME.ipynb  ->  dist/zh-CN/NAME.ipynb, dist/zh-CN/NAME/kernel-metadata.json

A built notebook has one more cell, collapsed, before the cell that imports tpukit: an archive of tpukit/ and
of the tasks and tools that the notebook uses (tar, xz, base85), the lines that check and unpack it, and the
choice between it and a clone around the notebook. (In notebooks/ symbolic links let a clone's notebooks
import the three packages.) Notebooks on
impedance tomography carry the part of pyEIT that the simulator imports too, because neither Colab nor Kaggle
has it. Pictures of the notebook's texts become part of it. `kaggle kernels push -p dist/NAME` reads
kernel-metadata.json, in which the owner of the id is a placeholder. Building twice gives equal bytes."""

import base64
import functools
import importlib.metadata
import json
import re
from pathlib import Path

import nbformat

from release import pack

ROOT = Path(__file__).parent.parent
IMPORT_LINE = "\nimport tpukit\n"  # of a notebook's first code cell
# A notebook's own metadata -> the name that Kaggle's command has for the accelerator
MACHINE_SHAPES = {"tpuV5e8": "TpuV5E8", "nvidiaTeslaT4": "NvidiaTeslaT4"}
OWNER = "INSERT_YOUR_USERNAME"
PYEIT_PARTS = ("pyeit/__init__.py", "pyeit/eit/", "pyeit/mesh/")


def main():
    for path in build(ROOT / "dist"):
        print(f"{path.stat().st_size / 1e3:6.0f} kB  {path}")


def build(out):
    """Build every notebook into the folder `out`. Returns the paths written."""
    written = []
    for source in sorted((ROOT / "notebooks").glob("**/*.ipynb")):
        notebook = nbformat.read(source, 4)
        embed(notebook, archive_for(notebook), source.parent)
        target = out / source.relative_to(ROOT / "notebooks")
        target.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, target)
        write_kernel_metadata(notebook, target)
        written.append(target)
    return written


def archive_for(notebook):
    """Return the archive that a notebook needs."""
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    guests = frozenset(pack.guests_of(code))
    return _archive(guests, "import simulate" in code, 'show_own("demo' in code)


@functools.cache  # the notebooks of both languages have the same
def _archive(guests, simulates, demo):
    return pack.library(guests, pyeit_files() if simulates else None, demo)


def write_kernel_metadata(notebook, path):
    """Write what `kaggle kernels push` needs to know of a built notebook.

    It goes into a folder of the notebook's name, because Kaggle's command takes one folder a notebook."""
    wanted = notebook.metadata["kaggle"]
    language = "-zh" if path.parent.name == "zh-CN" else ""
    slug = f"tpukit-{path.stem}{language}".replace("_", "-")
    metadata = dict(
        id=f"{OWNER}/{slug}",
        title=slug.replace("-", " "),  # Kaggle makes the slug from the title
        code_file=f"../{path.name}",
        language="python",
        kernel_type="notebook",
        is_private=True,
        enable_internet=wanted["isInternetEnabled"],
        enable_gpu=notebook.metadata.accelerator == "GPU",
        enable_tpu=notebook.metadata.accelerator == "TPU",
        machine_shape=MACHINE_SHAPES[wanted["accelerator"]],
        dataset_sources=[],
        kernel_sources=[],
    )
    folder = path.with_suffix("")
    folder.mkdir(exist_ok=True)
    (folder / "kernel-metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def pyeit_files():
    """Return the part of the installed pyEIT that the simulator imports, with its licence (BSD): name ->
    content."""
    found = {path.as_posix(): path for path in importlib.metadata.distribution("pyeit").files}
    code = {name: path.locate().read_bytes() for name, path in found.items() if name.startswith(PYEIT_PARTS)}
    code = {name: content for name, content in code.items() if name.endswith(".py")}
    # Not every installation has the file, so a copy of it lies here.
    return code | {"pyeit/LICENSE.txt": Path(__file__).with_name("pyeit-LICENSE.txt").read_bytes()}


def embed(notebook, archive, folder):
    """Put the archive before the cell that imports tpukit, and the pictures of the texts, relative to
    `folder`, into them."""
    [number] = [n for n, cell in enumerate(notebook.cells) if IMPORT_LINE in f"\n{cell.source}\n"]
    notebook.cells.insert(number, nbformat.from_dict(pack.cell(archive)))
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for path in re.findall(r"\]\(([^):]+\.png)\)", cell.source):
                data = base64.b64encode((folder / path).read_bytes()).decode()
                cell.source = cell.source.replace(path, f"data:image/png;base64,{data}")


if __name__ == "__main__":
    main()
