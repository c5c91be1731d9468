"""An exponential moving average (EMA) of the weights, which is scored and kept instead of them."""

import copy
import functools

import torch
from torch import Tensor, nn

from tpukit.devices.runtime import Runtime
from tpukit.devices.tensors import move

EVERY = 10  # steps


class WeightEMA:
    """The average of the weights of `model`, which lies on the device; updated every 10 steps."""

    def __init__(self, model: nn.Module, decay: float, runtime: Runtime) -> None:
        self.decay, self.runtime = decay, runtime
        # By way of the host: on XLA a copy of a tensor shares its memory, which a step donates.
        self.model = runtime.to_device(move(copy.deepcopy(model), "cpu").requires_grad_(False))
        self.update = runtime.inference(functools.partial(update_average, self.model, model))

    def step(self, step: int) -> None:
        """Update the average if it is due. step: the number of steps taken."""
        if step % EVERY == 0:
            # Forget faster at first, so that the initial weights do not dominate a short training (as in Phil
            # Wang's ema_pytorch).
            decay = min(self.decay, 1 - (1 + step // EVERY) ** (-2 / 3))
            # From the host as a vector: every value of a Python number would be another graph.
            self.update(self.runtime.put(torch.tensor([1 - decay])))


def update_average(average: nn.Module, model: nn.Module, weight: Tensor) -> None:
    """Move the averaged weights towards the model's by (1,) `weight`; buffers are copied."""
    for mean, value in zip(average.parameters(), model.parameters()):
        if value.requires_grad:  # else it is the same, of any type
            mean.lerp_(value, weight)
    for mean, value in zip(average.buffers(), model.buffers()):
        mean.copy_(value + 0)  # as a plain copy it would share its memory
