"""Lay out a dataset in the memory of an XLA device so that a step gathers samples of it and copies nothing
else.

Left to itself, the TPU's compiler stores images with the samples in the lanes, which pads least, and begins
every step with a copy of the whole set, because a gather needs each sample together. Samples of more than 256
KiB it gathers from slices of the whole set. A set that is stored in rows of 128 lanes, each sample in parts
of at most 256 KiB, is gathered as it lies.
"""

import math

import numpy as np

from tpukit.devices.chips import LANES

TILE = 8 * LANES  # elements, whether of 1, 2 or 4 bytes: a part is whole tiles
MAX_PART = 2**18  # bytes


def rows_shape(array: np.ndarray) -> tuple[int, ...]:
    """Return the shape in which a numpy array (N, ...) is stored: (N * parts, elements of a part / 128, 128).

    It is the array's own if such rows would be half empty, or if a TPU holds a number as two. Samples of
    less than 1 KiB make sets that fast memory mostly holds whole, without padding them further."""
    size, itemsize = math.prod(array.shape[1:]), array.dtype.itemsize
    if size <= TILE // 2 or size * itemsize < 1024 or itemsize > 4:
        return array.shape
    parts = math.ceil(size * itemsize / MAX_PART)
    elements = math.ceil(size / (parts * TILE)) * TILE
    return len(array) * parts, elements // LANES, LANES


def to_rows(array: np.ndarray) -> np.ndarray:
    """Copy a numpy array (N, ...) to the shape `rows_shape`, each sample padded by zeros."""
    rows = np.zeros(rows_shape(array), array.dtype)
    if not len(array):  # an empty test set, which its evaluation names
        return rows
    samples = array.reshape(len(array), -1)
    rows.reshape(len(array), -1)[:, : samples.shape[1]] = samples
    return rows
