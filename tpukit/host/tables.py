"""A small table, and sentences, that read the same in a shell and in a notebook; durations in words, and what a GiB is."""

import html
import io
import re

GIB = 2**30
# What a terminal obeys instead of showing it (ESC among them), what turns text around, and halves of characters; ends of lines
# and tabs stay.
UNSHOWN = re.compile(
    r"\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


NO_FORMULAS = 'class="tex2jax_ignore mathjax_ignore"'  # for MathJax 2 and 3, which read $...$ in whatever a notebook shows


def printable(text):
    """The text as a terminal may show it, whoever wrote it: control characters stand there by their names, as \\x1b."""
    return UNSHOWN.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))


class Table:
    """title, column names, rows of values. Printed, it is drawn for a terminal, a notebook shows it as HTML."""

    def __init__(self, title, columns, rows):
        self.title, self.columns = printable(title), tuple(map(printable, columns))
        self.rows = [tuple("" if v is None else printable(v) for v in row) for row in rows]

    def __repr__(self):
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        # As `Text`, in which rich sees no markup of its own.
        table = RichTable(title=Text(self.title), box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
        for column in self.columns:
            table.add_column(Text(column), overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(value) for value in row))
        out = io.StringIO()
        Console(file=out, width=118, force_jupyter=False).print(table)  # in Jupyter it would display, not write
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).rstrip()

    def _repr_html_(self):
        head = "".join(_cell("th", name) for name in self.columns)
        rows = "".join(f"<tr>{''.join(_cell('td', value) for value in row)}</tr>" for row in self.rows)
        return f"<div {NO_FORMULAS}><b>{html.escape(self.title)}</b><table><tr>{head}</tr>{rows}</table></div>"


def _cell(tag, text):
    whole = ";white-space:nowrap" if len(text) <= 16 else ""  # dates and names of hardware
    return f"<{tag} style='text-align:left{whole}'>{html.escape(text)}</{tag}>"


class Sentences(list):
    """Sentences, one a line. `words` like these are shown as code; nothing else in them is taken for markup."""

    def __repr__(self):
        return "\n".join(f"- {sentence}" for sentence in self._lines())

    def _repr_html_(self):
        # The text is escaped before the backquotes are looked at: an odd one changes how words look, never what they are.
        said = (re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(line)) for line in self._lines())
        return f"<ul {NO_FORMULAS}>{''.join(f'<li>{line}</li>' for line in said)}</ul>"

    def _lines(self):
        return [" ".join(printable(sentence).splitlines()) for sentence in self]


def format_duration(seconds):
    """A duration in words: 90 s, 2.5 min, 30.0 h, 3.0 days. Nothing for None; 0 s for what is over."""
    if seconds is None:
        return ""
    for size, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {name}"
    return f"{max(seconds, 0):.0f} s"
