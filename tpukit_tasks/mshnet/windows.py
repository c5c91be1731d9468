"""An image of any size as overlapping windows of the size that the network was trained on, and their
predictions as one.

Its long side is scaled to that size, as in an evaluation, but it is never shrunk more than the training
images were, so that no target is lost: a larger one is cut. Shapes: C channels, H and W the size of the
image, S the side of a window."""

import itertools
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image

MARGIN = 8  # the part of a window, an eighth, that its predictions keep from an edge within the image


def scale(image: np.ndarray, size: int, smallest: float) -> np.ndarray:
    """(C, H, W) uint8 -> (C, h, w) uint8, where the longer of h and w is S, or `smallest` times H or W if
    that is more."""
    height, width = image.shape[1:]
    factor = max(size / max(height, width), smallest)
    target = max(round(width * factor), 1), max(round(height * factor), 1)
    planes = [Image.fromarray(plane).resize(target, Image.Resampling.BILINEAR) for plane in image]
    return np.stack([np.asarray(plane) for plane in planes])


def resize(predictions: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """(1, 1, h, w) -> (1, 1, H, W), bilinear. size: (H, W)."""
    values = torch.from_numpy(np.ascontiguousarray(predictions))
    return torch.nn.functional.interpolate(values, size=size, mode="bilinear").numpy()


def split(image: np.ndarray, size: int) -> tuple[list[np.ndarray], Callable[[list], np.ndarray]]:
    """(C, H, W) -> (windows, join). windows: list of (C, S, S), which share their memory; a short side is
    mirrored.

    join: a function from the list of their predictions, (1, S, S) each, to that of the image, (1, 1, H, W).
    Every pixel comes from the window whose edge is farthest away."""
    height, width = image.shape[1:]
    padded = np.pad(image, ((0, 0), (0, max(size - height, 0)), (0, max(size - width, 0))), "symmetric")
    places = list(itertools.product(*(_places(length, size) for length in padded.shape[1:])))
    windows = [padded[:, top : top + size, left : left + size] for (top, _), (left, _) in places]

    def join(predictions):
        whole = np.empty((1, 1, *padded.shape[1:]), predictions[0].dtype)
        for ((top, row), (left, column)), part in zip(places, predictions, strict=True):
            whole[0, :, row : top + size, column : left + size] = part[:, row - top :, column - left :]
        return whole[..., :height, :width]

    return windows, join


def _places(length, size):
    """Return the windows along an axis: a list of (start, the first pixel that comes from this window and no
    longer from the one before)."""
    stride = size - 2 * (size // MARGIN)
    starts = np.linspace(0, length - size, -(-(length - size) // stride) + 1).astype(int).tolist()
    middles = [(before + after + size) // 2 for before, after in zip(starts, starts[1:])]
    return list(zip(starts, [0, *middles]))
