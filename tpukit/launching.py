"""One function on one core, on all cores of a machine, on many hosts: `launch(train, task, run)`.

The notebook's process forks one agent, and the agent forks the cores: torchrun's elastic launcher for GPUs and CPUs,
`torch_xla.launch` for TPU cores, or a single process for SPMD. The notebook's process opens no device, so that it can launch
again. It watches the cores through the run directory (`watching.py`).
"""

import dataclasses
import datetime
import faulthandler
import functools
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Callable

from tpukit import environment, files
from tpukit.devices import open_runtime
from tpukit.errors import TpukitError
from tpukit.run import Run
from tpukit.runtime import check_batch
from tpukit.tables import GIB
from tpukit.task import Workload
from tpukit.troubles import mend_for
from tpukit.watching import Paths, Watch, end_with_parent
from tpukit.world import World

PARALLEL = ("processes", "spmd")
# Kaggle sets these for one process; several would each wait for the wrong peers.
ONE_PROCESS_VARIABLES = ("TPU_PROCESS_ADDRESSES", "CLOUD_TPU_TASK_ID")


def launch(function, task, run, *, cores=None, parallel="processes", hang_timeout_s=900.0):
    """Call `function(task, run, runtime=...)` on every core and return what rank 0's call returned.

    function: `tpukit.train`, or one like it; it may be defined in a notebook cell, as may the task. cores: all that are here
    unless given (one on a CPU, where any number of processes can be tried). parallel: "processes", one for each core, or
    "spmd", one program over all TPU cores of this host. hang_timeout_s: when no step ends for so long, every core's stack is
    shown and the launch ends; it has to be longer than the first compilation and than rank 0's scoring of an evaluation.

    On one core the function runs in this process. Under `torchrun` this process already is one of the cores. The result has to
    be something JSON can hold. Raises TpukitError when there are fewer cores than asked, when batch_size does not divide,
    or when this process has already opened the device; `CoreFailed`, within seconds and leaving no process behind, when a
    core fails or hangs.
    """
    if parallel not in PARALLEL:
        raise TpukitError(f"parallel={parallel!r}: choose one of {', '.join(PARALLEL)}")
    if hang_timeout_s <= 0:
        raise TpukitError(f"hang_timeout_s={hang_timeout_s:g}: it has to be more than 0 seconds")
    env = environment.detect()
    job = _Job(function, task, run, env, cores, hang_timeout_s)
    if environment.under_torchrun():
        return _call_under_torchrun(job, parallel)
    count = _count_cores(env, cores, parallel)
    check_batch(task.batch_size, count)
    if count == 1:
        return function(task, run, runtime=open_runtime(env, task.precision))
    _refuse_an_opened_device(env)
    if parallel == "spmd":
        agent = functools.partial(_core, dataclasses.replace(job, spmd_cores=count))
    elif env.accelerator == "tpu":
        agent = functools.partial(_start_tpu_cores, job)
    else:
        agent = functools.partial(_start_with_torchrun, job, count)
    # Of this host: several may launch one training in a folder that they share, where rank 0's lock is that of all.
    with files.held(run.path / f".launch-{socket.gethostname()}.lock"):
        return Watch(job, agent, count, processes=1 if parallel == "spmd" else count).wait()


@dataclasses.dataclass(frozen=True)
class _Job:
    """What every core needs to know."""

    function: Callable
    task: Workload
    run: Run
    env: environment.Environment
    cores: int | None
    hang_timeout_s: float
    spmd_cores: int | None = None

    @property
    def folder(self):
        return self.run.path / "cores"


# Before anything starts


def _count_cores(env, cores, parallel):
    """How many cores this host runs."""
    if cores is not None and cores < 1:
        raise TpukitError(f"cores={cores}: ask for 1 or more, or leave it out to take all")
    if parallel == "spmd" and env.accelerator not in ("tpu", "xla"):
        raise TpukitError(f"parallel='spmd' is for TPU cores; {environment.NAMES[env.accelerator]}s take 'processes'")
    if env.accelerator in ("cpu", "xla"):
        return cores or 1
    found = env.cores
    expected = environment.chips_by_bounds(env.variables) or found
    # Colab's one chip says 2,2,1 too, and works: on one core nobody waits for others.
    if env.accelerator == "tpu" and found > 1 and cores != 1 and expected != found:
        raise TpukitError(
            f"{found} TPU chips are here, but TPU_CHIPS_PER_HOST_BOUNDS={env.variables['TPU_CHIPS_PER_HOST_BOUNDS']} speaks "
            f"of {expected}, "
            "and the cores would wait for the missing ones: start a fresh session, or use cores=1"
        )
    if cores is None or cores == found:
        return found
    several_hosts = env.host == "tpu-vm" and found and cores % found == 0
    if cores > found and not several_hosts:
        env.require("tpu" if env.accelerator == "tpu" else "cuda", cores=cores)
    if env.accelerator == "tpu" and 1 < cores < found:
        raise TpukitError(
            f"asked for {cores} of {found} TPU cores: torch_xla starts one or all, so use cores=1 or cores={found}"
        )
    return found if several_hosts else cores


