"""Augmentation and normalisation of a batch on the device: maths of fixed shapes from a few numbers that the
host drew.

What the settings switch off is not in the graph. The crop is two matrix products, so that no pixel is
gathered. Shapes: B batch, S side of the images."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

NUM_UNIFORMS = 7  # uniform numbers for each sample


def draw(numbers: np.ndarray, *, flip: float, crop: float, colour: float) -> np.ndarray:
    """(B, NUM_UNIFORMS) uniform in [0, 1) -> (B, NUM_UNIFORMS) float32, columns as `apply` unpacks them.

    flip, crop, colour: see `ImageClassifier`.

    zoom: side of the part of the image that is kept, as a share, from a uniform area. left, top: where it
    starts. is_flipped: 0 or 1. Then factors of brightness, contrast and saturation, uniform in 1 ± colour."""
    area, left, top, mirror, *colours = np.asarray(numbers, np.float64).T
    zoom = np.sqrt(crop + (1 - crop) * area)
    factors = [1 + colour * (2 * number - 1) for number in colours]
    columns = [zoom, left * (1 - zoom), top * (1 - zoom), mirror < flip, *factors]
    return np.stack(columns, 1).astype(np.float32)


def apply(image: Tensor, parameters: Tensor, *, flip: float, crop: float, colour: float) -> Tensor:
    """The augmented images, float32 in [0, 255]. image: (B, 3, S, S) uint8. parameters: of `draw`."""
    import torch

    columns = parameters[:, :, None, None, None].unbind(1)
    zoom, left, top, is_flipped, brightness, contrast, saturation = columns
    image = image.float()  # (B, 3, S, S)
    with torch.autocast(image.device.type, enabled=False):
        if crop < 1:
            across = _crop_matrix(zoom[:, 0], left[:, 0], image.shape[-1])  # (B, S, S)
            down = _crop_matrix(zoom[:, 0], top[:, 0], image.shape[-1])
            image = down[:, None] @ image @ across[:, None].transpose(2, 3)
        if flip:
            image = torch.where(is_flipped > 0, image.flip(3), image)
        if colour:
            image = image * brightness
            image = _blend(image, _grey(image).mean((1, 2, 3), keepdim=True), contrast)
            image = _blend(image, _grey(image), saturation).clamp(0, 255)
    return image


def _crop_matrix(zoom, start, size):
    """Bilinear enlargement of a part of an axis to the whole: zoom, start (B, 1, 1) as shares -> (B, S, S),
    rows sum to 1."""
    import torch

    pixel = torch.arange(size, dtype=zoom.dtype, device=zoom.device)
    centre = ((pixel[:, None] + 0.5) * zoom + start * size - 0.5).clamp(0, size - 1)  # (B, S, 1)
    return (1 - (centre - pixel).abs()).clamp(min=0)


def _grey(image):
    """(B, 3, S, S) -> (B, 1, S, S), by the luma of ITU-R BT.601."""
    return 0.299 * image[:, :1] + 0.587 * image[:, 1:2] + 0.114 * image[:, 2:]


def _blend(image, other, share):
    return other + share * (image - other)


def normalise(image: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """(B, 3, S, S) in [0, 255] -> float32 with this mean and standard deviation of [0, 1] taken out, three
    numbers each."""
    import torch

    # Numbers of Python, because a tensor made of them would be copied to the device in every step.
    colours = zip(image.float().unbind(1), mean, std)
    return torch.stack([colour * (1 / (255 * s)) - m / s for colour, m, s in colours], 1)
