"""One function on every core. Nothing is imported here: the command line needs the constant and not torch."""

HANG_TIMEOUT_S = 900.0  # the default of `launch` and of the command line
