"""One function on one core or on all cores of a machine: `launch(train, task, run)`.

The notebook's process forks one process for each core (a single one for SPMD) and watches them
(supervisor.py). It opens no device itself, so that it can launch again. What a core does is in core.py;
docs/CONTRIBUTING.md lists the files of a launch."""

import dataclasses
import faulthandler
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import record

from tpukit.devices import open_runtime
from tpukit.devices.runtime import check_batch
from tpukit.devices.watchdog import Watchdog
from tpukit.host import environment, files
from tpukit.host.environment import Environment
from tpukit.host.errors import TpukitError
from tpukit.launching import HANG_TIMEOUT_S, tpu_chips
from tpukit.launching.core import Job, join_under_torchrun, leave_group, open_core
from tpukit.launching.supervisor import Supervisor, end_with_parent
from tpukit.runs.run import Run
from tpukit.training import batch_norm
from tpukit.training.task import Task

PARALLEL = ("processes", "spmd")


def launch(
    function: Callable,
    task: Task,
    run: Run,
    *,
    cores: int | None = None,
    parallel: str = "processes",
    hang_timeout_s: float = HANG_TIMEOUT_S,
) -> Any:
    """Call `function(task, run, runtime=...)` on every core and return what rank 0's call returned.

    function: `tpukit.train`, or one like it; it may be defined in a notebook cell, as may the task. cores: by
    default all of this host (one on a CPU, where any number of processes can be tried, and one GPU where each
    would see fewer than `batch_norm.MIN_SHARE` samples of a model with batch norm). parallel: "processes",
    one for each core, or "spmd", one process for all TPU cores of this host. hang_timeout_s: when no step
    completes for this long, every core's stack is shown and the launch ends; it must be longer than reading
    the dataset, the first compilation, and rank 0's scoring of an evaluation.

    On one core the function runs in this process. Under `torchrun` this process already is one of the cores.
    JSON must be able to hold the result. Raises TpukitError before anything starts; `CoreFailed`, leaving no
    process behind, when a core fails, hangs, or has not started after `supervisor.START_TIMEOUT_S`."""
    if parallel not in PARALLEL:
        raise TpukitError(f"parallel={parallel!r}: choose one of {', '.join(PARALLEL)}")
    if hang_timeout_s <= 0:
        raise TpukitError(f"hang_timeout_s={hang_timeout_s:g}: it must be more than 0 seconds")
    env = environment.detect()
    os.environ.update(environment.failed_lookups(os.environ))
    _check_one_host(env)
    job = Job(function, task, run, env, cores, hang_timeout_s)
    if environment.under_torchrun():
        return _call_under_torchrun(job, parallel)
    count = _count_cores(env, cores, parallel)
    if cores is None and env.accelerator == "cuda" and count > 1 and batch_norm.wants_one_gpu(task, count):
        run.print(
            f"training on 1 of {count} GPUs: on each, batch norm would see {task.batch_size // count} of"
            f" {task.batch_size} samples, too few for its statistics and to be faster; cores={count} uses all"
        )
        count = 1
    check_batch(task.batch_size, count)
    has_opened = _has_opened_a_device(env)
    if has_opened and count > 1:
        raise TpukitError(
            "Runtime is already initialized: this kernel has already used the"
            f" {environment.NAMES[env.accelerator]}, and processes forked from it cannot use it. Restart the"
            ' session, and use no device (a training on one core, `torch_xla.device()`, a tensor on "tpu")'
            " before the launch."
        )
    # With TPU_VISIBLE_CHIPS another training may rightly hold another chip.
    shares_the_chips = has_opened or (count == 1 and os.environ.get("TPU_VISIBLE_CHIPS"))
    if env.accelerator == "tpu" and not shares_the_chips:
        tpu_chips.wait_until_free(run)
    if count == 1:
        runtime = open_runtime(env, task.precision, libtpu_args=task.libtpu_args(task.batch_size))
        return function(task, run, runtime=runtime)
    if env.uses_torch_tpu:
        from tpukit.devices import torch_tpu

        torch_tpu.set_launch_variables(count)
    shape = dict(spmd_cores=count) if parallel == "spmd" else dict(processes=count)
    lock = files.exclusive_lock(run.path / ".launch.lock")
    # In the folder, which is this user's alone, the cores leave their addresses for each other.
    with lock, tempfile.TemporaryDirectory(prefix="tpukit-", ignore_cleanup_errors=True) as folder:
        with run.lock():  # a training on one core may be at work there
            pass
        return Supervisor(dataclasses.replace(job, rendezvous=Path(folder) / "rendezvous", **shape)).wait()


