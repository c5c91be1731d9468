"""One core, as the function that runs there sees it: `tpukit.core()`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from tpukit.devices import open_runtime
from tpukit.host import environment
from tpukit.host.errors import TpukitError
from tpukit.host.known_errors import explain_known_errors

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.optim import Optimizer
    from torch.utils.data import Dataset

    from tpukit.devices.distributed import World
    from tpukit.devices.runtime import Runtime
    from tpukit.launching.share import Share

Sample = TypeVar("Sample")

_CHANGED = (
    "Gradients changed between backward() and their average. After a clip the result is not one core's: call"
    " core.average_gradients(optimizer) first, then clip, then optimizer.step() and core.end_step()."
)


class Core:
    """This process's core, one of the cores of a launch.

        core = tpukit.core()
        for images, labels in core.share(dataset, batch_size=64).epoch(0):
            loss_of(model, images.to(core.device), labels.to(core.device)).backward()
            core.average_gradients(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            core.end_step()
        core.print("trained")

    Every rank must take the same number of steps, because a step waits for all ranks. For equal weights from
    the start, set one seed before the model is made."""

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
    averaged: WeakKeyDictionary[Optimizer, Callable[[], bool]]
    """The optimizers that `average_gradients` was given, each with its `watch_gradients`."""
    is_forked: bool
    """True if the notebook's process forked this one, and so passes signals on."""

    def __init__(self, runtime: Runtime, is_forked: bool = False):
        self.runtime, self.world, self.device = runtime, runtime.world, runtime.device
        self.rank, self.size = runtime.world.rank, runtime.world.size
        self.is_forked = is_forked
        self.averaged = WeakKeyDictionary()
        self._say_once = functools.cache(self.print)

    if not TYPE_CHECKING:  # an editor names these itself

        def __getattr__(self, name: str) -> Any:
            known = ", ".join(name for name in dir(self) if not name.startswith("_"))
            raise AttributeError(f"a core has no {name!r}; it has {known}; world has gather, broadcast")

    def print(self, *values: Any) -> None:
        """Print on rank 0 alone; `launch` shows it at once.

        Args:
            *values: what to print, as for Python's `print`."""
        if self.rank == 0:
            print(*values, flush=True)

    def share(
        self,
        dataset: Dataset[Sample],
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        **options: Any,
    ) -> Share[Sample]:
        """Return this core's part of a dataset, as a `DataLoader` whose method `epoch(number)` shuffles it.

        Args:
            dataset: of samples, with a length.
            batch_size: samples in one step, over all cores, which take equal parts of each batch. What is
                left after the last whole one is left out of that epoch.
            shuffle: whether the samples of an epoch are in random order.
            seed: of that order, the same on all cores.
            **options: of the `DataLoader`, as num_workers.

        Returns:
            The loader. Its order depends on the seed and the epoch alone.

        Raises:
            TpukitError: if the cores cannot share such batches."""
        from tpukit.launching.share import Share

        loader = Share(dataset, batch_size, self.world, shuffle, seed, **options)
        if loader.left_out:
            self.print(
                f"{loader.left_out} samples do not fill a batch of {batch_size}: left out of each epoch"
            )
        return loader

    def mean(self, value: Tensor | float) -> float:
        """Return the mean of a number over all cores, which all must call.

        Args:
            value: of this core; reading a tensor waits for the device, so once an epoch is enough.

        Returns:
            The mean, on all cores."""
        return sum(self.world.all_gather(float(value))) / self.size

    def average_gradients(self, optimizer: Optimizer, *others: Optimizer) -> None:
        """Replace each gradient by its mean over all cores, for whatever reads it next: a clip, a scaler, the
        optimizer's step. All cores must call it, after `backward()` and before the scaler's `unscale_`; for
        LBFGS in the closure. An overflow on one core becomes one of all, so that all skip the step.

        The first time, cores whose weights differ get rank 0's. A closure also ends its step, and returns the
        mean of the cores' losses, so that all stop alike.

        Args:
            optimizer: one whose parameters have gradients.
            *others: more of them."""
        from tpukit.devices.optimizers import separate_gradients  # here: it loads torch

        optimizers = optimizer, *others
        for each in optimizers:
            if each not in self.averaged:
                self._prepare(each)
            if self.averaged[each]() and self.size > 1:
                self._say_once(_CHANGED)
        separate_gradients(*optimizers)
        for each in optimizers:
            self.runtime.even_out_gradients(each)
            self.runtime.all_reduce_gradients(each)

    def _prepare(self, optimizer: Optimizer) -> None:
        """Let all cores have the same weights, and the first step be compiled like the others."""
        from tpukit.devices.optimizers import watch_gradients

        self.averaged[optimizer] = watch_gradients(optimizer)
        if self.runtime.copy_weights_of_rank_0(optimizer):
            self._say_once("The cores' weights differed and are rank 0's now: seed torch before a model")
        self.runtime.zero_optimizer_state(optimizer)

    def end_step(self) -> None:
        """End a training step: on XLA, run what was traced. The launch counts it as one step."""
        self.runtime.end_traced_step()
        self.world.heartbeat(self.world.step + 1)

    def optimizer_step(self, optimizer: Optimizer) -> None:
        """Average the gradients, update the weights and end the step, as `xm.optimizer_step` does. What
        changes gradients, as a clip or a scaler does, has to come after the average: call
        `average_gradients`, and the rest yourself.

        Args:
            optimizer: the optimizer of this core's model, after `backward()`."""
        self.average_gradients(optimizer)
        self.runtime.optimizer_step(optimizer)
        self.end_step()

    # What `Checkpoints.restore_into(..., random=core)` asks for

    def state_dict(self) -> dict[str, Any]:
        """Return the random states of all cores, on rank 0: Python's, NumPy's, torch's and the device's. All
        cores call it, because each waits for the others.

        Returns:
            dict(random: a list of them, by rank; on other ranks it is empty)."""
        self.runtime.sync()  # XLA's state moves with each
        return dict(random=self.runtime.random_states(others=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set this core's random states. If the number of cores has changed, draw other numbers, and say so.

        Args:
            state: what `state_dict` returned on rank 0."""
        self.runtime.sync()
        self.runtime.set_random_states(state["random"])
        if (before := len(state["random"])) != self.size:
            self.print(f"saved on {before} cores, resumed on {self.size}: dropout draws other numbers now")


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
@explain_known_errors()
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
