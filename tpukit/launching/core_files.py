"""The files of a launch, by which its cores, which share no memory with the notebook's process, report to it.

In the run's folder:
    .launch-HOST.lock   the notebook's process holds it, so that a second launch in this run is refused
    log.txt             rank 0 appends what it prints; the notebook's process shows it
    progress.json       rank 0 replaces it; the notebook's process shows it as a progress bar
    cores/stop          the notebook's process leaves the number of the signal that it got; rank 0 reads it at each metric sync
    cores/rank-NN.*     `CoreFiles`. On a TPU VM in cores/HOST/, because the hosts of a slice may share a disk.
In a temporary folder that no other user can open:
    rendezvous          the processes of this host exchange their addresses
"""

import dataclasses
import re
from pathlib import Path

HANG_TIMEOUT_S = 900.0  # the default of `launch` and of the command line, which must not import torch for it

# What a launch leaves in its folder, all of which the next one may delete.
LEFT_BY_A_LAUNCH = re.compile(r"rank-\d+\.(log|step|stacks|hang|end)")


@dataclasses.dataclass(frozen=True)
class CoreFiles:
    """What one core writes, for the notebook's process to read. NN is its index on this host; on one host that is its rank."""

    log: Path
    """what it printed"""
    step: Path
    """the number of the last completed step, written at each step; empty until the core has started"""
    stacks: Path
    """the stack of every thread at a crash in native code, or when the notebook's process requested it by SIGUSR1"""
    hang: Path
    """the stack of every thread, written when no step has completed for hang_timeout_s; empty otherwise"""
    end: Path
    """JSON: how it ended, see `core.run_core`. Written last: a core that is gone without it was killed, or crashed."""

    @classmethod
    def of(cls, folder, index):
        return cls(*(folder / f"rank-{index:02d}.{field.name}" for field in dataclasses.fields(cls)))
