"""Attention on an XLA device, forward and backward: by TPU kernels where they can be had, otherwise in
slices.

XLA alone writes the numbers of all pairs of tokens to the device's memory and reads them again in every part
of the computation. The kernels (`pallas_attention`) keep them in fast memory.

Letters: B batch, T tokens, H heads, D channels of a head, C = H * D, g = 128 / D heads fill the lanes of a
register."""

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.nn import functional as F
from torch_xla import _XLAC

from tpukit.devices.kernel_counts import count_kernel
from tpukit.devices.tensors import cores_sharing, with_optimization_barrier
from tpukit.host.errors import first_line

LANES = 128
KERNEL_DIMS = (32, 64, 128)  # of a head
KERNEL_TOKENS = (128, 256, 512, 1024, 2048, 4096)  # those whose keys and logits fit the TPU's fast memory
KERNEL_TOKENS_BIASED = (128, 256)  # and the bias with its gradient, all queries at a time
KERNEL_SCRIPT = Path(__file__).with_name("pallas_attention.py")
TOLERANCE = 0.02  # of `try_kernel`, relative: a few roundings to bf16, of 0.4% at most each
MAX_PAIRS = (
    2**29
)  # of tokens at a time on a core, over batch and heads, without the kernels; 2 bytes each in bf16

_unavailable = "it is for TPUs"  # why this process does without the kernels; "": it uses them


