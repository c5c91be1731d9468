"""The one kind of error that is meant for the user."""


class TpukitError(ValueError):
    """Says what was got, what is needed and what to do. The command line prints it without a traceback."""
