"""A process that hangs says where, and can be ended: `Watchdog`."""

import faulthandler
import os
import time
from typing import IO


class Watchdog:
    """Writes every thread's Python stack to the open file `stacks` after timeout_s seconds without a
    `heartbeat`.

    kills_process: also end this process then. steps: an open file that always holds the step of the last
    heartbeat. waits_for_first_step: watch from the first step on, not from now."""

    def __init__(
        self,
        timeout_s: float,
        stacks: IO[str],
        *,
        kills_process: bool,
        steps: IO[str] | None = None,
        waits_for_first_step: bool = False,
    ):
        self.timeout_s, self.stacks, self.kills_process = timeout_s, stacks, kills_process
        self.steps, self.armed_at = steps, float("-inf")
        self.waits_for_first_step = waits_for_first_step
        self.heartbeat(0)

    def heartbeat(self, step: int) -> None:
        if self.steps:
            os.pwrite(self.steps.fileno(), b"%20d" % step, 0)
        if self.waits_for_first_step and step == 0:
            return
        now = time.monotonic()
        if now - self.armed_at > 1:  # arming starts a thread, so at most once a second
            self.armed_at = now
            faulthandler.dump_traceback_later(self.timeout_s, file=self.stacks, exit=self.kills_process)
