"""MSHNet's upsampling on tiles, as products and convolutions: torch's own gathers on XLA, which has no
backward there and would cut the training step into several graphs.

Shapes: B batch, T tiles of an image, C channels, h and W the size of a tile; see `tiling.py`."""

import torch
from torch import Tensor
from torch.nn import functional as F

from tpukit_tasks.mshnet.tpu.tiling import apply, compute_dtype, exchange_halo, merge, rows, split


def upsample(x: Tensor, factor: int, tiles: int) -> Tensor:
    """Bilinear upsampling with aligned corners: (T*B, C, h, W) -> (T*B, C, factor * h, factor * W)."""
    if factor == 2:
        x = apply(_Upsample2xAlong, x, rows(x, tiles), 2, tiles)
        column = torch.arange(x.shape[3], dtype=compute_dtype(x), device=x.device)
        return apply(_Upsample2xAlong, x, column, 3, tiles)
    x = merge(x, tiles)
    by_rows, by_columns = (_interpolation_matrix(size, factor, x) for size in x.shape[-2:])
    return split(by_rows @ x @ by_columns.T, tiles)


def _interpolation_matrix(size, factor, like):
    """(factor * size, size), built on the device of `like`."""
    out, dtype = size * factor, compute_dtype(like)
    position = torch.arange(out, dtype=dtype, device=like.device) * ((size - 1) / (out - 1))
    source = torch.arange(size, dtype=dtype, device=like.device)
    return (1 - (position[:, None] - source[None, :]).abs()).clamp(min=0).to(like.dtype)


class _Upsample2xAlong(torch.autograd.Function):
    """Twice as many pixels along one axis. position: of the pixels in the image, from 0.

    Of S pixels, with u = 1 / (2S - 1), a[i] = u * i * x[i] and d = a[i - 1] - a[i], the new pixels 2i - 1 and
    2i are S * u * (x[i - 1] + x[i]) + d and u * x[i - 1] + x[i] + d. So a transposed convolution of x and a
    writes each to its place; elementwise, the compiler writes odd and even pixels apart and then once more,
    because none of its passes interleaves."""

    @staticmethod
    def forward(ctx, x, position, axis, tiles):
        size = x.shape[axis] * (tiles if axis == 2 else 1)
        unit = 1 / (2 * size - 1)
        half = float(torch.tensor(size * unit, dtype=x.dtype))  # rounded; 1 + unit - half makes up for it
        one = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
        of_x = torch.stack([half * one, one, (1 + unit - half) * one, unit * one], 2)  # (C in, C out, 4)
        kernel = torch.cat([of_x, torch.stack([-one, -one, one, one], 2)])
        weight = unit * position
        ctx.save_for_backward(weight, kernel)
        ctx.axis, ctx.tiles, ctx.unit, ctx.half = axis, tiles, unit, half
        maps = torch.cat([x, (weight * x).to(x.dtype)], 1)
        if axis == 3:
            return F.conv_transpose2d(maps, kernel[:, :, None], stride=(1, 2), padding=(0, 1))
        maps = exchange_halo(maps, tiles, 1)
        return F.conv_transpose2d(maps, kernel[:, :, :, None], stride=(2, 1), padding=(3, 0))

    @staticmethod
    def backward(ctx, gradient):
        weight, kernel = ctx.saved_tensors
        if ctx.axis == 2:
            gradient = exchange_halo(gradient, ctx.tiles, 1)
            grad_x, grad_a = F.conv2d(gradient, kernel[:, :, :, None], stride=(2, 1)).chunk(2, 1)
        else:  # not as a convolution, whose result would be larger than what it reads
            padded = F.pad(gradient, (1, 1))
            size = gradient.shape[3]
            last, first, second, beyond = (padded[..., start : start + size : 2] for start in range(4))
            grad_x = ctx.half * last + first + (1 + ctx.unit - ctx.half) * second + ctx.unit * beyond
            grad_a = second + beyond - last - first
        return (grad_x + weight * grad_a).to(gradient.dtype), None, None, None
