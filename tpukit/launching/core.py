"""What every core of a launch does: join the others, open its device, call the function, and write how that
ended."""

import copy
import dataclasses
import datetime
import faulthandler
import gc
import itertools
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

# Parts of torch import it late. Imported while there is a process group, its functions' defaults would keep
# the group, and the group's threads abort the process when Python ends before them.
import torch.distributed.nn.functional  # noqa: F401

from tpukit.devices import add_libtpu_args, open_runtime
from tpukit.devices.distributed import World
from tpukit.devices.runtime import Runtime
from tpukit.devices.watchdog import Watchdog
from tpukit.host import environment, files
from tpukit.host.errors import TpukitError
from tpukit.host.known_errors import fix_for
from tpukit.host.tables import GIB
from tpukit.launching import tpu_chips
from tpukit.runs.run import Run
from tpukit.training.task import Task


@dataclasses.dataclass(frozen=True)
class Job:
    """What every process of a launch is given."""

    function: Callable
    task: Task
    run: Run
    env: environment.Environment
    requested_cores: int | None
    hang_timeout_s: float
    processes: int = 1
    spmd_cores: int | None = None  # how many the one process drives, with parallel="spmd"
    rendezvous: Path | None = None  # the file in which the processes meet

    @property
    def folder(self) -> Path:
        """Where the cores leave their files."""
        return self.run.path / "cores"

    def file(self, index: int, name: str) -> Path:
        """The path of what core number `index` writes: its log, step, stacks, hang or end."""
        return self.folder / f"rank-{index:02d}.{name}"


def run_core(job: Job, index: int) -> None:
    """Call the job's function as one rank, in a process of its own, which is core number `index`.

    Writes how that ended to its file `end`, as JSON: dict(outcome="done", rank), with the `result` of rank 0;
    dict(outcome="stopped") after a signal; or dict(outcome="failed", core, rank, step, time,
    description)."""
    runtime = None
    try:
        # All stay open until the process ends: faulthandler writes to its files at any moment.
        names = ("log", "step", "stacks", "hang")
        log, steps, stacks, hang = (open(job.file(index, name), "w", buffering=1) for name in names)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        sys.stdout = sys.stderr = log  # a notebook's own would continue to write to the notebook
        faulthandler.enable(file=stacks)
        faulthandler.register(signal.SIGUSR1, file=stacks)
        run = copy.copy(job.run)  # which knows where Drive was mounted
        run.echo, run.is_launched = False, True  # the notebook's process shows log.txt, and passes signals on
        world = join(job, index)
        runtime = open_core(job, run, world)
        # It does not end this process: the notebook's process does, once it has the stacks of all.
        runtime.watchdog = Watchdog(job.hang_timeout_s, hang, kills_process=False, steps=steps)
        result = job.function(job.task, run if world.rank == 0 else run.read_only(), runtime=runtime)
        ending = dict(outcome="done", rank=world.rank)
        if world.rank == 0:
            ending["result"] = json.loads(json.dumps(result))  # fails here for what JSON cannot hold
        leave_group()
    except BaseException as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # until the end is written
        ending = dict(outcome="stopped")
        if not isinstance(error, KeyboardInterrupt) and getattr(error, "code", None) != 128 + signal.SIGTERM:
            explained = f"{traceback.format_exc()}\n{fix_for(str(error)) or ''}".strip()
            ending = dict(
                outcome="failed",
                core=index,
                rank=runtime.world.rank if runtime else index,
                step=runtime.step if runtime else None,
                time=time.time(),
                description=str(error) if isinstance(error, TpukitError) else explained,
            )
    finally:
        faulthandler.cancel_dump_traceback_later()
    files.write_atomic(job.file(index, "end"), json.dumps(ending))


