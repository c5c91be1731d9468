"""Open a runtime for the accelerator. torch is imported inside `open_runtime`: the table of chips works
without."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tpukit.host.environment import Environment, failed_lookups, release, tpu_chips, version_of
from tpukit.host.errors import TpukitError

if TYPE_CHECKING:
    from tpukit.devices.distributed import World
    from tpukit.devices.runtime import Runtime

LONG_COMPILE_S = 0.5  # graphs of a few operations compile in milliseconds, and are not reported
# Those that know the flag below; an unknown flag ends the process.
LIBTPU_RELEASES = ((0, 0, 17), (0, 0, 21))
# Without it one process that opens several chips hangs (pytorch/xla #9084).
NO_LAUNCH_BARRIER = "--xla_tpu_use_enhanced_launch_barrier=false"


def open_runtime(env: Environment, precision: str = "auto", *, world: World | None = None) -> Runtime:
    """Return the runtime of the accelerator that `environment.detect()` found. This is where a device is
    first touched.

    world: this process among others; by default it is alone."""
    from tpukit.devices.runtime import Runtime

    if env.accelerator == "tpu":
        os.environ.update(failed_lookups(os.environ))
    elif "torch_tpu" in env.versions:
        # torch loads it, and the first backward() would ask Google's metadata server for a TPU, for minutes.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    if env.uses_torch_tpu:
        from tpukit.devices.torch_tpu import TorchTPURuntime

        return TorchTPURuntime(env.accelerator, precision, world)
    if env.accelerator == "tpu":
        avoid_launch_barrier()
    if env.accelerator in ("tpu", "xla"):
        from tpukit.devices.xla import XLARuntime

        return XLARuntime(env.accelerator, precision, world)
    if env.accelerator == "cuda":
        from tpukit.devices.cuda import CUDARuntime

        return CUDARuntime(env.accelerator, precision, world)
    return Runtime(env.accelerator, precision, world)


def is_open(env: Environment) -> bool:
    """Return whether this process has opened the XLA device or the TPU, which processes forked from it then
    cannot use. For CUDA only a forked process can tell: see `processes.open_for_group`."""
    if env.accelerator not in ("tpu", "xla"):
        return False
    if env.uses_torch_tpu:
        from tpukit.devices import torch_tpu as private
    else:
        from tpukit.devices import xla_private as private
    return private.is_open()


def check_micro_batches(env: Environment, count: int) -> None:
    """Raise TpukitError if gradients that are accumulated in one graph may be wrong."""
    from tpukit.devices.chips import V6E, find_chip

    by_torch_xla = env.accelerator == "tpu" and not env.uses_torch_tpu
    if count > 1 and by_torch_xla and find_chip(env.device_name) is V6E:
        raise TpukitError(
            f"micro_batches={count} on a {V6E.name}: torch_xla 2.8 was reported to compute wrong gradients"
            " there if a step accumulates them, and nobody has checked this step on that chip. Use"
            " micro_batches=1 with a smaller batch_size, or a v5e"
        )


def avoid_launch_barrier() -> None:
    """Give `NO_LAUNCH_BARRIER` to libtpu, which reads its flags when it opens the chips, unless the user has
    set that flag."""
    if tpu_chips() or release(version_of("libtpu") or "", 3) not in LIBTPU_RELEASES:
        return  # a container hides the bus; torch_xla gives the flag if it sees chips there
    given = os.environ.get("LIBTPU_INIT_ARGS", "").split()
    if NO_LAUNCH_BARRIER.partition("=")[0] not in {flag.partition("=")[0] for flag in given}:
        os.environ["LIBTPU_INIT_ARGS"] = " ".join([*given, NO_LAUNCH_BARRIER])
