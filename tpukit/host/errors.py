"""Errors meant for the user."""

import contextlib
from collections.abc import Iterator

from tpukit.host.tables import printable


class TpukitError(ValueError):
    """Says what it got, what it needs and what to do. The command line prints it without a traceback."""

    def __init__(self, *args: object) -> None:
        # A notebook and tyro print them as they are, with the names of files in them.
        super().__init__(*(printable(value) if isinstance(value, str) else value for value in args))

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows in place of a traceback: the sentence."""
        return [f"{type(self).__name__}: {self}"]


class Damaged(TpukitError):
    """A file whose content is not what was written."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return next(iter(str(error).splitlines()), type(error).__name__)


@contextlib.contextmanager
def explained(what: str, kind: type[TpukitError] = TpukitError) -> Iterator[None]:
    """Context manager: raise any error of a foreign library as one of this kind that begins with `what`. A
    TpukitError stays as it is."""
    try:
        yield
    except TpukitError:
        raise
    except Exception as error:
        raise kind(f"{what}: {first_line(error)}") from error
