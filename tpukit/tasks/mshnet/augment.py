"""The published augmentation (flip, scale, pad, crop, blur) and the evaluation's resize, as linear maps of
rows and columns.

`rows @ image @ columns.T`: on the host a sample at a time, by the few weights of each row that are not zero;
on a device a batch at a time, by dense matrices, so that no pixel is gathered and every shape is fixed. Both
equal PIL's result, which rounds to whole grey levels after every pass.

Shapes: B batch, C colours, H and W the size of the originals, S the size of the result, K weights that are
not zero."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy import ndimage
from torch import Tensor

from tpukit.devices.tensors import is_on_xla

NUM_UNIFORMS = 6  # uniform numbers for each sample


class Crop(NamedTuple):
    """The augmentation of a sample."""

    flip: bool
    long_size: int  # pixels to which the long side is scaled
    x1: int  # pixel of the scaled image where the crop starts
    y1: int
    blur: float | None  # radius in pixels


def random_crop(
    numbers: Sequence[float], image_size: tuple[int, int], base_size: int, crop_size: int
) -> Crop:
    """The crop of six uniform numbers in [0, 1). image_size: (width, height) of the original. The long side
    is uniform in [base/2, 2 base], both ends included."""
    flip, scale, x, y, blur, radius = numbers
    shortest, longest = base_size // 2, base_size * 2
    long_size = shortest + int(scale * (longest - shortest + 1))
    width, height = scaled_size(image_size, long_size)
    x1 = int(x * (max(width - crop_size, 0) + 1))
    y1 = int(y * (max(height - crop_size, 0) + 1))
    return Crop(bool(flip < 0.5), long_size, x1, y1, float(radius) if blur < 0.5 else None)


def scaled_size(image_size: tuple[int, int], long_size: int) -> tuple[int, int]:
    """(width, height) with the long side at long_size; the short side keeps the ratio, rounded half up."""
    width, height = image_size
    if height > width:
        return int(width * long_size / height + 0.5), long_size
    return long_size, int(height * long_size / width + 0.5)


def resampling(image_size: tuple[int, int], size: int, crop: Crop | None = None) -> dict:
    """The parameters of `on_host` and `on_device` for one sample: of a crop, or of a resize to (size, size).

    axes (2, 4) float32: for rows and columns, each the original's and the scaled length, where the crop
    starts, and whether to flip. blur (): the weight of a neighbour in one pass of the blur. mask_rows,
    mask_columns (S,) int32: the nearest original pixel, -1 beyond the edge."""
    crop = crop or Crop(False, 0, 0, 0, None)
    width, height = scaled_size(image_size, crop.long_size) if crop.long_size else (size, size)
    # PIL's blur: three box filters; below a radius of 1 each reaches the next pixel only.
    variance = (crop.blur or 0.0) ** 2 / 3
    axes = [(image_size[1], height, crop.y1, False), (image_size[0], width, crop.x1, crop.flip)]
    return dict(
        axes=np.array(axes, np.float32),
        blur=np.float32(variance / (2 - 2 * variance)),
        mask_rows=_nearest(*axes[0], size),
        mask_columns=_nearest(*axes[1], size),
    )


def _nearest(source, target, start, flip, size):
    """(size,) int32: the original pixel that PIL takes for each pixel of a crop; -1 beyond the edge."""
    step = source / target
    # Added up one by one as PIL does: where the exact position is a whole number, its rounding decides.
    nearest = np.add.accumulate(np.concatenate([[step / 2], np.full(target - 1, step)])).astype(np.int32)
    if flip:
        nearest = source - 1 - nearest
    nearest = nearest[start : start + size]
    return np.concatenate([nearest, np.full(size - len(nearest), -1, np.int32)])


# On the host


def planes(image: np.ndarray) -> np.ndarray:
    """(H, W) or (H, W, 3) -> (C, H, W)."""
    return image[None] if image.ndim == 2 else image.transpose(2, 0, 1)


def on_host(image: np.ndarray, mask: np.ndarray, parameters: dict) -> tuple[np.ndarray, np.ndarray]:
    """Resample one image, (H, W) or (H, W, 3), and its mask, (H, W), both uint8 -> (C, S, S) and (1, S, S)
    uint8. parameters: of `resampling`."""
    axes, blur = parameters["axes"], parameters["blur"]
    mask_rows, mask_columns = parameters["mask_rows"], parameters["mask_columns"]
    height, rows = _sparse_weights(axes[0], len(mask_rows))
    width, columns = _sparse_weights(axes[1], len(mask_rows))
    box = np.array([blur, 1, blur]) / (1 + 2 * blur)
    thrice = np.convolve(np.convolve(box, box), box)  # (7,)
    resampled = []
    for plane in planes(image[height, width]):
        plane = torch.from_numpy(plane.astype(np.float32))  # (h, w), the part of the original that is needed
        plane = _sparse_matmul(rows, plane)  # (S, w)
        plane = _sparse_matmul(columns, plane.T.contiguous()).T.numpy()  # (S, S)
        if blur > 0:
            for axis in (0, 1):  # three passes that repeat the edge are one that mirrors three pixels
                plane = ndimage.convolve1d(plane, thrice, axis, mode="reflect")
        resampled.append(plane.round().astype(np.uint8))
    mask = mask.take(mask_rows, 0).take(mask_columns, 1)
    mask[mask_rows < 0] = 0
    mask[:, mask_columns < 0] = 0
    return np.stack(resampled), mask[None]


def _sparse_matmul(matrix, image):
    """A matrix of K weights in each row, (S, K) each with its pixel, times an image (H, W) -> (S, W)."""
    pixel, weight = matrix
    # An embedding bag is just that, and fast on a CPU.
    return torch.nn.functional.embedding_bag(pixel, image, mode="sum", per_sample_weights=weight)


def _sparse_weights(axis, size):
    """The slice of the original's pixels that a sample needs; of these the (S, K) that count in each row of
    `_weights`, and their weights."""
    source, target, start, flip = axis.tolist()
    step = source / target
    reach = max(step, 1.0)
    centre = (np.arange(start, start + size) + 0.5) * step
    first = np.floor(centre - reach)
    taps = np.arange(np.ceil(2 * reach) + 1, dtype=np.float32)  # (K,)
    distance = np.abs((first + 0.5 - centre)[:, None].astype(np.float32) + taps)  # (S, K)
    weights = 1 - distance / np.float32(reach)
    pixel = first.astype(np.int32)[:, None] + taps.astype(np.int32)
    weights[(weights < 0) | (pixel < 0) | (pixel >= source)] = 0
    weights /= weights.sum(1, keepdims=True).clip(1e-6)
    weights[int(target - start) :] = 0  # beyond the edge
    if flip:
        pixel = int(source) - 1 - pixel
    pixel = pixel.clip(0, int(source) - 1)
    lowest, end = int(pixel.min()), int(pixel.max()) + 1
    return slice(lowest, end), (torch.from_numpy(pixel - lowest), torch.from_numpy(weights))


# On a device


def on_device(
    images: Tensor, masks: Tensor, parameters: dict[str, Tensor], *, in_bfloat16: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Resample a batch by two matrix products for the images, and by their like, or by reading pixels, for
    the masks.

    images: (B, C, H, W), masks: (B, 1, H, W), both uint8; smaller images lie in the upper left corner.
    parameters: of `resampling`, stacked. in_bfloat16: whether the device rounds the factors of a product to
    bfloat16, as XLA's do. Returns images (B, C, S, S) float32 in [0, 255], not rounded, and masks (B, 1, S,
    S) uint8."""
    axes, blur = parameters["axes"], parameters["blur"]
    mask_rows, mask_columns = parameters["mask_rows"], parameters["mask_columns"]
    in_bfloat16 = is_on_xla(images) if in_bfloat16 is None else in_bfloat16
    height, width = images.shape[-2:]
    with torch.autocast(images.device.type, enabled=False):
        weights = _blur(_weights(axes, mask_rows.shape[-1], max(height, width)), blur)
        rows, columns = weights[:, :1, :, :height], weights[:, 1:, :, :width]  # (B, 1, S, H), (B, 1, S, W)
        images = images.float()
        if not in_bfloat16:
            return rows @ images @ columns.mT, _pixels(masks, mask_rows, mask_columns)
        # Of 8 bits: each factor is a sum of parts that have no more of them, as whole numbers up to 255.
        coarse, fine = _in_two_parts(rows, 1 / 128)
        images = coarse @ images + fine @ images  # (B, C, S, W)
        whole, fraction = _in_two_parts(images, 1)
        coarse, fine = _in_two_parts(columns, 1 / 128)
        images = whole @ coarse.mT + whole @ fine.mT + fraction @ coarse.mT + fraction @ fine.mT
        rows = _one_hot(mask_rows, height)[:, None]  # (B, 1, S, H)
        columns = _one_hot(mask_columns, width)[:, None]  # (B, 1, S, W)
        masks = rows @ masks.float() @ columns.mT  # (B, 1, S, S)
    return images, masks.to(torch.uint8)


