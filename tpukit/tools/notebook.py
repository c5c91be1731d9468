"""A notebook as JSON: its cells, and the parameters that it can be given."""

import ast
import contextlib
import json
from pathlib import Path
from typing import Any

from tpukit.host.errors import TpukitError

Cell = dict[str, Any]
SCALARS = (str, int, float, bool, type(None))


def code_cell(source: str) -> Cell:
    return dict(cell_type="code", execution_count=None, metadata={}, outputs=[], source=source)


def place_after(tag: str, cells: list[Cell]) -> int:
    """The place after the cell with this tag; 0 where there is none."""
    tags = [cell["metadata"].get("tags", []) for cell in cells]
    return next((place + 1 for place, given in enumerate(tags) if tag in given), 0)


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
    """The names to which the cell tagged `parameters` assigns a number, a text, a bool or None, with their
    values; empty without the cell."""
    found, place = {}, place_after("parameters", cells)
    try:
        lines = ast.parse(cells[place - 1]["source"]).body if place else []
    except (SyntaxError, ValueError, RecursionError) as error:
        raise TpukitError(f"the cell tagged `parameters` is not plain Python ({error})") from error
    for line in lines:
        match line:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                with contextlib.suppress(ValueError):
                    found[name] = ast.literal_eval(value)
    return {name: value for name, value in found.items() if isinstance(value, SCALARS)}
