"""The form of the older guides: a function for each core, which torch_xla or torch starts.

    torch_xla.launch(tpukit.train_core, args=(task, "outputs/mnist"))  # xmp.spawn takes the same arguments
    torch.multiprocessing.spawn(tpukit.train_core, args=(task, "outputs/mnist"), nprocs=2)

`launch` is the shorter way: it also watches the cores, and a notebook can launch again."""

import multiprocessing
import os
import sys
from pathlib import Path

from tpukit.devices import processes
from tpukit.devices.distributed import World
from tpukit.host import environment
from tpukit.host.errors import TpukitError
from tpukit.launching.job import HANG_TIMEOUT_S, Job
from tpukit.launching.joining import describe, join_group, joined
from tpukit.runs.run import Run
from tpukit.training.launch_plan import launch_plan
from tpukit.training.loop import train
from tpukit.training.task import Task


def train_core(index: int, task: Task, run_folder: str | Path) -> None:
    """Train `task` as one of the processes that `xmp.spawn`, `torch_xla.launch` or
    `torch.multiprocessing.spawn` started, in the run folder `run_folder`; a run that is there is resumed.

    index: this process's number, which they pass. On a TPU rank and number of cores come from torch_xla;
    elsewhere, on one host, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set before the spawn, as for
    torch.distributed.init_process_group("env://"). Flags that the task has for libtpu are not set: the chip
    is open already. A core that fails prints its rank, step and error, and all end."""
    env = environment.detect()
    is_opened_by_torch_xla = env.accelerator == "tpu" and not env.uses_torch_tpu
    if is_opened_by_torch_xla:
        rank, size = processes.rank_of_opened_chip()
    else:
        rank, size = _rank_by_variables(env, index)
    run = Run(run_folder)
    job = Job(train, launch_plan(task, run), env, HANG_TIMEOUT_S, processes=size)
    core = None
    try:
        world = _join(job, index, rank, size, is_opened_by_torch_xla)
        run = Run.open(run_folder, task) if world.rank == 0 else run.read_only()
        world.broadcast(0)  # before the others read what rank 0 has made
        stacks = sys.__stderr__ or sys.stderr
        with joined(job, world, stacks, kills_process=size > 1) as core:
            train(task, run, runtime=core.runtime)
    except Exception as error:
        words = f"{describe(job, index, core)} failed: {error}"
        if is_opened_by_torch_xla and size > 1:
            # torch_xla waits for the other cores, and they for this one; it ends them once this one is gone.
            print(words, file=sys.__stderr__, flush=True)
            os._exit(1)
        raise TpukitError(words) from error


def _rank_by_variables(env: environment.Environment, index: int) -> tuple[int, int]:
    world_size = os.environ.get("WORLD_SIZE", "1")
    size = int(world_size) if world_size.isdecimal() else 0
    is_alone = "WORLD_SIZE" not in os.environ and env.accelerator != "xla"
    if index >= size or (is_alone and multiprocessing.parent_process() is not None):
        raise TpukitError(
            f"process {index} of a spawn does not know how many there are: before the spawn set WORLD_SIZE,"
            " MASTER_ADDR (localhost) and MASTER_PORT (a free port) in os.environ, or use `tpukit.launch`"
        )
    return index, size


def _join(job: Job, index: int, rank: int, size: int, is_opened_by_torch_xla: bool) -> World:
    if size == 1:
        return World()
    if is_opened_by_torch_xla:
        return join_group(job, index, init_method="xla://")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(index))  # as in a launch
    return join_group(job, index, init_method="env://")
