"""Explain why a graph was compiled again: what differs from the call before it."""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_flatten_with_path

from tpukit.host.errors import TpukitError

KEEP_ONE_GRAPH = (
    "Keep every batch the same shape; choose between losses by `torch.where`;"
    " numbers that change from step to step belong in tensors"
)


class UnexpectedRecompilation(TpukitError):
    """A call of a compiled function traced a graph beyond the number it is allowed.

    Its arguments: the function's name, the number of the call, and the number of graphs allowed."""

    causes: tuple[str, ...] = ()  # sentences about arguments that differ from the call before

    def __str__(self):
        function, call, max_graphs = self.args
        traced = f"call {call} of `{function}` traced a new graph, but at most {max_graphs} may be compiled"
        return "\n".join([*self.causes, traced, KEEP_ONE_GRAPH])


class TensorType(NamedTuple):
    shape: tuple[int, ...]
    dtype: str

    def __str__(self):
        return f"{self.shape} {self.dtype}"


def signature(
    names: tuple[str, ...], arguments: tuple, mutates: tuple[nn.Module, Optimizer] | None = None
) -> dict[str, Any]:
    """Return what a graph depends on besides the values of tensors: the arguments of a call, whose parameters
    have these names, as name -> TensorType or number (in a dict the key names); the mode of the model and the
    settings of the optimizer that the call changes."""
    depends_on: dict[str, Any] = {}
    for name, argument in zip(names, arguments):
        for path, leaf in tree_flatten_with_path(argument)[0]:
            whole = name + keystr(path)
            label = str(getattr(path[-1], "key", whole)) if path else name
            if torch.is_tensor(leaf):
                leaf = TensorType(tuple(leaf.shape), str(leaf.dtype).removeprefix("torch."))
            depends_on[whole if label in depends_on else label] = leaf
    if mutates is not None:
        assert len(arguments) <= len(names), "an argument without a name would not be looked at"
        model, optimizer = mutates
        depends_on["the model's training mode"] = model.training
        for number, group in enumerate(optimizer.param_groups):
            which = f" of group {number}" if len(optimizer.param_groups) > 1 else ""
            settings = {name: value for name, value in group.items() if name != "params"}
            depends_on |= {f"the optimizer's {name}{which}": value for name, value in settings.items()}
    return depends_on


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return what differs between two signatures, as a list of sentences."""
    sentences = [f"{name} is new: {value}" for name, value in after.items() if name not in before]
    sentences += [f"{name} is missing" for name in before if name not in after]
    sentences += [
        _change(name, before[name], after[name])
        for name in after
        if before.get(name, after[name]) != after[name]
    ]
    return sentences


def _change(name, old, new):
    if not (isinstance(old, TensorType) and isinstance(new, TensorType) and old.dtype == new.dtype):
        return f"{name} went from {old} to {new}"
    is_ragged = old.shape[1:] == new.shape[1:] and new.shape[:1] < old.shape[:1]
    return f"{name} went from {old.shape} to {new.shape}{': the last batch is ragged' if is_ragged else ''}"
