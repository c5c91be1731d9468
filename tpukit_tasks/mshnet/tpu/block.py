"""MSHNet's block for XLA: the plain `model.Block` in fewer passes over its maps, with the same numbers.

Batch norm and channel attention multiply and shift whole channels, so both become one `scale` and `shift` of
the second convolution's result, which is all that is kept for backward. What decides them is small, (N, C) or
less, and left to autograd; the functions below are the passes over maps for which autograd would need more.

Shapes: N = T*B tiles, see `tiling.py`; C channels, h and W the size of a tile. Maps are in the type of
autocast, all else in `tiling.compute_dtype`."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tpukit_tasks.mshnet.model import Block, takes_batch_statistics
from tpukit_tasks.mshnet.tpu import tiling
from tpukit_tasks.mshnet.tpu.tiling import apply


def forward(layers: Block, maps: Sequence[Tensor], tiles: int) -> Tensor:
    """`Block.forward` of tiles. maps: (N, C, h, W) each, whose channels follow one another."""
    if layers.shortcut is None:
        (residual,) = maps
        (out,) = _convolve_and_normalise([layers.conv1], [layers.bn1], maps, tiles)
    else:
        layer, norm = layers.shortcut
        out, residual = _convolve_and_normalise([layers.conv1, layer], [layers.bn1, norm], maps, tiles)
    x = tiling.conv2d([layers.conv2], [F.relu(out)], tiles)
    sums = _sums(x)
    scale, shift = _scale_and_shift(layers.bn2, layers.conv2.bias, x, *sums)
    # The mean and the largest value of the normalised images, (B, C): a negative scale, one with a negative
    # weight, reverses the order. The sign of the weight is known before the convolution, so that its pass
    # finds the largest value too.
    mean = scale * tiling.by_image(sums[0], tiles).sum(0) / (x.shape[2] * x.shape[3] * tiles) + shift
    largest = tiling.by_image(apply(_TileMax, x, layers.bn2.weight.detach().sign()), tiles).amax(0)
    largest = scale.abs() * largest + shift
    attention = layers.ca.from_pooled(mean[:, :, None, None], largest[:, :, None, None])  # (B, C, 1, 1)
    attention = tiling.for_tiles(attention.flatten(1).to(scale.dtype), tiles)  # (N, C)
    scale, shift = attention * scale, attention * shift
    pooled = apply(_PoolChannels, x, scale, shift)  # (N, 2, h, W)
    attention = torch.sigmoid(tiling.conv2d_rows_as_channels(layers.sa.conv1, pooled, tiles))  # (N, 1, h, W)
    return apply(_Gate, x, scale, shift, attention, residual)


def _convolve_and_normalise(layers, norms, maps, tiles):
    """Convolutions of maps, each with its batch norm: a list. Of tiles they are one convolution, whose pass
    adds up the sums too; whole images have so many channels that the zeros around a 1x1 kernel would cost
    more than a pass."""
    found = []
    for together in [layers] if tiles > 1 else [[layer] for layer in layers]:
        out = tiling.conv2d(together, maps, tiles)
        found += zip(*(part.chunk(len(together), 1) for part in (out, *_sums(out))))
    return [
        _affine(part, *_scale_and_shift(norm, layer.bias, part, *sums)).to(part.dtype)
        for layer, norm, (part, *sums) in zip(layers, norms, found)
    ]


def _affine(x, scale, shift):
    """scale * x + shift, each (C,) or (N, C)."""
    return scale[..., None, None] * x + shift[..., None, None]


def _grads_of_affine(x, scale, grad_y):
    """The gradients of x, scale and shift from that of scale * x + shift."""
    return (scale[..., None, None] * grad_y).to(x.dtype), (grad_y * x).sum((2, 3)), grad_y.sum((2, 3))


def _sums(x):
    """Sum and sum of squares of each tile's channels, (N, C) each."""
    x = x.to(tiling.compute_dtype(x))
    return x.sum((2, 3)), (x * x).sum((2, 3))


