"""The published augmentation: flip, scale, pad, crop, blur; and the resize of the evaluation. PIL images in and out."""

import numpy as np
from PIL import Image, ImageFilter, ImageOps

DRAWS = 6  # uniform numbers that one sample uses up


def plan(numbers, image_size, base_size, crop_size):
    """Turn six uniform numbers in [0, 1) into the settings of `augment`.

    image_size: (width, height) of the original. Returns a dict: flip (bool), long_size, x1, y1 (pixels), blur (radius
    in pixels, or None). The long side is uniform in [base/2, 2 base], both ends included.
    """
    flip, scale, x, y, blur, radius = numbers
    shortest, longest = base_size // 2, base_size * 2
    long_size = shortest + int(scale * (longest - shortest + 1))
    width, height = scaled_size(image_size, long_size)
    return dict(
        flip=bool(flip < 0.5),
        long_size=long_size,
        x1=int(x * (max(width - crop_size, 0) + 1)),
        y1=int(y * (max(height - crop_size, 0) + 1)),
        blur=float(radius) if blur < 0.5 else None,
    )


def scaled_size(image_size, long_size):
    """(width, height) with the long side at long_size; the short side keeps the ratio, rounded half up."""
    width, height = image_size
    if height > width:
        return int(width * long_size / height + 0.5), long_size
    return long_size, int(height * long_size / width + 0.5)


def augment(image, mask, *, flip, long_size, x1, y1, blur, crop_size):
    """One training sample: (image, mask) of any equal size -> (image, mask) of crop_size x crop_size."""
    if flip:
        image, mask = ImageOps.mirror(image), ImageOps.mirror(mask)
    width, height = scaled_size(image.size, long_size)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    mask = mask.resize((width, height), Image.Resampling.NEAREST)
    box = (x1, y1, x1 + crop_size, y1 + crop_size)  # a crop beyond the edge is filled with 0: the padding
    image, mask = image.crop(box), mask.crop(box)
    if blur is not None:
        image = image.filter(ImageFilter.GaussianBlur(blur))
    return image, mask


def resize(image, mask, base_size):
    """One evaluation sample: both resized to base_size x base_size."""
    size = (base_size, base_size)
    return image.resize(size, Image.Resampling.BILINEAR), mask.resize(size, Image.Resampling.NEAREST)


def to_array(image):
    """A PIL image in mode L or RGB -> (C, H, W) uint8 with C = 1 or 3."""
    array = np.asarray(image)
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
