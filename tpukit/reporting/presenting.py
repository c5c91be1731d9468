"""Present something in a notebook or a shell."""

from typing import Any

from tpukit.host.tables import in_notebook
from tpukit.reporting import language


def present(thing: Any) -> None:
    """Display a table, sentences or an image in a notebook, print it in a shell."""
    thing = language.translated(thing)
    if in_notebook():
        from IPython.display import display

        display(thing)
    else:
        print(f"\n{thing}")
