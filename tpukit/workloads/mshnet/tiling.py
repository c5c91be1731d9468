"""Spatial tiling with halo exchange: MSHNet's layers in shapes that a TPU computes fast, with the same numbers.

A TPU works on 128 numbers side by side, its lanes. Where channels are few, its compiler puts the batch there, and a batch of
32 leaves three quarters of every load, store and product empty. So images are split into T tiles of whole rows that lie side
by side in the batch: tile t of image b is sample t * B + b. Where cores share the batch (SPMD) each orders its own images so,
and no tile leaves its core. Only layers that read neighbouring rows or whole images differ.

Letters: B batch, C channels, H and W the size of the image, h = H/T the rows of a tile, K the size of a kernel, D cores that
share the batch. Everywhere tiles=None means torch's own layers, for other devices, which are faster with them.
"""

import torch
from torch.nn import functional as F

from tpukit.devices.runtime import cores_sharing, is_on_xla

LANES = 128
MIN_ROWS = 16  # of a tile of the image; the network halves them twice


def num_tiles(image):
    """How many tiles of each image fill the lanes with a core's images of (B, C, H, W); None on devices without lanes."""
    if not is_on_xla(image):
        return None
    batch, tiles, height = image.shape[0] // cores_sharing(image), 1, image.shape[2]
    while 2 * tiles * batch <= LANES and height % (8 * tiles) == 0 and height // (2 * tiles) >= MIN_ROWS:
        tiles *= 2
    return tiles


def split(x, tiles):
    """(B, C, H, W) -> (T*B, C, h, W)."""
    return torch.cat(_by_core(x).chunk(tiles, 3), 1).flatten(0, 1) if tiles and tiles > 1 else x


def merge(x, tiles):
    """(T*B, C, h, W) -> (B, C, H, W)."""
    return torch.cat(_by_core(x).chunk(tiles, 1), 3).flatten(0, 1) if tiles and tiles > 1 else x


def _by_core(x):
    """(T*B, ...) -> (D, T*B/D, ...)."""
    return x.unflatten(0, (cores_sharing(x), -1))


def by_image(x, tiles):
    """(T*B, ...) -> (T, B, ...)."""
    return _by_core(x).unflatten(1, (tiles or 1, -1)).transpose(0, 1).flatten(1, 2)


def for_tiles(x, tiles):
    """(B, ...) -> (T*B, ...): what is known of each image, for each of its tiles."""
    return _by_core(x).repeat(1, tiles, *[1] * (x.dim() - 1)).flatten(0, 1)


