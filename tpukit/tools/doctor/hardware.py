"""`tpukit doctor --hardware`: what tpukit assumes of an accelerator and no CPU can show.

Each check opens the device in a process of its own, with a limit: one that hangs or fails costs itself
alone."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from tpukit.host.environment import Environment, detect
from tpukit.host.errors import first_line
from tpukit.host.tables import GIB
from tpukit.tools.child import last_line, run_python
from tpukit.tools.doctor import NOTE, OK, WARNING, Check

LIMIT_S = 120
# Gradients of this many steps may lie on the device at once; torch_xla lets the host run 32 steps ahead.
MAX_STEPS_AHEAD = 6
# Of the largest value, by attention in half precision against the formula in fp32.
LARGEST_ERROR = 0.05
# As CDEIT computes it: name -> (batch, heads, tokens, channels of a head), whether a bias is added.
ATTENTION_SHAPES = dict(
    windows=((32, 16, 256, 32), True),
    all_tokens=((4, 16, 1024, 32), False),
    middle=((4, 16, 16, 32), False),
)


def check_hardware(env: Environment) -> list[Check]:
    """Check the accelerator that `env` has, in processes that open it."""
    checks = []
    for name, (accelerators, _) in CHECKS.items():
        if env.accelerator in accelerators:
            checks.append(_check_in_a_process(name))
    return checks or [Check("hardware", NOTE, "no TPU and no GPU is here to be checked")]


def _check_in_a_process(name: str) -> Check:
    what = name.replace("_", " ")
    try:
        ran = run_python("-m", "tpukit.tools.doctor.hardware", name, timeout_s=LIMIT_S)
    except subprocess.TimeoutExpired:
        return Check(what, WARNING, f"did not end within {LIMIT_S} s", "start a fresh session and try again")
    answer = ran.stdout.strip().rpartition("\n")[2]  # the libraries may print too
    if ran.returncode or not answer.startswith("{"):
        return Check(what, WARNING, f"does not run: {last_line(ran)}", "`tpukit doctor --error` may know it")
    return Check(**json.loads(answer))


def run_ahead(env: Environment) -> Check:
    """Whether the steps that the host has handed over, and that are still to run, fit into the memory: how
    many steps' gradients the device held at most, while the host handed over 60 steps without waiting."""
    import torch

    from tpukit.devices import open_runtime

    runtime = open_runtime(env, "bf16")
    size = 8192 if env.accelerator == "tpu" else 256  # in fp32: 256 MiB of weights
    model = runtime.to_device(torch.nn.Linear(size, size, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(x):
        optimizer.zero_grad(set_to_none=True)
        with runtime.autocast():
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = runtime.compile(step, name="step", mutates=(model, optimizer))
    x = runtime.put({"x": torch.ones(size, size)})["x"]
    peaks = []
    for steps in (1, 60):
        for _ in range(steps):
            compiled(x)
        runtime.sync()
        peaks += [peak for peak, _ in runtime.memory()]
    if not peaks:
        return Check("run ahead", NOTE, f"{runtime} does not tell how much of its memory is used")
    held = 1 + (peaks[1] - peaks[0]) / (size * size * 4)
    found = f"60 steps in a row held the gradients of {held:.1f} steps ({size * size * 4 / GIB:.2g} GiB each)"
    if held <= MAX_STEPS_AHEAD:
        return Check("run ahead", OK, found)
    fix = "train with --log-every 4: every fourth step then waits for the device"
    return Check("run ahead", WARNING, found, fix)


def attention(env: Environment) -> Check:
    """Whether the kernels that torch chooses for attention compute it. On an H100 or H200, torch 2.11 takes
    cuDNN's, others in training than in evaluation."""
    from tpukit.devices import open_runtime

    runtime = open_runtime(env, "auto")
    errors = {name: attention_error(runtime, *shape) for name, shape in ATTENTION_SHAPES.items()}
    found = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    found = f"largest error against the formula, in {runtime.precision}: {found}"
    if all(error < LARGEST_ERROR for error in errors.values()):  # NaN is not
        return Check("attention", OK, found)
    fix = "call torch.backends.cuda.enable_cudnn_sdp(False) before a training, and please report it"
    return Check("attention", WARNING, found, fix)


def attention_error(runtime: Any, shape: tuple[int, int, int, int], has_bias: bool) -> float:
    """The largest error of attention's output in training and in evaluation, and of its gradients, relative
    to the largest value. shape: batch, heads, tokens, channels of a head."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

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


# Name -> the accelerators that it is for, and the check. On the CPU XLA device the first is rehearsed.
CHECKS: dict[str, tuple[tuple[str, ...], Callable[[Environment], Check]]] = dict(
    run_ahead=(("tpu", "xla"), run_ahead),
    attention=(("cuda",), attention),
)


if __name__ == "__main__":
    try:
        answer = CHECKS[sys.argv[1]][1](detect())
    except Exception as error:
        sys.exit(first_line(error))
    print(json.dumps(dataclasses.asdict(answer)))
