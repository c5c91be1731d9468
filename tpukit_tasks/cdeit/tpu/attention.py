"""Attention on an XLA device, forward and backward: by TPU kernels if they work here, otherwise in slices.

XLA alone writes the numbers of all pairs of tokens to the device's memory and reads them again in every part
of the computation. The kernels (`kernels.py`) keep them in fast memory.

Shapes: B batch, T tokens, H heads, D channels of a head, C = H * D, g = 128 / D heads fill the lanes of a
register."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from tpukit.devices import xla_private
from tpukit.devices.chips import LANES
from tpukit.devices.tensors import with_optimization_barrier
from tpukit.host.errors import first_line
from tpukit_tasks.kernel_counts import count_kernel

if TYPE_CHECKING:
    from tpukit.devices.xla import XLARuntime

KERNEL_DIMS = (32, 64, 128)  # sizes of a head that the kernels take
KERNEL_TOKENS = (128, 256, 512, 1024, 2048, 4096)  # those whose keys and logits fit the TPU's fast memory
KERNEL_TOKENS_BIASED = (128, 256)  # and the bias with its gradient, all queries at a time
KERNEL_SCRIPT = Path(__file__).with_name("kernels.py")
TOLERANCE = 0.02  # relative, for `try_kernels`: a few roundings to bf16, each of 0.4% at most
MAX_PAIRS = 2**29  # tokens squared, over batch and heads, that a core holds at a time without the kernels

# Why this process does without the kernels; None: it uses them.
_disabled_reason: str | None = "it is for TPUs"


def attention(qkv: Tensor, heads: int, bias: Tensor | None = None) -> Tensor:
    """Softmax attention of all tokens with all. -> (B, T, C)

    qkv: (B, T, 3 C) queries, keys and values. bias: (1, H, T, T), added to the logits."""
    batch, tokens, width = qkv.shape
    dim = width // 3 // heads
    if _kernels_take(qkv, dim, bias is not None):
        laid_out = None if bias is None else _kernel_bias(bias, LANES // dim)
        return cast(Tensor, KernelAttention.apply(qkv, laid_out, heads))
    query, key, value = qkv.view(batch, tokens, 3, heads, dim).permute(2, 0, 3, 1, 4)  # (B, H, T, D) each
    if bias is None:
        parts = (part.flatten(0, 1) for part in (query, key, value))
        out = cast(Tensor, SlicedAttention.apply(*parts)).view(query.shape)
    else:  # a window has few pairs, and the gradient of a bias in slices does not fit the memory
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias.to(query.dtype))
    return out.transpose(1, 2).reshape(batch, tokens, width // 3)


# The choice between the two


def choose(runtime: "XLARuntime") -> str:
    """Find out whether all ranks can use the kernels, before their first graph. Returns a sentence for the
    log. Collective: an all-reduce needs the same graph on all ranks."""
    global _disabled_reason
    reason = _reason_here(runtime)
    failed = [rank for rank, [works] in enumerate(runtime.world.all_gather([reason is None])) if not works]
    if failed and reason is None:
        reason = f"it does not work on rank {', '.join(map(str, failed))}"
    _disabled_reason = reason
    if reason is None:
        return "attention: by a TPU kernel (Pallas)"
    kernel = "the TPU kernel, which needs a fraction of the memory traffic"
    return f"attention: in slices, not by {kernel}: {reason}"


def _reason_here(runtime):
    """Why this rank cannot use the kernels, or None."""
    global _disabled_reason
    if runtime.accelerator != "tpu":
        return "it is for TPUs"
    if runtime.precision != "bf16":
        return f"it computes in bf16, not in {runtime.precision}"
    _disabled_reason = None  # so that the trial uses them
    try:
        if runtime.runs_graphs:
            try_kernels(runtime.device)
        else:
            kernel_payloads((1, 128, 384), 4, False)
    except Exception as error:  # jax, its lowering and libtpu raise many types for what they do not support
        return f"it does not work here ({first_line(error)})"
    return None


def try_kernels(device: torch.device) -> None:
    """Run both kernels, for the most tokens and with a bias. Raises ArithmeticError if they differ from
    slices, and what jax or libtpu raise if they fail."""
    generator = torch.Generator().manual_seed(0)
    for tokens, heads_of_bias in ((KERNEL_TOKENS[-1], 0), (256, 4)):
        inputs = [torch.randn(1, tokens, 3 * LANES, generator=generator).bfloat16()]
        if heads_of_bias:
            inputs.append(torch.randn(1, heads_of_bias, tokens, tokens, generator=generator))
        computed = output_and_gradients([value.to(device) for value in inputs])
        expected = output_and_gradients([value.float() for value in inputs])
        for a, b in zip(computed, expected):
            error = float((a.cpu().float() - b).norm() / b.norm())
            if not error < TOLERANCE:
                raise ArithmeticError(f"it is wrong by {error:.1%} for {tokens} tokens")


def output_and_gradients(inputs: list[Tensor]) -> list[Tensor]:
    """Attention with 4 heads, and the gradients of the sum of its squares. inputs: qkv, and a bias or not."""
    inputs = [value.requires_grad_() for value in inputs]
    out = attention(inputs[0], 4, *inputs[1:])
    return [value.detach() for value in (out, *torch.autograd.grad(out.square().sum(), inputs))]


def _kernels_take(qkv, dim, biased):
    _, tokens, width = qkv.shape
    sizes = KERNEL_TOKENS_BIASED if biased else KERNEL_TOKENS
    fits = tokens in sizes and dim in KERNEL_DIMS and width % (3 * LANES) == 0
    return fits and _disabled_reason is None and qkv.dtype == torch.bfloat16 and qkv.device.type == "xla"


# With the kernels


def _kernel_bias(bias, group):
    """(1, H, T queries, T keys) -> (H / g, T keys, g * T queries) float32, which lies as the kernel's logits
    do."""
    _, heads, tokens, _ = bias.shape
    bias = bias.float().view(heads // group, group, tokens, tokens).permute(0, 3, 1, 2)
    return bias.reshape(heads // group, tokens, group * tokens)


class KernelAttention(torch.autograd.Function):
    """`attention` by the kernels. bias: see `_kernel_bias`."""

    @staticmethod
    def forward(ctx, qkv, bias, heads):
        ctx.save_for_backward(qkv, bias)
        ctx.heads = heads
        batch, tokens, width = qkv.shape
        outputs = [((batch, tokens, width // 3), qkv.dtype)]
        return _call("forward", heads, [qkv, qkv, qkv], bias, outputs)[0]

    @staticmethod
    def backward(ctx, gradient):
        qkv, bias = ctx.saved_tensors
        outputs = [(value.shape, value.dtype) for value in (qkv, bias) if value is not None]
        found = _call("backward", ctx.heads, [qkv, qkv, qkv, gradient.to(qkv.dtype)], bias, outputs)
        return found[0], None if bias is None else found[1], None


def _call(kind, heads, operands, bias, outputs):
    """A kernel's results, as traced tensors. operands: queries, keys and values are three times the same
    tensor. outputs: [(shape, dtype)]."""
    batch, tokens, width = shape = tuple(operands[0].shape)
    # For every head two matrix products forward and five backward, of 2 T T D each. (The zeros by which a
    # kernel tells heads apart do not count, though the chip multiplies them.)
    flops = dict(forward=2, backward=5)[kind] * 2 * batch * tokens**2 * width // 3
    # Operands and results cross the memory bus once each (see the kernels' docstring): the compiler's own
    # count has that.
    count_kernel(f"attention {kind}", flops)
    code = kernel_payloads(shape, heads, bias is not None)[kind]
    operands = operands if bias is None else [*operands, bias]
    return xla_private.tpu_custom_call(operands, code, *map(list, zip(*outputs)))


@functools.cache
def kernel_payloads(shape: tuple[int, int, int], heads: int, biased: bool) -> dict[str, str]:
    """Return the payload of the `tpu_custom_call` of each kernel ("forward", "backward"), lowered by jax in a
    process that leaves the TPU alone. shape: (B, T, 3 C). Raises RuntimeError with its words."""
    request = json.dumps(dict(shape=shape, heads=heads, biased=biased))
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}  # flags are for torch_xla's compiler
    command = [sys.executable, "-P", "-s", str(KERNEL_SCRIPT), request]
    # A session of its own: Ctrl-C is for this process.
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, start_new_session=True)
    if ran.returncode:
        raise RuntimeError((ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1])
    return json.loads(ran.stdout.splitlines()[-1])  # jax's libraries print, too


# Without


class SlicedAttention(torch.autograd.Function):
    """softmax(query key^T / sqrt(D)) value, (N, T, D) each, for some of the N at a time, of each core if
    several share them.

    Kept for the backward pass is the logarithm of the softmax's denominator, from which a weight is one
    exponential: p = exp(s - lse). (As in FlashAttention, Dao et al., NeurIPS 2022.)"""

    @staticmethod
    def forward(ctx, query, key, value):
        outs, lses = [], []
        for q, k, v in _slices(query, key, value):
            if outs:  # XLA would otherwise hold the pairs of all slices at a time
                q = with_optimization_barrier(q, outs[-1])
            s = _logits(q, k)
            lses.append(s.to(torch.promote_types(s.dtype, torch.float32)).logsumexp(-1, keepdim=True))
            outs.append(_weights(s, lses[-1]) @ v)
        out, lse = torch.cat(outs), torch.cat(lses)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, out, lse = ctx.saved_tensors
        # (N, T, 1): of the gradients of a row's weights their mean, by these weights.
        mean = (out.to(lse.dtype) * gradient.to(lse.dtype)).sum(-1, keepdim=True)
        parts, last = [], ()
        for q, k, v, d, lse, mean in _slices(query, key, value, gradient, lse, mean):
            if last:
                q = with_optimization_barrier(q, *last)
            p = _weights(_logits(q, k), lse)
            ds = (p * (d @ v.mT - mean)).to(q.dtype) * q.shape[-1] ** -0.5
            last = ds @ k, ds.mT @ q, p.mT @ d
            parts.append(last)
        return tuple(map(torch.cat, zip(*parts)))


def _slices(*tensors):
    """Tuples of a slice of each tensor (N, ...)."""
    count = max(1, MAX_PAIRS // tensors[0].shape[1] ** 2)
    return zip(*(x.split(count) for x in tensors))


def _logits(q, k):
    return q @ k.mT * q.shape[-1] ** -0.5


def _weights(s, lse):
    return (s - lse).exp().to(s.dtype)
