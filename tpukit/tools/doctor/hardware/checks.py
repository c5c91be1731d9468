"""The checks, and what they find."""

import dataclasses
import functools
import math
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import conv2d, scaled_dot_product_attention

import tpukit
from tpukit.devices import open_runtime, trial
from tpukit.devices.chips import find_chip
from tpukit.devices.runtime import Runtime
from tpukit.host import known_errors
from tpukit.host.environment import Environment
from tpukit.host.errors import first_line
from tpukit.host.tables import GIB
from tpukit.tasks.datasets import make_synthetic
from tpukit.training.step import TrainingStep
from tpukit.training.task import Task

PASS, FAIL, INFO, SKIP = "PASS", "FAIL", "INFO", "SKIP"
HARDWARE = ("tpu", "cuda")  # what else there is rehearses the checks, in small
OPENS_WITHIN_S = 60.0
FP32_ERROR = 1e-5  # of a product's norm; with factors rounded to bf16 it is 3e-3, to TF32 3e-4
STEPS = 100
LOST_BYTES = 2**20  # that as many steps may add to the peak of memory
LOSS_CHANGE = 0.05  # between one core and several, in fp32
# Gradients of this many steps may lie on the device at once; torch_xla lets the host run 32 steps ahead.
MAX_STEPS_AHEAD = 6
NORM_ERROR = 0.01  # of a gradient's norm in fp32
FLAG = "--xla_tpu_msa_inefficient_use_to_copy_ratio"
# Of the largest value, by attention in half precision against the formula in fp32.
LARGEST_ERROR = 0.05
# As CDEIT computes it: name -> (batch, heads, tokens, channels of a head), whether a bias is added.
ATTENTION_SHAPES = dict(
    windows=((32, 16, 256, 32), True),
    all_tokens=((4, 16, 1024, 32), False),
    middle=((4, 16, 16, 32), False),
)
COPIES = 50


@dataclasses.dataclass(frozen=True)
class Outcome:
    """outcome: whether the check's sentence holds (PASS, FAIL), a number without a right answer (INFO), or
    not tried (SKIP). text: what was found. numbers: name with unit -> value; JSON holds finite ones."""

    outcome: str
    text: str
    numbers: dict[str, float] = dataclasses.field(default_factory=dict)


def judged(holds: bool, text: str, **numbers: float) -> Outcome:
    """PASS or FAIL, with those of the numbers that are finite."""
    finite = {name: float(f"{value:.4g}") for name, value in numbers.items() if math.isfinite(value)}
    return Outcome(PASS if holds else FAIL, text, finite)


def opens(env: Environment) -> Outcome:
    """A process opens the device within a minute, multiplies on it, and reads how much memory it has."""
    began = time.monotonic()
    runtime = open_runtime(env)
    is_right = multiplies(runtime)
    took_s = time.monotonic() - began
    memory = runtime.memory()
    holds = is_right and took_s < OPENS_WITHIN_S and (bool(memory) or env.accelerator not in HARDWARE)
    size = f"{memory[0][1] / GIB:.1f} GiB" if memory else "memory that it does not tell"
    text = f"{runtime.device_name()}, {size}, opened in {took_s:.1f} s; precision auto is {runtime.precision}"
    return judged(holds, text, seconds=took_s, memory_gib=runtime.memory_size() / GIB)


def step(env: Environment) -> Outcome:
    """A step that is replayed (TPU) or captured (GPU) gives the losses, weights and state of an eager one."""
    errors, bounds = {}, {}
    for name in ("fp32", "auto"):
        runtime = open_runtime(env, name)
        errors[name], bounds[name] = trial.step_error(runtime), trial.MAX_ERROR[runtime.precision]
    holds = all(error < bounds[name] for name, error in errors.items())
    text = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    return judged(holds, f"largest relative differences: {text}", **errors)