def open_core(job: Job, run: Run, world: World) -> Runtime:
    """Open this core's device as one rank of `world`, and let rank 0 print which cores started."""
    # OpenMP's threads do not survive a fork, and it waits for them forever: where the launching process may
    # have computed with torch, as in a notebook, each core's host part takes one thread. Next to an
    # accelerator that is enough.
    is_forked = not environment.under_torchrun()
    one_thread = is_forked and (job.env.accelerator != "cpu" or "ipykernel" in sys.modules)
    processes_here = int(os.environ.get("LOCAL_WORLD_SIZE", job.processes))  # torchrun's, or ours
    torch.set_num_threads(1 if one_thread else max(1, (os.cpu_count() or 1) // processes_here))
    runtime = open_runtime(job.env, job.task.precision, world=world, spmd_cores=job.spmd_cores)
    if job.requested_cores and runtime.cores != job.requested_cores:
        raise TpukitError(
            f"requested {job.requested_cores} cores, found {runtime.cores}: see their logs in {job.folder}"
        )
    memory = runtime.memory()
    size = f", {memory[0][1] / GIB:.2f} GiB" if memory else ""
    share = f"{job.task.batch_size // runtime.cores} samples per step"
    mine = [f"{device}, {share}{size}" for device in runtime.device_names()]
    if lines := sum(world.gather(mine), start=[]):  # rank 0 has those of all
        for number, line in enumerate(lines):
            run.print(f"core {number}: {line}")
        run.print(f"all {len(lines)} cores started")
    return runtime


# The process group


def join(job: Job, index: int) -> World:
    """The `World` of one of a launch's processes, which meet in a file and use the loopback device only."""
    by_torch_xla = job.env.accelerator == "tpu" and not job.env.uses_torch_tpu
    if job.env.accelerator == "tpu":
        tpu_chips.clear_variables(job.processes)
    if by_torch_xla:  # before `open_chip`: libtpu reads them once
        cores = job.spmd_cores or job.processes
        add_libtpu_args(job.task.libtpu_args(job.task.batch_size // cores))
    else:
        os.environ.update(RANK=str(index), LOCAL_RANK=str(index), WORLD_SIZE=str(job.processes))
        # torch_tpu opens no chip without an address; they meet in a file.
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    if job.spmd_cores:
        return World()
    rank, size = index, job.processes
    if by_torch_xla:
        rank, size = tpu_chips.open_chip(index, job.processes)
    if sys.platform == "linux":
        os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
    store = dist.FileStore(str(job.rendezvous), size)
    store.set_timeout(_group_timeout(job))
    return join_group(job, index, rank=rank, world_size=size, store=store)


_launches_under_torchrun = itertools.count()  # of this process; all ranks make the same


def join_under_torchrun(job: Job) -> World:
    """Return the `World` of one of torchrun's processes, which meet in the store of torchrun's agent.

    The names in it begin with the launch's number: torch takes the same names for each process group, and so
    reads addresses of the launch before, at which nobody listens any more."""
    store, rank, size = next(dist.rendezvous("env://"))
    store.set_timeout(_group_timeout(job))
    store = dist.PrefixStore(f"launch-{next(_launches_under_torchrun)}", store)
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    return join_group(job, local_rank, rank=rank, world_size=size, store=store)


def join_group(job: Job, local_rank: int, **of_init) -> World:
    """The `World` of this process, after it has joined the others. of_init: arguments of
    torch.distributed.init_process_group."""
    backend = "gloo"
    if job.env.accelerator == "cuda":
        from tpukit.devices import cuda

        if torch.cuda._is_in_bad_fork():
            raise TpukitError(
                "Cannot re-initialize CUDA in forked subprocess: the kernel that launched this core has"
                " already used or queried CUDA (`torch.cuda.is_available()` is enough). Restart the session,"
                " and launch before anything that uses a GPU; `tpukit.detect()` is safe."
            )
        cuda.check_cuda()
        torch.cuda.set_device(local_rank)  # "cuda" means this GPU from here on
        backend = "cpu:gloo,cuda:nccl"
    elif job.env.uses_torch_tpu:
        from tpukit.devices import torch_tpu

        torch_tpu.open_device()  # which makes its backend known to torch.distributed
        backend = torch_tpu.BACKEND
    dist.init_process_group(backend, timeout=_group_timeout(job), **of_init)
    return World(dist.get_rank(), dist.get_world_size())


def _group_timeout(job: Job) -> datetime.timedelta:
    return datetime.timedelta(seconds=max(600, 4 * job.hang_timeout_s))


def leave_group() -> None:
    """Leave the other ranks after all is done; after a failure they may be gone, and waiting for them would
    hang."""
    if dist.is_initialized():
        gc.collect()  # NCCL waits for every graph that holds one of its operations
        dist.destroy_process_group()
