"""Ask about, or act on, the device that a model's tensors lie on: XLA, mostly. Elsewhere nothing changes."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

XLA_DEVICES = {"xla", "tpu"}  # types of device, one by each package for TPUs


def is_on_xla(tensor: Tensor) -> bool:
    """Return whether XLA compiles what is computed with a tensor, by whichever package."""
    return tensor.device.type in XLA_DEVICES


def move(model: nn.Module, *to: Any, **options: Any) -> nn.Module:
    """Return a model moved as by `model.to`, with what an XLA device loses otherwise, where each place that
    has a parameter gets a new one: what is tied is tied, and hooks and attributes of parameters are kept."""
    parts = [(part, part._parameters.items()) for part in model.modules()]
    places = [(part, name, old) for part, its in parts for name, old in its if old is not None]
    model, moved = model.to(*to, **options), {}
    for part, name, old in places:
        new = moved.setdefault(old, part._parameters[name])
        if new is not old:
            vars(new).update(vars(old))
            new._backward_hooks = old._backward_hooks
            new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks
            setattr(part, name, new)  # an RNN has a list of them, too
    return model


def with_optimization_barrier(tensor: Tensor, *after: Tensor) -> Tensor:
    """Return the tensor, if torch_xla makes a graph of it computed apart from what reads it and after others.

    XLA moves a cheap computation into each operation that reads it. Where that is a convolution and the
    computation a whole layer's, it takes the compiler minutes."""
    if tensor.device.type != "xla":
        return tensor
    import torch_xla.core.xla_model as xm

    tensor = tensor.clone()
    xm.optimization_barrier_([tensor, *after])
    return tensor


def after_gradients(batch: dict[str, Tensor], gradients: list[Tensor]) -> dict[str, Tensor]:
    """Return a batch that torch_xla's graph reads once it has these gradients, whose memory the computation
    of the next ones then reuses. Only a compiler would start earlier."""
    if not gradients or gradients[0].device.type != "xla":
        return batch
    import torch_xla.core.xla_model as xm

    batch = {name: values.clone() for name, values in batch.items()}  # the barrier changes them
    xm.optimization_barrier_([*gradients, *batch.values()])
    return batch


def recomputed(function: Callable, tensor: Tensor, *others: Any) -> Any:
    """Return function(tensor, *others), keeping only the arguments for the backward pass, which computes it
    again. The function may not draw random numbers."""
    if tensor.device.type == "xla":  # XLA would optimise torch's own away, as the same computation twice
        from torch_xla.utils.checkpoint import checkpoint
    else:
        from torch.utils.checkpoint import checkpoint
    return checkpoint(function, tensor, *others, use_reentrant=True, preserve_rng_state=False)
