"""The published augmentation (flip, scale, pad, crop, blur) and the resize of the evaluation, as what they are: linear maps
of rows and columns.

`rows @ image @ columns^T`: on the host by the few weights of each row that are not zero, a sample at a time, and on a device
with dense ones, a batch at a time, where no pixel is gathered and every shape is fixed. Both equal PIL's result but for its
rounding of every pass to whole grey levels.

Letters: B batch, C colours, H and W the size of the originals, S the size of the result.
"""

import numpy as np
import torch

DRAWS = 6  # uniform numbers that one sample uses up


def plan(numbers, image_size, base_size, crop_size):
    """Turn six uniform numbers in [0, 1) into what `settings` takes.

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


def settings(image_size, size, *, flip=False, long_size=None, x1=0, y1=0, blur=None):
    """What `on_host` and `on_device` have to know of one sample: from a `plan`, or, without a long_size, to resize it to
    (size, size).

    Returns a dict of numpy arrays: axes (2, 4) float32 for rows and columns, each the original's and the scaled length, where
    the crop starts, and whether to flip; blur (), the weight of a neighbour in one pass of the blur; mask_rows, mask_columns
    (S,) int32, the nearest original pixel, -1 beyond the edge.
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


# On the host


def planes(image):
    """(H, W) or (H, W, 3) -> (C, H, W)."""
    return image[None] if image.ndim == 2 else image.transpose(2, 0, 1)


def on_host(image, mask, axes, blur, mask_rows, mask_columns):
    """One sample. image: (H, W) or (H, W, 3), mask: (H, W), uint8; the rest: of `settings`. Returns (C, S, S) and (1, S, S)
    uint8."""
    size = len(mask_rows)
    (height, rows), (width, columns) = (_few_weights(*axis, size) for axis in axes.tolist())
    blurs = [_few_blur_weights(float(blur), size)] if blur > 0 else []
    made = [torch.from_numpy(plane.astype(np.float32)) for plane in planes(image[height, width])]
    made = [_weighed(_weighed(plane, rows, *blurs), columns, *blurs).round_().to(torch.uint8) for plane in made]
    mask = mask.take(mask_rows, 0).take(mask_columns, 1)
    mask[mask_rows < 0] = 0
    mask[:, mask_columns < 0] = 0
    return torch.stack(made).numpy(), mask[None]


def _few_weights(source, target, start, flip, size):
    """The slice of the original's pixels that a sample needs; of these the (size, few) that weigh in each row of `_weights`,
    and how much."""
    step = source / target
    reach = max(step, 1.0)
    centre = (np.arange(start, start + size) + 0.5) * step
    first = np.floor(centre - reach)
    taps = np.arange(np.ceil(2 * reach) + 1, dtype=np.float32)
    weights = 1 - np.abs((first + 0.5 - centre)[:, None].astype(np.float32) + taps) / np.float32(reach)
    pixel = first.astype(np.int32)[:, None] + taps.astype(np.int32)
    weights[(weights < 0) | (pixel < 0) | (pixel >= source)] = 0
    weights /= weights.sum(1, keepdims=True).clip(1e-6)
    weights[int(target - start) :] = 0  # beyond the edge
    pixel = (int(source) - 1 - pixel if flip else pixel).clip(0, int(source) - 1)
    lowest, end = int(pixel.min()), int(pixel.max()) + 1
    return slice(lowest, end), (torch.from_numpy(pixel - lowest), torch.from_numpy(weights))


def _few_blur_weights(neighbour, size):
    """The pixels that weigh, and their weights, in what `_blurred` does."""
    once = np.array([neighbour, 1, neighbour]) / (1 + 2 * neighbour)
    taps = np.convolve(np.convolve(once, once), once).astype(np.float32)
    pixel = np.arange(size, dtype=np.int32)[:, None] + np.arange(-3, 4, dtype=np.int32)
    # Three passes that repeat the edge are one that mirrors three pixels.
    pixel = np.minimum(np.where(pixel < 0, -1 - pixel, pixel), 2 * size - 1 - pixel)
    return torch.from_numpy(pixel), torch.from_numpy(np.tile(taps, (size, 1)))


def _weighed(image, *matrices):
    """(H, W) -> (W, S): the transposed product with matrices of few weights a row. An embedding bag is just that, and fast on
    a CPU."""
    for pixel, weights in matrices:
        image = torch.nn.functional.embedding_bag(pixel, image, mode="sum", per_sample_weights=weights)
    return image.T.contiguous()


# On a device


def on_device(images, masks, axes, blur, mask_rows, mask_columns):
    """The samples of a batch by two matrix products each.

    images: (B, C, H, W), masks: (B, 1, H, W), both uint8; an image smaller than that lies in the upper left corner. The rest:
    a row of `settings` each. Returns images (B, C, S, S) float32 in [0, 255], not rounded, and masks (B, 1, S, S) uint8.
    """
    height, width, size = *images.shape[-2:], mask_rows.shape[-1]
    with torch.autocast(images.device.type, enabled=False):
        rows, columns = (_blurred(_weights(axes[:, a], size, n), blur)[:, None] for a, n in enumerate((height, width)))
        # A TPU multiplies float32 as bfloat16, of 8 bits: each factor goes in parts that have no more of them.
        coarse, fine = _parts(rows, 1 / 128)
        images = images.float()
        images = coarse @ images + fine @ images
        whole, rest = _parts(images, 1)
        coarse, fine = _parts(columns, 1 / 128)
        images = whole @ coarse.mT + whole @ fine.mT + rest @ coarse.mT + rest @ fine.mT
        rows, columns = ((at[..., None] == _count(n, at)).float() for at, n in ((mask_rows, height), (mask_columns, width)))
        masks = rows[:, None] @ masks.float() @ columns[:, None].mT
    return images, masks.to(torch.uint8)


def _parts(x, step):
    """x as a multiple of `step`, and the rest."""
    coarse = (x / step).floor() * step
    return coarse, x - coarse


def _weights(axis, size, length):
    """(B, 4) of `settings` -> (B, size, length): the triangle filter, as wide as a scaled pixel where that is wider than an
    original one."""
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