def _pixels(masks, rows, columns):
    """(B, 1, H, W) at rows and columns, (B, S) each -> (B, 1, S, S); 0 for -1."""
    rows, columns = rows[:, :, None].long(), columns[:, None]  # (B, S, 1), (B, 1, S)
    index = (rows * masks.shape[3] + columns).flatten(1).clamp(min=0)  # (B, S * S)
    read = masks.flatten(1).gather(1, index).view(len(masks), 1, rows.shape[1], -1)
    return read * (torch.minimum(rows, columns) >= 0)[:, None]


def _in_two_parts(x, step):
    """x as a multiple of `step`, and the rest."""
    coarse = (x / step).floor() * step
    return coarse, x - coarse


def _one_hot(index, length):
    """(B, S) -> (B, S, length) float32; a row of zeros for -1."""
    return (index[..., None] == _arange(length, index)).float()


def _weights(axes, size, length):
    """Bilinear resampling along axes, which averages where it shrinks: (B, 2, 4) of `resampling` -> (B, 2, S,
    length)."""
    source, target, start, flip = (axes[..., i, None, None] for i in range(4))  # (B, 2, 1, 1)
    out = _arange(size, axes)[:, None] + start  # (B, 2, S, 1)
    step = source / target
    pixel = _arange(length, axes) + 0.5
    pixel = torch.where(flip > 0, source - pixel, pixel)  # (B, 2, 1, length)
    weights = (1 - (pixel - (out + 0.5) * step).abs() / step.clamp(min=1)).clamp(min=0)  # (B, 2, S, length)
    weights = weights * ((pixel > 0) & (pixel < source) & (out < target))
    return weights / weights.sum(3, keepdim=True).clamp(min=1e-6)


def _blur(weights, blur):
    """Three passes of a box filter over the rows of (B, 2, S, length); the edge rows repeat. blur: (B,)."""
    blur = blur[:, None, None, None]
    total = 1 + 2 * blur
    for _ in range(3):
        padded = torch.cat([weights[:, :, :1], weights, weights[:, :, -1:]], 2)
        weights = (weights + blur * (padded[:, :, :-2] + padded[:, :, 2:])) / total
    return weights


def _arange(length, like):
    return torch.arange(length, dtype=like.dtype, device=like.device)
