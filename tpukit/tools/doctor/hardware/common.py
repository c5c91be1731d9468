"""The checks that TPUs and GPUs share. torch is imported by the process of a check alone."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpukit.devices import open_runtime
from tpukit.devices.chips import find_chip
from tpukit.host import known_errors
from tpukit.host.environment import Environment
from tpukit.host.errors import first_line
from tpukit.host.tables import GIB
from tpukit.tools.child import last_line, run_python
from tpukit.tools.doctor.hardware.outcome import FAIL, Outcome, is_hardware, judged, measured

if TYPE_CHECKING:
    from tpukit.devices.runtime import Runtime
    from tpukit.training.step import TrainingStep
    from tpukit.training.task import Task

OPENS_WITHIN_S = 60.0
FP32_ERROR = 1e-5  # of a product's norm; with factors rounded to bf16 it is 3e-3, to TF32 3e-4
STEPS = 100
LOST_BYTES = 2**20  # that as many steps may add to the peak of memory
LOSS_CHANGE = 0.05  # between one core and several, of a training of 90 steps in fp32
# It leads a process group of its own, which a check that is ended leaves behind.
OPEN_DEVICE = """
import os
from tpukit import detect
from tpukit.devices import open_runtime
from tpukit.launching.supervisor import end_with_parent
end_with_parent(os.getppid())
runtime = open_runtime(detect())
runtime.sync()
print("open", flush=True)
"""


def opens(env: Environment) -> Outcome:
    """A process opens the device within a minute, multiplies on it, and reads how much memory it has."""
    import torch

    began = time.monotonic()
    runtime = open_runtime(env)
    total = _products(runtime, torch.ones(64, 64), torch.ones(64, 64)).sum()
    took_s = time.monotonic() - began
    memory = runtime.memory()
    holds = total == 64**3 and took_s < OPENS_WITHIN_S and (bool(memory) or not is_hardware(env))
    size = f"{memory[0][1] / GIB:.1f} GiB" if memory else "memory that it does not tell"
    text = f"{runtime.device_name()}, {size}, opened in {took_s:.1f} s; precision auto is {runtime.precision}"
    return judged(holds, text, seconds=took_s, memory_gib=runtime.memory_size() / GIB)


def precision(env: Environment) -> Outcome:
    """Products and convolutions in fp32 have the errors of fp32, not of bf16 or TF32."""
    import torch
    from torch.nn.functional import conv2d

    generator = torch.Generator().manual_seed(0)
    runtime = open_runtime(env, "fp32")
    a, b = torch.randn(2, 512, 512, generator=generator)
    x, w = (torch.randn(shape, generator=generator) for shape in ((4, 32, 32, 32), (32, 32, 3, 3)))
    product = _error(_products(runtime, a, b), a.double() @ b.double())
    on_device = runtime.put({"x": x, "w": w})
    convolved = runtime.to_cpu(conv2d(on_device["x"], on_device["w"]))
    convolution = _error(convolved, conv2d(x.double(), w.double()))
    rate = _tflops(runtime, size=8192 if is_hardware(env) else 256)
    chip = find_chip(env.device_name)
    share = f", {rate * 1e12 / chip.flops:.0%} of its peak" if chip and chip.flops else ""
    text = f"errors: product {product:.1e}, convolution {convolution:.1e}; half precision {rate:.3g} TFLOP/s"
    holds = max(product, convolution) < FP32_ERROR
    return judged(holds, text + share, product=product, convolution=convolution, half_tflops=rate)


def step(env: Environment) -> Outcome:
    """A step that is replayed (TPU) or captured (GPU) gives the losses, weights and state of an eager one."""
    from tpukit.devices import trial

    errors, bounds = {}, {}
    for name in ("fp32", "auto"):
        runtime = open_runtime(env, name)
        errors[name], bounds[name] = trial.step_error(runtime), trial.MAX_ERROR[runtime.precision]
    holds = all(error < bounds[name] for name, error in errors.items())
    text = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    return judged(holds, f"largest relative differences: {text}", **errors)


def replays(env: Environment) -> Outcome:
    """Steps with a changing learning rate are one graph, wait for nothing, and lose no memory."""
    from tpukit.tasks.mnist import MNIST

    task = MNIST(batch_size=8, channels=8)
    runtime = open_runtime(env)
    taken = new_step(task, runtime)
    batch = runtime.put(task.example(task.batch_size))
    peaks = []
    for first in (0, STEPS):
        with waits_refused(env) if first else contextlib.nullcontext():
            for number in range(first, first + STEPS):
                taken(batch, 0, 1 - number / (4 * STEPS))
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
    _, outcome = train_digits(env, 1)
    return outcome


def all_cores(env: Environment) -> Outcome:
    """A training on all cores, a process each, has the losses of one on one core."""
    # The several first: afterwards this process has opened the device.
    several, outcome = train_digits(env, cores_of(env), precision="fp32")
    one, _ = train_digits(env, 1, precision="fp32")
    change = max(abs(a - b) / max(b, 0.1) for a, b in zip(several, one, strict=True))
    holds = outcome.outcome != FAIL and change < LOSS_CHANGE
    return judged(holds, f"losses differ by {change:.2%}; {outcome.text}", **outcome.numbers, change=change)


def all_reduce(env: Environment) -> Outcome:
    """The gradients that all cores exchange in a step become their mean."""
    import tpukit
    from tpukit.devices import trial

    with tempfile.TemporaryDirectory(prefix="tpukit-hardware-") as folder:
        task = tpukit.MNIST(batch_size=8 * cores_of(env), precision="fp32")
        run = tpukit.Run.open(Path(folder) / "run", task)
        error = tpukit.launch(reduce_on_core, task, run, cores=cores_of(env), hang_timeout_s=120)
    text = f"on {cores_of(env)} cores the mean is wrong by {error:.1e}"
    return judged(error < trial.MAX_ERROR["fp32"], text, error=error)


def reduce_on_core(task: Task, run: Any, *, runtime: Runtime) -> float:
    """What `all_reduce` runs on each core."""
    from tpukit.devices import trial

    return trial.all_reduce_error(runtime)


def mshnet(env: Environment) -> Outcome:
    """How long a step of MSHNet takes, compiled and eager, and its memory: numbers without a right answer."""
    from tpukit.tasks.mshnet import MSHNet

    batch_size, side, steps = (16, 256, 25) if is_hardware(env) else (2, 32, 2)
    task = MSHNet(batch_size=batch_size, base_size=side, crop_size=side)
    runtime = open_runtime(env, libtpu_args=task.libtpu_args(batch_size))
    taken = new_step(task, runtime)
    batch = runtime.put(task.example(batch_size))
    numbers, texts = {}, [f"batch {batch_size} of {side} pixels in {runtime.precision}"]
    for name, way in (("compiled", taken.compiled), ("eager", taken.eager)):
        times_s = []
        for _ in range(steps):
            began = time.perf_counter()
            sums = way(*taken.arguments(batch, task.epochs))
            finish(runtime, sums)
            times_s.append(time.perf_counter() - began)
        settled_s = times_s[len(times_s) // 2 :]  # a captured step warms up for 3
        numbers |= {f"{name}_ms": 1e3 * statistics.median(settled_s), f"{name}_first_s": times_s[0]}
        texts.append(f"{name} {numbers[f'{name}_ms']:.1f} ms (first {times_s[0]:.1f} s)")
    for peak, _ in runtime.memory()[:1]:
        numbers["memory_gib"] = peak / GIB
        texts.append(f"peak {peak / GIB:.2f} GiB")
    return measured(", ".join(texts), **numbers)


def out_of_memory(env: Environment) -> Outcome:
    """Asking for more memory than there is ends in an error that tpukit knows, and the device computes on."""
    import torch

    runtime = open_runtime(env)
    x = runtime.put({"x": torch.ones(2**20)})["x"]
    try:
        _allocate_4_tib(runtime, x)
        return Outcome(FAIL, "4 TiB were given out without an error")
    except Exception as error:
        known, text = known_errors.match(str(error)), first_line(error)
    still = float(_products(runtime, torch.ones(8, 8), torch.ones(8, 8)).sum()) == 8**3
    told = "known" if known else "not known"
    return judged(bool(known) and still, f"{told}: {text}" + ("" if still else "; then it computed wrongly"))


def killed(env: Environment) -> Outcome:
    """After its process was killed, a device can be opened again within a minute."""
    holder = subprocess.Popen(
        [sys.executable, "-P", "-c", f"{OPEN_DEVICE}\nimport time; time.sleep(600)"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert holder.stdout is not None
        has_opened = any(line.strip() == "open" for line in iter(holder.stdout.readline, ""))
    finally:
        holder.kill()
        holder.wait()
    if not has_opened:
        return Outcome(FAIL, "the process that was to be killed could not open the device")
    began = time.monotonic()
    while True:
        ran = run_python("-c", OPEN_DEVICE)
        took_s = time.monotonic() - began
        if ran.returncode == 0 or took_s > OPENS_WITHIN_S:
            break
        time.sleep(1)
    said = "" if ran.returncode == 0 else f": {last_line(ran)}"
    text = f"open again {took_s:.1f} s after the kill" if not said else f"not open after {took_s:.0f} s{said}"
    return judged(ran.returncode == 0 and took_s < OPENS_WITHIN_S, text, seconds=took_s)


# What the checks share


def cores_of(env: Environment) -> int:
    """How many cores the checks of several use; a processor pretends to be two."""
    return env.cores if is_hardware(env) else 2


def new_step(task: Task, runtime: Runtime) -> TrainingStep:
    """A compiled training step of a task, from fresh weights."""
    import torch

    from tpukit.training.step import TrainingStep

    torch.manual_seed(0)
    taken = TrainingStep(task, runtime, task.model().train())
    taken.compile()
    return taken


def finish(runtime: Runtime, result: Any) -> None:
    """Wait until the device has computed all that was asked for: a number of it is here."""
    runtime.sync()
    runtime.to_cpu(result)


@contextlib.contextmanager
def waits_refused(env: Environment):
    """Context manager: on a GPU, an operation that makes the host wait for it raises RuntimeError."""
    if env.accelerator != "cuda":
        yield
        return
    import torch

    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def train_digits(
    env: Environment, cores: int, parallel: str = "processes", **settings: Any
) -> tuple[list[float], Outcome]:
    """Train MNIST on synthetic digits, and judge it. Returns (the losses on the way, the outcome)."""
    import tpukit
    from tpukit.tasks.datasets import make_synthetic

    size, batch_size, channels, least = (6000, 128, 32, 0.9) if is_hardware(env) else (1500, 16, 8, 0.5)
    with tempfile.TemporaryDirectory(prefix="tpukit-hardware-") as folder:
        data = make_synthetic("mnist", Path(folder) / "digits", size=size)
        sizes: dict[str, Any] = dict(epochs=2, batch_size=batch_size, channels=channels, log_every=10)
        task = tpukit.MNIST(dataset_dir=data, **sizes, **settings)
        run = tpukit.Run.open(Path(folder) / "run", task)
        began = time.monotonic()
        scores = tpukit.launch(tpukit.train, task, run, cores=cores, parallel=parallel, hang_timeout_s=120)
        took_s = time.monotonic() - began
        records = run.records("train")
        events = [event for event in run.records("compile") if event["what"] == "step"]
    graphs, speed = sum(event["programs"] for event in events), records[-1]["speed"]
    fallbacks = (speed["counters"] or {}).get("fallbacks", {})
    refused = [reason for event in events if not event["programs"] for reason in event["why"]]
    learned = scores["accuracy"] > least
    # Where CPU XLA devices reduce on the host, a step is two graphs.
    most = 2 if env.accelerator == "xla" and cores > 1 and parallel == "processes" else 1
    text = (
        f"accuracy {scores['accuracy']:.3f} in {took_s:.1f} s; cores: {cores}, graphs of the step: {graphs}"
    )
    for name, found in (("ran on the CPU", fallbacks), ("not captured", refused)):
        text += f"; {name}: {', '.join(found)}" if found else ""
    outcome = judged(
        learned and graphs <= most and not fallbacks and not refused,
        text,
        accuracy=scores["accuracy"],
        seconds=took_s,
        images_per_s=speed["images_per_s"],
    )
    return [record["loss"] for record in records], outcome


def _products(runtime, a, b):
    """a @ b, computed on the device, on the CPU."""
    on_device = runtime.put({"a": a, "b": b})
    return runtime.to_cpu(on_device["a"] @ on_device["b"])


def _allocate_4_tib(runtime, x):
    square = x[:, None] * x
    runtime.sync()
    return float(runtime.to_cpu(square[0, 0]))


def _error(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


def _tflops(runtime, size, count=20):
    """The rate of products of size x size in half precision, the best of three."""
    import torch

    has_bf16 = runtime.device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = torch.bfloat16 if has_bf16 else torch.float16
    x = runtime.put({"x": torch.full((size, size), 1 / size, dtype=dtype)})["x"]  # whose powers are itself
    times_s = []
    for _ in range(4):  # the first compiles
        runtime.sync()
        began, y = time.perf_counter(), x
        for _ in range(count):
            y = y @ x
        runtime.sync()  # before the slice, for which alone XLA would compute less
        finish(runtime, y[:1, :1])
        times_s.append(time.perf_counter() - began)
    return 2 * size**3 * count / min(times_s[1:]) / 1e12
