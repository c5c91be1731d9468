"""Present something in a notebook or a shell."""

from typing import Any

from tpukit.reporting import language


def present(thing: Any) -> None:
    """Display a table, sentences or an image in a notebook, print it in a shell."""
    thing = language.translated(thing)
    if in_notebook():
        from IPython.display import display

        display(thing)
    else:
        print(f"\n{thing}")


def in_notebook() -> bool:
    """Return True in a kernel, where all that is displayed becomes part of a notebook."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    return hasattr(get_ipython(), "kernel")
