"""Format tables, lists of sentences and durations for shell and notebook, and make text safe to print."""

import html
import io
import re
import sys
import textwrap
from collections.abc import Iterable
from typing import Any

from tpukit.host.language import translate

GIB = 2**30
PAGE_COLUMNS = 100  # of a printed line in a notebook: pages from 1,000 pixels show them without a break
# Control characters, marks of text direction, and surrogates; newlines and tabs are allowed.
UNPRINTABLE = re.compile(
    r"\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
# Otherwise MathJax 2 and 3 read $...$ in a notebook as formulas.
NO_FORMULAS = 'class="tex2jax_ignore mathjax_ignore"'


def printable(text: object) -> str:
    """Escape a text's control characters (\\x1b), so that a terminal shows them and does not obey them."""
    return UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), str(text))


def notebook_kernel() -> Any:
    """Return this process's kernel, in which all that is displayed becomes part of a notebook; None in a
    shell."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(shell, "kernel", None)


def fit_page(text: str) -> str:
    """Wrap the lines of a text at words in a notebook, whose page would break them within words."""
    if notebook_kernel() is None:
        return text
    wrapper = textwrap.TextWrapper(PAGE_COLUMNS, break_long_words=False, break_on_hyphens=False)
    return "\n".join(map(wrapper.fill, text.split("\n")))


def say(text: object) -> None:
    """Print a text with its control characters escaped."""
    print(fit_page(printable(text)))


class Table:
    """A title, column names and rows of values, in the language of the page: text in a terminal, HTML in a
    notebook.

    are_names: the values are names of code, which no language translates."""

    def __init__(
        self,
        title: str,
        columns: Iterable[str],
        rows: Iterable[Iterable],
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
        Console(file=out, width=118, force_jupyter=False).print(table)  # in Jupyter it would display
        return "\n".join([self.title, *(line.rstrip() for line in out.getvalue().splitlines())]).rstrip()

    def _repr_html_(self):
        head = "".join(_cell("th", name) for name in self.columns)
        body = "".join(f"<tr>{''.join(_cell('td', value) for value in row)}</tr>" for row in self.rows)
        table = f"<table><tr>{head}</tr>{body}</table>"
        return f"<div {NO_FORMULAS}><b>{html.escape(self.title)}</b>{table}</div>"


def _shown(value):
    return translate(_printed(value))


def _printed(value):
    return "" if value is None else printable(value)


def _cell(tag, text):
    # A heading may have several lines in a narrow page; a date or a chip's name may not.
    longest = 8 if tag == "th" else 16
    whole = ";white-space:nowrap" if len(text) <= longest else ""
    wrap = "break-word" if tag == "th" else "anywhere"  # a path may break anywhere, a heading at its words
    return f"<{tag} style='text-align:left;overflow-wrap:{wrap}{whole}'>{html.escape(text)}</{tag}>"


class Sentences(list):
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


def format_duration(seconds: float) -> str:
    """Format a duration: 90 s, 2.5 min, 30.0 h, 3.0 days."""
    for size, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.0f} s"
