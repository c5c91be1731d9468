"""Open a runtime for the accelerator. torch is imported with a runtime's class: the table of chips works
without."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

from tpukit.host.environment import Backend, Environment, release, tpu_chips, version_of
from tpukit.host.errors import TpukitError
from tpukit.host.known_errors import explain_known_errors

if TYPE_CHECKING:
    from tpukit.devices.distributed import World
    from tpukit.devices.runtime import Runtime

# Of each `Environment.backend` the module here and the class in it, both loaded when they are needed.
RUNTIMES: dict[Backend, tuple[str, str]] = {
    "cpu": ("runtime", "Runtime"),
    "cuda": ("cuda", "CUDARuntime"),
    "torch_xla": ("xla", "XLARuntime"),
    "torch_tpu": ("torch_tpu", "TorchTPURuntime"),
}
LONG_COMPILE_S = 0.5  # graphs of a few operations compile in milliseconds, and are not reported
# Those that know the flag below; an unknown flag ends the process.
LIBTPU_RELEASES = ((0, 0, 17), (0, 0, 21))
# Without it one process that opens several chips hangs (pytorch/xla #9084).
NO_LAUNCH_BARRIER = "--xla_tpu_use_enhanced_launch_barrier=false"


@explain_known_errors()
def open_runtime(env: Environment, precision: str = "auto", *, world: World | None = None) -> Runtime:
    """Return the runtime of the accelerator that `environment.detect()` found. This is where a device is
    first touched.

    world: this process among others; by default it is alone."""
    if env.accelerator == "tpu":
        if env.backend == "torch_xla":
            avoid_launch_barrier()
    elif "torch_tpu" in env.versions:
        # torch loads it, and the first backward() would ask Google's metadata server for a TPU, for minutes.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    return runtime_class(env)(env.accelerator, precision, world)


@explain_known_errors()
def runtime_class(env: Environment) -> type[Runtime]:
    """Return the class of the accelerator's runtimes. Opens no device."""
    if env.backend == "torch_xla":
        env.check_versions()
    module, name = RUNTIMES[env.backend]
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def check_micro_batches(env: Environment, count: int) -> None:
    """Raise TpukitError if gradients that are accumulated in one graph may be wrong."""
    from tpukit.devices.chips import V6E, find_chip

    if count > 1 and env.backend == "torch_xla" and find_chip(env.device_name) is V6E:
        raise TpukitError(
            f"micro_batches={count} on a {V6E.name}: torch_xla 2.8 was reported to compute wrong gradients"
            " there if a step accumulates them, and nobody has checked this step on that chip. Use"
            " micro_batches=1 with a smaller batch_size, or a v5e"
        )


def avoid_launch_barrier() -> None:
    """Give `NO_LAUNCH_BARRIER` to libtpu, which reads its flags when it opens the chips, unless the user has
    set that flag."""
    if tpu_chips():
        return  # torch_xla sets both
    # A container hides the bus. libtpu's lock would let one process of several open its chip.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    if release(version_of("libtpu") or "", 3) not in LIBTPU_RELEASES:
        return
    given = os.environ.get("LIBTPU_INIT_ARGS", "").split()
    if NO_LAUNCH_BARRIER.partition("=")[0] not in {flag.partition("=")[0] for flag in given}:
        os.environ["LIBTPU_INIT_ARGS"] = " ".join([*given, NO_LAUNCH_BARRIER])
