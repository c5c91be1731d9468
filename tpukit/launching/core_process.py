"""The life of a core in a launch: join the others, open its device, call the function, and write how that
ended."""

import contextlib
import datetime
import faulthandler
import gc
import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Generator
from typing import IO, Any

import torch
import torch.distributed as dist

# Parts of torch import it late. Imported while there is a process group, its functions' defaults would keep
# the group, and the group's threads abort the process when Python ends before them.
import torch.distributed.nn.functional  # noqa: F401  # pyright: ignore[reportUnusedImport]
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from tpukit.devices import avoid_launch_barrier, chip_access, open_runtime, runtime_class
from tpukit.devices.distributed import World
from tpukit.devices.runtime import Runtime
from tpukit.devices.watchdog import Watchdog
from tpukit.host import files
from tpukit.host.errors import TpukitError
from tpukit.host.known_errors import fix_for
from tpukit.host.signals import is_stop
from tpukit.host.text import GIB
from tpukit.launching.core import Core, running
from tpukit.launching.job import PRINTED, Job, portable


def run_core(job: Job, index: int) -> None:
    """Call the job's function as one rank, in a process of its own, which is core number `index`.

    Writes rank 0's result to its file `result`, and how the call ended to its file `end`, as JSON:
    dict(outcome="done", core=index, alone), see `_StepsAlone`; dict(outcome="stopped") after a signal; or
    dict(outcome="failed", where, time, description)."""
    core = None
    try:
        # All stay open until the process ends: faulthandler writes to its files at any moment.
        names = ("log", "step", "stacks", "hang")
        log, steps, stacks, hang = (
            open(job.file(index, name), "w", buffering=1, errors="replace") for name in names
        )
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        before: Any = sys.stdout, sys.stderr
        sys.stdout = sys.stderr = log  # a notebook's own would continue to write to the notebook
        faulthandler.enable(file=stacks)
        faulthandler.register(signal.SIGUSR1, file=stacks)
        # Neither this nor the watchdog ends the process: the notebook's does, once it has the stacks of all.
        faulthandler.dump_traceback_later(job.start_timeout_s, file=hang)
        world = join(job, index)
        if world.rank == 0:
            sys.stdout = open(job.folder / PRINTED, "a", buffering=1, encoding="utf-8", errors="replace")
            write = log.write
            log.write = lambda text: (sys.stdout.write(text), sys.stdout.flush(), write(text))[2]
        for stream, now in zip(before, (sys.stdout, sys.stderr)):  # a logging handler, for one, has kept it
            stream.write, stream.flush = now.write, now.flush
        with joined(job, world, hang, kills_process=False, steps=steps) as core:
            counted = None if job.plan.trains else _StepsAlone(core)
            result = portable(job.call(core), core)
            if world.rank == 0:
                torch.save(result, job.file(index, "result"))
            alone = counted and counted.end()
        ending: dict[str, Any] = dict(outcome="done", core=index, alone=alone)
    except BaseException as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # until the end is written
        ending = _ending(error, describe(job, index, core))
    faulthandler.cancel_dump_traceback_later()
    files.write_atomic(job.file(index, "end"), json.dumps(ending))