def replays(env: Environment) -> Outcome:
    """Steps with a changing learning rate are one graph, wait for nothing, and lose no memory."""
    runtime = open_runtime(env)
    taken, batch = new_step(tpukit.MNIST(batch_size=8, channels=8), runtime)
    peaks = []
    for first in (0, STEPS):
        if first and env.accelerator == "cuda":
            torch.cuda.set_sync_debug_mode("error")  # what waits for the device raises RuntimeError
        for number in range(first, first + STEPS):
            taken(batch, 0, 1 - number / (4 * STEPS))
        if env.accelerator == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        runtime.sync()
        peaks += [peak for peak, _ in runtime.memory()]
    events = [event for event in runtime.pop_compile_events() if event["what"] == "step"]
    graphs = sum(event["programs"] for event in events)
    why = "".join(f"; {reason}" for event in events if not event["programs"] for reason in event["why"])
    lost = peaks[1] - peaks[0] if peaks else 0
    holds = graphs == int(runtime.has_graphs) and lost <= LOST_BYTES
    text = f"{2 * STEPS} steps, graphs: {graphs}; the last {STEPS} took {lost / 2**20:.1f} MiB more{why}"
    return judged(holds, text, graphs=graphs, lost_mib=lost / 2**20)


def training(env: Environment) -> Outcome:
    """A short training on one core compiles its step once, runs no operation elsewhere, and learns."""
    return _train_digits(env, 1)[1]


