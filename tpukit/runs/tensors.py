"""Read what `torch.save` wrote, without running code from it."""

import argparse
import contextlib
import pickle
import re
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tpukit.host.errors import reading

NUMBERS = "biufc"  # NumPy's kinds of types that are numbers


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
