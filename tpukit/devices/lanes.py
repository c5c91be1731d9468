"""How a dataset lies in the memory of an XLA device, so that a step gathers samples of it and copies nothing
else.

Left to itself, the TPU's compiler stores images with the samples in the lanes, which pads least, and begins
every step with a copy of the whole set, because a gather needs each sample together. Samples of more than 256
KiB it gathers from slices of the whole set. A set that is stored in rows of 128 lanes, each sample in parts
of at most 256 KiB, is gathered as it lies.

N samples, B of them in a batch.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tpukit.devices.chips import LANES

TILE = 8 * LANES  # elements, whether of 1, 2 or 4 bytes: a part is whole tiles
MAX_PART = 2**18  # bytes


class Stored(NamedTuple):
    """An array on the device. rows: (N * parts, elements of a part / 128, 128), or as `is_split` says the
    array itself. shape: the array's, (N, ...)."""

    rows: Tensor
    shape: tuple[int, ...]


def is_split(array: np.ndarray) -> bool:
    """Whether an array is stored in rows: not where these would be half empty, and not where a TPU holds a
    number as two. Samples of less than 1 KiB make sets that fast memory mostly holds whole, without padding
    them further."""
    size, itemsize = math.prod(array.shape[1:]), array.dtype.itemsize
    return size > TILE // 2 and size * itemsize >= 1024 and itemsize <= 4


def part_sizes(array: np.ndarray) -> tuple[int, int]:
    """(parts of a sample, elements of a part) of an array (N, ...) in rows."""
    size = math.prod(array.shape[1:])
    parts = math.ceil(size * array.dtype.itemsize / MAX_PART)
    return parts, math.ceil(size / (parts * TILE)) * TILE


def stored_nbytes(array: np.ndarray) -> int:
    """Bytes that a numpy array (N, ...) takes on the device."""
    elements = math.prod(part_sizes(array)) if is_split(array) else math.prod(array.shape[1:])
    return len(array) * elements * array.dtype.itemsize


def to_rows(array: np.ndarray) -> np.ndarray:
    """A copy of a numpy array (N, ...) as `Stored.rows` has it."""
    if not is_split(array):
        return np.array(array)
    (parts, elements), size = part_sizes(array), math.prod(array.shape[1:])
    rows = np.zeros((len(array), parts * elements), array.dtype)
    rows[:, :size] = array.reshape(len(array), size)
    return rows.reshape(len(array) * parts, elements // LANES, LANES)


def take(stored: Stored, index: Tensor) -> Tensor:
    """Samples of a stored array, (B, ...). index: (B,)."""
    rows, shape = stored
    if rows.shape == shape:
        return rows.index_select(0, index)
    parts = len(rows) // shape[0]
    if parts > 1:
        index = (index[:, None] * parts + torch.arange(parts, device=index.device)).flatten()
    samples = rows.index_select(0, index).view(len(index) // parts, -1)
    return samples[:, : math.prod(shape[1:])].view(-1, *shape[1:])