def _refuse_an_opened_device(env):
    import torch

    if env.accelerator == "cuda":
        opened = torch.cuda.is_initialized()
    elif env.accelerator in ("tpu", "xla"):
        import torch_xla

        opened = torch_xla._XLAC._xla_runtime_is_initialized()
    else:
        opened = False
    if opened:
        raise TpukitError(
            f"Runtime is already initialized: this kernel has already used the {environment.NAMES[env.accelerator]}, and "
            f"processes "
            "made from it cannot. Restart the session, and touch no device (a training on one core, `torch_xla.device()`, "
            "`.cuda()`) before the launch."
        )


# The agents: each runs in a process of its own and starts the cores


def _start_with_torchrun(job, count):
    """Start `count` processes on this host by torchrun's elastic launcher, and wait for them."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: whatever its name resolves to
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id="tpukit",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="fork",  # so that a function of a notebook cell is found
    )
    elastic_launch(config, _core)(job, count)


_forked_job = None


def _start_tpu_cores(job):
    """Start one process for each TPU core of this host by torch_xla, and wait for them."""
    global _forked_job
    import torch_xla

    for name in ONE_PROCESS_VARIABLES:
        os.environ.pop(name, None)
    _forked_job = job  # by the fork, because torch_xla would pickle it
    torch_xla.launch(_tpu_core, start_method="fork")


def _tpu_core(index):
    _core(_forked_job)


# In every core


def _core(job, siblings=1):
    """What every process of a launch does: call the function as one rank, and leave in the run directory how it ended.

    siblings: how many processes the agent makes from itself. All of them have to exist before one connects to it: the agent's
    store then resolves names in a thread, and a process forked at that moment would wait for the resolver's lock for ever.
    """
    end_with_parent()
    rank = _rank(job.env)
    paths = Paths(job.folder, rank)
    with open(paths.log, "w", buffering=1) as log, open(paths.stacks, "w") as stacks, open(paths.step, "wb") as steps:
        os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
        sys.stdout = sys.stderr = log  # a notebook's own would go on writing to the notebook
        faulthandler.enable(file=stacks)
        faulthandler.register(signal.SIGUSR1, file=stacks)
        # The agent ends the others so when one has failed; they are not to look as if they had died first.
        _on_sigterm(_asked_to_end)
        files.write_whole(paths.process, json.dumps(dict(pid=os.getpid())))
        while len(list(job.folder.glob("rank-*.process"))) < siblings:
            time.sleep(0.01)
        runtime = None
        try:
            run = Run(job.run.path, job.run.backup)
            run.prints = False  # the notebook's process shows log.txt
            run = run if rank == 0 else run.muted()
            runtime = _open(job, run, forked=True)
            # The notebook's process shows the stacks, and ends us.
            runtime.watch(job.hang_timeout_s, stacks, ends=False, steps=steps)
            result = job.function(job.task, run, runtime=runtime)
            if rank == 0:
                files.write_whole(job.folder / "result.json", json.dumps(result))
            paths.done.touch()
            _part()
        except BaseException as error:
            _on_sigterm(signal.SIG_IGN)  # until what happened is written down
            if isinstance(error, KeyboardInterrupt) or getattr(error, "code", None) == 128 + signal.SIGTERM:
                paths.stopped.touch()  # as it was asked to
                return
            _leave_error(paths.error, error, rank, runtime.step if runtime else None)
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()


def _open(job, run, forked):
    """Join the other ranks, open this core's device, and let rank 0 say which cores started."""
    import torch

    # OpenMP's threads do not come along in a fork, and it waits for them for ever: where the launching process may have
    # computed with torch, as in a notebook, each core's host part takes one thread. Beside an accelerator that is enough.
    one_thread = forked and (job.env.accelerator != "cpu" or "ipykernel" in sys.modules)
    torch.set_num_threads(1)
    if job.spmd_cores:
        world = World()
    else:
        world = _join(job.env, datetime.timedelta(seconds=max(600, 4 * job.hang_timeout_s)))
    if not one_thread:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world.size))
    runtime = open_runtime(job.env, job.task.precision, world=world, spmd_cores=job.spmd_cores)
    if job.cores and runtime.cores != job.cores:
        raise TpukitError(f"asked for {job.cores} cores, found {runtime.cores}: see {job.folder} for what each said")
    check_batch(job.task.batch_size, runtime.cores)
    memory = runtime.memory()
    about = [
        dict(host=socket.gethostname(), device=name, memory=memory[0][1] if memory else 0) for name in runtime.device_names()
    ]
    lines = [line for part in world.gather(about) for line in part]
    for number, line in enumerate(lines):
        size = f", {line['memory'] / GIB:.2f} GiB" if line["memory"] else ""
        share = job.task.batch_size // runtime.cores
        run.say(f"core {number}: {line['device']} on {line['host']}, {share} sample{'s' * (share > 1)} a step{size}")
    if lines:
        run.say(f"all {len(lines)} cores started")
    return runtime


