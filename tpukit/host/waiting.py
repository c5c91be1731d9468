"""Wait for a lock that another process holds."""

import contextlib
import fcntl
import re
import socket
import time
from pathlib import Path
from typing import BinaryIO

from tpukit.host.errors import TpukitError
from tpukit.host.text import say

POLL_S = 0.1  # between two attempts to get the lock
SAY_AFTER_S = 5.0  # then print who holds the lock
GIVE_UP_AFTER_S = 60.0  # if the holder did nothing for so long


def wait_for(file: BinaryIO, path: Path) -> None:
    """Wait for the lock of an open file, in which its holder wrote "process PID on HOST".

    After SAY_AFTER_S seconds a line says who is waited for. Raises TpukitError once the holder did nothing
    for GIVE_UP_AFTER_S seconds, because it is stopped, for instance. What one on another host does, or
    without a /proc, is not known: it counts as nothing. path: what the lock is for."""
    waited = idle = 0.0  # not by a clock, which goes on while this process is stopped
    work = said = None
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        file.seek(0)
        holder = file.read(300).decode(errors="replace")
        named = re.fullmatch(r"process (\d+) on (.*)", holder, re.DOTALL)
        before, work = work, _work_of(int(named[1])) if named and named[2] == socket.gethostname() else 0.0
        if work != before:
            idle = 0.0
        if waited >= SAY_AFTER_S and not said:
            say(said := f"waiting for {holder or 'another process'}, which is using {path}")
        if idle >= GIVE_UP_AFTER_S:
            raise TpukitError(
                f"{holder or 'another process'} is using {path}, and did nothing for {idle:.0f} s: if it is"
                " stopped, continue it (`fg`) or end it; then start again"
            )
        time.sleep(POLL_S)
        waited, idle = waited + POLL_S, idle + POLL_S


def _work_of(pid: int) -> float:
    """Return a number that changes while a process or one that it started works: ticks of the CPU, or the
    time while it waits for a disk. 0 if /proc does not tell."""
    work = 0.0
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError, ValueError):  # it may end meanwhile
            state, *values = (thread / "stat").read_text().rpartition(")")[2].split()
            if state == "D":
                return time.monotonic()
            work += int(values[10]) + int(values[11])
            work += sum(map(_work_of, map(int, (thread / "children").read_text().split())))
    return work
