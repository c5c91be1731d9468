"""The devices of a training. Opening one is here; nothing is imported before, because the table of chips needs no torch."""

from tpukit.host.errors import TpukitError


def open_runtime(env, precision="auto", *, world=None, spmd_cores=None):
    """The runtime of the accelerator that `environment.detect()` found. This is where a device is first touched.

    world: this process among others; by default it is alone. spmd_cores: run one graph over that many XLA devices.
    """
    from tpukit.devices.runtime import PRECISIONS, Runtime

    if precision not in PRECISIONS:
        raise TpukitError(f"precision={precision!r}: choose one of {', '.join(PRECISIONS)}")
    if env.accelerator == "tpu" and env.tpu_backend == "torch_tpu":
        from tpukit.devices.torch_tpu import TorchTPURuntime

        if spmd_cores:
            raise TpukitError("parallel='spmd' is torch_xla's: with torch_tpu use 'processes'")
        return TorchTPURuntime(env.accelerator, precision, world)
    if env.accelerator in ("tpu", "xla"):
        from tpukit.devices.xla import XLARuntime

        return XLARuntime(env.accelerator, precision, world, spmd_cores)
    return Runtime(env.accelerator, precision, world)