# Before anything starts


def _check_one_host(env: Environment) -> None:
    """Raise TpukitError where the environment names several hosts, of a TPU slice or of torchrun."""
    names = os.environ.get("TPU_WORKER_HOSTNAMES", "") if env.accelerator == "tpu" else ""
    hosts = max(names.count(",") + 1, int(os.environ.get("GROUP_WORLD_SIZE", "1")))
    if hosts > 1:
        raise TpukitError(f"this is one of {hosts} hosts: {tpu_chips.ONE_HOST}")


def _count_cores(env: Environment, cores: int | None, parallel: str) -> int:
    """How many cores a launch uses."""
    if cores is not None and cores < 1:
        raise TpukitError(f"cores={cores}: give 1 or more, or leave it out to use all")
    if parallel == "spmd" and (env.uses_torch_tpu or env.accelerator not in ("tpu", "xla")):
        here = "with torch_tpu" if env.uses_torch_tpu else f"on a {environment.NAMES[env.accelerator]}"
        raise TpukitError(f"parallel='spmd' is for TPU cores through torch_xla; {here} use 'processes'")
    if env.accelerator in ("cpu", "xla"):
        return cores or 1
    here = env.cores
    if cores is None or cores == here:
        return here
    if cores > here:
        env.require(env.accelerator, cores=cores)
    # torch_xla starts one or all; torch_tpu itself knows how many chips of a host are linked.
    if env.accelerator == "tpu" and cores != 1 and not env.uses_torch_tpu:
        raise TpukitError(f"requested {cores} of {here} TPU cores: use cores=1 or cores={here}")
    return cores


def _has_opened_a_device(env: Environment) -> bool:
    """Whether this process has opened the XLA device."""
    if env.accelerator not in ("tpu", "xla"):
        return False  # a core checks CUDA, see `core.join_group`: only a forked process can tell
    if env.uses_torch_tpu:
        from tpukit.devices import torch_tpu as private
    else:
        from tpukit.devices import xla_private as private
    return private.is_open()


# Under torchrun


@record  # torchrun's report then shows the traceback of the rank that failed first
def _call_under_torchrun(job: Job, parallel: str) -> Any:
    """This process is one of torchrun's: join the others and call the function. torchrun watches over it."""
    from tpukit.devices import torch_tpu

    end_with_parent(os.getppid())
    by_torch_tpu = job.env.uses_torch_tpu
    if (job.env.accelerator == "tpu" and not by_torch_tpu) or parallel == "spmd":
        raise TpukitError(
            "torchrun is for GPUs. On TPUs run `tpukit train` without it, which starts all cores of this host"
        )
    if by_torch_tpu:
        torch_tpu.check_launch_variables(int(os.environ["WORLD_SIZE"]))
        tpu_chips.clear_variables(int(os.environ["LOCAL_WORLD_SIZE"]))

    runtime = None
    try:
        world = join_under_torchrun(job)
        runtime = open_core(job, job.run, world)
        runtime.watchdog = Watchdog(job.hang_timeout_s, sys.stderr, kills_process=True)
        result = job.function(job.task, job.run, runtime=runtime)
        leave_group()
        return result
    except Exception as error:
        step = f" in step {runtime.step + 1}" if runtime else ""
        print(f"rank {environment.rank()} failed{step}: {error}", file=sys.stderr)
        if by_torch_tpu:
            torch_tpu.leave_without_waiting()
        raise
    finally:
        faulthandler.cancel_dump_traceback_later()
