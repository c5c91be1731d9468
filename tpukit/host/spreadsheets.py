"""Write tables for spreadsheets."""

import csv
import io
from collections.abc import Iterable
from typing import Any

from tpukit.host.text import printable


def as_csv(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return a table as CSV. Texts are escaped, and have a quote before what a spreadsheet would take for a
    formula and compute."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows(map(_csv_cell, row) for row in (columns, *rows))
    return out.getvalue()


def _csv_cell(value: Any) -> Any:
    if not isinstance(value, str):  # a negative number is no formula
        return value
    text = printable(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
