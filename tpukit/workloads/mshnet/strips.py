"""Layers in the shapes that a TPU is fast at, with the same numbers.

A TPU works on 128 numbers side by side, its lanes. Where channels are few its compiler puts the batch there, and a batch of
32 leaves three quarters of every load, store and product empty. So images are cut into S strips of rows that lie side by side
in the batch: strip s of image b is sample s * B + b. Only what looks at neighbouring rows or at whole images has to know.

Letters: B batch, C channels, H and W the size of the image, S strips, K the size of a kernel.
"""

import torch
from torch.nn import functional as F

from tpukit.devices.xla import on_one_xla_core

LANES = 128
LEAST_ROWS = 16  # of a strip of the image; the network halves them twice


def count(image):
    """How many strips fill the lanes with a batch of images (B, C, H, W); 1 where there are none, or where the batch is
    shared by cores."""
    number, has_lanes = 1, on_one_xla_core(image)
    while (
        has_lanes
        and 2 * number * image.shape[0] <= LANES
        and image.shape[2] % (8 * number) == 0
        and image.shape[2] // (2 * number) >= LEAST_ROWS
    ):
        number *= 2
    return number


def cut(x, count):
    """(B, C, H, W) -> (S*B, C, H/S, W)."""
    return x if count == 1 else torch.cat(x.chunk(count, 2), 0)


def join(x, count):
    """The reverse of `cut`."""
    return x if count == 1 else torch.cat(x.chunk(count, 0), 2)


def over_all(x, count, reduction):
    """(S*B, C, 1, 1) of strips -> (B, C, 1, 1) of their images, by "mean" or "amax"."""
    return x if count == 1 else getattr(x.view(count, -1, *x.shape[1:]), reduction)(0)


def beside(*parts, count):
    """Maps to be read by `convolve` as if their channels were one after another."""
    return torch.cat(parts, 1) if count == 1 else parts


def convolve(layer, x, count):
    """A convolution of images that are cut into strips; x: a map, or the parts that `beside` gave."""
    if count == 1:
        return layer(x)
    parts, reach = x if isinstance(x, tuple) else (x,), layer.kernel_size[0] // 2
    weights = layer.weight.split([part.shape[1] for part in parts], 1)
    # Part by part, because putting them together writes and reads all of them again.
    bordered = [_Bordered.apply(part, count, reach) if reach else part for part in parts]
    first, *rest = (F.conv2d(part, weight, padding=(0, reach)) for part, weight in zip(bordered, weights))
    return sum(rest, first) + layer.bias.view(1, -1, 1, 1).to(first.dtype)


def attend(layer, x, count):
    """A convolution of a few channels to one: (S*B, C, h, W) -> (S*B, 1, h, W)."""
    if x.device.type != "xla":
        return layer(x)
    # On XLA, because two channels would leave the lanes empty; whole rows of pixels fill them.
    return cut(convolve_rows(layer, join(x, count)), count)


