"""Cross entropy over a large vocabulary, for some positions at a time: the logits of a batch would be
gigabytes.

Shapes: B batch, T positions, t of them at a time, W width of the model, V entries of the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tpukit.devices.tensors import cores_sharing, is_on_xla, with_optimization_barrier

MAX_LOGITS = 2**26  # that are there at a time, in float32: 256 MiB


def cross_entropy(hidden: Tensor, head: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(scalar, differentiable in hidden and head: the sum of all; (B,): the cross entropy of each row, summed
    over its positions, without gradient), float32.

    hidden: (B, T, W), the model's output. head: (V, W), whose products with it are the logits. labels: (B, T)
    the right entry of each position; below 0: the position does not count."""
    return _CrossEntropy.apply(hidden, head, labels)  # pyright: ignore[reportReturnType]


class _CrossEntropy(torch.autograd.Function):
    """The gradients are computed with the loss, from the same logits; the backward pass scales them. (As in
    Liger Kernel, Hsu et al., 2024.)"""

    @staticmethod
    def forward(ctx, hidden, head, labels):
        rows, of_hidden, of_head = torch.zeros_like(labels[:, 0], dtype=torch.float32), [], None
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head.dtype
        weight = head.to(dtype)  # once, not for each part
        for h, counts, losses, gradient in _parts(hidden.to(dtype), weight, labels):
            rows = rows + losses
            if ctx.needs_input_grad[0]:
                # Not divided by the number of positions yet: in fp16 little would be left.
                g = gradient().to(dtype)  # (B, t, V), of the logits
                of_hidden.append(((g @ weight) * counts).to(hidden.dtype))
                if ctx.needs_input_grad[1]:
                    part = (g.flatten(0, 1).t() @ (h * counts).flatten(0, 1)).float()
                    of_head = part if of_head is None else of_head + part
        ctx.save_for_backward(torch.cat(of_hidden, 1) if of_hidden else None, of_head)
        ctx.mark_non_differentiable(rows)
        return rows.sum(), rows

    @staticmethod
    def backward(ctx, *scales):
        of_hidden, of_head = ctx.saved_tensors
        return of_hidden * scales[0], None if of_head is None else of_head * scales[0], None


def _parts(hidden: Tensor, head: Tensor, labels: Tensor) -> Iterator[tuple]:
    """Yield, for some positions at a time: hidden (B, t, W), whether they count (B, t, 1), losses (B,), and a
    function that returns the gradient of their sum in the logits, (B, t, V), wrong where they do not."""
    rows = hidden.shape[0] // cores_sharing(hidden)
    count = max(1, MAX_LOGITS // (rows * head.shape[0]))
    losses = None
    for h, label in zip(hidden.split(count, 1), labels.split(count, 1)):
        if losses is not None:  # XLA may else hold the logits of all parts at a time
            h = with_optimization_barrier(h, losses)
        logs = (h @ head.t()).log_softmax(-1, dtype=torch.float32)  # (B, t, V)
        counts, label = label[..., None] >= 0, label[..., None].clamp(min=0).long()
        if is_on_xla(h):  # where a gather and a scatter are slow
            is_right = label == torch.arange(head.shape[0], device=label.device)
            right = torch.where(is_right, logs, 0.0).sum(-1, keepdim=True)
            gradient = lambda: logs.exp() - is_right.float()  # noqa: E731
        else:  # where each pass over the logits takes its time
            right = logs.gather(-1, label)
            gradient = lambda: logs.exp_().scatter_add_(-1, label, -torch.ones_like(right))  # noqa: E731
        losses = -torch.where(counts, right, 0.0).sum((1, 2))
        yield h, counts, losses, gradient
