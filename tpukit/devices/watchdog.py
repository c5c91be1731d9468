"""`Watchdog`: a process that hangs reports where, and can be ended."""

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Callable
from typing import IO


class Watchdog:
    """Writes every thread's Python stack to the open file `stacks` after timeout_s seconds without a
    `heartbeat`, without those in which `is_compiling()` is true.

    kills_process: also end this process then. steps: an open file that always holds the step of the last
    heartbeat, and then what else a `World` writes. from_start: watch from now on, not
    from the first step."""

    def __init__(
        self,
        timeout_s: float,
        stacks: IO[str],
        *,
        kills_process: bool,
        steps: IO[str] | None = None,
        from_start: bool = True,
        is_compiling: Callable[[], bool] = lambda: False,
    ):
        self.timeout_s, self.stacks, self.kills_process = timeout_s, stacks, kills_process
        self.steps, self.armed_at = steps, float("-inf")
        self.from_start, self.is_compiling = from_start, is_compiling
        self.ended = threading.Event()
        self.heartbeat(0)
        # A hang that lets no thread run is not extended, and so reported.
        threading.Thread(target=self._extend, daemon=True).start()

    def _extend(self) -> None:
        while not self.ended.wait(min(10, self.timeout_s / 4)):
            if self.armed_at > 0 and self.is_compiling():
                self._arm()

    def _arm(self) -> None:
        self.armed_at = time.monotonic()
        faulthandler.dump_traceback_later(self.timeout_s, file=self.stacks, exit=self.kills_process)

    def close(self) -> None:
        """Watch no longer."""
        self.ended.set()
        faulthandler.cancel_dump_traceback_later()

    def write(self, number: int, position: int) -> None:
        if self.steps:
            with contextlib.suppress(OSError):  # only a message would name it
                os.pwrite(self.steps.fileno(), b"%20d" % number, position)

    def heartbeat(self, step: int) -> None:
        self.write(step, 0)
        if step == 0 and not self.from_start:
            return
        if time.monotonic() - self.armed_at > 1:  # arming starts a thread, so at most once a second
            self._arm()
