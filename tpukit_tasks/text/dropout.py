"""Dropout by a mask that two numbers decide on. torch's own draws another mask where a layer is computed
again for the backward pass (see `devices.tensors.recomputed`), so that the gradients would be wrong."""

import torch
from torch import Tensor, nn

BITS = 2**31  # of a mask's random numbers


class Dropout(nn.Module):
    """Zero a share `p` of the inputs in training, and scale the others by 1 / (1 - p).

    number: of this module in its network. `seed`: an int32 scalar on the device, which its network sets for
    each forward pass. The mask is the same on every device."""

    seed: Tensor

    def __init__(self, p: float, number: int) -> None:
        super().__init__()
        self.p, self.number = p, number

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        places = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape)
        is_kept = mixed(places, mixed(mixed(self.seed) ^ self.number)) >= self.p * BITS
        return torch.where(is_kept, x / (1 - self.p), 0.0).to(x.dtype)


def mixed(numbers: Tensor, key: Tensor | int = 0) -> Tensor:
    """Return pseudorandom numbers from 0 to `BITS` - 1 of the shape of some int32 numbers, which these and a
    key decide on: lowbias32 (Wellons, 2018) of 31 bits, with the key in its middle. Never negative before a
    shift, which torch_xla takes for a division that rounds towards zero."""
    numbers = (numbers ^ key) & BITS - 1
    numbers = (numbers ^ numbers >> 16) * 0x7FEB352D & BITS - 1  # int32 wraps around
    numbers = ((numbers ^ numbers >> 15) + key) * (0x846CA68B - 2**32) & BITS - 1
    return numbers ^ numbers >> 16


def replace_torchs(model: nn.Module) -> list[Dropout]:
    """Replace each dropout of torch's within adapters of peft by one of this module, and return these."""
    found = []
    for layer in model.modules():
        for name, module in getattr(layer, "lora_dropout", {}).items():
            if isinstance(module, nn.Dropout):
                found.append(Dropout(module.p, len(found)))
                layer.lora_dropout[name] = found[-1]  # pyright: ignore[reportIndexIssue]
    return found
