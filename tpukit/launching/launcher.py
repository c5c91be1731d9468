"""One function on one core or on all cores of a machine: `launch(function, *args)`.

The notebook's process forks one process for each core and watches them (supervisor.py). It opens no device
itself, so that it can launch again. What a core does is in core_process.py."""

import dataclasses
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Never, TypeVar, TypeVarTuple

from tpukit.devices import open_runtime, runtime_class
from tpukit.host import environment
from tpukit.host.environment import Environment
from tpukit.host.errors import TpukitError
from tpukit.launching.core import Core, is_running, running
from tpukit.launching.job import HANG_TIMEOUT_S, Job, LaunchedCall, portable

Args = TypeVarTuple("Args")
Result = TypeVar("Result")


def launch(
    function: Callable[[*Args], Result],
    *args: *Args,
    cores: int | None = None,
    hang_timeout_s: float | None = None,
    **unknown: Never,
) -> Result:
    """Call `function(*args)` on every core and return what rank 0's call returned.

    On one core the function runs in this process. On several, each core gets a process of its own, forked
    from this one, which shows what rank 0 prints and passes interrupts on.

    Args:
        function: any function, even one of a notebook cell; `tpukit.core()` tells it which core it runs on. A
            function of a task and a run, like `tpukit.train`, gets the keyword `runtime`.
        *args: arguments of the function.
        cores: number of cores; by default all of this host: one on a CPU, where any number of processes can
            be tried, and one GPU if more would not serve a task.
        hang_timeout_s: seconds without a completed step after which every core's stack is shown and the
            launch ends, not counting a core's compilations. It must be longer than reading the dataset.
            By default 900, which for a plain function count from its first step on, see `Core.end_step`.
        **unknown: none; keywords of the function go into a `functools.partial`.

    Returns:
        What the function returned on rank 0. From several cores it may hold numbers, strings, arrays and
        tensors, which then lie on the CPU, in lists, tuples and dicts; None takes the place of anything else,
        with a sentence.

    Raises:
        TpukitError: before anything starts, if these cores cannot be used as requested.
        CoreFailed: if a core fails, hangs, or has not started after `Job.start_timeout_s`. No process is
            left behind."""
    if not callable(function):
        raise TpukitError(f"launch needs a function, not {function!r:.40}: launch(f, x), not launch(f(x))")
    if unknown:
        raise TpukitError(
            f"launch has no option {', '.join(unknown)}: bind your function's by functools.partial"
        )
    if is_running():
        raise TpukitError("launch in a launched function, whose cores are taken: call the function itself")
    if hang_timeout_s is not None and hang_timeout_s <= 0:
        raise TpukitError(f"hang_timeout_s={hang_timeout_s:g}: it must be more than 0 seconds")
    if environment.TORCHRUN in os.environ:
        raise TpukitError(
            "this process was started by torchrun: start your program without torchrun, because tpukit starts"
            " the processes itself"
        )
    env = environment.detect()
    environment.check_one_host(env)
    plan = describe_call(args)
    from_start = plan.trains or hang_timeout_s is not None
    job = Job(function, plan, env, hang_timeout_s or HANG_TIMEOUT_S, from_start=from_start)
    count = _count_cores(env, cores)
    if cores is None and env.accelerator == "cuda" and count > 1 and (why := plan.why_one_gpu(count)):
        plan.say(f"using 1 of {count} GPUs: {why}; cores={count} uses all")
        count = 1
    plan.check(function, count)
    if env.accelerator in ("cpu", "xla") and environment.chips_here(os.environ):
        plan.say(f"the TPU here is not used: this runs on {env.device_name}")
    _check_device(env, count, plan.say)
    if count == 1:
        with running(Core(open_runtime(env, plan.precision))) as core:
            result = job.call(core)
            portable(result, core)  # says what several cores would not return
            return result
    return _call_in_processes(job, count)


def describe_call(args: tuple[Any, ...]) -> LaunchedCall:
    """Return the plan of a call with these arguments: what the first one's method `for_launch(*others)`
    returns, as a task's does for a run; otherwise a plain function's."""
    plan = None
    if args and hasattr(args[0], "for_launch"):
        plan = args[0].for_launch(*args[1:])
    return plan or LaunchedCall(arguments=lambda core: (args, {}))


def _count_cores(env: Environment, cores: int | None) -> int:
    """Return how many cores a launch uses."""
    if cores is not None and cores < 1:
        raise TpukitError(f"cores={cores}: give 1 or more, or leave it out to use all")
    if env.accelerator in ("cpu", "xla"):
        return cores or 1
    if cores is None or cores == env.cores:
        return env.cores
    if cores > env.cores:
        env.require(env.accelerator, cores=cores)
    # torch_xla starts one or all; other backends themselves know how many devices of a host are linked.
    if env.backend == "torch_xla" and cores != 1:
        raise TpukitError(f"requested {cores} of {env.cores} TPU cores: use cores=1 or cores={env.cores}")
    return cores


def _check_device(env: Environment, count: int, say: Callable[[str], None]) -> None:
    """Wait until no other process holds the TPU. Raises TpukitError if this process holds the device that
    several cores are to open."""
    # Only XLA devices are asked: the class is not loaded for a CPU or a GPU, whose cores load it themselves.
    has_opened = env.accelerator in ("tpu", "xla") and runtime_class(env).is_open()
    if has_opened and count > 1:
        raise TpukitError(
            "Runtime is already initialized: this kernel has already used the"
            f" {environment.NAMES[env.accelerator]}, and processes forked from it cannot use it. Restart the"
            " session, and use no device (a training run on one core, `torch_xla.device()`, a tensor on"
            ' "tpu") before the launch.'
        )
    if env.accelerator == "tpu" and not has_opened:
        from tpukit.devices import chip_access

        chip_access.wait_until_free(say)


def _call_in_processes(job: Job, count: int) -> Any:
    """Call the job's function on several cores, in forked processes. Return rank 0's result."""
    from tpukit.launching.supervisor import Supervisor

    if job.env.accelerator == "tpu":
        runtime_class(job.env).set_launch_variables(count)
    # In `private`, which is this user's alone, the cores leave their addresses for each other.
    private = tempfile.TemporaryDirectory(prefix="tpukit-", ignore_cleanup_errors=True)
    with job.plan.reserve() as folder, private as meeting:
        rendezvous = Path(meeting) / "rendezvous"
        job = dataclasses.replace(job, folder=folder, rendezvous=rendezvous, processes=count)
        return Supervisor(job).wait()
