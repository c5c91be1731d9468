"""What may be in a file of `torch.save`, so that reading it runs no code."""

import argparse
import contextlib
import io
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tpukit.host.errors import reading

NUMBERS = "biufc"  # NumPy's kinds of types that are numbers
device_reads = 0  # by all calls of `plain` in this process; `metrics_report` tells them from the user's

Refuse = Callable[[Any, str, str], Any]
"""What takes the place of a value that no file can have: function of the value, its key and its kind."""


class Array(np.ndarray):
    """An array of numbers that is written as a call of `to_array`."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        import torch

        content = np.array(self).reshape(-1).view(np.uint8)
        return to_array, (torch.as_tensor(content), self.dtype.str, self.shape)


def to_array(content: Any, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the array of numbers that has these bytes. Files name it: neither to be moved nor renamed."""
    if np.dtype(str(dtype)).kind not in NUMBERS:
        raise pickle.UnpicklingError(f"it has an array of {dtype}, which are no numbers")
    return content.numpy().view(str(dtype)).reshape(shape)


def plain(value: Any, key: str, refuse: Refuse) -> Any:
    """Return a value as its file has it: copies of lists, tuples and dicts, with tensors on the CPU.

    key: where it is, in words. refuse: called for each part that `load_tensors` could not read."""
    import torch

    global device_reads
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            return refuse(value, key, "a meta tensor without values")
        device_reads += value.device.type == "xla"
        value = value.detach().cpu()
        is_view = value.layout == torch.strided and value.untyped_storage().nbytes() > value.nbytes
        return value.clone() if is_view else value  # without the rest of what it is a view of
    if type(value) in (list, tuple):
        return type(value)(plain(each, f"{key}[{number}]", refuse) for number, each in enumerate(value))
    if type(value) in (dict, OrderedDict):
        copy = type(value)()
        for name, each in value.items():
            copy[plain(name, f"a key of {key}", refuse)] = plain(each, f"{key}[{name!r}]", refuse)
        # `_metadata`: the versions of modules, by which they read states of earlier ones
        getattr(copy, "__dict__", {}).update(getattr(value, "__dict__", {}))
        return copy
    if type(value) in (np.ndarray, np.memmap) and value.dtype.kind in NUMBERS:
        return value.view(Array)
    if value is None or type(value) in (str, int, float, bool):
        return value
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        load_tensors(file)
    except (pickle.PickleError, AttributeError, TypeError):
        return refuse(value, key, f"a {type(value).__name__}")
    return value


def load_tensors(file: BinaryIO) -> Any:
    """Read what `torch.save` wrote: pytrees of tensors, numbers, strings and arrays. Code is never run:
    raises UnpicklingError for a file that asks for more."""
    import torch

    try:
        with torch.serialization.safe_globals(_plain_types()):
            return torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        if "weights_only" not in str(error):
            raise
        # torch goes on to recommend weights_only=False, which would run the code.
        match = re.search(r"GLOBAL (\S+)|(TorchScript archive|legacy \.tar)", str(error))
        asked = match[1] or match[2] if match else "something that is not a tensor"
        raise pickle.UnpicklingError(
            f"it asks to load {asked}, which could run code: ask for a state dict or a .safetensors file"
        ) from None


def _plain_types() -> list[Any]:
    """Return types that checkpoints hold besides tensors, and that run no code: numbers and settings."""
    numbers = np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"
    scalar = np.float64(0).__reduce__()[0]
    names = ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")  # its name in NumPy 1 and 2
    return [
        *((scalar, name) for name in names),
        to_array,
        np.dtype,
        *{type(np.dtype(number)) for number in numbers},
        argparse.Namespace,
    ]


def explain_damage(path: Path) -> contextlib.AbstractContextManager[None]:
    """Context manager: raise whatever reading a weight file raises as Damaged, or as Unreadable."""
    return reading(path, f"weights {path}: damaged or not a weight file")
