"""Spatial tiling with halo exchange: MSHNet's layers in shapes that a TPU computes fast, with the same
numbers.

A TPU works on 128 numbers side by side, its lanes. If channels are few, its compiler puts the batch there,
and a batch of 32 leaves three quarters of every load, store and product empty. So images are split into T
tiles of whole rows that lie side by side in the batch: tile t of image b is sample t * B + b. Only layers
that read neighbouring rows or whole images differ.

Shapes: B batch, C channels, H and W the size of the image, h = H/T the rows of a tile, K the size of a
kernel."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tpukit.devices.chips import LANES
from tpukit.devices.tensors import with_optimization_barrier

MIN_ROWS = 8  # in a tile of the image; the network halves them twice


def num_tiles(image: Tensor) -> int:
    """Return how many tiles of each image fill the lanes with images (B, C, H, W)."""
    batch, tiles, height = image.shape[0], 1, image.shape[2]
    while 2 * tiles * batch <= LANES and height % (8 * tiles) == 0 and height // (2 * tiles) >= MIN_ROWS:
        tiles *= 2
    return tiles


def split(x: Tensor, tiles: int) -> Tensor:
    """(B, C, H, W) -> (T*B, C, h, W)."""
    return torch.cat(x.chunk(tiles, 2), 0) if tiles > 1 else x


def merge(x: Tensor, tiles: int) -> Tensor:
    """(T*B, C, h, W) -> (B, C, H, W)."""
    return torch.cat(x.chunk(tiles, 0), 2) if tiles > 1 else x


def by_image(x: Tensor, tiles: int) -> Tensor:
    """(T*B, ...) -> (T, B, ...)."""
    return x.unflatten(0, (tiles, -1))


def for_tiles(x: Tensor, tiles: int) -> Tensor:
    """(B, ...) -> (T*B, ...): repeat the values of each image for each of its tiles."""
    return x.repeat(tiles, *[1] * (x.dim() - 1))


def rows(x: Tensor, tiles: int) -> Tensor:
    """(T*B, 1, h, 1): which row of the image, from 0, each row of the tiles (T*B, C, h, W) is."""
    height = x.shape[2]
    row = torch.arange(tiles * height, dtype=compute_dtype(x), device=x.device)
    row = row.view(tiles, 1, 1, height, 1)
    return row.expand(-1, x.shape[0] // tiles, -1, -1, -1).flatten(0, 1)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The type of sums and weights: float32, or that of x if it has more bits."""
    return torch.promote_types(x.dtype, torch.float32)


def exchange_halo(x: Tensor, tiles: int, halo: int) -> Tensor:
    """(T*B, C, h, W) -> (T*B, C, h + 2 * halo, W): each tile with the nearest rows of the tiles above and
    below, or zeros. If a tile has fewer rows than the halo, of several tiles."""
    height, batch = x.shape[2], len(x) // tiles
    above, below = [], []
    for distance, start in enumerate(range(0, halo, height), 1):  # of a tile, and its rows of the halo
        count, away = min(height, halo - start), min(distance, tiles) * batch
        # The axis of size 1 is for libtpu 0.0.21: without it, the same values move 18% more through HBM.
        last, first = x[:, :, -count:].unflatten(0, (1, -1)), x[:, :, :count].unflatten(0, (1, -1))
        zeros = torch.zeros_like(last[:, :away])
        above.insert(0, torch.cat([zeros, last[:, : len(x) - away]], 1).flatten(0, 1))
        below.append(torch.cat([first[:, away:], zeros], 1).flatten(0, 1))
    return torch.cat([*above, x, *below], 2)


def conv2d(layers: Sequence[nn.Conv2d], maps: Sequence[Tensor], tiles: int) -> Tensor:
    """Convolutions without their biases, one after another in the channels, of maps (T*B, C, h, W), which
    follow one another in the channels too."""
    dtype = autocast_dtype(maps[0], layers[0])
    weights = [layer.weight for layer in layers]
    return apply(_Convolutions, tiles, len(layers), *[tensor.to(dtype) for tensor in (*weights, *maps)])


