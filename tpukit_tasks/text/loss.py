"""Cross entropy over a large vocabulary, for some positions at a time: the logits of a batch would be
gigabytes.

Shapes: B batch, T positions, t of them at a time, W width of the model, V entries of the vocabulary."""

import torch
from torch import Tensor

from tpukit.devices.tensors import is_on_xla, with_optimization_barrier

MAX_LOGITS = 2**26  # at a time, in float32: 256 MiB
MEMORY_SHARE = 8  # the logits may take 1 / MEMORY_SHARE of a GPU's memory, if the step leaves half of it free
LOGIT_BYTES = 10  # in half precision, in float32, and its logarithm


def cross_entropy(hidden: Tensor, head: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return (the sum of all, a scalar that is differentiable in hidden and head; (B,): the cross entropy of
    each row, summed over its positions, without gradient), in float32.

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
        rows, positions, is_xla = hidden.to(dtype), labels, is_on_xla(hidden)
        if not is_xla:  # all positions are one row
            rows, positions = rows.flatten(0, 1)[None], positions.flatten()[None]
        most = _most_logits(hidden.is_cuda)
        count = max(1, most // (len(rows) * len(weight)))
        for h, label in zip(rows.split(count, 1), positions.split(count, 1)):  # (B, t, W), (B, t)
            if each:  # XLA may else hold the logits of all parts at a time
                h = with_optimization_barrier(h, each[-1])
            logits = h @ weight.t()  # (B, t, V)
            logs = logits.log_softmax(-1, dtype=torch.float32)
            counts, label = label[..., None] >= 0, label[..., None].clamp(min=0).long()  # (B, t, 1)
            if is_xla:  # where gather and scatter are slow
                is_right = label == torch.arange(len(weight), device=label.device)
                right = torch.where(is_right, logs, 0.0).sum(-1, keepdim=True)
            else:
                right = logs.gather(-1, label)
            each.append(-torch.where(counts, right, 0.0)[..., 0])
            if ctx.needs_input_grad[0]:
                # The gradient of the logits, wrong at positions that do not count, and not yet divided by the
                # number of positions: in fp16 little would be left.
                if is_xla:
                    g = (logs.exp() - is_right.float()).to(logits.dtype)
                else:  # each pass over the logits takes its time: their gradient is written over them
                    g = torch.exp(logs, out=logits).scatter_(-1, label, right.expm1().to(logits.dtype))
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


@torch.compiler.assume_constant_result
def _most_logits(is_cuda: bool) -> int:
    """Return how many logits there may be at a time. A GPU with free memory takes more: with fewer parts,
    fewer products are added up for the gradient of the head."""
    if is_cuda:
        total = torch.cuda.get_device_properties().total_memory
        share = total // MEMORY_SHARE
        if torch.cuda.memory_allocated() + share <= total // 2:
            return max(MAX_LOGITS, share // LOGIT_BYTES)
    return MAX_LOGITS


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in float32. In fp16 a sum over thousands of positions could overflow."""
    if a.dtype != torch.float16:
        return (a @ b).float()
    if a.is_cuda and not torch.compiler.is_compiling():  # torch 2.9 cannot trace a product with out_dtype
        return torch.mm(a, b, out_dtype=torch.float32)
    with torch.autocast(a.device.type, enabled=False):
        return a.float() @ b.float()