def attention(qkv, heads, bias=None):
    """Softmax attention of all tokens with all. -> (B, T, C)

    qkv: (B, T, 3 C) queries, keys and values. bias: (1, H, T, T), added to the logits."""
    batch, tokens, width = qkv.shape
    dim = width // 3 // heads
    if _kernel_takes(qkv, dim, bias is not None):
        return KernelAttention.apply(qkv, None if bias is None else _kernel_bias(bias, LANES // dim), heads)
    query, key, value = qkv.view(batch, tokens, 3, heads, dim).permute(2, 0, 3, 1, 4)  # (B, H, T, D) each
    if bias is None:
        out = SlicedAttention.apply(*(part.flatten(0, 1) for part in (query, key, value))).view(query.shape)
    else:  # the windows' pairs are few, and the gradient of a bias in slices does not fit beside them
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias.to(query.dtype))
    return out.transpose(1, 2).reshape(batch, tokens, width // 3)


# Which of the two


def choose(runtime):
    """Find out whether all ranks can use the kernels, before their first graph. Returns a sentence for the
    log.

    runtime: an XLARuntime. Collective: an all-reduce needs the same graph on all ranks."""
    global _unavailable
    if runtime.accelerator != "tpu":
        _unavailable = "it is for TPUs"
    elif runtime.mesh is not None:
        _unavailable = "it is for one core, not for a graph over several (SPMD)"
    elif runtime.precision != "bf16":
        _unavailable = f"it computes in bf16, not in {runtime.precision}"
    else:
        _unavailable = ""
        try:
            runtime.try_attention_kernel()
        except (
            Exception
        ) as error:  # jax, its lowering and libtpu raise many types for what they do not support
            _unavailable = f"it does not work here ({first_line(error)})"
    answers = runtime.world.all_gather([not _unavailable])
    failed = ", ".join(str(rank) for rank, [works] in enumerate(answers) if not works)
    if failed and not _unavailable:
        _unavailable = f"it does not work on rank {failed}"
    if _unavailable:
        return (
            "attention: in slices, not by the TPU kernel, which needs a fraction of the memory traffic:"
            f" {_unavailable}"
        )
    return "attention: by a TPU kernel (Pallas)"


def try_kernel(device):
    """Run both kernels, for the most tokens and with a bias, and compare them with slices. Raises where they
    fail or differ."""
    generator = torch.Generator().manual_seed(0)
    for tokens, heads_of_bias in ((KERNEL_TOKENS[-1], 0), (256, 4)):
        inputs = [torch.randn(1, tokens, 3 * LANES, generator=generator).bfloat16()]
        if heads_of_bias:
            inputs.append(torch.randn(1, heads_of_bias, tokens, tokens, generator=generator))
        found = _output_and_gradients([value.to(device) for value in inputs])
        wanted = _output_and_gradients([value.float() for value in inputs])
        for a, b in zip(found, wanted):
            error = float((a.cpu().float() - b).norm() / b.norm())
            if not error < TOLERANCE:
                raise ArithmeticError(f"it is wrong by {error:.1%} for {tokens} tokens")


def _output_and_gradients(inputs):
    inputs = [value.requires_grad_() for value in inputs]
    out = attention(inputs[0], 4, *inputs[1:])
    return [value.detach() for value in (out, *torch.autograd.grad(out.square().sum(), inputs))]


def _kernel_takes(qkv, dim, biased):
    _, tokens, width = qkv.shape
    fits = (
        tokens in (KERNEL_TOKENS_BIASED if biased else KERNEL_TOKENS)
        and dim in KERNEL_DIMS
        and width % (3 * LANES) == 0
    )
    return fits and not _unavailable and qkv.dtype == torch.bfloat16 and qkv.device.type == "xla"


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
        operands = [qkv, qkv, qkv] if bias is None else [qkv, qkv, qkv, bias]
        (out,) = _call(
            "forward", heads, operands, [((batch, tokens, width // 3), qkv.dtype)], bias is not None
        )
        return out

    @staticmethod
    def backward(ctx, gradient):
        qkv, bias = ctx.saved_tensors
        operands = [qkv, qkv, qkv, gradient.to(qkv.dtype)]
        if bias is None:
            (of_qkv,) = _call("backward", ctx.heads, operands, [(qkv.shape, qkv.dtype)], False)
            return of_qkv, None, None
        outputs = [(qkv.shape, qkv.dtype), (bias.shape, bias.dtype)]
        return *_call("backward", ctx.heads, [*operands, bias], outputs, True), None


def _call(kind, heads, operands, outputs, biased):
    """A kernel's results, as traced tensors. operands: queries, keys and values are three times the same
    tensor. outputs: [(shape, dtype)]."""
    shape = tuple(operands[0].shape)
    # Operands and results cross the memory bus once each (see the kernels' docstring): the compiler's own
    # count has that.
    count_kernel(f"attention {kind}", hbm_bytes=0, flops=kernel_flops(kind, *shape))
    return _XLAC._xla_tpu_custom_call(
        operands, kernel_payload(kind, shape, heads, biased), *map(list, zip(*outputs))
    )


def kernel_flops(kind, batch, tokens, width):
    """FLOP of one kernel: for every head two matrix products forward and five backward, of 2 T T D each. (The
    zeros by which a kernel tells heads apart do not count, though the chip multiplies them.) width: 3 C."""
    return dict(forward=2, backward=5)[kind] * 2 * batch * tokens**2 * width // 3


@functools.cache
def kernel_payload(kind, shape, heads, biased):
    """The kernel's code, a string, lowered by jax. Raises RuntimeError with jax's words where it cannot."""
    return _lowering(os.getpid()).payload(kind=kind, shape=shape, heads=heads, biased=biased)


@functools.lru_cache(maxsize=1)
def _lowering(pid):
    """The `KernelLowering` of this process: a fork must not read the answers to its parent."""
    return KernelLowering()


class KernelLowering:
    """jax in a process of its own, which leaves the TPU alone. It lowers all kernels, one after the other,
    because importing jax takes longer than lowering one; and ends with this process, whose pipe it reads."""

    process = None

    def payload(self, **request):
        """What a `tpu_custom_call` of the kernel carries. request: the arguments of
        `pallas_attention.payload`."""
        if self.process is None:
            self._start()
        try:
            answer = self._ask(request)
        except BaseException:  # an interrupt, too: the next question must not get this one's answer
            self.process.kill()
            self.process = None
            raise
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["payload"]

    def _start(self):
        self.errors = tempfile.TemporaryFile("w+")  # no pipe, which would fill
        environ = {
            name: value for name, value in os.environ.items() if name != "XLA_FLAGS"
        }  # for torch_xla's compiler
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-s", str(KERNEL_SCRIPT)],
            env={**environ, "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process
        )

    def _ask(self, request):
        with contextlib.suppress(BrokenPipeError):  # it has ended: see below
            print(json.dumps(request), file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("{"):  # jax's libraries print, too
                return json.loads(line)
        code = self.process.wait()
        self.errors.seek(0)
        raise RuntimeError((self.errors.read().strip().splitlines() or [f"exit code {code}"])[-1])


# Without


class SlicedAttention(torch.autograd.Function):
    """softmax(query key^T / sqrt(D)) value, (N, T, D) each, for some of the N at a time, of each core where
    several share them.

    Kept for the backward pass is the logarithm of the softmax's denominator, from which a weight is one
    exponential:
    p = exp(s - lse). (As in FlashAttention, Dao et al., NeurIPS 2022.)
    """

    @staticmethod
    def forward(ctx, query, key, value):
        outs, lses = [], []
        for q, k, v in _slices(query, key, value):
            if outs:  # XLA would otherwise hold the pairs of all slices at a time
                q = with_optimization_barrier(q, outs[-1])
            s = _logits(q, k)
            lses.append(s.to(torch.promote_types(s.dtype, torch.float32)).logsumexp(-1, keepdim=True))
            outs.append(_weights(s, lses[-1]) @ v)
        out, lse = _joined(outs), _joined(lses)
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
        return tuple(map(_joined, zip(*parts)))


def _slices(*tensors):
    """Tuples of a slice of each tensor (N, ...)."""
    count, cores = max(1, MAX_PAIRS // tensors[0].shape[1] ** 2), cores_sharing(tensors[0])
    return zip(
        *([part.flatten(0, 1) for part in x.unflatten(0, (cores, -1)).split(count, 1)] for x in tensors)
    )


def _joined(slices):
    """The tensor (N, ...) of its slices."""
    cores = cores_sharing(slices[0])
    return torch.cat([part.unflatten(0, (cores, -1)) for part in slices], 1).flatten(0, 1)


def _logits(q, k):
    return q @ k.mT * q.shape[-1] ** -0.5


def _weights(s, lse):
    return (s - lse).exp().to(s.dtype)