def autocast_dtype(x: Tensor, layer: nn.Conv2d) -> torch.dtype:
    """The dtype in which a convolution of x is computed."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else layer.weight.dtype


def apply(function: type[torch.autograd.Function], *arguments: object) -> Tensor:
    """Return function.apply(*arguments), which torch does not declare to be a tensor."""
    return cast(Tensor, function.apply(*arguments))


class _Convolutions(torch.autograd.Function):
    """Convolutions of the same maps, tile by tile, as one; the gradient of the maps is one too, of the
    gradient's tiles with their halo. Autograd's would compute the gradient of the halo as well, and add it to
    the neighbours in one more pass.

    Maps are concatenated only here, where the compiler reads one after another without copying them."""

    @staticmethod
    def forward(ctx, tiles, num_layers, *tensors):
        weights, maps = tensors[:num_layers], tensors[num_layers:]
        size = max(weight.shape[2] for weight in weights)
        kernel = torch.cat([F.pad(weight, [(size - weight.shape[2]) // 2] * 4) for weight in weights])
        ctx.save_for_backward(kernel, *tensors)
        ctx.tiles, ctx.num_layers = tiles, num_layers
        return _convolve(maps, kernel, tiles)

    @staticmethod
    def backward(ctx, gradient):
        kernel, *tensors = ctx.saved_tensors
        weights, maps = tensors[: ctx.num_layers], tensors[ctx.num_layers :]
        gradient = with_optimization_barrier(gradient)
        channels = [one.shape[1] for one in maps]
        grad_maps = [
            _convolve([gradient], part.flip(2, 3).transpose(0, 1), ctx.tiles) if needed else None
            for part, needed in zip(kernel.split(channels, 1), ctx.needs_input_grad[2 + len(weights) :])
        ]
        grad_weights = []
        for weight, part in zip(weights, gradient.split([len(weight) for weight in weights], 1)):
            pairs = zip(maps, weight.split(channels, 1))
            grad_weights.append(torch.cat([_gradient_of_kernel(*pair, part, ctx.tiles) for pair in pairs], 1))
        return None, None, *grad_weights, *grad_maps


def _convolve(maps, weight, tiles):
    padded = [_padded(one, weight, tiles) for one in maps]
    maps, padding = [one for one, _ in padded], padded[0][1]
    return F.conv2d(torch.cat(maps, 1) if len(maps) > 1 else maps[0], weight, padding=padding)


def _gradient_of_kernel(x, weight, gradient, tiles):
    # Not by torch.nn.grad, which adds to the graph.
    x, padding = _padded(x, weight, tiles)
    backward, ones, mask = torch.ops.aten.convolution_backward, [1, 1], [False, True, False]
    return backward(gradient, x, weight, None, ones, padding, ones, False, [0, 0], 1, mask)[1]


def _padded(x, weight, tiles):
    """Return (x with its halo, the rest of the padding by rows and columns)."""
    halo, columns = (size // 2 for size in weight.shape[2:])
    return (exchange_halo(x, tiles, halo), [0, columns]) if halo and tiles > 1 else (x, [halo, columns])


def conv2d_of_pixels(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """A 1x1 convolution from few channels or to one, as products and sums: the compiler adds them to the
    passes before and after, and computes the result again where it is read instead of keeping it."""
    assert layer.bias is not None
    weight, bias = layer.weight.flatten(1), layer.bias[:, None, None]  # (C out, C in), (C out, 1, 1)
    if len(weight) == 1:
        out = (weight[0, :, None, None] * x).sum(1, keepdim=True) + bias
    else:
        out = sum((column[:, None, None] * channel for column, channel in zip(weight.T, x.split(1, 1))), bias)
    return out.to(autocast_dtype(x, layer))


def conv2d_rows_as_channels(layer: nn.Conv2d, x: Tensor, tiles: int) -> Tensor:
    """A convolution to one channel that treats each pixel of a row as a channel: (T*B, C, h, W) -> (T*B, 1,
    h, W).

    A few channels would leave the matrix unit empty; whole rows fill it, and if the batch is in the lanes,
    no value moves. Along a row the kernel becomes a banded matrix: input column i reaches output column o by
    tap i - o + K // 2."""
    batch, channels, height, width = x.shape
    size, dtype = layer.kernel_size[0], autocast_dtype(x, layer)
    with torch.autocast(x.device.type, enabled=False):
        column = torch.arange(width, device=x.device)
        tap = column[None, :] - column[:, None] + size // 2  # (W out, W in)
        taps = torch.arange(size, device=x.device)[:, None, None]  # (K, 1, 1)
        band = (tap == taps).to(layer.weight.dtype)  # (K, W out, W in), one-hot along K
        weight = layer.weight.view(channels * size, size) @ band.view(size, -1)  # (C * K, W out * W in)
    weight = weight.view(channels, size, width, width).permute(2, 0, 3, 1)  # (W out, C, W in, K)
    weight = weight.reshape(width, channels * width, size, 1)
    rows = x.transpose(2, 3).reshape(batch, channels * width, height, 1)
    out = apply(_Convolutions, tiles, 1, weight.to(dtype), rows.to(dtype))  # (T*B, W out, h, 1)
    out = out.permute(0, 3, 2, 1)
    return out if layer.bias is None else out + layer.bias.to(dtype)
