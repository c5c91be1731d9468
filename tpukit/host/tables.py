"""Tables and lists of sentences for shell and notebook."""

import html
import io
import re
import shutil
from collections.abc import Iterable
from typing import Any

from tpukit.host.language import translate
from tpukit.host.text import printable

# Otherwise MathJax 2 and 3 read $...$ in a notebook as formulas.
NO_FORMULAS = 'class="tex2jax_ignore mathjax_ignore"'


class Table:
    """A title, column names and rows of values, in the language of the page: text in a terminal, HTML in a
    notebook.

    are_names: the values are names of code, which no language translates."""

    def __init__(
        self,
        title: str,
        columns: Iterable[str],
        rows: Iterable[Iterable[Any]],
        *,
        are_names: bool = False,
    ):
        self.title = _shown(title)
        self.columns = tuple(map(_shown, columns))
        as_text = _printed if are_names else _shown
        self.rows = [tuple(map(as_text, row)) for row in rows]

    def __repr__(self):
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        # `Text`, because rich would interpret markup in a str.
        table = RichTable(box=box.SIMPLE_HEAD)
        for column in self.columns:
            table.add_column(Text(column), overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(value) for value in row))
        out = io.StringIO()
        width = min(118, max(40, shutil.get_terminal_size((118, 0)).columns))
        Console(file=out, width=width, force_jupyter=False).print(table)  # in Jupyter it would display
        return "\n".join([self.title, *(line.rstrip() for line in out.getvalue().splitlines())]).rstrip()

    def as_html(self) -> str:
        head = "".join(_cell("th", name) for name in self.columns)
        body = "".join(f"<tr>{''.join(_cell('td', value) for value in row)}</tr>" for row in self.rows)
        table = f"<table><tr>{head}</tr>{body}</table>"
        return f"<div {NO_FORMULAS}><b>{html.escape(self.title)}</b>{table}</div>"

    def _repr_html_(self) -> str:
        return self.as_html()


def _shown(value: object) -> str:
    return translate(_printed(value))


def _printed(value: object) -> str:
    return "" if value is None else printable(value)


def _cell(tag: str, text: str) -> str:
    # A heading may have several lines in a narrow page; a date or a chip's name may not.
    longest = 8 if tag == "th" else 16
    whole = ";white-space:nowrap" if len(text) <= longest else ""
    wrap = "break-word" if tag == "th" else "anywhere"  # a path may break anywhere, a heading at its words
    return f"<{tag} style='text-align:left;overflow-wrap:{wrap}{whole}'>{html.escape(text)}</{tag}>"


class Sentences(list[str]):
    """Sentences, one per line. Words in `backticks` are shown as code; nothing else is markup."""

    def __repr__(self):
        return "\n".join(f"- {sentence}" for sentence in self._lines())

    def _repr_html_(self):
        # Escaped first, so that backticks can only change how text looks.
        items = (re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(line)) for line in self._lines())
        return f"<ul {NO_FORMULAS}>{''.join(f'<li>{line}</li>' for line in items)}</ul>"

    def _lines(self):
        return [translate(" ".join(printable(sentence).splitlines())) for sentence in self]


class Notice(Sentences):
    """Sentences that nobody should miss: a notebook shows them in a box."""

    def _repr_html_(self):
        box = "border:2px solid #d97706;border-radius:6px;padding:2px 12px;margin:6px 0"
        return f"<div style='{box}'>{super()._repr_html_()}</div>"
