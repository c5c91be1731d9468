"""Batch norm on several cores, and with frozen statistics."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from tpukit.devices.runtime import Runtime
from tpukit.devices.tensors import is_on_xla

MIN_SHARE = 16
"""Samples below which its error rises (Wu and He, Group Normalization, 2018, figure 1)."""


def why_one_gpu(make_model: Callable[[], nn.Module], variant: str, share: int, batch_size: int) -> str:
    """Return a reason if each of several GPUs would have fewer than `MIN_SHARE` samples for its batch norms,
    otherwise "".

    Such a share is also too little work for a card: a step is bound by its launches, of which each card does
    all. share: samples of a batch that one GPU sees at once."""
    if share >= MIN_SHARE or variant != "per-core" or not _has_statistics_of_the_batch(make_model()):
        return ""
    return (
        f"on each, batch norm would see {share} of {batch_size} samples, too few for its statistics and to be"
        " faster"
    )


def note(model: nn.Module, batch_size: int, micro_batches: int, runtime: Runtime) -> str:
    """Return a sentence on batch norms that see only a part of each batch, or ""."""
    if runtime.world.size == 1 or not _has_statistics_of_the_batch(model):
        return ""
    share = batch_size // runtime.cores // micro_batches
    return (
        f"batch norm takes its statistics from each core's {share} of {batch_size} samples; cores=1 takes"
        " them from the whole batch"
    )


def _has_statistics_of_the_batch(model: nn.Module) -> bool:
    others = (FrozenBatchNorm, torch.nn.SyncBatchNorm)
    return any(isinstance(m, _BatchNorm) and not isinstance(m, others) for m in model.modules())


def freeze(model: nn.Module) -> None:
    """Make every batch norm a `FrozenBatchNorm`. Its scale and offset still learn."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.__class__ = FrozenBatchNorm


class FrozenBatchNorm(_BatchNorm):
    """A batch norm that uses its running statistics in training too."""

    def forward(self, input: Tensor) -> Tensor:
        x = self._normalised(input, self.running_mean, self.running_var)
        for part in self.children():  # timm's batch norms have their activation as a child
            x = part(x)
        return x

    def _normalised(self, input, mean, variance):
        # Keeps the dtype of the input; below, float32 statistics would make float32 of bfloat16.
        if not is_on_xla(input):
            return F.batch_norm(input, mean, variance, self.weight, self.bias, eps=self.eps)
        # Written out, because XLA has no backward of batch norm in evaluation mode.
        shape = (1, -1, *[1] * (input.dim() - 2))
        scale = torch.rsqrt(variance + self.eps)
        scale = scale if self.weight is None else scale * self.weight
        x = (input - mean.view(shape)) * scale.view(shape)
        return x if self.bias is None else x + self.bias.view(shape)
