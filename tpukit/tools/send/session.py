"""The notebook of one session, and what Kaggle's command wants beside it.

Values get into it as Python literals; nothing else of the user's does, but the cells of a notebook."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpukit.host import files
from tpukit.tools import pack
from tpukit.tools.notebook import Cell, code_cell, place_after, read_cells
from tpukit.tools.send import Session
from tpukit.tools.send.chain import Chain

NOTEBOOK = "notebook.ipynb"  # in a chain's folder: the user's, as it was when it was sent
KERNEL = dict(display_name="Python 3", language="python", name="python3")
CHECK = """import tpukit
from tpukit.tools.doctor import hardware

hardware.check_hardware(tpukit.detect(), rehearse={rehearse})"""
SHAPES = dict(tpu="TpuV5E8", gpu="NvidiaTeslaT4", none="")  # Kaggle's names of accelerators


def write(folder: Path, chain: Chain, session: Session, library: Cell) -> None:
    """Write session.ipynb and kernel-metadata.json into `folder`, which lies in the chain's. library: the
    cell with the packed library, for a notebook that has none."""
    settings = chain.settings[session.setting]
    cells = []
    if chain.kind == "notebook":
        cells = read_cells(folder.parent / NOTEBOOK)
        place = place_after("parameters", cells)
        cells[place:place] = [code_cell(f"globals().update({_literal(settings)})")] if settings else []
    elif chain.kind == "task":
        given = dict(task=chain.task, settings=settings, name=chain.name, resumes=bool(session.source))
        cells = [_inside(f"train_task(**{_literal(given)})")]
    else:
        cells = [code_cell(CHECK.format(rehearse=chain.accelerator == "none"))]
    if not place_after(pack.TAG, cells):
        cells.insert(0, dict(library))
    given = dict(accelerator=chain.accelerator, hours=session.hours)
    cells.insert(place_after(pack.TAG, cells), _inside(f"watch(get_ipython(), **{_literal(given)})"))
    cells.append(_inside("write('done')"))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    notebook = dict(cells=cells, metadata=dict(kernelspec=KERNEL), nbformat=4, nbformat_minor=5)
    metadata = dict(
        id=session.kernel,
        title=session.kernel.rpartition("/")[2],  # of which Kaggle makes the name in the address
        code_file="session.ipynb",
        language="python",
        kernel_type="notebook",
        is_private=True,
        enable_gpu=chain.accelerator == "gpu",
        enable_tpu=chain.accelerator == "tpu",
        enable_internet=chain.internet,
        machine_shape=SHAPES[chain.accelerator],
        dataset_sources=chain.datasets,
        kernel_sources=[session.source] if session.source else [],
    )
    with files.explain_unwritable(folder):
        folder.mkdir(parents=True, exist_ok=True)
    files.write_atomic(folder / "session.ipynb", json.dumps(notebook, indent=1))
    files.write_atomic(folder / "kernel-metadata.json", json.dumps(metadata, indent=1))


def _inside(call: str) -> Cell:
    """A cell that calls a function of inside.py."""
    return code_cell(f"from tpukit.tools.send import inside\n\ninside.{call}")


def _literal(values: Mapping[str, Any]) -> str:
    """Python's text for values that JSON can hold: data, never code."""
    return repr(json.loads(json.dumps(values)))
