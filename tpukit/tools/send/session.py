"""The notebook of one session, and what Kaggle's command wants beside it.

Values get into it as Python literals; nothing else of the user's does, but the cells of a notebook."""

import ast
import json
import keyword
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpukit.host import files
from tpukit.host.errors import TpukitError
from tpukit.tools.send import Session, kaggle, pack
from tpukit.tools.send.chain import Chain

NOTEBOOK = "notebook.ipynb"  # in a chain's folder: the user's, as it was when it was sent
KERNEL = dict(display_name="Python 3", language="python", name="python3")

Cell = dict[str, Any]


def write(folder: Path, chain: Chain, session: Session) -> None:
    """Write session.ipynb and kernel-metadata.json into `folder`, which lies in the chain's."""
    settings = chain.settings[session.setting]
    first = _call("watch", "get_ipython()", accelerator=chain.accelerator, hours=session.hours)
    if chain.kind == "notebook":
        cells = _with_parameters(read_cells(folder.parent / NOTEBOOK), settings)
        place = next((n + 1 for n, cell in enumerate(cells) if pack.TAG in _tags(cell)), 0)
        cells.insert(place, first)
    elif chain.kind == "task":
        name = chain.run_name(session.setting)
        given = dict(task=chain.task, settings=settings, name=name, resumes=session.source is not None)
        cells = [first, _call("train_task", **given)]
    else:
        cells = [first, _call("check_hardware", rehearse=chain.accelerator == "none")]
    if not any(pack.TAG in _tags(cell) for cell in cells):
        cells.insert(0, pack.cell(pack.library()))
    cells.append(_call("finish"))
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
        machine_shape=kaggle.SHAPES.get(chain.accelerator, ""),
        dataset_sources=chain.datasets,
        competition_sources=[],
        kernel_sources=[session.source] if session.source else [],
    )
    with files.explain_unwritable(folder):
        folder.mkdir(parents=True, exist_ok=True)
    files.write_atomic(folder / "session.ipynb", json.dumps(notebook, indent=1))
    files.write_atomic(folder / "kernel-metadata.json", json.dumps(metadata, indent=1))


def _call(function: str, *first: str, **values: Any) -> Cell:
    """A cell that calls a function of inside.py. values: what JSON can hold."""
    given = ", ".join([*first, *([f"**{json.loads(json.dumps(values))!r}"] if values else [])])
    return _code(f"from tpukit.tools.send import inside\n\ninside.{function}({given})")


def _code(source: str) -> Cell:
    return dict(cell_type="code", execution_count=None, metadata={}, outputs=[], source=source)


def _tags(cell: Cell) -> list:
    metadata = cell.get("metadata")
    tags = metadata.get("tags") if isinstance(metadata, dict) else None
    return tags if isinstance(tags, list) else []


# A notebook of the user's


def read_cells(path: Path) -> list[Cell]:
    """The cells of a notebook, with their source as one str and without outputs. Its metadata stay behind:
    an image that they pin has its own accelerator's packages. Raises TpukitError for another file."""
    try:
        cells = [dict(cell) for cell in json.loads(path.read_bytes())["cells"]]
        for cell in cells:
            cell["source"] = "".join(cell["source"])
            cell |= dict(outputs=[], execution_count=None) if cell["cell_type"] == "code" else {}
        return cells
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise TpukitError(f"{path} cannot be read as a notebook ({error}): name an .ipynb file") from error


def parameters(cells: list[Cell]) -> dict[str, Any]:
    """The names that the cell tagged `parameters` assigns literals to, with these; empty without the cell."""
    found = {}
    for cell in _tagged(cells):
        try:
            tree = ast.parse(cell["source"])
        except (SyntaxError, ValueError, RecursionError) as error:
            raise TpukitError(f"the cell tagged `parameters` is not plain Python ({error})") from error
        for line in tree.body:
            match line:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    try:
                        found[name] = ast.literal_eval(value)
                    except ValueError:
                        continue
    return found


def parse(name: str, text: str, known: Mapping[str, Any]) -> Any:
    """The value of a parameter, of the type that the notebook gives it. Raises TpukitError for an unknown
    name or another type."""
    if name not in known:
        among = ", ".join(known) or "no cell is tagged `parameters`"
        raise TpukitError(f"the notebook has no parameter {name!r}: {among}")
    default = known[name]
    if isinstance(default, str):
        return text
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = text
    if isinstance(default, float) and type(value) is int:
        value = float(value)
    if default is not None and type(value) is not type(default):
        raise TpukitError(f"{name} is {text!r}: give a value like the notebook's, {default!r}")
    return value


def _tagged(cells: list[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell["cell_type"] == "code" and "parameters" in _tags(cell)][:1]


def _with_parameters(cells: list[Cell], values: Mapping[str, Any]) -> list[Cell]:
    """The cells with one more after the cell of the parameters, which assigns these values."""
    if wrong := [name for name in values if not name.isidentifier() or keyword.iskeyword(name)]:
        raise TpukitError(f"{wrong[0]!r} cannot be the name of a parameter")
    if values:
        place = cells.index(_tagged(cells)[0]) + 1
        lines = [f"{name} = {json.loads(json.dumps(value))!r}" for name, value in values.items()]
        cells.insert(place, _code("\n".join(lines)))
    return cells
