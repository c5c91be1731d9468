"""The form of the older guides: a function for each core, which torch_xla starts.

    torch_xla.launch(tpukit.train_core, args=(task, "outputs/mnist"))  # xmp.spawn takes the same arguments

`launch` is the shorter way: it also watches the cores, and a notebook can launch again."""

import os
import sys
from pathlib import Path

from tpukit.devices import chip_access
from tpukit.devices.distributed import World
from tpukit.host import environment
from tpukit.host.errors import TpukitError
from tpukit.launching.core_process import describe, join_group, joined
from tpukit.launching.job import HANG_TIMEOUT_S, Job
from tpukit.runs.run import Run
from tpukit.training.launched_call import launched_call
from tpukit.training.loop import train
from tpukit.training.task import Task


def train_core(index: int, task: Task, run_folder: str | Path) -> None:
    """Train `task` as one of the processes that `xmp.spawn` or `torch_xla.launch` started. Flags that the
    task has for libtpu are not set: the chip is open already. A core that fails prints its rank, step and
    error, and all end.

    Args:
        index: this process's number, which they pass.
        task: what to train.
        run_folder: folder of the run; a run that is there is resumed.

    Raises:
        TpukitError: if the processes are not torch_xla's, or the only one fails."""
    env = environment.detect()
    if env.backend != "torch_xla":
        raise TpukitError("train_core is for torch_xla's processes; here use tpukit.launch")
    _, size = chip_access.rank_of_opened_chip()
    run = Run(run_folder)
    job = Job(train, launched_call(task, run), env, HANG_TIMEOUT_S, processes=size)
    core = None
    try:
        world = join_group(job, index, init_method="xla://") if size > 1 else World()
        run = Run.open(run_folder, task) if world.rank == 0 else run.read_only()
        world.broadcast(0)  # before the others read what rank 0 has made
        stacks = sys.__stderr__ or sys.stderr
        with joined(job, world, stacks, kills_process=size > 1) as core:
            train(task, run, runtime=core.runtime)
    except Exception as error:
        words = f"{describe(job, index, core)} failed: {error}"
        if size > 1:
            # torch_xla waits for the other cores, and they for this one; it ends them once this one is gone.
            print(words, file=sys.__stderr__, flush=True)
            os._exit(1)
        raise TpukitError(words) from error
