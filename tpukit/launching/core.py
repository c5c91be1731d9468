"""One core, as the function that runs there sees it: `tpukit.core()`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from tpukit.devices import open_runtime
from tpukit.host import environment
from tpukit.host.errors import TpukitError

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

    from tpukit.devices.distributed import World
    from tpukit.devices.runtime import Runtime


class Core:
    """This process's core, one of the cores of a launch.

        core = tpukit.core()
        for images, labels in batches[core.rank :: core.size]:
            optimizer.zero_grad()
            loss_of(model, images.to(core.device), labels.to(core.device)).backward()
            core.optimizer_step(optimizer)
        core.print("trained")

    Every rank must take the same number of steps, because a step waits for all ranks, and must start from
    the same weights: set one seed, or load those of `core.world.broadcast(model.state_dict())`."""

    rank: int
    """Number of this core, from 0 to size - 1."""
    size: int
    """Number of cores in the launch."""
    device: torch.device
    """For the model and the batches."""
    world: World
    """What the ranks tell each other, see `World.all_gather` and `World.broadcast`."""
    runtime: Runtime
    """The runtime of the device."""
    is_forked: bool
    """True if the notebook's process forked this one, and so passes signals on."""

    def __init__(self, runtime: Runtime, is_forked: bool = False):
        self.runtime, self.world, self.device = runtime, runtime.world, runtime.device
        self.rank, self.size = runtime.world.rank, runtime.world.size
        self.is_forked = is_forked

    def print(self, *values: Any) -> None:
        """Print on rank 0 alone; `launch` shows it at once.

        Args:
            *values: what to print, as for Python's `print`."""
        if self.rank == 0:
            print(*values, flush=True)

    def optimizer_step(self, optimizer: Optimizer) -> None:
        """End a training step, as `xm.optimizer_step` does: average the gradients over all cores, update the
        weights, and on XLA run what was traced. The launch counts it as one step.

        Args:
            optimizer: the optimizer of this core's model, after `backward()`."""
        self.runtime.even_out_gradients(optimizer)
        self.runtime.all_reduce_gradients(optimizer)
        self.runtime.optimizer_step(optimizer)
        self.runtime.end_traced_step()
        self.world.heartbeat(self.world.step + 1)


_running: Core | None = None


def core() -> Core:
    """Return the core that this process runs on.

    Returns:
        In a function that `launch` calls, one of its cores. Elsewhere the only core, whose device is opened
        by the first call.

    Raises:
        TpukitError: if this is one of several processes that something else started."""
    return _running or _alone()


def is_running() -> bool:
    """Return whether this process is in a function that was launched."""
    return _running is not None


@functools.cache
def _alone() -> Core:
    from tpukit.devices import chip_access

    env = environment.detect()
    if (
        count := chip_access.count_started(env)
    ) > 1:  # each would train, and save, as if it were the only one
        raise TpukitError(
            f"tpukit.core(): this process is one of {count}, started by torchrun, torch_xla.launch, xmp.spawn"
            " or the like. Start your program without these, and let `tpukit.launch(function)` call the"
            " function that asks: it starts the processes itself."
        )
    return Core(open_runtime(env, "fp32"))


@contextlib.contextmanager
def running(current: Core) -> Generator[Core]:
    """Context manager: `core()` returns `current`."""
    global _running
    before, _running = _running, current
    try:
        yield current
    finally:
        _running = before
