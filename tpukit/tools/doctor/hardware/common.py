"""What a check finds, and the checks that TPUs and GPUs share."""

import dataclasses
import functools
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import conv2d

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
    _, seconds = best_of(runtime, lambda: functools.reduce(torch.matmul, [x] * (count + 1)))
    rate, chip = 2 * size**3 * count / seconds, find_chip(env.device_name)
    share = f", {rate / chip.flops:.0%} of its peak" if chip and chip.flops else ""
    found = judged(True, f"{rate / 1e12:.3g} TFLOP/s{share}", tflops=rate / 1e12)
    return dataclasses.replace(found, outcome=INFO)


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


def best_of(runtime: Runtime, function: Callable, count: int = 6) -> tuple[Any, float]:
    """(the result, the shortest time in seconds) of calls of a function; the first compiles."""
    times_s = []
    for _ in range(count):
        runtime.sync()
        began = time.perf_counter()
        result = function()
        runtime.sync()  # before a part is read, for which alone XLA would compute less
        runtime.to_cpu(result[0].flatten()[:1])  # only then all is computed
        times_s.append(time.perf_counter() - began)
    return result, min(times_s[1:])


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