def all_cores(env: Environment) -> Outcome:
    """A training on all cores, a process each or (TPU) as one graph, has the losses of one on one core."""
    by_torch_xla = env.accelerator in ("tpu", "xla") and not env.uses_torch_tpu
    ways = ("processes", "spmd") if by_torch_xla else ("processes",)
    # The several first: afterwards this process has opened the device. What rounding does grows: after the
    # first half of the training even two devices that are right differ.
    found = {way: _train_digits(env, cores_of(env), way, precision="fp32") for way in ways}
    one, _ = _train_digits(env, 1, precision="fp32")
    holds, texts, changes = True, [], {}
    for way, (losses, outcome) in found.items():
        changes[way] = max(abs(a - b) / max(b, 0.1) for a, b in zip(losses, one[: len(one) // 2]))
        holds = holds and outcome.outcome == PASS and changes[way] < LOSS_CHANGE
        texts.append(f"{way}: losses differ by {changes[way]:.2%}, {outcome.text}")
    return judged(holds, "; ".join(texts), **changes)


def all_reduce(env: Environment) -> Outcome:
    """The gradients that all cores exchange in a step become their mean."""
    with tempfile.TemporaryDirectory(prefix="tpukit-hardware-") as folder:
        task = tpukit.MNIST(batch_size=8 * cores_of(env), precision="fp32")
        run = tpukit.Run.open(Path(folder) / "run", task)
        measure = lambda task, run, *, runtime: trial.all_reduce_error(runtime)  # noqa: E731
        error = tpukit.launch(measure, task, run, cores=cores_of(env), hang_timeout_s=120)
    text = f"on {cores_of(env)} cores the mean is wrong by {error:.1e}"
    return judged(error < trial.MAX_ERROR["fp32"], text, error=error)


def precision(env: Environment) -> Outcome:
    """Products and convolutions in fp32 have the errors of fp32, not of bf16 or TF32."""
    generator = torch.Generator().manual_seed(0)
    shapes = dict(a=(512, 512), b=(512, 512), x=(4, 32, 32, 32), w=(32, 32, 3, 3))
    host = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    runtime = open_runtime(env, "fp32")
    found = runtime.to_cpu(_product_and_convolution(**runtime.put(host)))
    exact = _product_and_convolution(**{name: values.double() for name, values in host.items()})
    product, convolution = map(error_of, found, exact)
    text = f"errors: product {product:.1e}, convolution {convolution:.1e}"
    return judged(max(product, convolution) < FP32_ERROR, text, product=product, convolution=convolution)


def speed(env: Environment) -> Outcome:
    """How fast large products in half precision are: a number without a right answer."""
    runtime = open_runtime(env, "auto")
    size, count = (8192, 20) if env.accelerator in HARDWARE else (256, 20)
    dtype = torch.float16 if runtime.precision == "fp16" else torch.bfloat16
    x = runtime.put({"x": torch.full((size, size), 1 / size, dtype=dtype)})["x"]  # whose powers are itself
    seconds = best_of(runtime, lambda: functools.reduce(torch.matmul, [x] * (count + 1)))
    rate, chip = 2 * size**3 * count / seconds, find_chip(env.device_name)
    share = f", {rate / chip.flops:.0%} of its peak" if chip and chip.flops else ""
    return Outcome(INFO, f"{rate / 1e12:.3g} TFLOP/s{share}", {"tflops": float(f"{rate / 1e12:.4g}")})


def out_of_memory(env: Environment) -> Outcome:
    """Asking for more memory than there is ends in an error that tpukit knows, and the device computes on."""
    runtime = open_runtime(env)
    try:
        _allocate_4_tib(runtime)
        return Outcome(FAIL, "4 TiB were given out without an error")
    except Exception as error:
        known, text = known_errors.match(str(error)), first_line(error)
    goes_on = multiplies(runtime)
    text = f"{'known' if known else 'not known'}: {text}" + ("" if goes_on else "; then it computed wrongly")
    return judged(bool(known) and goes_on, text)


# Of a TPU


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
        times_ms[name] = 1e3 * best_of(runtime, lambda: attention.output_and_gradients(inputs))
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


# Of a GPU


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


# What the checks share


def cores_of(env: Environment) -> int:
    """How many cores the checks of several use; a processor pretends to be two."""
    return env.cores if env.accelerator in HARDWARE else 2


def new_step(task: Task, runtime: Runtime) -> tuple[TrainingStep, dict[str, Any]]:
    """(a compiled training step of a task, from fresh weights; a batch on the device)."""
    torch.manual_seed(0)
    taken = TrainingStep(task, runtime, task.model().train())
    taken.compile()
    return taken, runtime.put(task.example(task.batch_size))


def best_of(runtime: Runtime, function: Callable) -> float:
    """The shortest time of five calls of a function, in seconds; one before them compiles."""
    times_s = []
    for _ in range(6):
        runtime.sync()
        began = time.perf_counter()
        _kept = function()  # what nobody keeps, XLA does not compute
        runtime.sync()
        times_s.append(time.perf_counter() - began)
    return min(times_s[1:])


def multiplies(runtime: Runtime) -> bool:
    """Whether a product of ones on the device is right."""
    ones = runtime.put({"ones": torch.ones(64, 64)})["ones"]
    return bool(runtime.to_cpu(ones @ ones).sum() == 64**3)


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference, relative to that of what is expected."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def _product_and_convolution(a, b, x, w):
    return a @ b, conv2d(x, w)


def _allocate_4_tib(runtime):
    x = runtime.put({"x": torch.ones(2**20)})["x"]
    square = x[:, None] * x
    runtime.sync()
    runtime.to_cpu(square[0, 0])


def _train_digits(env, cores, parallel="processes", **settings):
    """Train MNIST on synthetic digits, and judge it. Returns (the losses on the way, the outcome)."""
    size, batch_size, channels, least = (6000, 128, 32, 0.9)
    if env.accelerator not in HARDWARE:
        size, batch_size, channels, least = (1500, 16, 8, 0.5)
    with tempfile.TemporaryDirectory(prefix="tpukit-hardware-") as folder:
        data = make_synthetic("mnist", Path(folder) / "digits", size=size)
        settings |= dict(epochs=2, batch_size=batch_size, channels=channels, log_every=10)
        task = tpukit.MNIST(dataset_dir=data, **settings)
        run = tpukit.Run.open(Path(folder) / "run", task)
        began = time.monotonic()
        scores = tpukit.launch(tpukit.train, task, run, cores=cores, parallel=parallel, hang_timeout_s=120)
        took_s = time.monotonic() - began
        records = run.records("train")
        events = [event for event in run.records("compile") if event["what"] == "step"]
    accuracy, graphs = scores["accuracy"], sum(event["programs"] for event in events)
    fallbacks = (records[-1]["speed"]["counters"] or {}).get("fallbacks", {})
    refused = [reason for event in events if not event["programs"] for reason in event["why"]]
    # Where CPU XLA devices reduce on the host, a step is two graphs.
    most = 2 if env.accelerator == "xla" and cores > 1 and parallel == "processes" else 1
    text = f"accuracy {accuracy:.3f} in {took_s:.1f} s; cores: {cores}, graphs of the step: {graphs}"
    for name, found in (("ran on the CPU", fallbacks), ("not captured", refused)):
        text += f"; {name}: {', '.join(found)}" if found else ""
    holds = accuracy > least and graphs <= most and not fallbacks and not refused
    return [record["loss"] for record in records], judged(holds, text, accuracy=accuracy, seconds=took_s)
