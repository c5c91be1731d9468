"""Stop a training run when its state is complete, and a process whose parent has ended."""

import contextlib
import ctypes
import os
import signal
import threading
from typing import NoReturn

PR_SET_PDEATHSIG = 1
# A closed terminal or connection sends SIGHUP, which Windows has not.
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
AFTER_THIS_STEP = "stopping after this step, with a checkpoint; a second signal stops at once, without saving"


class StopSignal:
    """Turns the first SIGINT, SIGTERM or SIGHUP into a stop between two steps; a second one stops at once.

    says: what to print at the first one. Only the main thread can receive signals; elsewhere this does
    nothing. A signal that is ignored stays so: `nohup` ignores SIGHUP.
    """

    def __init__(self, says: str = AFTER_THIS_STEP):
        self.says = says
        self.signal: int | None = None
        self.at_step = False

    def __enter__(self):
        is_main = threading.current_thread() is threading.main_thread()
        numbers = [n for n in SIGNALS if signal.getsignal(n) != signal.SIG_IGN] if is_main else []
        self._previous = {number: signal.signal(number, self._receive) for number in numbers}
        return self

    def __exit__(self, *_):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: object) -> None:
        if self.signal is not None:
            _raise(number)
        self.signal = number
        with contextlib.suppress(OSError):  # the terminal may be gone, which is what SIGHUP says
            print(self.says)

    def check(self):
        """Raise KeyboardInterrupt or SystemExit if a signal came. Call it only when the state is complete."""
        if self.signal is not None:
            self.at_step = True
            _raise(self.signal)


def _raise(number: int) -> NoReturn:
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


def is_stop(error: BaseException) -> bool:
    """Return whether an error is what `StopSignal.check` raises."""
    codes = [128 + number for number in SIGNALS]
    return isinstance(error, KeyboardInterrupt) or getattr(error, "code", None) in codes


def end_with_parent(parent: int) -> None:
    """Let Linux end this process when its parent (a pid) ends, so that a restarted kernel leaves no core
    behind."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that was asked
        os._exit(1)
