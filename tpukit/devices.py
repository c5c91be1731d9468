"""Which runtime a device gets."""

from tpukit.errors import TpukitError
from tpukit.runtime import PRECISIONS, Runtime
from tpukit.xla import XLARuntime


def open_runtime(env, precision="auto", *, world=None, spmd_cores=None):
    """The runtime of the accelerator that `environment.detect()` found. This is where a device is first touched.

    world: this process among others, alone unless given. spmd_cores: run one program over so many XLA devices.
    """
    if precision not in PRECISIONS:
        raise TpukitError(f"precision={precision!r}: choose one of {', '.join(PRECISIONS)}")
    if env.accelerator in ("tpu", "xla"):
        return XLARuntime(env.accelerator, precision, world, spmd_cores)
    return Runtime(env.accelerator, precision, world)
