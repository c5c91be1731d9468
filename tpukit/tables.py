"""A small table that reads the same in a shell and in a notebook."""

import html
import io


class Table:
    """title, column names, rows of values. Printed, it is drawn for a terminal, a notebook shows it as HTML."""

    def __init__(self, title, columns, rows):
        self.title, self.columns = title, tuple(columns)
        self.rows = [tuple("" if v is None else str(v) for v in row) for row in rows]

    def __repr__(self):
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(title=self.title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
        for column in self.columns:
            table.add_column(column, overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(value) for value in row))
        out = io.StringIO()
        Console(file=out, width=118, force_jupyter=False).print(table)  # in Jupyter it would display, not write
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).rstrip()

    def _repr_html_(self):
        head = "".join(f"<th style='text-align:left'>{html.escape(c)}</th>" for c in self.columns)
        rows = "".join(
            "<tr>" + "".join(f"<td style='text-align:left'>{html.escape(v)}</td>" for v in row) + "</tr>" for row in self.rows
        )
        return f"<b>{html.escape(self.title)}</b><table><tr>{head}</tr>{rows}</table>"