def _scale_and_shift(norm, bias, x, total, squares):
    """Batch norm of x + bias as (scale, shift) of x, (C,) each. Updates the running statistics as torch does.

    x: (N, C, h, W). bias: (C,), of the convolution before; batch statistics take it away again, so it gets no
    gradient. total, squares: of `_sums`."""
    if takes_batch_statistics(norm):
        count = x.numel() // x.shape[1]
        mean = total.sum(0) / count
        variance = (squares.sum(0) / count - mean**2).clamp(min=0)
        with torch.no_grad():
            norm.num_batches_tracked.add_(1)
            norm.running_mean.lerp_((mean + bias).to(norm.running_mean.dtype), norm.momentum)
            norm.running_var.lerp_((variance * count / (count - 1)).to(norm.running_var.dtype), norm.momentum)
    else:
        mean, variance = norm.running_mean - bias, norm.running_var
    scale = norm.weight * torch.rsqrt(variance + norm.eps)
    return scale, norm.bias - scale * mean


class _TileMax(torch.autograd.Function):
    """(N, C, h, W) -> (N, C): the largest value of sign * x in each tile's channels. sign: (C,). Equal ones
    share the gradient.

    autograd of `amax` would count them in 64 bits."""

    @staticmethod
    def forward(ctx, x, sign):
        sign = sign[:, None, None]
        largest = (sign * x).amax((2, 3), keepdim=True)
        ctx.save_for_backward(x, sign, largest)
        return largest.flatten(1)

    @staticmethod
    def backward(ctx, gradient):
        x, sign, largest = ctx.saved_tensors
        # The compiler may have taken the largest before x was rounded to its type.
        error = torch.finfo(x.dtype).eps / 2 * largest.abs()
        grad_x = _split_grad_among_maxima(gradient[..., None, None], sign * x, largest - error, (2, 3))
        return (sign * grad_x).to(x.dtype), None


class _PoolChannels(torch.autograd.Function):
    """Mean and largest over the channels of scale * x + shift: (N, C, h, W) -> (N, 2, h, W). scale, shift:
    (N, C)."""

    @staticmethod
    def forward(ctx, x, scale, shift):
        y = _affine(x, scale, shift)
        largest = y.amax(1, keepdim=True)
        ctx.save_for_backward(x, scale, shift, largest)
        return torch.cat([y.mean(1, keepdim=True), largest], 1).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        x, scale, shift, largest = ctx.saved_tensors
        # Multiplied and added at once, as some devices do, a value is rounded differently. One bound for all
        # channels of a pixel is read faster than one for each.
        size = largest.abs() + shift.abs().amax(1)[:, None, None, None]
        bound = largest - 2 * torch.finfo(largest.dtype).eps * size
        of_max = _split_grad_among_maxima(gradient[:, 1:], _affine(x, scale, shift), bound, 1)
        grad_y = gradient[:, :1] / x.shape[1] + of_max
        return _grads_of_affine(x, scale, grad_y)


def _split_grad_among_maxima(gradient, x, bound, dim):
    """The gradient of x, given that of its largest value along `dim`: those that reach a bound just below it
    share it."""
    is_largest = x >= bound
    share = gradient / is_largest.sum(dim, keepdim=True, dtype=x.dtype).clamp(min=1)
    return torch.where(is_largest, share, 0)


class _Gate(torch.autograd.Function):
    """ReLU(attention * (scale * x + shift) + residual), (N, C, h, W), with scale, shift (N, C) and attention
    (N, 1, h, W)."""

    @staticmethod
    def forward(ctx, x, scale, shift, attention, residual):
        out = F.relu(attention * _affine(x, scale, shift) + residual).to(x.dtype)
        ctx.save_for_backward(x, scale, shift, attention, out)
        return out

    @staticmethod
    def backward(ctx, gradient):
        x, scale, shift, attention, out = ctx.saved_tensors
        gradient = torch.where(out > 0, gradient, 0)  # the residual's
        grad_attention = (gradient * _affine(x, scale, shift)).sum(1, keepdim=True).to(attention.dtype)
        grad_y = attention * gradient.to(scale.dtype)
        return *_grads_of_affine(x, scale, grad_y), grad_attention, gradient
