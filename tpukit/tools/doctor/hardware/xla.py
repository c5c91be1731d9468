"""The checks for TPUs. The CPU XLA device rehearses them."""

import dataclasses
import os
from typing import Any

import torch

import tpukit
from tpukit.devices import open_runtime
from tpukit.devices.runtime import Runtime
from tpukit.host.environment import Environment
from tpukit.host.tables import GIB
from tpukit.tools.doctor.hardware.common import (
    HARDWARE,
    SKIP,
    Outcome,
    best_of,
    judged,
    multiplies,
    new_step,
)

# Gradients of this many steps may lie on the device at once; torch_xla lets the host run 32 steps ahead.
MAX_STEPS_AHEAD = 6
NORM_ERROR = 0.01  # of a gradient's norm in fp32
FLAG = "--xla_tpu_msa_inefficient_use_to_copy_ratio"


def run_ahead(env: Environment) -> Outcome:
    """The host runs ahead of the device without holding the gradients of many steps in its memory."""
    runtime = open_runtime(env, "bf16")
    size = 8192 if env.accelerator in HARDWARE else 256  # in fp32: 256 MiB of weights
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
        return Outcome(SKIP, f"{runtime} does not tell how much of its memory is used")
    held = 1 + (peaks[1] - peaks[0]) / (size * size * 4)
    text = f"60 steps in a row held the gradients of {held:.1f} steps ({size * size * 4 / GIB:.2g} GiB each)"
    holds = held <= MAX_STEPS_AHEAD
    advice = "" if holds else "; train with --log-every 4: every fourth step then waits for the device"
    return judged(holds, text + advice, steps_held=held)


def attention_kernels(env: Environment) -> Outcome:
    """CDEIT's attention kernels run, agree with attention in slices, and are faster."""
    from tpukit.tasks.cdeit.tpu import attention

    runtime: Any = open_runtime(env, "bf16")  # an XLARuntime
    note = attention.choose(runtime)  # a process of jax lowers the kernels, and they are compared with slices
    why_not, times_ms = attention._disabled_reason, {}
    size = (2, 4096, 1536) if env.accelerator in HARDWARE else (2, 128, 384)
    inputs = [runtime.put({"qkv": torch.randn(size).bfloat16()})["qkv"]]
    for name, reason in ({"slices": "to be compared"} | ({} if why_not else {"kernels": None})).items():
        attention._disabled_reason = reason
        times_ms[name] = 1e3 * best_of(runtime, lambda: attention.output_and_gradients(inputs))[1]
    works = why_not is None and times_ms["kernels"] < times_ms["slices"]
    text = f"{note}; {', '.join(f'{name} {took:.2f} ms' for name, took in times_ms.items())}"
    return judged(works or env.accelerator not in HARDWARE, text, **times_ms)


def micro_batches(env: Environment) -> Outcome:
    """Gradients that a step accumulates over micro-batches have the norm that a CPU computes."""
    task = tpukit.MNIST(batch_size=32, clip_norm=1.0)
    norms = []
    for runtime, parts in ((open_runtime(env, "fp32"), 4), (Runtime("cpu", "fp32"), 1)):
        taken, batch = new_step(dataclasses.replace(task, micro_batches=parts), runtime)
        for _ in range(3):
            taken(batch, 0)
        norms.append(float(runtime.to_cpu(taken.sums)[3]))
    error = abs(norms[0] - norms[1]) / norms[1]
    text = f"norm {norms[0]:.5g} after 3 steps of 4 micro-batches, on a CPU in one {norms[1]:.5g}"
    return judged(error < NORM_ERROR, text, error=error)


def libtpu_flag(env: Environment) -> Outcome:
    """libtpu takes the flag that MSHNet gives its compiler."""
    wanted = f"{FLAG}=2.5"
    os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {wanted}".strip()
    runtime = open_runtime(env)  # an unknown flag ends the process
    is_right = multiplies(runtime)
    return judged(is_right, f"{wanted}: a product of ones is {'right' if is_right else 'WRONG'}")
