"""Cross entropy over a large vocabulary, for some positions at a time: the logits of a batch would be
gigabytes.

Shapes: B batch, T positions, t of them at a time, W width of the model, V entries of the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tpukit.devices.tensors import cores_sharing, is_on_xla, with_optimization_barrier

MAX_LOGITS = 2**26  # that are there at a time, in float32: 256 MiB
MEMORY_SHARE = 8  # the logits may take 1 / MEMORY_SHARE of a GPU's memory, if the step leaves half of it free
LOGIT_BYTES = 10  # in half precision, in float32, and its logarithm


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
        each, of_hidden, of_head = [], [], None
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head.dtype
        weight = head.to(dtype)  # once, not for each part
        rows, positions = hidden.to(dtype), labels
        if not is_on_xla(hidden):  # whose cores may share the rows; elsewhere all positions are one
            rows, positions = rows.flatten(0, 1)[None], positions.flatten()[None]
        for h, counts, losses, gradient in _parts(rows, weight, positions):
            each.append(losses)
            if ctx.needs_input_grad[0]:
                # Not divided by the number of positions yet: in fp16 little would be left.
                g = gradient()  # (B, t, V), of the logits
                of_hidden.append(((g @ weight) * counts).to(hidden.dtype))
                if ctx.needs_input_grad[1]:
                    part = _product(g.flatten(0, 1).t(), (h * counts).flatten(0, 1))
                    of_head = part if of_head is None else of_head.add_(part)
        ctx.save_for_backward(torch.cat(of_hidden, 1).view(hidden.shape) if of_hidden else None, of_head)
        by_row = torch.cat(each, 1).view(labels.shape).sum(1)
        ctx.mark_non_differentiable(by_row)
        return by_row.sum(), by_row

    @staticmethod
    def backward(ctx, *scales):
        of_hidden, of_head = ctx.saved_tensors
        return of_hidden * scales[0], None if of_head is None else of_head * scales[0], None


def _parts(hidden: Tensor, head: Tensor, labels: Tensor) -> Iterator[tuple]:
    """Yield, for some positions at a time: hidden (B, t, W), whether they count (B, t, 1), losses (B, t), and
    a function that returns the gradient of their sum in the logits, (B, t, V), wrong where they do not."""
    rows = hidden.shape[0] // cores_sharing(hidden)
    most = _most_logits() if hidden.is_cuda else MAX_LOGITS
    count = max(1, most // (rows * head.shape[0]))
    losses = None
    for h, label in zip(hidden.split(count, 1), labels.split(count, 1)):
        if losses is not None:  # XLA may else hold the logits of all parts at a time
            h = with_optimization_barrier(h, losses)
        logits = h @ head.t()  # (B, t, V)
        logs = logits.log_softmax(-1, dtype=torch.float32)
        counts, label = label[..., None] >= 0, label[..., None].clamp(min=0).long()
        if is_on_xla(h):  # where a gather and a scatter are slow
            is_right = label == torch.arange(head.shape[0], device=label.device)
            right = torch.where(is_right, logs, 0.0).sum(-1, keepdim=True)
            gradient = lambda: (logs.exp() - is_right.float()).to(h.dtype)  # noqa: E731
        else:  # where each pass over the logits takes its time: their gradient is written over them
            right = logs.gather(-1, label)
            gradient = lambda: torch.exp(logs, out=logits).scatter_(  # noqa: E731
                -1, label, right.expm1().to(logits.dtype)
            )
        losses = -torch.where(counts, right, 0.0)[..., 0]
        yield h, counts, losses, gradient


@torch.compiler.assume_constant_result
def _most_logits() -> int:
    """Return how many logits there may be at a time on this GPU. With fewer parts, fewer products are added
    up for the gradient of the head."""
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties().total_memory
        share = total // MEMORY_SHARE
        if torch.cuda.memory_allocated() + share <= total // 2:
            return max(MAX_LOGITS, share // LOGIT_BYTES)
    return MAX_LOGITS


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32. In fp16 a sum over thousands of positions could overflow."""
    if a.dtype != torch.float16:
        return (a @ b).float()
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    with torch.autocast(a.device.type, enabled=False):
        return a.float() @ b.float()
