"""The one kind of error that is meant for the user."""


class TpukitError(ValueError):
    """Says what was got, what is needed and what to do. The command line prints it without a traceback."""


def first_line(error):
    """The first line of what an error says, or its type where it says nothing."""
    return next(iter(str(error).splitlines()), type(error).__name__)
