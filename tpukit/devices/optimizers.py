"""The tensors of an optimizer: those that it updates, and those that it keeps. And `adamw`, for tasks."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Adam, AdamW, Optimizer

from tpukit.host.errors import TpukitError


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def parameters_with_gradient(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that the next step of an optimizer updates."""
    return [p for p in parameters_of(optimizer) if p.grad is not None]


def gradients(optimizer: Optimizer) -> list[Tensor]:
    """Return the gradients that the next step of an optimizer uses."""
    return [p.grad for p in parameters_of(optimizer) if p.grad is not None]


def separate_gradients(*optimizers: Optimizer) -> None:
    """Give each gradient memory of its own, before anything is written to it. Of a sample of one pixel,
    autograd makes those of two biases views of one tensor, which a second micro-batch, a clip or a scaler
    would change twice: https://github.com/pytorch/pytorch/issues/34082."""
    owners = {}  # address of a storage, which XLA's have, too -> the first parameter whose gradient is in it
    for parameter in itertools.chain.from_iterable(map(parameters_with_gradient, optimizers)):
        gradient: Any = parameter.grad
        if gradient.layout == torch.strided:
            if owners.setdefault(gradient.untyped_storage()._cdata, parameter) is not parameter:
                parameter.grad = gradient.clone()


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """Return the tensors of an optimizer's state, wherever they lie."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in values if isinstance(value, Tensor)]


def watch_gradients(optimizer: Optimizer) -> Callable[[], bool]:
    """Return a function that tells, once after a backward pass, whether anything has written to the gradients
    since, as a clip does. It looks at the first, whose writes torch counts."""
    watched = [p for p in parameters_of(optimizer) if p.requires_grad][:1]
    versions: list[int] = []
    for weight in watched:
        weight.register_post_accumulate_grad_hook(lambda w: versions.append(w.grad._version))

    def were_changed() -> bool:
        before, now = versions[-1:], [w.grad._version for w in watched if w.grad is not None]
        versions.clear()
        return bool(before and now and before != now)

    return were_changed


def adamw(model: Module, lr: float, weight_decay: float, **options: Any) -> Optimizer:
    """Return AdamW of the parameters that train, of a model on the device. Biases and the weights of norms,
    which have one dimension, do not decay."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in parameters if p.ndim > 1]
    others = [p for p in parameters if p.ndim <= 1]
    groups = [dict(params=decayed, weight_decay=weight_decay), dict(params=others, weight_decay=0.0)]
    return AdamW([g for g in groups if g["params"]], lr=lr, **options)


def count_steps_on_device(optimizer: Optimizer) -> None:
    """Let an optimizer keep its step counters on the device if torch can (`capturable`). On the host they
    would be constants of a graph. Raises TpukitError for a rate of 0 by which torch's Adam would then
    divide."""
    for group in optimizer.param_groups:
        if isinstance(optimizer, Adam) and group["lr"] == 0 and not group["fused"]:
            raise TpukitError(
                "lr=0: on this device torch's Adam divides by the learning rate, so that the weights would be"
                " no numbers: use a small one, or name what is not to train as freeze="
            )
        if "capturable" in group:
            group["capturable"] = True


class HostNumbers:
    """Optimizer state on the host, mostly step counters, which a graph of the device does not update.

    Made before a step is traced; `measure` after it finds what the step adds."""

    def __init__(self, optimizer: Optimizer):
        self.states = [(state, dict(state)) for state in optimizer.state.values()]
        self.tensors = [value for value in state_tensors(optimizer) if value.device.type == "cpu"]
        self.before = [value.clone() for value in self.tensors]
        self.increments: list[Tensor] = []

    def measure(self) -> None:
        self.increments = [value - before for value, before in zip(self.tensors, self.before)]

    def were_replaced(self) -> bool:
        """Return whether the step put other numbers or tensors in place of those before."""
        return any(state[name] is not value for state, saved in self.states for name, value in saved.items())

    def restore(self) -> None:
        for state, saved in self.states:
            state.update(saved)
        for value, before in zip(self.tensors, self.before):
            value.copy_(before)

    def advance(self) -> None:
        """Add what a step adds."""
        if self.tensors:
            torch._foreach_add_(self.tensors, self.increments)


# Many tensors as one: an operation of each would be hundreds of kernels


def flattened(tensors: Iterable[Tensor]) -> dict[torch.dtype, Tensor]:
    """Return dtype -> (N,): copies of the tensors of that type, one after another, each in the order in which
    its memory lies."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(_in_memory_order(tensor).flatten())
    return {dtype: torch.cat(parts) for dtype, parts in by_dtype.items()}


def copy_flattened(tensors: list[Tensor], flat: Tensor) -> None:
    """Write to tensors of one type what `flattened` would make `flat` of."""
    with torch.no_grad():
        targets = [_in_memory_order(tensor) for tensor in tensors]
        parts = flat.split([target.numel() for target in targets])
        torch._foreach_copy_(targets, [part.view(target.shape) for part, target in zip(parts, targets)])


def _in_memory_order(tensor: Tensor) -> Tensor:
    """Return a view with the axis of the largest stride first."""
    return tensor.detach().permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
