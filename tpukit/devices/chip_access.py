"""A TPU chip for each process of a host: the variables that say which, chips that are still busy, and opening
one by torch_xla."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from tpukit.host.environment import ONE_HOST, TORCHRUN, Environment
from tpukit.host.errors import TpukitError
from tpukit.host.known_errors import explain_known_errors

# Both name the same bounds; torch_xla reads the second if the first is not set.
BOUNDS = {
    "TPU_PROCESS_BOUNDS": "TPU_HOST_BOUNDS",
    "TPU_CHIPS_PER_PROCESS_BOUNDS": "TPU_CHIPS_PER_HOST_BOUNDS",
}
# What an earlier training run on one chip, or a guide, leaves behind. torch_xla keeps what it finds, and all
# processes would open the same chip.
LEFTOVER_VARIABLES = (
    *BOUNDS,
    "TPU_VISIBLE_CHIPS",
    "TPU_VISIBLE_DEVICES",
    "TPU_PROCESS_PORT",
    "PJRT_LOCAL_PROCESS_RANK",
    "PJRT_LOCAL_PROCESS_COUNT",
)
# Kaggle sets these for one process; several would each wait for the wrong peers.
ONE_PROCESS_VARIABLES = ("TPU_PROCESS_ADDRESSES", "CLOUD_TPU_TASK_ID")


def clear_variables() -> None:
    """Remove from the environment what would send the processes of this host to the wrong chips and peers."""
    for name in LEFTOVER_VARIABLES + ONE_PROCESS_VARIABLES:
        value = os.environ.pop(name, None)
        asks_google = not os.environ.get("TPU_SKIP_MDS_QUERY")  # torch_xla, if a name is not set
        if value and name in BOUNDS and not asks_google:
            os.environ.setdefault(BOUNDS[name], value)


def wait_until_free(say: Callable[[str], None], root: Path = Path("/"), timeout_s: float = 60.0) -> None:
    """Wait until no other process holds a TPU chip: one that was killed can keep it for half a minute. say:
    prints why."""
    deadline, was_told = time.monotonic() + timeout_s, False
    while busy := [str(device) for device in sorted(root.glob("dev/vfio/[0-9]*")) if is_busy(device)]:
        held = ", ".join(busy)
        if time.monotonic() > deadline:
            raise TpukitError(
                f"Device or resource busy: another process has held {held} for {timeout_s:g} s. "
                "`tpukit doctor` names it: end it, or restart the session of its notebook."
            )
        if not was_told:
            say(f"another process still holds {held}; waiting up to {timeout_s:g} s until it is free")
        was_told = True
        time.sleep(min(1.0, timeout_s / 10))


def is_busy(device: Path) -> bool:
    try:
        os.close(os.open(device, os.O_RDWR))
    except OSError as error:
        return error.errno == errno.EBUSY
    return False


def count_started(env: Environment) -> int:
    """Return how many processes torchrun, torch.distributed or torch_xla has made of this program; 1 if it is
    alone. Opens no device."""
    if TORCHRUN in os.environ:
        return int(os.environ["WORLD_SIZE"])
    if dist.is_initialized():
        return dist.get_world_size()
    if env.backend == "torch_xla":
        import torch_xla.runtime as xr

        return xr.world_size()
    return 1


@explain_known_errors()
def open_chip(index: int, processes: int) -> tuple[int, int]:
    """Open one of this host's chips in this process, as `torch_xla.launch` does in each of its processes;
    waits in libtpu for the others. Returns (rank, world size)."""
    from torch_xla._internal import pjrt

    pjrt.initialize_multiprocess(index, processes)
    rank, size = rank_of_opened_chip()
    if size != processes:  # each would train a model of its own
        cause = f"core {index} sees {size} of {processes} cores: the chips are not linked"
        raise TpukitError(f"{cause}. Start a fresh session and set no variable TPU_*, or use cores=1")
    return rank, size


def rank_of_opened_chip() -> tuple[int, int]:
    """Return (rank, world size) of a process that has opened its chip."""
    import torch_xla.distributed.xla_backend  # noqa: F401  registers xla:// for `init_process_group`
    import torch_xla.runtime as xr

    if xr.world_size() > xr.local_process_count():
        cores = f"{xr.world_size()} cores, of which this host has {xr.local_process_count()}"
        raise TpukitError(f"found {cores}: {ONE_HOST}")
    return xr.global_ordinal(), xr.world_size()
