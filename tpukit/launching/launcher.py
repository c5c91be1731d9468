"""One function on one core, on all cores of a machine, on many hosts: `launch(train, task, run)`.

The notebook's process forks one agent, and the agent forks one process for each core (a single one for SPMD). The notebook's
process opens no device, so that it can launch again. It watches the cores through the run directory (`watching.py`).
"""

import contextlib
import copy
import dataclasses
import datetime
import errno
import faulthandler
import functools
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Callable

from tpukit.devices.distributed import World
from tpukit.devices.runtime import check_batch, check_cuda, open_runtime
from tpukit.host import environment, files
from tpukit.host.errors import TpukitError
from tpukit.host.known_errors import fix_for
from tpukit.host.tables import GIB
from tpukit.launching.supervisor import Paths, Supervisor, end_with_parent
from tpukit.runs.run import Run
from tpukit.training.task import Workload

PARALLEL = ("processes", "spmd")
# Kaggle sets these for one process; several would each wait for the wrong peers.
ONE_PROCESS_VARIABLES = ("TPU_PROCESS_ADDRESSES", "CLOUD_TPU_TASK_ID")
# What an earlier training on one chip, or a guide, leaves behind. torch_xla keeps what it finds, and all processes would open
# the same chip.
LEFTOVER_VARIABLES = (
    "TPU_VISIBLE_CHIPS",
    "TPU_VISIBLE_DEVICES",
    "TPU_PROCESS_BOUNDS",
    "TPU_CHIPS_PER_PROCESS_BOUNDS",
    "TPU_PROCESS_PORT",
    "PJRT_LOCAL_PROCESS_RANK",
    "PJRT_LOCAL_PROCESS_COUNT",
)
# Both name the same bounds; torch_xla takes the second where the first is not set.
BOUNDS = {"TPU_PROCESS_BOUNDS": "TPU_HOST_BOUNDS", "TPU_CHIPS_PER_PROCESS_BOUNDS": "TPU_CHIPS_PER_HOST_BOUNDS"}
START_TIMEOUT_S = 300.0


def launch(function, task, run, *, cores=None, parallel="processes", hang_timeout_s=900.0):
    """Call `function(task, run, runtime=...)` on every core and return what rank 0's call returned.

    function: `tpukit.train`, or one like it; it may be defined in a notebook cell, as may the task. cores: all that are here
    unless given (one on a CPU, where any number of processes can be tried). parallel: "processes", one for each core, or
    "spmd", one program over all TPU cores of this host. hang_timeout_s: when no step ends for so long, every core's stack is
    shown and the launch ends; it has to be longer than the first compilation and than rank 0's scoring of an evaluation.

    On one core the function runs in this process. Under `torchrun` this process already is one of the cores. The result has to
    be something JSON can hold. Raises TpukitError when there are fewer cores than asked, when batch_size does not divide,
    or when this process has already opened the device; `CoreFailed`, leaving no process behind, within seconds when a core
    fails, and when one hangs or has not started after START_TIMEOUT_S.
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
    if env.accelerator == "tpu":
        _wait_for_chips(run)
    processes = 1 if parallel == "spmd" else count
    with contextlib.ExitStack() as during:
        # Of this host: the hosts of a TPU slice launch one training in a folder that they share, where rank 0's lock is that of
        # all. Elsewhere another host that trains there keeps its files.
        during.enter_context(files.exclusive_lock(run.path / f".launch-{socket.gethostname()}.lock"))
        if env.host != "tpu-vm":
            with run.lock():
                pass
        # Where the cores leave their addresses for one another: no other user can read or write there, nor over a network.
        private = during.enter_context(tempfile.TemporaryDirectory(prefix="tpukit-", ignore_cleanup_errors=True))
        job = dataclasses.replace(job, store=f"{private}/store", spmd_cores=count if parallel == "spmd" else None)
        return Supervisor(job, functools.partial(_start_cores, job, processes), count, processes).wait()


@dataclasses.dataclass(frozen=True)
class _Job:
    """What every core needs to know."""

    function: Callable
    task: Workload
    run: Run
    env: environment.Environment
    cores: int | None
    hang_timeout_s: float
    store: str = ""
    spmd_cores: int | None = None

    @property
    def folder(self):
        """What the cores of this host leave; the hosts of a TPU slice share the run's disk."""
        return self.run.path / "cores" / (socket.gethostname() if self.env.host == "tpu-vm" else "")

    @property
    def start_timeout_s(self):
        """How long the cores may take to open their devices and to meet; the hosts of a TPU slice are started one by one."""
        return START_TIMEOUT_S * (2 if self.env.host == "tpu-vm" else 1)


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
            f"of {expected}, and the cores would wait for the missing ones: start a fresh session, or use cores=1"
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
            "processes forked from it cannot use it. Restart the session, and touch no device (a training on one core, "
            "`torch_xla.device()`, `.cuda()`) before the launch."
        )
    if env.accelerator == "cuda" and not _fork_can_compute():
        raise TpukitError(
            "Cannot re-initialize CUDA in forked subprocess: this kernel has already asked CUDA something "
            "(`torch.cuda.is_available()` is enough) or computed a gradient beside an accelerator, and processes forked from "
            "it cannot compute. Restart the session, and launch before anything that asks for a GPU; `tpukit.detect()` is safe."
        )


