"""Augmentation and normalisation of a batch on the device: maths of fixed shapes from a few numbers that the
host drew.

The crop is two matrix products, so that no pixel is gathered. Shapes: B batch, S side of the images."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from tpukit.host.errors import TpukitError

if TYPE_CHECKING:
    from torch import Tensor

NUM_UNIFORMS = 8  # uniform numbers for each sample


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """Which changes are made; the fields are those of `ImageClassifier`. What is off is not in the graph."""

    flip: float = 0.0
    crop: float = 1.0
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    mixup: float = 0.0

    @property
    def num_uniforms(self):
        return 0 if self == Augmentation() else NUM_UNIFORMS

    def parameters(self, numbers: np.ndarray) -> np.ndarray:
        """(B, NUM_UNIFORMS) uniform in [0, 1) -> (B, NUM_UNIFORMS) float32, columns as `apply` unpacks them.

        zoom: side of the part of the image that is kept, as a share, from a uniform area. left, top: where it
        starts. is_flipped: 0 or 1. Then three factors, uniform in 1 ± their field, and the image's own share
        in its mixture, of Beta(mixup, mixup)."""
        from scipy import special

        area, left, top, flip, *colours, mixture = np.asarray(numbers, np.float64).T
        zoom = np.sqrt(self.crop + (1 - self.crop) * area)
        share = special.betaincinv(self.mixup, self.mixup, mixture) if self.mixup else np.ones_like(area)
        reaches = self.brightness, self.contrast, self.saturation
        factors = [1 + reach * (2 * number - 1) for reach, number in zip(reaches, colours)]
        columns = [zoom, left * (1 - zoom), top * (1 - zoom), flip < self.flip, *factors, share]
        return np.stack(columns, 1).astype(np.float32)

    def apply(self, image: Tensor, parameters: Tensor) -> Tensor:
        """The augmented images, float32 in [0, 255]. image: (B, 3, S, S) uint8. parameters: (B,
        NUM_UNIFORMS)."""
        import torch

        columns = parameters[:, :, None, None, None].unbind(1)
        zoom, left, top, is_flipped, brightness, contrast, saturation, share = columns
        image = image.float()  # (B, 3, S, S)
        with torch.autocast(image.device.type, enabled=False):
            if self.crop < 1:
                across = _crop_matrix(zoom[:, 0], left[:, 0], image.shape[-1])  # (B, S, S)
                down = _crop_matrix(zoom[:, 0], top[:, 0], image.shape[-1])
                image = down[:, None] @ image @ across[:, None].transpose(2, 3)
            if self.flip:
                image = torch.where(is_flipped > 0, image.flip(3), image)
            if self.brightness:
                image = image * brightness
            if self.contrast:
                image = _blend(image, _grey(image).mean((1, 2, 3), keepdim=True), contrast)
            if self.saturation:
                image = _blend(image, _grey(image), saturation)
            if self.brightness or self.contrast or self.saturation:
                image = image.clamp(0, 255)
            if self.mixup:
                image = share * image + (1 - share) * partners(image)
        return image


def partners(values: Tensor) -> Tensor:
    """The other one of each pair (0, 1), (2, 3), ...: (B, ...) -> (B, ...). A pair lies in one core's share
    of the batch, so that any number of cores mixes the same images. Raises TpukitError for an odd B."""
    if len(values) % 2:
        raise TpukitError(f"mixup pairs the images of a core, which has {len(values)}: make that even")
    return values.reshape(len(values) // 2, 2, *values.shape[1:]).flip(1).reshape(values.shape)


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

    def constants(values):  # (3, 1, 1), made in the compiled graph: the host would send it with every step
        return torch.stack([torch.full((1, 1), value, device=image.device) for value in values])

    factor = constants([1 / (255 * s) for s in std])
    offset = constants([-m / s for m, s in zip(mean, std)])
    return image.float() * factor + offset
