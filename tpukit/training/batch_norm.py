"""Variants of batch norm for several cores, and for training with frozen statistics."""

import torch
from torch.nn import functional as F

from tpukit.devices.tensors import is_on_xla
from tpukit.host.errors import TpukitError


def apply(model, variant, runtime):
    """The model with its batch norms made "per-core", "synced" or "frozen", see `Workload.batch_norm`."""
    if variant == "frozen":
        freeze(model)
    elif variant == "synced" and runtime.device.type == "cuda":
        return torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    elif variant == "synced" and runtime.world.size > 1:
        raise TpukitError(
            "batch_norm='synced' runs on GPUs. On TPU cores parallel='spmd' takes the statistics of the whole batch; "
            "otherwise choose 'per-core' or 'frozen'"
        )
    return model  # with one process, one graph sees the whole batch as it is


def freeze(model):
    """Make every batch norm a `FrozenBatchNorm`. Its scale and offset still learn."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.__class__ = FrozenBatchNorm


class FrozenBatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    """A batch norm that uses its running statistics in training too."""

    def forward(self, x):
        if not is_on_xla(x):  # keeps the dtype of x; below, float32 statistics would make float32 of bfloat16
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        # Written out, because XLA has no backward of batch norm in evaluation mode.
        shape = (1, -1, *[1] * (x.dim() - 2))
        scale = torch.rsqrt(self.running_var + self.eps)
        scale = scale if self.weight is None else scale * self.weight
        x = (x - self.running_mean.view(shape)) * scale.view(shape)
        return x if self.bias is None else x + self.bias.view(shape)