def rows(x, tiles):
    """(T*B, 1, h, 1): which row of the image, from 0, each row of the tiles (T*B, C, h, W) is."""
    tiles, height = tiles or 1, x.shape[2]
    row = torch.arange(tiles * height, dtype=compute_dtype(x), device=x.device).view(1, tiles, 1, 1, height, 1)
    cores = cores_sharing(x)
    return row.expand(cores, -1, x.shape[0] // (cores * tiles), -1, -1, -1).flatten(0, 2)


def compute_dtype(x):
    """The type of sums and weights: float32, or that of x if it has more bits."""
    return torch.promote_types(x.dtype, torch.float32)


def exchange_halo(x, tiles, halo):
    """(T*B, C, h, W) -> (T*B, C, h + 2 * halo, W): each tile with the nearest rows of the tiles above and below, or zeros."""
    last, first = _by_core(x[:, :, -halo:]), _by_core(x[:, :, :halo])
    batch = last.shape[1] // tiles
    zeros = torch.zeros_like(last[:, :batch])
    above = torch.cat([zeros, last[:, :-batch]], 1).flatten(0, 1)
    below = torch.cat([first[:, batch:], zeros], 1).flatten(0, 1)
    return torch.cat([above, x, below], 2)


def concat_channels(*maps, tiles):
    """Maps one after another in the channels, as `conv2d` takes them: of tiles the tuple of them, which nothing copies."""
    return maps if tiles and tiles > 1 else torch.cat(maps, 1)


def conv2d(layer, x, tiles, *, bias=True):
    """A convolution of tiled images. x: (T*B, C, h, W), or several of them from `concat_channels`. bias: whether to add it."""
    if tiles is None:
        return layer(x)
    maps = x if isinstance(x, tuple) else (x,)
    kind = maps[0].device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else layer.weight.dtype
    weights = layer.weight.to(dtype).split([part.shape[1] for part in maps], 1)
    # Map by map, because concatenating them would write and read all of them again.
    out, *others = [_Convolution.apply(part.to(dtype), weight, tiles) for part, weight in zip(maps, weights)]
    for other in others:
        out = out + other
    return out + layer.bias.view(1, -1, 1, 1).to(dtype) if bias else out


class _Convolution(torch.autograd.Function):
    """A convolution of tiles whose backward is one too, of the gradient's tiles with their halo. Autograd's would compute the
    gradient of the halo as well, and add it to the neighbours in one more pass over the map."""

    @staticmethod
    def forward(ctx, x, weight, tiles):
        ctx.save_for_backward(x, weight)
        ctx.tiles = tiles
        return _convolve(x, weight, tiles)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        to_x = to_weight = None
        if ctx.needs_input_grad[0]:
            to_x = _convolve(gradient, weight.flip(2, 3).transpose(0, 1), ctx.tiles)
        if ctx.needs_input_grad[1]:
            x, padding = _padded(x, weight.shape[2] // 2, ctx.tiles)
            _, to_weight, _ = torch.ops.aten.convolution_backward(
                gradient, x, weight, None, [1, 1], padding, [1, 1], False, [0, 0], 1, [False, True, False]
            )
        return to_x, to_weight, None


def _convolve(x, weight, tiles):
    x, padding = _padded(x, weight.shape[2] // 2, tiles)
    return F.conv2d(x, weight, padding=padding)


def _padded(x, halo, tiles):
    """(x with its halo, what is left of the padding by rows and columns)."""
    return (exchange_halo(x, tiles, halo), [0, halo]) if halo and tiles > 1 else (x, [halo, halo])


def conv2d_rows_as_channels(layer, x):
    """A convolution to one channel that treats each pixel of a row as a channel: (B, C, H, W) -> (B, 1, H, W).

    A few channels would leave the lanes empty; whole rows fill them. Along a row the kernel becomes a banded matrix: input
    column i reaches output column o by tap i - o + K // 2."""
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


def upsample(x, factor, tiles):
    """Bilinear upsampling with aligned corners: (T*B, C, h, W) -> (T*B, C, factor * h, factor * W)."""
    if tiles is None:
        return F.interpolate(x, scale_factor=factor, mode="bilinear", align_corners=True)
    # Not so on XLA: it gathers, which has no backward there and would cut the training step into several graphs.
    if factor == 2:
        return upsample2x(x, tiles)
    x = merge(x, tiles)
    by_rows, by_columns = (_interpolation_matrix(size, factor, x) for size in x.shape[-2:])
    return split(by_rows @ x @ by_columns.T, tiles)


def _interpolation_matrix(size, factor, like):
    """(factor * size, size), built on the device of `like`."""
    out, dtype = size * factor, compute_dtype(like)
    position = torch.arange(out, dtype=dtype, device=like.device) * ((size - 1) / (out - 1))
    source = torch.arange(size, dtype=dtype, device=like.device)
    return (1 - (position[:, None] - source[None, :]).abs()).clamp(min=0).to(like.dtype)


def upsample2x(x, tiles):
    """`upsample` by 2. Every new pixel lies between two old ones, so this blends each pixel with its neighbours, first by row,
    then by column."""
    x = _Upsample2xAlong.apply(x, rows(x, tiles), 2, tiles)
    column = torch.arange(x.shape[3], dtype=compute_dtype(x), device=x.device)
    return _Upsample2xAlong.apply(x, column, 3, tiles)


class _Upsample2xAlong(torch.autograd.Function):
    """Twice as many pixels along one axis: for each pixel one blended with the pixel before it, and one with the pixel after.

    position: of the pixels in the image, from 0."""

    @staticmethod
    def forward(ctx, x, position, axis, tiles):
        ctx.axis, ctx.tiles = axis, tiles
        ctx.save_for_backward(position)
        size, last = x.shape[axis], _size(x, axis, tiles) - 1
        padded = _with_neighbours(x, axis, tiles)
        previous, here, following = (padded.narrow(axis, start, size) for start in (0, 1, 2))
        first = here + position / (2 * last + 1) * (previous - here)
        second = here + (last - position) / (2 * last + 1) * (following - here)
        return _interleave(first.to(x.dtype), second.to(x.dtype), axis)

    @staticmethod
    def backward(ctx, gradient):
        (position,) = ctx.saved_tensors
        axis, tiles = ctx.axis, ctx.tiles
        size, last = gradient.shape[axis] // 2, _size(gradient, axis, tiles) // 2 - 1
        padded = _with_neighbours(gradient, axis, tiles)
        # A pixel has part in four new ones: the second of the pixel before, its own two, and the first of the pixel after.
        second_before, first, second, first_after = (_every_other(padded, axis, start, size) for start in range(4))
        to_x = (last + 1 - position) * second_before + (2 * last + 1 - position) * first
        to_x = to_x + (last + 1 + position) * second + (position + 1) * first_after
        return (to_x / (2 * last + 1)).to(gradient.dtype), None, None, None


def _interleave(first, second, axis):
    """(N, C, h, W) each -> (N, C, 2h, W) or, by columns, (N, C, h, 2W).

    In a TPU's memory h, W, C and N follow one another, and the two are put side by side along the axis that comes next there,
    so that nothing has to move; what `stack` gives is copied to another layout and back."""
    if axis == 2:
        return torch.cat([first, second], 3).view(*first.shape[:2], -1, first.shape[3])
    both = torch.cat([first, second], 1).unflatten(1, (2, -1))  # (N, 2, C, h, W)
    return both.permute(0, 2, 3, 4, 1).flatten(3)


def _size(x, axis, tiles):
    """Of the image along the axis."""
    return x.shape[axis] * (tiles if axis == 2 else 1)


def _with_neighbours(x, axis, tiles):
    """x with one pixel more on either side along the axis, zero outside the image."""
    return exchange_halo(x, tiles, 1) if axis == 2 else F.pad(x, (1, 1))


def _every_other(x, axis, start, size):
    """`size` pixels along the axis from `start`, leaving out every other one."""
    slices = [slice(None)] * axis + [slice(start, start + 2 * size - 1, 2)]
    return x[tuple(slices)]