class _StepsAlone:
    """Counts the optimizer steps whose gradients a core has not averaged."""

    def __init__(self, core: Core):
        self.core, self.count, self.optimizer = core, 0, None
        self.collectives = _count_collectives(core.runtime.accelerator)
        register_optimizer_step_post_hook(self._note)

    def _note(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer not in self.core.averaged:
            self.count += 1
            self.optimizer = optimizer  # kept alive: the function's own is gone when it returns

    def end(self) -> tuple[int, int] | None:
        """Return (count, a number that is the same on all cores unless each trained alone), or None without
        such steps."""
        optimizer, self.optimizer = self.optimizer, None
        if optimizer is None or optimizer in self.core.averaged:
            return None
        is_silent = _count_collectives(self.core.runtime.accelerator) == self.collectives
        return self.count, self.core.rank if is_silent else self.core.runtime.checksum(optimizer)


def _count_collectives(accelerator: str) -> float:
    """Return how many collectives this process has taken part in, DDP's among them. NaN, which equals
    nothing, if that is unknown: without a group, and on a TPU, whose links torch does not see."""
    group: Any = dist.group.WORLD
    return math.nan if group is None or accelerator == "tpu" else group._get_sequence_number_for_group()


def _ending(error: BaseException, where: str) -> dict[str, Any]:
    """Return how a core ended, if by this error: stopped by a signal, or failed."""
    if is_stop(error):
        return dict(outcome="stopped")
    description = str(error)
    if not isinstance(error, TpukitError):
        description = f"{traceback.format_exc()}\n{fix_for(description) or ''}".strip()
    return dict(outcome="failed", where=where, time=time.time(), description=description)


def describe(job: Job, index: int, core: Core | None) -> str:
    """Describe where this process's core, number `index`, is; None before it has started."""
    return job.describe(index, core.world.step, core.rank) if core else job.describe(index, None)


@contextlib.contextmanager
def joined(job: Job, world: World, stacks: IO[str], **watch: Any) -> Generator[Core]:
    """Context manager: open this process's device as one rank of `world`, and leave the others at the end.

    stacks, watch: arguments of the `Watchdog`."""
    try:
        core = Core(open_core(job, world), is_forked=job.rendezvous is not None)
        faulthandler.cancel_dump_traceback_later()  # it has started
        watch |= dict(from_start=job.from_start, is_compiling=core.runtime.is_compiling)
        world.watchdog = Watchdog(job.hang_timeout_s, stacks, **watch)
        with running(core):
            yield core
        # Not after a failure: the others may be gone, and waiting for them would hang.
        if dist.is_initialized():
            gc.collect()  # NCCL waits for every graph that holds one of its operations
            dist.destroy_process_group()
    finally:
        faulthandler.cancel_dump_traceback_later()
        if world.watchdog:
            world.watchdog.close()


def open_core(job: Job, world: World) -> Runtime:
    """Open this core's device as one rank of `world`, and let rank 0 print which cores started."""
    # OpenMP's threads do not survive a fork, and it waits for them forever: the launching process may have
    # computed with torch. One is enough next to an accelerator.
    torch.set_num_threads(1)
    runtime = open_runtime(job.env, job.plan.precision, world=world)
    memory = runtime.memory()
    size = f", {memory[0][1] / GIB:.2f} GiB" if memory else ""
    mine = f"{runtime.device_name()}{size}"
    if lines := world.gather(mine):  # rank 0 has those of all
        for number, line in enumerate(lines):
            job.plan.say(f"core {number}: {line}")
        job.plan.say(f"all {len(lines)} cores started")
    return runtime


# The process group


def join(job: Job, index: int) -> World:
    """Return the `World` of one of a launch's processes, which meet in a file and use the loopback device
    only."""
    rank, size = index, job.processes
    if job.env.accelerator == "tpu":
        chip_access.clear_variables()
    if (job.env.accelerator, job.env.backend) == ("tpu", "torch_xla"):
        avoid_launch_barrier()  # before `open_chip`: libtpu reads its flags once
        rank, size = chip_access.open_chip(index, size)
    else:
        os.environ.update(RANK=str(index), LOCAL_RANK=str(index), WORLD_SIZE=str(size))
        # They meet in a file, but a chip may not open without an address.
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    if sys.platform == "linux":
        os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
    # torch has types for neither.
    store = dist.FileStore(str(job.rendezvous), size)  # pyright: ignore[reportPrivateImportUsage]
    store.set_timeout(_group_timeout(job))  # pyright: ignore[reportUnknownMemberType]
    return join_group(job, index, rank=rank, world_size=size, store=store)


def join_group(job: Job, local_rank: int, **init_args: Any) -> World:
    """Return the `World` of this process, after it has joined the others. init_args: of
    torch.distributed.init_process_group."""
    backend = runtime_class(job.env).open_for_group(local_rank)
    dist.init_process_group(backend, timeout=_group_timeout(job), **init_args)
    return World(dist.get_rank(), dist.get_world_size())


def _group_timeout(job: Job) -> datetime.timedelta:
    return datetime.timedelta(seconds=max(600, 4 * job.hang_timeout_s))
