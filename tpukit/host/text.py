"""Text that is safe to print and fits a notebook's page; durations and sizes."""

import re
import sys
import textwrap
from typing import Any

GIB = 2**30
PAGE_COLUMNS = 100  # a notebook page shows a printed line this long unbroken from 1,000 pixels on
# Control characters, marks of text direction, and surrogates; newlines and tabs are allowed.
UNPRINTABLE = re.compile(
    r"\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def printable(text: object) -> str:
    """Escape a text's control characters (\\x1b), so that a terminal shows them and does not obey them."""
    return UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), str(text))


def one_line(name: object) -> str:
    """Escape the line breaks, too, of a file's name, which could otherwise look like a message."""
    return re.sub(r"[\n\r\t]", lambda match: repr(match[0])[1:-1], printable(name))


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


def format_bytes(size: float) -> str:
    """Format a number of bytes: 12 bytes, 3.4 kB, 5.6 MB, 7.8 GB."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size:.0f} bytes"


def format_duration(seconds: float) -> str:
    """Format a duration: 90 s, 2.5 min, 30.0 h, 3.0 days."""
    for size, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.0f} s"
