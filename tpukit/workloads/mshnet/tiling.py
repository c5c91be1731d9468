"""Spatial tiling with halo exchange: MSHNet's layers in shapes that a TPU computes fast, with the same numbers.

A TPU works on 128 numbers side by side, its lanes. Where channels are few, its compiler puts the batch there, and a batch of
32 leaves three quarters of every load, store and product empty. So images are split into T tiles of whole rows that lie side
by side in the batch: tile t of image b is sample t * B + b. Only layers that read neighbouring rows or whole images differ.

Letters: B batch, C channels, H and W the size of the image, T tiles, K the size of a kernel.
"""

import torch
from torch.nn import functional as F

from tpukit.devices.xla import on_one_xla_core

LANES = 128
MIN_ROWS = 16  # of a tile of the image; the network halves them twice


def num_tiles(image):
    """How many tiles fill the lanes with a batch (B, C, H, W); 1 on devices without lanes, or if cores share the batch."""
    if not on_one_xla_core(image):
        return 1
    batch, _, height, _ = image.shape
    tiles = 1
    while 2 * tiles * batch <= LANES and height % (8 * tiles) == 0 and height // (2 * tiles) >= MIN_ROWS:
        tiles *= 2
    return tiles


def split(x, tiles):
    """(B, C, H, W) -> (T*B, C, H/T, W)."""
    return x if tiles == 1 else torch.cat(x.chunk(tiles, 2), 0)


def merge(x, tiles):
    """(T*B, C, H/T, W) -> (B, C, H, W)."""
    return x if tiles == 1 else torch.cat(x.chunk(tiles, 0), 2)


def global_mean(x, tiles):
    """(T*B, C, H/T, W) -> (B, C, 1, 1), over whole images."""
    x = x.mean((2, 3), keepdim=True)  # (T*B, C, 1, 1)
    return x if tiles == 1 else x.view(tiles, -1, *x.shape[1:]).mean(0)


def global_max(x, tiles):
    """(T*B, C, H/T, W) -> (B, C, 1, 1), over whole images."""
    # amax, because the backward of an adaptive max pool over a whole image does not compile for a TPU v5e.
    x = x.amax((2, 3), keepdim=True)  # (T*B, C, 1, 1)
    return x if tiles == 1 else x.view(tiles, -1, *x.shape[1:]).amax(0)


def concat_channels(*maps, tiles):
    """Maps one after another in the channels, as `conv2d` takes them: of tiles the tuple of them, which nothing copies."""
    return torch.cat(maps, 1) if tiles == 1 else maps


def conv2d(layer, x, tiles):
    """A convolution of tiled images. x: (T*B, C, H/T, W), or several of them from `concat_channels`."""
    if tiles == 1:
        return layer(x)
    maps = x if isinstance(x, tuple) else (x,)
    halo = layer.kernel_size[0] // 2
    weights = layer.weight.split([part.shape[1] for part in maps], 1)
    # Map by map, because concatenating them would write and read all of them again.
    padded = [_ExchangeHalo.apply(part, tiles, halo) if halo else part for part in maps]
    out, *others = [F.conv2d(part, weight, padding=(0, halo)) for part, weight in zip(padded, weights)]
    for other in others:
        out = out + other
    return out + layer.bias.view(1, -1, 1, 1).to(out.dtype)


def conv2d_to_one_channel(layer, x, tiles):
    """A convolution of a few channels to one: (T*B, C, h, W) -> (T*B, 1, h, W)."""
    if x.device.type != "xla":
        return layer(x)
    # Two channels would leave the lanes empty; whole rows of pixels fill them.
    return split(conv2d_rows_as_channels(layer, merge(x, tiles)), tiles)


