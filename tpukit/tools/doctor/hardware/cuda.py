"""The checks for GPUs. A processor rehearses them, without graphs."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tpukit
from tpukit.devices import open_runtime
from tpukit.devices.runtime import Runtime
from tpukit.host.environment import Environment
from tpukit.tools.doctor.hardware.common import HARDWARE, Outcome, judged, new_step

# Of the largest value, by attention in half precision against the formula in fp32.
LARGEST_ERROR = 0.05
# As CDEIT computes it: name -> (batch, heads, tokens, channels of a head), whether a bias is added.
ATTENTION_SHAPES = dict(
    windows=((32, 16, 256, 32), True),
    all_tokens=((4, 16, 1024, 32), False),
    middle=((4, 16, 16, 32), False),
)
COPIES = 50


def attention(env: Environment) -> Outcome:
    """The kernels that torch chooses for attention compute it, in training and in evaluation."""
    # On an H100 or H200, torch 2.11 takes cuDNN's, different ones in training and in evaluation.
    runtime = open_runtime(env, "auto")
    shapes = ATTENTION_SHAPES if env.accelerator in HARDWARE else dict(small=((2, 2, 16, 8), True))
    errors = {name: attention_error(runtime, *shape) for name, shape in shapes.items()}
    holds = all(error < LARGEST_ERROR for error in errors.values())  # NaN is not
    found = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    advice = "" if holds else "; torch.backends.cuda.enable_cudnn_sdp(False) before a training may help"
    text = f"largest error against the formula, in {runtime.precision}: {found}"
    return judged(holds, text + advice, **errors)


def attention_error(runtime: Runtime, shape: tuple[int, int, int, int], has_bias: bool) -> float:
    """The largest error of attention's output in training and in evaluation, and of its gradients, relative
    to the largest value. shape: batch, heads, tokens, channels of a head."""

    def compute(qkv, bias=None):
        return scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), attn_mask=bias)

    def outputs(*leaves):
        trained = compute(*leaves)
        gradients = torch.autograd.grad(trained.float().square().sum(), leaves)
        with torch.no_grad():
            return trained.detach(), compute(*leaves), *gradients

    batch, heads, tokens, channels = shape
    dtype = dict(bf16=torch.bfloat16, fp16=torch.float16, fp32=torch.float32)[runtime.precision]
    sizes = [(batch, tokens, 3, heads, channels)] + [(1, heads, tokens, tokens)] * has_bias
    leaves = [torch.randn(size, device=runtime.device, dtype=dtype, requires_grad=True) for size in sizes]
    computed = outputs(*leaves)
    with sdpa_kernel(SDPBackend.MATH):
        wanted = outputs(*(leaf.detach().float().requires_grad_() for leaf in leaves))
    errors = [(ours.float() - right).abs().max() / right.abs().max() for ours, right in zip(computed, wanted)]
    return float(torch.stack(errors).max())  # NaN if any is


def overflow(env: Environment) -> Outcome:
    """A step in fp16 whose gradients overflow leaves the weights as they are and halves the loss's scale."""
    runtime = open_runtime(env, "fp16")
    taken, batch = new_step(tpukit.MNIST(batch_size=8, channels=8, precision="fp16"), runtime)
    for _ in range(6):  # after which a step is captured
        taken(batch, 0)
    assert runtime.scaler is not None and runtime.scaler._scale is not None
    before = [value.detach().clone() for value in taken.model.parameters()]
    runtime.scaler._scale.fill_(2.0**100)
    taken(batch, 0)
    is_kept = all(map(torch.equal, before, taken.model.parameters()))
    scale = runtime.scaler.get_scale()
    runtime.scaler._scale.fill_(2.0**8)
    taken(batch, 0)
    goes_on = not all(map(torch.equal, before, taken.model.parameters()))
    text = f"weights {'kept' if is_kept else 'CHANGED'}, scale 2^100 became {scale:.4g}, the next step "
    text += "moves on" if goes_on else "does NOTHING"
    return judged(is_kept and scale == 2.0**99 and goes_on, text)


def copies(env: Environment) -> Outcome:
    """A copy to the host holds what the device held when it was asked for, whatever is computed later."""
    runtime = open_runtime(env)
    wrong = 0
    for number in range(COPIES):
        values = torch.full((2**20,), float(number), device=runtime.device)
        wait = runtime.to_cpu_async({"values": values})
        copied = (
            wait() if env.accelerator not in HARDWARE else None
        )  # a processor copies when it is waited for
        values.fill_(-1.0)  # queued behind the copy
        wrong += int((copied or wait())["values"].ne(number).any())
    return judged(not wrong, f"{wrong} of {COPIES} copies were overtaken", wrong=wrong)
