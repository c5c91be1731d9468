"""The command line. `commands.py` lists the commands; each imports what it needs when it runs."""

import atexit
import gc
import os
import sys
from collections.abc import Sequence

from tpukit import __version__
from tpukit.host.environment import release
from tpukit.host.errors import TpukitError, first_line, importing
from tpukit.host.text import printable

NOT_OPENED = "TPU initialization failed"  # libtpu's words


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 done, 1 an error that was explained, 2 wrong usage, 130 interrupted."""
    if argv is None:
        return _main_of_process(sys.argv[1:])
    # A notebook's stream has no such method, and takes every character.
    if reconfigure := getattr(sys.stdout, "reconfigure", None):
        reconfigure(errors="replace")
    try:
        code = _run(list(argv))
        sys.stdout.flush()
        return code or 0
    except SystemExit as end:  # tyro's, 0 after a help text, 2 for wrong usage; or a signal's
        return int(end.code or 0)
    except TpukitError as error:
        message = str(error)
        if NOT_OPENED in message and (torch_xla := sys.modules.get("torch_xla")):
            # Version 2.8 tries to open the device once more when the process ends, and aborts.
            atexit.unregister(torch_xla._prepare_to_exit)
    except ImportError as error:
        if (error.name or "").startswith("tpukit"):
            raise
        advice = "`python -m tpukit doctor` lists what is missing or broken, and how to fix it"
        message = f"{first_line(error)}. {advice}"
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # our output has no reader (`| head`); what Python still buffers goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.filename is None or isinstance(error, FileNotFoundError):  # an error of tpukit's own
            raise
        advice = "check its name and its permissions, or choose another"
        message = f"cannot use {error.filename} ({str(error.strerror).lower()}): {advice}"
    print(printable(f"tpukit: {message}"), file=sys.stderr)
    return 1


def _main_of_process(argv: list[str]) -> int:
    code = [1]  # for an error that nothing catches
    atexit.register(_leave, code)  # what is registered first is called last
    code[0] = main(argv)
    return code[0]


def _leave(code: list[int]) -> None:
    """End the process here, without taking its libraries down, where that is known to crash: with cuDNN 9.10
    and newer under torch 2.9 and older, after a convolution on a GPU. The command has done its work."""
    gc.freeze()  # Python would search all that torch_xla has loaded for cycles, which takes a second
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized() or release(torch.__version__) > (2, 9):
        return
    if (torch.backends.cudnn.version() or 0) >= 91000:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code[0])


def _run(argv: list[str]) -> int | None:
    if argv == ["--version"]:
        print(__version__)
        return 0
    if argv == ["doctor"]:  # works without tyro, which the images of Colab and Kaggle lack
        from tpukit_tools.cli.doctor import doctor

        return doctor()
    if os.environ.get("NO_COLOR"):
        os.environ.setdefault("PYTHON_TYRO_ANSI_CODES", "False")
    with importing():
        from tpukit_tools.cli.commands import run

    return run(argv)
