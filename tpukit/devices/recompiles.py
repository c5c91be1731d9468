"""Why a program was compiled: what differs from the call before it, in words. Pure functions of arguments and traces."""

import collections
import re

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path


def described(names, arguments):
    """The arguments of a call, whose parameters have these names, as name -> (shape, dtype), or number. A tensor in a dict is
    called by its key."""
    found = {}
    for name, argument in zip(names, arguments):
        for path, leaf in tree_flatten_with_path(argument)[0]:
            label = str(getattr(path[-1], "key", f"{name}{keystr(path)}")) if path else name
            found[label] = (tuple(leaf.shape), str(leaf.dtype).removeprefix("torch.")) if torch.is_tensor(leaf) else leaf
    return found


def changes(before, after):
    """What of `described` is another kind of argument than it was, as a list of sentences."""
    said = [f"{name} is new: {_word(value)}" for name, value in after.items() if name not in before]
    said += [f"{name} is gone" for name in before if name not in after]
    for name, new in after.items():
        old = before.get(name, new)
        if old == new:
            continue
        shapes = [value[0] for value in (old, new) if _is_tensor(value)]
        ragged = len(shapes) == 2 and shapes[0][1:] == shapes[1][1:] and shapes[1][:1] < shapes[0][:1]
        same_dtype = len(shapes) == 2 and old[1] == new[1]
        a, b = shapes if same_dtype else (_word(old), _word(new))
        said.append(f"{name} went from {a} to {b}{': the last batch is ragged' if ragged else ''}")
    return said


def _is_tensor(value):
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], tuple)


def _word(value):
    return f"{value[0]} {value[1]}" if _is_tensor(value) else str(value)


def new_operation(before, after):
    """The first operation of a trace, as torch_xla prints it, that the trace before has not: "aten::mul in loss, mnist.py line
    40"; or None.

    A trace names the innermost line of Python of each operation where torch_xla's debugging of traces was on.
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
    # What only brings an input says less than what is done with it, and the backward pass has no line of its own.
    operation, place = min(fresh, key=lambda f: (f[0] == "xla::device_data", f[1] is None))
    return f"{operation} in {place[1]}, {place[2]} line {place[3]}" if place else operation


def _without_numbers(line):
    return re.sub(r"%\d+|, scope=[^,]+|, ROOT=\d+", "", line)