def _fork_can_compute():
    """Whether a process forked from this one could use CUDA and compute gradients. torch marks only the forked process, so one
    is asked."""
    child = multiprocessing.get_context("fork").Process(target=_compute_in_fork)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # "fork() of a multi-threaded process", as in `Supervisor.wait`
        child.start()
    child.join(20)
    if child.is_alive():
        child.kill()
        child.join()
    return child.exitcode == 0


def _compute_in_fork():
    import torch

    try:
        torch.ones(1, requires_grad=True).backward()
    except RuntimeError:  # autograd's threads did not come along
        os._exit(1)
    os._exit(torch.cuda._is_in_bad_fork())


def _wait_for_chips(run, root=Path("/"), timeout_s=60.0):
    """Wait until no other process holds a TPU chip: one that was killed can keep it for half a minute."""
    deadline, told = time.monotonic() + timeout_s, False
    while busy := [str(device) for device in sorted(root.glob("dev/vfio/[0-9]*")) if _is_busy(device)]:
        if time.monotonic() > deadline:
            raise TpukitError(
                f"Device or resource busy: another process has held {', '.join(busy)} for {timeout_s:g} s. "
                "`tpukit doctor` names it: end it, or restart the session of its notebook."
            )
        if not told:
            told = True
            run.print(f"another process still holds {', '.join(busy)}; waiting up to {timeout_s:g} s until it is free")
        time.sleep(min(1.0, timeout_s / 10))


def _is_busy(device):
    try:
        os.close(os.open(device, os.O_RDWR))
    except OSError as error:
        return error.errno == errno.EBUSY
    return False


# The agent: a process of its own, which forks the cores


def _start_cores(job, count):
    """Fork one process for each core of this host, and wait until all have ended."""
    if job.env.accelerator == "tpu":
        _clear_variables(count)
    fork, agent = multiprocessing.get_context("fork"), os.getpid()
    cores = [fork.Process(target=_forked_core, args=(job, index, count, agent)) for index in range(count)]
    for index, core in enumerate(cores):
        core.start()
        files.write_atomic(Paths(job.folder, index).process, json.dumps(dict(pid=core.pid)), durable=False)
    for core in cores:
        core.join()


def _clear_variables(count):
    """Take away what would send the processes of this host to the wrong chips and peers."""
    if "," in os.environ.get("TPU_WORKER_HOSTNAMES", ""):
        names = ONE_PROCESS_VARIABLES  # the others tell several hosts where each stands
    else:
        names = (*LEFTOVER_VARIABLES, *(ONE_PROCESS_VARIABLES if count > 1 else ()))
    for name in names:
        value = os.environ.pop(name, None)
        if value and name in BOUNDS and os.environ.get("TPU_SKIP_MDS_QUERY"):  # then torch_xla asks nobody else
            os.environ.setdefault(BOUNDS[name], value)


def _forked_core(job, index, count, agent):
    end_with_parent(agent)
    if job.env.accelerator != "tpu":
        os.environ.update(RANK=str(index), LOCAL_RANK=str(index), WORLD_SIZE=str(count))
    try:
        _core(job, index, count)
    except BaseException as error:
        if not (path := Paths(job.folder, index).error).exists():  # its log could not be opened, perhaps
            _leave_error(path, error, index, None)
        raise


# In every core