def _join(env, timeout):
    """The `World` of this process; its peers are found by torchrun's variables, on TPUs by PJRT."""
    import torch.distributed as dist

    if env.accelerator == "tpu":
        import torch_xla.distributed.xla_backend  # noqa: F401  registers xla://

        dist.init_process_group("gloo", init_method="xla://", timeout=timeout)
        return World(dist.get_rank(), dist.get_world_size())
    if env.accelerator == "cuda":
        import torch

        torch.cuda.set_device(_local_rank())  # "cuda" means this GPU from here on
    dist.init_process_group("cpu:gloo,cuda:nccl" if env.accelerator == "cuda" else "gloo", timeout=timeout)
    return World(dist.get_rank(), dist.get_world_size())


def _part():
    """Leave the others after all is done; after a failure they may be gone, and waiting for them would hang."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _local_rank():
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("PJRT_LOCAL_PROCESS_RANK") or 0)


def _rank(env):
    if env.accelerator == "tpu" and "PJRT_LOCAL_PROCESS_RANK" in os.environ:
        import torch_xla.runtime as xr

        return xr.global_ordinal()
    return environment.rank()


def _on_sigterm(handler):
    if threading.current_thread() is threading.main_thread():  # only there Python allows it
        signal.signal(signal.SIGTERM, handler)


def _asked_to_end(number, frame):
    raise SystemExit(128 + number)


def _leave_error(path, error, rank, step):
    mend = "" if isinstance(error, TpukitError) else mend_for(str(error)) or ""
    found = dict(
        rank=rank,
        step=step,
        host=socket.gethostname(),
        time=time.time(),
        message=str(error) if isinstance(error, TpukitError) else "",
        traceback=traceback.format_exc(),
        mend=mend,
    )
    files.write_whole(path, json.dumps(found))


# Under torchrun


def _call_under_torchrun(job, parallel):
    """This process is one of torchrun's: join the others and call the function. torchrun watches over it."""
    from torch.distributed.elastic.multiprocessing.errors import record

    if job.env.accelerator == "tpu" or parallel == "spmd":
        raise TpukitError(
            "torchrun starts GPU processes. On TPUs run `tpukit train` itself on every host: the cores find their peers"
        )

    @record  # torchrun's report then shows the traceback of the rank that failed first
    def call():
        job.folder.mkdir(parents=True, exist_ok=True)
        rank = _rank(job.env)
        runtime = None
        with open(Paths(job.folder, rank).stacks, "w") as stacks:
            try:
                runtime = _open(job, job.run, forked=False)
                runtime.watch(job.hang_timeout_s, stacks, ends=True)
                result = job.function(job.task, job.run, runtime=runtime)
                _part()
                return result
            except Exception as error:
                step = f" in step {runtime.step + 1}" if runtime else ""
                print(f"rank {rank} on {socket.gethostname()} failed{step}: {error}", file=sys.stderr)
                raise
            finally:
                faulthandler.cancel_dump_traceback_later()

    return call()
