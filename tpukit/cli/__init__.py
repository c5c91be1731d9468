"""The command line. `commands.py` lists the commands; each imports what it needs when it runs."""

import os
import sys

from tpukit import __version__
from tpukit.host.errors import TpukitError, first_line
from tpukit.host.tables import printable


def main(argv=None):
    """Entry point. Returns the exit code: 0 done, 1 an error that was explained, 2 wrong usage, 130 interrupted."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0  # functions that Python users call too return what they made
    except TpukitError as error:
        print(printable(f"tpukit: {error}"), file=sys.stderr)
        return 1
    except ImportError as error:
        if (error.name or "").startswith("tpukit"):
            raise
        install = f" Install it with: {sys.executable} -m pip install tyro." if error.name == "tyro" else ""
        advice = "`python -m tpukit doctor` lists what is missing or broken, and how to fix it"
        print(printable(f"tpukit: {first_line(error)}.{install} {advice}"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output is gone (`| head`); what Python still buffers goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(argv):
    if argv == ["--version"]:
        print(__version__)
        return 0
    if argv == ["doctor"]:  # works without tyro, which the images of Colab and Kaggle lack
        from tpukit.cli.doctor import doctor

        return doctor()
    from tpukit.cli.commands import run

    try:
        return run(argv or ["--help"])
    except SystemExit as end:  # tyro's: 0 after a help text, 2 for wrong usage
        return end.code if argv else 2