def _core(job, index, count):
    """What every process of a launch does: open its device, call the function as one rank, and leave in the run directory how
    it ended.

    index: of this process among the `count` of this host, which names its files.
    """
    paths = Paths(job.folder, index)
    with open(paths.log, "w", buffering=1) as log, open(paths.stacks, "w") as stacks, open(paths.step, "wb") as steps:
        os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
        sys.stdout = sys.stderr = log  # a notebook's own would go on writing to the notebook
        faulthandler.enable(file=stacks)
        faulthandler.register(signal.SIGUSR1, file=stacks)
        # One that is asked to end is not to look as if it had died.
        signal.signal(signal.SIGTERM, _asked_to_end)
        runtime = None
        try:
            run = copy.copy(job.run)  # which knows where Drive was mounted
            run.echo = False  # the notebook's process shows log.txt
            runtime = _open(job, run, functools.partial(_join, job, index, count), forked=True)
            run = run if runtime.world.rank == 0 else run.read_only()
            # The notebook's process shows the stacks, and ends us.
            runtime.start_watchdog(job.hang_timeout_s, stacks, ends=False, steps=steps)
            result = job.function(job.task, run, runtime=runtime)
            if runtime.world.rank == 0 or index == 0 and runtime.world.rank >= count:  # on another host, its first
                files.write_atomic(job.folder / "result.json", json.dumps(result))
            paths.done.touch()
            _part()
        except BaseException as error:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # until what happened is written down
            if isinstance(error, KeyboardInterrupt) or getattr(error, "code", None) == 128 + signal.SIGTERM:
                paths.stopped.touch()  # as it was asked to
                return
            _leave_error(paths.error, error, index, runtime)
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()


def _open(job, run, join, *, forked):
    """Join the other ranks by `join`, open this core's device, and let rank 0 say which cores started."""
    import torch

    # OpenMP's threads do not come along in a fork, and it waits for them for ever: where the launching process may have
    # computed with torch, as in a notebook, each core's host part takes one thread. Beside an accelerator that is enough.
    one_thread = forked and (job.env.accelerator != "cpu" or "ipykernel" in sys.modules)
    torch.set_num_threads(1)
    world = join()
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
        run.print(f"core {number}: {line['device']} on {line['host']}, {share} sample{'s' * (share > 1)} a step{size}")
    if lines:
        run.print(f"all {len(lines)} cores started")
    return runtime


def _join(job, index, count):
    """The `World` of one of the `count` processes that the agent forked on this host. On one host the processes meet in a file
    and talk over the loopback device alone."""
    import torch.distributed as dist

    if job.spmd_cores:
        return World()
    rank, size = _open_tpu(index, count) if job.env.accelerator == "tpu" else (index, count)
    if size > count:  # several TPU hosts find one another by PJRT
        import torch_xla.distributed.xla_backend  # noqa: F401  registers xla://

        dist.init_process_group("gloo", init_method="xla://", timeout=_timeout(job))
        return World(dist.get_rank(), dist.get_world_size())
    if sys.platform == "linux":
        os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
    store = dist.FileStore(job.store, size)
    store.set_timeout(_timeout(job))
    return _join_group(job, index, rank=rank, world_size=size, store=store)


def _open_tpu(index, count):
    """Open one of the `count` TPU chips of this host in this process, as `torch_xla.launch` does in each of its own; waits in
    libtpu for the other processes. Returns (rank, world size) over all hosts."""
    import torch_xla.runtime as xr
    from torch_xla._internal import pjrt

    pjrt.initialize_multiprocess(index, count)
    if xr.addressable_device_count() > 1:
        raise TpukitError("each chip of this TPU has two cores (v2, v3): use parallel='spmd', one program over all of them")
    return xr.global_ordinal(), xr.world_size()


def _join_group(job, local_rank, **how):
    """The `World` of this process, which meets its peers as torch.distributed is told."""
    import torch.distributed as dist

    if job.env.accelerator == "cuda":
        import torch

        check_cuda()
        torch.cuda.set_device(local_rank)  # "cuda" means this GPU from here on
    dist.init_process_group("cpu:gloo,cuda:nccl" if job.env.accelerator == "cuda" else "gloo", timeout=_timeout(job), **how)
    return World(dist.get_rank(), dist.get_world_size())


def _timeout(job):
    return datetime.timedelta(seconds=max(600, 4 * job.hang_timeout_s))


def _part():
    """Leave the others after all is done; after a failure they may be gone, and waiting for them would hang."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _asked_to_end(number, frame):
    raise SystemExit(128 + number)


def _leave_error(path, error, index, runtime):
    fix = "" if isinstance(error, TpukitError) else fix_for(str(error)) or ""
    found = dict(
        core=index,
        rank=runtime.world.rank if runtime else index,
        step=runtime.step if runtime else None,
        host=socket.gethostname(),
        time=time.time(),
        message=str(error) if isinstance(error, TpukitError) else "",
        traceback=traceback.format_exc(),
        fix=fix,
    )
    files.write_atomic(path, json.dumps(found))


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
        rank = environment.rank()
        join = functools.partial(_join_group, job, int(os.environ.get("LOCAL_RANK", 0)))
        runtime = None
        with open(Paths(job.folder, rank).stacks, "w") as stacks:
            try:
                runtime = _open(job, job.run, join, forked=False)
                runtime.start_watchdog(job.hang_timeout_s, stacks, ends=True)
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
