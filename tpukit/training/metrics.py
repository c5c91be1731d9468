"""Metrics of the training steps: sums on the device, read by the host once per interval and checked for
divergence."""

import dataclasses
import math
import time
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from tpukit.devices.runtime import Runtime
from tpukit.host.errors import TpukitError
from tpukit.runs.run import Run
from tpukit.training.data import Batch
from tpukit.training.task import Task

# The fp16 loss scale starts at 2**16. A gradient that overflows even at this one is above 1e9.
MIN_LOSS_SCALE = 2.0**-14
SUMS = dict(loss=0.0, steps=0.0, bad_step=-1.0, grad_norm=0.0)
"""Metrics summed on the device over an interval, with their initial values. bad_step: the first step whose
loss was not finite, counted from 0 at the start of the interval, -1 for none. grad_norm: the last step's,
if it is clipped or compiled; otherwise `sync` computes the norm of the last gradient."""


def new_sums(runtime: Runtime, values: dict[str, float] = SUMS) -> Tensor:
    """Make the sums on the device, (4,) float32 in the order of SUMS."""
    # One vector, because XLA would fold single numbers into the graph as constants.
    return runtime.put(torch.tensor([values[name] for name in SUMS], dtype=torch.float32))


def accumulate(sums: Tensor, loss: Tensor, grad_norm: Tensor | None, *, overflow_is_skipped: bool) -> Tensor:
    """Add one step to the sums, on the device. loss: scalar. grad_norm: scalar, or None if the step does not
    compute it.

    overflow_is_skipped: a loss scaler skips steps whose gradient overflows, so an infinite norm is not yet an
    error."""
    loss_sum, steps, bad_step, last_norm = sums.unbind()
    is_good = loss.abs() < math.inf  # NaN is not; `isfinite` would be four operations
    if grad_norm is not None:
        last_norm = grad_norm
        if not overflow_is_skipped:
            is_good = is_good & (grad_norm < math.inf)
    bad_step = torch.where(is_good | (bad_step >= 0), bad_step, steps)
    return torch.stack([loss_sum + loss, steps + 1, bad_step, last_norm])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
    """The metrics since the last reset of the sums, over all ranks, on the host."""

    sums: dict[str, float]
    """As SUMS: `loss` is the mean over ranks, `bad_step` the first of any rank, the rest rank 0's."""
    memory: list[tuple[float, float]]
    """(peak bytes, total bytes) of every device of every rank"""
    stop_signal: int | None
    """the signal that any rank received"""
    save_due: bool
    """whether rank 0 is due to save a checkpoint"""


def sync(
    sums: Tensor,
    model: nn.Module,
    runtime: Runtime,
    *,
    has_norm: bool,
    stop_signal: int | None,
    save_due: bool,
) -> Interval:
    """Read the sums of all ranks: an `Interval`. The only place in the training loop that waits for the
    device and the ranks.

    has_norm: whether the steps compute their gradient norm. stop_signal, save_due: this rank's."""
    grad_norm = sums[-1:] if has_norm else gradient_norm(model).to(sums.device)
    values = runtime.to_cpu(torch.cat([sums[:-1], grad_norm])).tolist()
    mine = dict(zip(SUMS, values), memory=runtime.memory(), stop=stop_signal or 0, save=save_due)
    ranks = runtime.world.all_gather(mine)
    bad_steps = [rank["bad_step"] for rank in ranks if rank["bad_step"] >= 0]
    mean_loss = sum(rank["loss"] for rank in ranks) / len(ranks)
    sums_of_0 = {name: ranks[0][name] for name in SUMS}
    return Interval(
        sums=dict(sums_of_0, loss=mean_loss, bad_step=min(bad_steps, default=-1.0)),
        memory=[device for rank in ranks for device in rank["memory"]],
        stop_signal=int(max(rank["stop"] for rank in ranks)) or None,
        save_due=bool(ranks[0]["save"]),
    )


def gradient_norm(model: nn.Module) -> Tensor:
    """Return the norm of the last step's gradient, (1,); 0 if there was none."""
    gradients = [p.grad.float() for p in model.parameters() if p.grad is not None]
    return nn.utils.get_total_norm(gradients).reshape(1)


@runtime_checkable
class Rated(Protocol):
    """A task whose speed has other figures than samples per second."""

    def rates(self, model: nn.Module, runtime: Runtime, samples_per_s: float) -> dict[str, float]:
        """Return the other figures of its speed.

        Args:
            model: the model, on the device.
            runtime: this core's `Runtime`.
            samples_per_s: samples per second, over all cores.

        Returns:
            Figures, by their names in the report."""
        ...


class Throughput:
    """Times the steps of an interval, and how long they waited for their batches."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.restart()

    def restart(self) -> None:
        self.started, self.steps, self.waited_s = time.monotonic(), 0, 0.0
        self.counters = self.runtime.counters()

    def timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the same batches, one for each step, counted and timed."""
        while True:
            asked = time.monotonic()
            batch = next(batches, None)
            self.waited_s += time.monotonic() - asked
            if batch is None:
                return
            self.steps += 1
            yield batch

    def measure(self, batch_size: int) -> dict:
        """Return a record's `speed`: dict of seconds, images_per_s, wait_s, counters, and on XLA the seconds
        of transfers."""
        seconds = time.monotonic() - self.started
        counters = self.runtime.counters()
        rate = self.steps * batch_size / seconds
        names = ("to_device_s", "from_device_s") if counters else ()
        took = {name: counters[name] - self.counters[name] for name in names}
        return dict(seconds=seconds, images_per_s=rate, wait_s=self.waited_s, counters=counters, **took)


# Divergence


class Diverged(TpukitError):
    """The loss or the gradient stopped being a finite number."""


def check_finite(interval: Interval, step: int, task: Task, run: Run, runtime: Runtime) -> None:
    """Raise Diverged, naming the first step whose loss or gradient was not finite. step: the last one of the
    interval."""
    bad_step, scaler = interval.sums["bad_step"], runtime.scaler
    # A loss scaler skips a step whose gradient overflows; without a scaler such a step is the end.
    if bad_step < 0 and not scaler.is_enabled() and not math.isfinite(interval.sums["grad_norm"]):
        bad_step = interval.sums["steps"] - 1
    scale = scaler.get_scale()  # halved at every step whose gradient overflows
    if bad_step >= 0:
        step += int(bad_step + 1 - interval.sums["steps"])
        what = f"loss or gradient is not a finite number at step {step}"
    elif scale < MIN_LOSS_SCALE:
        what = f"the gradient is not finite at step {step} even with the loss scaled down to {scale:.2g}"
    else:
        return
    files = [entry["file"] for entry in run.checkpoints()]
    good = f"the last good checkpoint is {files[0]}" if files else "there is no checkpoint yet"
    message = (
        f"{what}; {good} in {run.path / 'checkpoints'}. Start another run with a lower lr (now {task.lr}) or"
        f" in fp32 (now {runtime.precision}), from this run's best.safetensors if you pass it as weights=; or"
        " check the data."
    )
    run.log("diverged", step)
    run.print(message)
    raise Diverged(message)
