"""The notebook of one session, and what Kaggle's command wants beside it.

Values get into it as Python literals; nothing else of the user's does, but the cells of a notebook."""

import ast
import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpukit.host import files
from tpukit.host.errors import TpukitError
from tpukit.tools import pack
from tpukit.tools.send import Session
from tpukit.tools.send.chain import Chain

NOTEBOOK = "notebook.ipynb"  # in a chain's folder: the user's, as it was when it was sent
KERNEL = dict(display_name="Python 3", language="python", name="python3")
SHAPES = dict(tpu="TpuV5E8", gpu="NvidiaTeslaT4", none="")  # Kaggle's names of accelerators

Cell = dict[str, Any]


def write(folder: Path, chain: Chain, session: Session, library: Cell) -> None:
    """Write session.ipynb and kernel-metadata.json into `folder`, which lies in the chain's. library: the
    cell with the packed library, for a notebook that has none."""
    settings = chain.settings[session.setting]
    cells = []
    if chain.kind == "notebook":
        cells = read_cells(folder.parent / NOTEBOOK)
        place = _after("parameters", cells)
        cells[place:place] = [_code(f"globals().update({_literal(settings)})")] if settings else []
    elif chain.kind == "task":
        given = dict(task=chain.task, settings=settings, name=chain.name, resumes=bool(session.source))
        cells = [_inside(f"train_task(**{_literal(given)})")]
    else:
        cells = [_inside(f"check_hardware(rehearse={chain.accelerator == 'none'})")]
    if not _after(pack.TAG, cells):
        cells.insert(0, dict(library))
    given = dict(accelerator=chain.accelerator, hours=session.hours)
    cells.insert(_after(pack.TAG, cells), _inside(f"watch(get_ipython(), **{_literal(given)})"))
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
    return _code(f"from tpukit.tools.send import inside\n\ninside.{call}")


def _literal(values: Mapping[str, Any]) -> str:
    """Python's text for values that JSON can hold: data, never code."""
    return repr(json.loads(json.dumps(values)))


def _code(source: str) -> Cell:
    return dict(cell_type="code", execution_count=None, metadata={}, outputs=[], source=source)


def _after(tag: str, cells: list[Cell]) -> int:
    """The place after the cell with this tag; 0 where there is none."""
    tags = [cell["metadata"].get("tags", []) for cell in cells]
    return next((place + 1 for place, given in enumerate(tags) if tag in given), 0)


# A notebook of the user's


def read_cells(path: Path) -> list[Cell]:
    """The cells of a notebook, with their source as one str and without outputs. Its metadata stay behind:
    an image that they pin has its own accelerator's packages. Raises TpukitError for another file."""
    try:
        cells = [dict(cell) for cell in json.loads(path.read_bytes())["cells"]]
        for cell in cells:
            cell["source"] = "".join(cell["source"])
            cell["metadata"] = dict(tags=[]) | cell["metadata"]
            cell["metadata"]["tags"] = list(cell["metadata"]["tags"])
            cell |= dict(outputs=[], execution_count=None) if cell["cell_type"] == "code" else {}
        return cells
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise TpukitError(f"{path} cannot be read as a notebook ({error}): name an .ipynb file") from error


def parameters(cells: list[Cell]) -> dict[str, Any]:
    """The names that the cell tagged `parameters` assigns literals to, with these; empty without the cell."""
    found, place = {}, _after("parameters", cells)
    try:
        lines = ast.parse(cells[place - 1]["source"]).body if place else []
    except (SyntaxError, ValueError, RecursionError) as error:
        raise TpukitError(f"the cell tagged `parameters` is not plain Python ({error})") from error
    for line in lines:
        match line:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                with contextlib.suppress(ValueError):
                    found[name] = ast.literal_eval(value)
    return found


def parse(name: str, text: str, known: Mapping[str, Any]) -> Any:
    """The value of a parameter, of the type that the notebook gives it. Raises TpukitError for an unknown
    name or another type."""
    if name not in known:
        among = ", ".join(known) or "no cell is tagged `parameters`"
        raise TpukitError(f"the notebook has no parameter {name!r}: {among}")
    default, value = known[name], text
    if not isinstance(default, str):
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            value = ast.literal_eval(text)
    if isinstance(default, float) and type(value) is int:
        value = float(value)
    if default is not None and type(value) is not type(default):
        raise TpukitError(f"{name} is {text!r}: give a value like the notebook's, {default!r}")
    return value