def convolve_rows(layer, x):
    """A convolution to one channel, with whole rows of pixels as channels: (B, C, H, W) -> (B, 1, H, W)."""
    (_, channels, size, _), (batch, _, height, width) = layer.weight.shape, x.shape
    with torch.autocast(x.device.type, enabled=False):
        column = torch.arange(width, device=x.device)
        tap = column[None] - column[:, None] + size // 2  # (W out, W in)
        hot = (tap == torch.arange(size, device=x.device)[:, None, None]).to(layer.weight.dtype)  # (K, W, W)
        weight = layer.weight.view(channels * size, size) @ hot.view(size, -1)
    weight = weight.view(channels, size, width, width).permute(2, 0, 3, 1).reshape(width, channels * width, size, 1)
    rows = x.transpose(2, 3).reshape(batch, channels * width, height, 1)
    return F.conv2d(rows, weight, padding=(size // 2, 0)).permute(0, 3, 2, 1)


def double(x, count=1):
    """Bilinear upsampling by 2 with aligned corners: (S*B, C, h, w) -> (S*B, C, 2h, 2w), where S*h is the height of the image.

    Every new pixel lies between two old ones, so this is a blend of each pixel with its neighbours.
    """
    height, width = count * x.shape[2], x.shape[3]
    row = torch.arange(height, dtype=torch.float32, device=x.device).view(count, 1, 1, -1, 1)
    row = row.expand(-1, x.shape[0] // count, -1, -1, -1).flatten(0, 1)  # (S*B, 1, h, 1)
    x = _Doubled.apply(_Bordered.apply(x, count, 1), *_shares(row, height, x.dtype), 2)
    column = torch.arange(width, dtype=torch.float32, device=x.device)
    return _Doubled.apply(F.pad(x, (1, 1)), *_shares(column, width, x.dtype), 3)


def _shares(position, size, dtype):
    """How much of its neighbour before the first of the two new pixels has, and of its neighbour after the second one."""
    return (position / (2 * size - 1)).to(dtype), ((size - 1 - position) / (2 * size - 1)).to(dtype)


def interpolation(size, factor, like):
    """The (factor*size, size) matrix of linear interpolation with aligned corners, built on the device of `like`."""
    out = size * factor
    # Float64 on the host would be exact; float32 positions are within 1e-5 of a pixel at the sizes used here.
    position = torch.arange(out, dtype=torch.float32, device=like.device) * ((size - 1) / (out - 1))
    source = torch.arange(size, dtype=torch.float32, device=like.device)
    return (1 - (position[:, None] - source[None, :]).abs()).clamp(min=0).to(like.dtype)


# Two linear maps with their transposes written out: XLA would go over the whole map once for every slice that autograd undoes.


class _Bordered(torch.autograd.Function):
    """(S*B, C, h, W) -> (S*B, C, h + 2 reach, W): each strip with the nearest rows of the strips above and below, or zeros."""

    @staticmethod
    def forward(ctx, x, count, reach):
        ctx.count, ctx.reach = count, reach
        above, below = _from_neighbours(x[:, :, -reach:], x[:, :, :reach], count)
        return torch.cat([above, x, below], 2)

    @staticmethod
    def backward(ctx, gradient):
        reach, height = ctx.reach, gradient.shape[2] - 2 * ctx.reach
        above, below = _from_neighbours(gradient[:, :, -reach:], gradient[:, :, :reach], ctx.count)
        inside = gradient[:, :, reach:-reach]
        to_first, to_last = (0, 0, 0, height - reach), (0, 0, height - reach, 0)
        return F.pad(above, to_first) + inside + F.pad(below, to_last), None, None


def _from_neighbours(last, first, count):
    """What each strip gets from the strip above, which gives its `last` rows, and from the one below, which gives its
    `first`."""
    size = last.shape[0] // count
    nothing = torch.zeros_like(last[:size])
    if count == 1:
        return nothing, nothing
    return torch.cat([nothing, last[:-size]], 0), torch.cat([first[size:], nothing], 0)


class _Doubled(torch.autograd.Function):
    """Along one axis, n + 2 pixels (the outer two are borders) -> 2n: each blended with the one before, and with the one
    after."""

    @staticmethod
    def forward(ctx, x, before, after, axis):
        ctx.axis = axis
        ctx.save_for_backward(before, after)
        size = x.shape[axis] - 2
        inside = x.narrow(axis, 1, size)
        first = inside + before * (x.narrow(axis, 0, size) - inside)
        second = inside + after * (x.narrow(axis, 2, size) - inside)
        return torch.stack([first, second], axis + 1).flatten(axis, axis + 1)

    @staticmethod
    def backward(ctx, gradient):
        (before, after), axis = ctx.saved_tensors, ctx.axis
        first, second = gradient.unflatten(axis, (-1, 2)).unbind(axis + 1)
        to_before, to_after = before * first, after * second
        wide = [0, 0] * (3 - axis)
        inside = F.pad(first - to_before + second - to_after, [*wide, 1, 1])
        return F.pad(to_before, [*wide, 0, 2]) + inside + F.pad(to_after, [*wide, 2, 0]), None, None, None