def conv2d_rows_as_channels(layer, x):
    """A convolution to one channel that treats each pixel of a row as a channel: (B, C, H, W) -> (B, 1, H, W).

    Along a row the kernel becomes a banded matrix: input column i reaches output column o by tap i - o + K // 2."""
    batch, channels, height, width = x.shape
    size = layer.kernel_size[0]
    with torch.autocast(x.device.type, enabled=False):
        column = torch.arange(width, device=x.device)
        tap = column[None, :] - column[:, None] + size // 2  # (W out, W in)
        taps = torch.arange(size, device=x.device)[:, None, None]  # (K, 1, 1)
        band = (tap == taps).to(layer.weight.dtype)  # (K, W out, W in), one-hot along K
        weight = layer.weight.view(channels * size, size) @ band.view(size, -1)  # (C * K, W out * W in)
    weight = weight.view(channels, size, width, width).permute(2, 0, 3, 1)  # (W out, C, W in, K)
    weight = weight.reshape(width, channels * width, size, 1)
    rows = x.transpose(2, 3).reshape(batch, channels * width, height, 1)
    out = F.conv2d(rows, weight, padding=(size // 2, 0))  # (B, W out, H, 1)
    return out.permute(0, 3, 2, 1)


def upsample2x(x, tiles=1):
    """Bilinear upsampling by 2 with aligned corners: (T*B, C, h, w) -> (T*B, C, 2h, 2w), where T*h is the image's height.

    Every new pixel lies between two old ones, so this blends each pixel with its neighbours, first by row, then by column.
    """
    height, width = tiles * x.shape[2], x.shape[3]
    row = torch.arange(height, dtype=torch.float32, device=x.device).view(tiles, 1, 1, -1, 1)
    row = row.expand(-1, x.shape[0] // tiles, -1, -1, -1).flatten(0, 1)  # (T*B, 1, h, 1), in the image
    x = _ExchangeHalo.apply(x, tiles, 1)  # (T*B, C, h + 2, w)
    x = _Upsample2xAlong.apply(x, *_blend_weights(row, height, x.dtype), 2)
    column = torch.arange(width, dtype=torch.float32, device=x.device)
    x = F.pad(x, (1, 1))  # (T*B, C, 2h, w + 2)
    return _Upsample2xAlong.apply(x, *_blend_weights(column, width, x.dtype), 3)


def _blend_weights(position, size, dtype):
    """Weight of the pixel before in the first of the two new pixels, and of the pixel after in the second one."""
    return (position / (2 * size - 1)).to(dtype), ((size - 1 - position) / (2 * size - 1)).to(dtype)


def upsample(x, factor):
    """Bilinear upsampling with aligned corners, by two matrix products: (B, C, H, W) -> (B, C, factor * H, factor * W).

    `F.interpolate` gathers, which has no backward on XLA and would cut the training step into several graphs."""
    rows, columns = (_interpolation_matrix(size, factor, x) for size in x.shape[-2:])
    return rows @ x @ columns.T


def _interpolation_matrix(size, factor, like):
    """(factor * size, size), built on the device of `like`."""
    out = size * factor
    # Float64 on the host would be exact; float32 positions are within 1e-5 of a pixel at the sizes used here.
    position = torch.arange(out, dtype=torch.float32, device=like.device) * ((size - 1) / (out - 1))
    source = torch.arange(size, dtype=torch.float32, device=like.device)
    return (1 - (position[:, None] - source[None, :]).abs()).clamp(min=0).to(like.dtype)


# Two linear maps with a backward of their own: XLA would go over the whole map once for every slice that autograd undoes.


class _ExchangeHalo(torch.autograd.Function):
    """(T*B, C, h, W) -> (T*B, C, h + 2 * halo, W): each tile with the nearest rows of the tiles above and below, or zeros."""

    @staticmethod
    def forward(ctx, x, tiles, halo):
        ctx.tiles, ctx.halo = tiles, halo
        above, below = _rows_of_neighbours(x[:, :, -halo:], x[:, :, :halo], tiles)
        return torch.cat([above, x, below], 2)

    @staticmethod
    def backward(ctx, gradient):
        halo, height = ctx.halo, gradient.shape[2] - 2 * ctx.halo
        # A row's copy below its tile is the halo above the next one, and the other way round.
        top, bottom = _rows_of_neighbours(gradient[:, :, -halo:], gradient[:, :, :halo], ctx.tiles)
        inside = gradient[:, :, halo:-halo]
        to_first_rows, to_last_rows = (0, 0, 0, height - halo), (0, 0, height - halo, 0)
        return F.pad(top, to_first_rows) + inside + F.pad(bottom, to_last_rows), None, None


def _rows_of_neighbours(last, first, tiles):
    """(rows from the tile above, rows from the tile below) of every tile, given the last and the first rows of each."""
    batch = last.shape[0] // tiles
    zeros = torch.zeros_like(last[:batch])
    if tiles == 1:
        return zeros, zeros
    return torch.cat([zeros, last[:-batch]], 0), torch.cat([first[batch:], zeros], 0)


class _Upsample2xAlong(torch.autograd.Function):
    """Along one axis, n + 2 pixels, of which the outer two are halo, -> 2n pixels.

    Each of the n gives two: one blended with the pixel before it, one with the pixel after it."""

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
        before, after = ctx.saved_tensors
        first, second = gradient.unflatten(ctx.axis, (-1, 2)).unbind(ctx.axis + 1)
        to_before, to_after = before * first, after * second
        inside = first - to_before + second - to_after
        trailing = [0, 0] * (3 - ctx.axis)  # F.pad counts from the last axis
        gradient = F.pad(to_before, [*trailing, 0, 2]) + F.pad(inside, [*trailing, 1, 1]) + F.pad(to_after, [*trailing, 2, 0])
        return gradient, None, None, None
