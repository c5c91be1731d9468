"""What torch_tpu 0.2 keeps under private names, or changes from one torch to the next, in one place.

tests/devices/test_torch_tpu.py looks every name that is used here, and the public ones, up in the package
itself. torch_tpu is imported within, because most machines lack it."""

# It is not installed where types are checked.
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false
import atexit
import contextlib
import os
from pathlib import Path

import torch

from tpukit.host.errors import TpukitError

BACKEND = "cpu:gloo,tpu:tpu_dist"  # of torch.distributed: host memory, and the links between chips


def open_device() -> torch.device:
    """The TPU of this process, a torch.device. Raises TpukitError where torch_tpu finds none."""
    import torch_tpu  # noqa: F401  registers the device, if there is one

    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != "tpu":
        raise TpukitError(
            f"torch_tpu finds no TPU here (torch's accelerator is {accelerator}): `tpukit doctor` shows why"
        )
    return torch.device("tpu")


def is_open() -> bool:
    """Whether this process has opened the TPU, so that processes forked from it cannot."""
    import torch_tpu  # noqa: F401

    return torch.tpu.is_initialized()


def set_launch_variables(processes: int) -> None:
    """Set the variables by which the processes of this host, forked later, find each other and their
    chips."""
    import torch_tpu  # noqa: F401
    from torch.tpu.distributed import set_tpu_launch_env
    from torch_tpu._internal import env_utils

    for name, value in env_utils._resolved_values.items():
        # From an earlier launch, perhaps for other chips; torch_tpu would keep it.
        if os.environ.get(name) == value:
            del os.environ[name]
    env_utils._resolved_values.clear()
    try:
        set_tpu_launch_env(nproc_per_node=processes)
    except (RuntimeError, ValueError) as error:
        raise TpukitError(
            f"torch_tpu cannot start {processes} processes here: {error}. See `tpukit doctor`"
        ) from error
    check_launch_variables(processes)


def check_launch_variables(processes: int) -> None:
    """Raise TpukitError unless these variables are set for this number of processes: others would wait for
    chips that nobody opens."""
    addresses = os.environ.get("TORCH_TPU_SLICEBUILDER_ADDRESSES", "")
    chips = len(addresses.split(",")) if addresses else 0
    if chips != processes:
        raise TpukitError(
            f"TORCH_TPU_SLICEBUILDER_ADDRESSES names {chips} TPU chips, but {processes} processes were to"
            " run, one on each. `tpukit train` without torchrun sets it: unset it. Before torchrun run"
            ' `set -a; eval "$(python -m torch.tpu.distributed)"; set +a`, and start as many processes as it'
            " names chips"
        )


def leave_without_waiting() -> None:
    """Let this process end after an error. (torch_tpu would first wait for the other ranks, which wait for
    this one.)"""
    atexit.unregister(torch.tpu._shutdown_runtime)


def random_generator() -> torch.Generator:
    """The torch.Generator of the TPU's random numbers. (`torch.tpu.get_rng_state` refuses from torch 2.13
    on.)"""
    return torch.tpu.default_generators[torch.accelerator.current_device_index()]


def profile(folder: Path) -> contextlib.AbstractContextManager:
    """Context manager: profile the TPU and this process, for XProf in TensorBoard, in `folder`."""
    from torch_tpu._internal import profiler

    return profiler.profile(on_trace_ready=profiler.xprof_trace_handler(dir_name=str(folder)))
