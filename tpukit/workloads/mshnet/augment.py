"""The published augmentation (flip, scale, pad, crop, blur) and the resize of the evaluation, in two ways that agree.

On the host with PIL, a sample at a time; on a device as matrix products, `rows @ image @ columns^T`, because each of its parts is a linear
map of rows and columns: no pixel is gathered and every shape is fixed. They differ by PIL's rounding of every pass to whole grey levels.

Letters: B batch, C colours, H and W the size of the originals, S the size of the result.
"""

import numpy as np
import torch
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


# On the host: PIL images in and out


def augment(image, mask, *, flip, long_size, x1, y1, blur, crop_size):
    """One training sample: (image, mask) of any equal size -> (image, mask) of crop_size x crop_size."""
    if flip:
        image, mask = ImageOps.mirror(image), ImageOps.mirror(mask)
    width, height = scaled_size(image.size, long_size)
    # Only the pixels of the crop are computed. Masks whole: a box would move where their nearest pixel is by rounding.
    x2, y2 = min(x1 + crop_size, width), min(y1 + crop_size, height)
    along, down = image.width / width, image.height / height
    box = (x1 * along, y1 * down, min(x2 * along, image.width), min(y2 * down, image.height))
    image = image.resize((x2 - x1, y2 - y1), Image.Resampling.BILINEAR, box)
    image = image.crop((0, 0, crop_size, crop_size))  # beyond the edge it is filled with 0: the padding
    mask = mask.resize((width, height), Image.Resampling.NEAREST).crop((x1, y1, x1 + crop_size, y1 + crop_size))
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


# On the device


def settings(image_size, size, *, flip=False, long_size=None, x1=0, y1=0, blur=None):
    """What `on_device` has to know of one sample: as of `augment`, or, without a long_size, as of `resize`.

    Returns a dict of numpy arrays: axes (2, 4) float32 for rows and columns, each the original's and the scaled length, where the crop
    starts, and whether to flip; blur (), the weight of a neighbour in one pass of the blur; mask_rows, mask_columns (S,) int32, the nearest
    original pixel, -1 beyond the edge.
    """
    width, height = scaled_size(image_size, long_size) if long_size else (size, size)
    sigma2 = (blur or 0.0) ** 2 / 3  # PIL's blur: three box filters; below a radius of 1 each reaches to the next pixel only
    axes = [(image_size[1], height, y1, False), (image_size[0], width, x1, flip)]
    return dict(
        axes=np.array(axes, np.float32),
        blur=np.float32(sigma2 / (2 - 2 * sigma2)),
        mask_rows=_nearest(*axes[0], size),
        mask_columns=_nearest(*axes[1], size),
    )


def _nearest(source, target, start, flip, size):
    """(size,) int32: the original pixel that PIL takes for each pixel of a crop; -1 beyond the edge."""
    step = source / target
    # Added up one by one as PIL does: where the exact position is a whole number, its rounding decides.
    found = np.add.accumulate(np.concatenate([[step / 2], np.full(target - 1, step)])).astype(np.int32)
    found = (source - 1 - found if flip else found)[start : start + size]
    return np.concatenate([found, np.full(size - len(found), -1, np.int32)])


def on_device(images, masks, axes, blur, mask_rows, mask_columns):
    """The samples of a batch by two matrix products each.

    images: (B, C, H, W), masks: (B, 1, H, W), both uint8; an image smaller than that lies in the upper left corner. The rest: a row of
    `settings` each. Returns images (B, C, S, S) float32 in [0, 255], not rounded, and masks (B, 1, S, S) uint8.
    """
    height, width, size = *images.shape[-2:], mask_rows.shape[-1]
    with torch.autocast(images.device.type, enabled=False):  # a grey level is finer than a weight in bf16
        rows, columns = (_blurred(_weights(axes[:, a], size, n), blur) for a, n in enumerate((height, width)))
        images = rows[:, None] @ images.float() @ columns[:, None].mT
        rows, columns = ((at[..., None] == _count(n, at)).float() for at, n in ((mask_rows, height), (mask_columns, width)))
        masks = rows[:, None] @ masks.float() @ columns[:, None].mT
    return images, masks.to(torch.uint8)


def _weights(axis, size, length):
    """(B, 4) of `settings` -> (B, size, length): the triangle filter, as wide as a scaled pixel where that is wider than an original one."""
    source, target, start, flip = (axis[:, i, None, None] for i in range(4))
    at = _count(size, axis)[:, None] + start
    step = source / target
    pixel = _count(length, axis) + 0.5
    pixel = torch.where(flip > 0, source - pixel, pixel)  # (B, 1, length)
    weights = (1 - (pixel - (at + 0.5) * step).abs() / step.clamp(min=1)).clamp(min=0)  # (B, size, length)
    weights = weights * ((pixel > 0) & (pixel < source) & (at < target))
    return weights / weights.sum(2, keepdim=True).clamp(min=1e-6)


def _blurred(weights, blur):
    """Three passes of a box filter over the rows of (B, size, length); the edge rows repeat."""
    blur = blur[:, None, None]
    for _ in range(3):
        before = torch.cat([weights[:, :1], weights[:, :-1]], 1)
        after = torch.cat([weights[:, 1:], weights[:, -1:]], 1)
        weights = (weights + blur * (before + after)) / (1 + 2 * blur)
    return weights


def _count(length, like):
    return torch.arange(length, dtype=like.dtype, device=like.device)
