"""The published augmentation (flip, scale, pad, crop, blur) and the evaluation's resize.

On the host a sample at a time by PIL, as in the published code. On a device a batch at a time as linear maps
of rows and columns, `rows @ image @ columns.T` by dense matrices, so that no pixel is gathered and every
shape is fixed; that equals PIL's result, which rounds to whole grey levels after every pass.

Shapes: B batch, C colours, H and W the size of the originals, S the size of the result."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageFilter, ImageOps
from torch import Tensor

from tpukit.devices.tensors import is_on_xla

NUM_UNIFORMS = 6  # uniform numbers for each sample


class Crop(NamedTuple):
    """The square that becomes a sample: of an image that is flipped, scaled, and black beyond its edge."""

    size: int
    """Side in pixels."""
    scaled: tuple[int, int]
    """(width, height) to which the image is scaled."""
    flip: bool = False
    """Mirror it, left to right."""
    x1: int = 0
    """Column of the scaled image where the square starts."""
    y1: int = 0
    """Row of the scaled image where the square starts."""
    blur: float = 0.0
    """Radius in pixels, below 1."""


def random_crop(
    numbers: Sequence[float], image_size: tuple[int, int], base_size: int, crop_size: int
) -> Crop:
    """Return the crop of six uniform numbers in [0, 1). image_size: (width, height) of the original. The long
    side is uniform in [base/2, 2 base], both ends included."""
    flip, scale, x, y, blur, radius = numbers
    shortest, longest = base_size // 2, base_size * 2
    width, height = scaled_size(image_size, shortest + int(scale * (longest - shortest + 1)))
    x1 = int(x * (max(width - crop_size, 0) + 1))
    y1 = int(y * (max(height - crop_size, 0) + 1))
    return Crop(crop_size, (width, height), bool(flip < 0.5), x1, y1, float(radius) if blur < 0.5 else 0.0)


def scaled_size(image_size: tuple[int, int], long_size: int) -> tuple[int, int]:
    """Return (width, height) with the long side at long_size; the short side keeps the ratio, rounded half
    up."""
    width, height = (max(int(side * long_size / max(image_size) + 0.5), 1) for side in image_size)
    return width, height


def on_host(image: np.ndarray, mask: np.ndarray, crop: Crop) -> tuple[np.ndarray, np.ndarray]:
    """Cut the sample of an image (C, H, W) and its mask (H, W), both uint8 -> (C, S, S), (1, S, S) uint8."""
    box = (crop.x1, crop.y1, crop.x1 + crop.size, crop.y1 + crop.size)

    def cut(plane, method):
        picture = Image.fromarray(plane)
        picture = ImageOps.mirror(picture) if crop.flip else picture
        return picture.resize(crop.scaled, method).crop(box)

    blur = ImageFilter.GaussianBlur(crop.blur)  # radius 0: no blur
    planes = [cut(plane, Image.Resampling.BILINEAR).filter(blur) for plane in image]
    mask = np.asarray(cut(mask, Image.Resampling.NEAREST))
    return np.stack([np.asarray(plane) for plane in planes]), mask[None]


def device_parameters(image_size: tuple[int, int], crop: Crop) -> dict[str, np.ndarray]:
    """Return the parameters of one sample for `on_device`. image_size: (width, height) of the original.

    axes (2, 4) float32: for rows and columns, each the original's and the scaled length, where the crop
    starts, and whether to flip. blur (): the weight of a neighbour in one pass of the blur. mask_rows,
    mask_columns (S,) int32: the nearest original pixel, -1 beyond the edge."""
    rows = (image_size[1], crop.scaled[1], crop.y1, False)
    columns = (image_size[0], crop.scaled[0], crop.x1, crop.flip)
    # PIL's blur: three box filters; below a radius of 1 each reaches the next pixel only.
    variance = crop.blur**2 / 3
    return dict(
        axes=np.array([rows, columns], np.float32),
        blur=np.array(variance / (2 - 2 * variance), np.float32),
        mask_rows=_nearest(*rows, crop.size),
        mask_columns=_nearest(*columns, crop.size),
    )


def _nearest(source, target, start, flip, size):
    """(size,) int32: the original pixel that PIL takes for each pixel of a crop; -1 beyond the edge."""
    numbers = np.arange(1, source + 1, dtype=np.int32)[None]  # PIL crops with zeros beyond
    row = Image.fromarray(numbers[:, ::-1] if flip else numbers)
    scaled = row.resize((target, 1), Image.Resampling.NEAREST).crop((start, 0, start + size, 1))
    return np.asarray(scaled)[0] - 1


def on_device(
    images: Tensor, masks: Tensor, parameters: dict[str, Tensor], *, in_bfloat16: bool | None = None
) -> tuple[Tensor, Tensor]:
    """`on_host` for a batch: images (B, C, H, W) and masks (B, 1, H, W), both uint8, where smaller ones lie
    in the upper left corner -> images (B, C, S, S) float32 in [0, 255], not rounded, and masks (B, 1, S, S)
    uint8.

    parameters: of `device_parameters`, stacked. in_bfloat16: whether the device rounds the factors of a
    product to bfloat16, as XLA's do: then images and masks are products of whole numbers of 8 bits."""
    mask_rows, mask_columns = parameters["mask_rows"], parameters["mask_columns"]
    in_bfloat16 = is_on_xla(images) if in_bfloat16 is None else in_bfloat16
    height, width = images.shape[-2:]
    with torch.autocast(images.device.type, enabled=False):
        weights = _weights(parameters["axes"], mask_rows.shape[-1], max(height, width))
        weights = _blur(weights, parameters["blur"])
        rows, columns = weights[:, :1, :, :height], weights[:, 1:, :, :width]  # (B, 1, S, H), (B, 1, S, W)
        images = images.float()
        if not in_bfloat16:
            return rows @ images @ columns.mT, _pixels(masks, mask_rows, mask_columns)
        coarse, fine = _in_two_parts(rows, 1 / 128)
        images = coarse @ images + fine @ images  # (B, C, S, W)
        whole, fraction = _in_two_parts(images, 1)
        coarse, fine = _in_two_parts(columns, 1 / 128)
        images = whole @ coarse.mT + whole @ fine.mT + fraction @ coarse.mT + fraction @ fine.mT
        rows = _one_hot(mask_rows, height)[:, None]  # (B, 1, S, H)
        columns = _one_hot(mask_columns, width)[:, None]  # (B, 1, S, W)
        return images, (rows @ masks.float() @ columns.mT).to(torch.uint8)


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
    """Bilinear resampling along axes, which averages where it shrinks: (B, 2, 4) of `device_parameters` ->
    (B, 2, S, length)."""
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
