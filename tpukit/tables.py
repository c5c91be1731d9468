"""A small table, and sentences, that read the same in a shell and in a notebook; durations in words, and what a GiB is."""

import html
import io
import itertools
import re

GIB = 2**30


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
        head = "".join(_cell("th", name) for name in self.columns)
        rows = "".join(f"<tr>{''.join(_cell('td', value) for value in row)}</tr>" for row in self.rows)
        return f"<b>{html.escape(self.title)}</b><table><tr>{head}</tr>{rows}</table>"


def _cell(tag, text):
    whole = ";white-space:nowrap" if len(text) <= 16 else ""  # dates and names of hardware
    return f"<{tag} style='text-align:left{whole}'>{html.escape(text)}</{tag}>"


class Sentences(list):
    """Sentences, one a line. `words` like these stay as they are; nothing else in them is taken for a notebook's markup."""

    def __repr__(self):
        return "\n".join(f"- {sentence}" for sentence in self)

    def _repr_markdown_(self):
        return "\n".join("- " + "`".join(map(_escaped, s.split("`"), itertools.count())) for s in self)


def _escaped(part, index):
    """Every other part stands outside of backquotes: there, signs that a notebook takes for formulas or markup are escaped."""
    return part if index % 2 else re.sub(r"([$*_<])", r"\\\1", part)


def span(seconds):
    """A duration in words: 90 s, 2.5 min, 30.0 h, 3.0 days. Nothing for None; 0 s for what is over."""
    if seconds is None:
        return ""
    for size, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {name}"
    return f"{max(seconds, 0):.0f} s"
