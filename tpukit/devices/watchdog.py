"""A process that hangs says where, and can be ended: `Watchdog`."""

import faulthandler
import os
import time


class Watchdog:
    """Writes every thread's Python stack to the open file `stacks` after timeout_s seconds without a
    `heartbeat`.

    kills_process: also end this process then. steps: an open file that always holds the step of the last
    heartbeat."""

    def __init__(self, timeout_s, stacks, *, kills_process, steps=None):
        self.timer = dict(timeout=timeout_s, file=stacks, exit=kills_process)
        self.steps, self.armed_at = steps, float("-inf")

    def heartbeat(self, step):
        if self.steps:
            os.pwrite(self.steps.fileno(), b"%20d" % step, 0)
        now = time.monotonic()
        if now - self.armed_at > 1:  # arming starts a thread, so at most once a second
            self.armed_at = now
            faulthandler.dump_traceback_later(**self.timer)
