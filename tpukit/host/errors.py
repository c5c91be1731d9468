"""The one kind of error that is meant for the user."""

from tpukit.host.tables import printable


class TpukitError(ValueError):
    """Names what was found, what is needed and what to do. The command line prints it without a traceback."""

    def __str__(self) -> str:
        return printable(super().__str__())  # a notebook prints it as it is, with the names of files in it


class Damaged(TpukitError):
    """A file whose content is not what was written."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type where it has none."""
    return next(iter(str(error).splitlines()), type(error).__name__)
