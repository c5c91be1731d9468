"""Why a graph was compiled again: what differs from the call before it. Pure functions of arguments and traces."""

import collections
import re

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from tpukit.host.errors import TpukitError


class UnexpectedRecompilation(TpukitError):
    """A call of a compiled function traced a graph beyond the number it is allowed.

    causes: sentences about arguments that differ from the call before. operation: the first operation that the expected graph
    does not have, as `new_operation` names it, or None.
    """

    causes = ()

    def __init__(self, function, call, max_graphs, operation=None):
        super().__init__(function, call, max_graphs, operation)
        self.operation = operation

    def __str__(self):
        function, call, max_graphs, operation = self.args
        lines = [
            *self.causes,
            f"call {call} of `{function}` traced a new graph, but at most {max_graphs} may be compiled",
        ]
        if operation:
            lines.append(f"New in it: {operation}")
        lines.append(
            "Keep every batch the same shape; declare variants of the loss in `loss_variants`; numbers that change from step "
            "to step belong in tensors"
        )
        return "\n".join(lines)


def signature(names, arguments):
    """The arguments of a call, whose parameters have these names, as name -> (shape, dtype), or number. A tensor in a dict is
    called by its key."""
    found = {}
    for name, argument in zip(names, arguments):
        for path, leaf in tree_flatten_with_path(argument)[0]:
            label = str(getattr(path[-1], "key", f"{name}{keystr(path)}")) if path else name
            found[label] = (tuple(leaf.shape), str(leaf.dtype).removeprefix("torch.")) if torch.is_tensor(leaf) else leaf
    return found


def differences(before, after):
    """What differs between two signatures, as a list of sentences."""
    sentences = [f"{name} is new: {_describe(value)}" for name, value in after.items() if name not in before]
    sentences += [f"{name} is missing" for name in before if name not in after]
    sentences += [_change(name, before[name], after[name]) for name in after if before.get(name, after[name]) != after[name]]
    return sentences


def _change(name, old, new):
    if not (_is_tensor(old) and _is_tensor(new)):
        return f"{name} went from {_describe(old)} to {_describe(new)}"
    (old_shape, old_dtype), (new_shape, new_dtype) = old, new
    is_ragged = old_shape[1:] == new_shape[1:] and new_shape[:1] < old_shape[:1]
    what = f"{old_shape} to {new_shape}" if old_dtype == new_dtype else f"{_describe(old)} to {_describe(new)}"
    return f"{name} went from {what}{': the last batch is ragged' if is_ragged else ''}"


def _is_tensor(value):
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], tuple)


def _describe(value):
    return f"{value[0]} {value[1]}" if _is_tensor(value) else str(value)


def new_operation(before, after):
    """The first operation of a trace, as torch_xla prints it, that the previous trace does not have: "aten::mul in loss,
    mnist.py line 40"; or None.

    A trace names the innermost line of Python of each operation if torch_xla's IR debugging was on.
    """
    known = collections.Counter(map(_without_numbers, before.splitlines()))
    fresh = []
    for line in after.splitlines():
        plain = _without_numbers(line)
        known[plain] -= 1
        if known[plain] < 0 and (operation := re.search(r"\b(\w+::\w+)\(", line)):
            fresh.append((operation[1], re.search(r"location=([^,]+)@([^,]+):(\d+)", line)))
    if not fresh:
        return None
    # An input by itself says little, and the backward pass has no line of its own.
    operation, place = min(fresh, key=lambda f: (f[0] == "xla::device_data", f[1] is None))
    return f"{operation} in {place[1]}, {place[2]} line {place[3]}" if place else operation


def _without_numbers(line):
    return re.sub(r"%\d+|, scope=[^,]+|, ROOT=\d+", "", line)
