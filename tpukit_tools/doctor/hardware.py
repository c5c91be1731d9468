"""`tpukit doctor --hardware`: try what tpukit assumes of an accelerator and no CPU can show.

A check is a function whose docstring is what is assumed; it returns whether that holds, and what was found.
It runs in a process of its own, with a limit: one that hangs or fails costs itself alone. The report is one
JSON file, without names, paths and data, that docs/hardware/ of tpukit's repository collects."""

import contextlib
import copy
import faulthandler
import json
import math
import os
import subprocess
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import conv2d

import tpukit
from tpukit.data.datasets import make_synthetic
from tpukit.devices import open_runtime
from tpukit.devices.chips import find_chip
from tpukit.devices.runtime import Runtime
from tpukit.host import environment, files, known_errors
from tpukit.host.environment import Environment, detect
from tpukit.host.errors import TpukitError, first_line
from tpukit.host.text import GIB, say
from tpukit.launching.job import Job
from tpukit.launching.supervisor import CoreFailed
from tpukit.training import trial
from tpukit.training.step import TrainingStep
from tpukit.training.task import Task
from tpukit_tools import subprocess_call
from tpukit_tools.doctor import causes

FORMAT = "tpukit hardware 1"
REPORT = "hardware.json"
EMULATED = "TPUKIT_EMULATE_CHIPS"  # `tpukit emulate` sets it
HARDWARE = ("tpu", "cuda")  # a CPU rehearses the checks, torch_xla's CPU device those of a TPU
PASS, FAIL, SKIP = "PASS", "FAIL", "SKIP"
LIMIT_S = 300  # for one check; all_cores trains twice
CORES_LIMIT_S = (
    120  # for cores to start, and for a step of theirs; sooner than the check's, which has no cause
)
MEAN_ERROR = 1e-3  # largest mean error of gradients in fp32 over all cores
FP32_ERROR = 1e-5  # relative to a product's norm; with factors rounded to bf16 it is 3e-3, to TF32 3e-4
NETWORK_ERROR = 5e-3  # largest relative one of MSHNet in fp32, which rounds its gradients by 4e-4
STEPS = 100
WIDTH, LAYERS = 3162, 10  # 100 M parameters, 400 MB
AHEAD = 32  # steps, by which torch_xla lets the host be ahead
GUARDED_STEPS = 6  # after which a step is captured and replayed everywhere
LOST_BYTES = 2**20  # that as many steps may add to the peak of memory
LOSS_CHANGE = 0.05  # between one core and several, in fp32
LEAST_ACCURACY = 0.5  # on synthetic digits; by chance it is 0.1

Found = tuple[bool, str]


# The checks


def opens(env: Environment) -> Found:
    """A process opens the device, multiplies on it, and reads how much memory it has."""
    runtime = open_runtime(env)
    is_right = multiplies(runtime)
    memory = runtime.memory()
    size = f"{memory[0][1] / GIB:.1f} GiB" if memory else "memory of unknown size"
    text = f"{runtime.device_name()}, {size}; precision auto is {runtime.precision}"
    return is_right and (bool(memory) or env.accelerator not in HARDWARE), text


def step(env: Environment) -> Found:
    """Replayed (TPU) or captured (GPU) steps give the losses, weights and state of steps that are neither."""
    holds, errors = True, []
    for precision in ("fp32", "auto"):
        runtime = open_runtime(env, precision)
        error = trial.step_error(runtime)
        holds = holds and error < trial.MAX_ERROR
        errors.append(f"{precision} {error:.1e}")
    return holds, f"largest relative differences: {', '.join(errors)}"


def training(env: Environment) -> Found:
    """A short training run on one core compiles its step once, leaves nothing to the CPU, and learns."""
    _, holds, text = train_digits(env, 1)
    return holds, text


def all_reduce(env: Environment) -> Found:
    """The gradients that all cores exchange in a step become their mean."""
    cores = max(2, env.cores)  # a CPU pretends to be two
    error = tpukit.launch(all_reduce_error, cores=cores, hang_timeout_s=CORES_LIMIT_S)
    return error < MEAN_ERROR, f"on {cores} cores the mean is wrong by {error:.1e}"


def all_cores(env: Environment) -> Found:
    """A training run on all cores, a process each, has the losses of a run on one core."""
    # The several first: afterwards this process has opened the device.
    several, has_learned, text = train_digits(env, max(2, env.cores), precision="fp32")
    one, _, _ = train_digits(env, 1, precision="fp32")
    # What rounding does grows: after the first half of the run even two devices that are right differ.
    change = max(abs(a - b) / max(b, 0.1) for a, b in zip(several, one[: len(one) // 2]))
    return has_learned and change < LOSS_CHANGE, f"losses differ by {change:.2%}, {text}"


def attention_kernels(env: Environment) -> Found:
    """CDEIT's attention kernels run, and agree with attention in slices."""
    from tpukit_tasks.cdeit.tpu import attention

    runtime: Any = open_runtime(env, "bf16")  # an XLARuntime
    note = attention.choose(runtime)  # a process of jax lowers the kernels, and they are compared with slices
    return attention._disabled_reason is None or env.accelerator not in HARDWARE, note


def replays(env: Environment) -> Found:
    """Steps with a changing learning rate are one graph, wait for nothing, and leak no memory."""
    runtime = open_runtime(env)
    taken, batch = new_step(runtime)
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
    graphs, refused = graphs_of(runtime.compile_events)
    lost = peaks[1] - peaks[0] if peaks else 0
    text = f"{2 * STEPS} steps, graphs: {graphs}; the last {STEPS} took {lost / 2**20:.1f} MiB more{refused}"
    return graphs == int(runtime.has_graphs) and lost <= LOST_BYTES, text


def mshnet(env: Environment) -> Found:
    """MSHNet's network for TPUs, on tiles, gives the loss, gradients and statistics of the plain one."""
    from tpukit_tasks.mshnet import MSHNet, model
    from tpukit_tasks.mshnet.tpu import network, tiling

    runtime = open_runtime(env, "fp32")
    # The small one is built of the same parts. Of larger images fp32 rounds the
    # gradients more.
    task = MSHNet(network="small", crop_size=64, base_size=64)
    torch.manual_seed(0)
    plain: Any = task.model().train()
    there: Any = runtime.to_device(copy.deepcopy(plain))
    batch = {name: torch.as_tensor(values) for name, values in task.example(8).items()}
    outcomes: list[list[list[torch.Tensor]]] = []
    for function, net, values in ((model.loss, plain, batch), (network.loss, there, runtime.put(batch))):
        loss = function(net, values["image"], values["mask"], False)
        loss.backward()
        # A bias before the batch's statistics has none on tiles, and in the plain network a rounding error.
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters()]
        outcomes.append(runtime.to_cpu([[loss], grads, [*net.buffers()]]))
    errors = [relative_error(found, known) for known, found in zip(*outcomes)]
    words = ", ".join(
        f"{name} {error:.1e}" for name, error in zip(("loss", "gradients", "statistics"), errors)
    )
    is_right = max(errors) < NETWORK_ERROR and not any(map(math.isnan, errors))
    return is_right, f"{tiling.num_tiles(batch['image'])} tiles of an image; relative differences: {words}"


def run_ahead(env: Environment) -> Found:
    """A host many steps ahead of a device with 100 M parameters takes no extra memory per step."""
    runtime = open_runtime(env)
    torch.manual_seed(0)
    task = Wide(batch_size=8)
    taken = TrainingStep(task, runtime, task.model())
    taken.compile()
    batch = runtime.put(task.example(task.batch_size))
    for _ in range(GUARDED_STEPS):  # those that compile, and wait for each other
        taken(batch, 0)
        runtime.sync()
    before = [peak for peak, _ in runtime.memory()]
    began = time.monotonic()
    for _ in range(AHEAD):
        taken(batch, 0)
    given_s = time.monotonic() - began
    runtime.sync()
    took_s = time.monotonic() - began
    lost = sum(peak for peak, _ in runtime.memory()) - sum(before)
    size = sum(value.nbytes for value in taken.model.parameters())
    is_finite = bool(runtime.to_cpu(taken.sums).isfinite().all())
    text = f"{size / 4e6:.0f} M parameters; {AHEAD} steps were given out in {given_s:.2f} s and took"
    text += f" {took_s:.2f} s; being ahead took {lost / 2**20:.1f} MiB more"
    text += "" if is_finite else "; the loss is not finite"
    return is_finite and lost <= size, text


def precision(env: Environment) -> Found:
    """Products and convolutions in fp32 have the errors of fp32, not of bf16 or TF32."""
    runtime = open_runtime(env, "fp32")
    generator = torch.Generator().manual_seed(0)
    errors = []
    for function, a, b in ((torch.matmul, (512, 512), (512, 512)), (conv2d, (4, 32, 32, 32), (32, 32, 3, 3))):
        factors = dict(a=torch.randn(a, generator=generator), b=torch.randn(b, generator=generator))
        there = runtime.put(factors)
        found = runtime.to_cpu(function(there["a"], there["b"])).double()
        exact = function(factors["a"].double(), factors["b"].double())
        errors.append(float((found - exact).norm() / exact.norm()))
    return max(errors) < FP32_ERROR, f"errors: product {errors[0]:.1e}, convolution {errors[1]:.1e}"


def overflow(env: Environment) -> Found:
    """A step in fp16 whose gradients overflow leaves the weights as they are and halves the loss's scale."""
    runtime = open_runtime(env, "fp16")
    taken, batch = new_step(runtime)
    for _ in range(6):  # after which a step is captured
        taken(batch, 0)
    assert runtime.scaler._scale is not None
    before = [value.detach().clone() for value in taken.model.parameters()]
    runtime.scaler._scale.fill_(2.0**100)
    taken(batch, 0)
    is_kept = all(map(torch.equal, before, taken.model.parameters()))
    scale = runtime.scaler.get_scale()
    text = f"weights {'kept' if is_kept else 'CHANGED'}, scale 2^100 became {scale:.4g}"
    return is_kept and scale == 2.0**99, text


def out_of_memory(env: Environment) -> Found:
    """Asking for more memory than there is ends in an error that tpukit knows, and the device still works."""
    runtime = open_runtime(env)
    try:
        x = runtime.put(torch.ones(2**20))
        square = x[:, None] * x
        runtime.sync()  # else XLA computes no more of it than is read
        runtime.to_cpu(square[0, 0])
        return False, "4 TiB were given out without an error"
    except Exception as error:
        known, text = known_errors.match(str(error)), first_line(error)
    with contextlib.suppress(Exception):  # torch_xla raises an error of allocation again, in its next call
        runtime.to_cpu(runtime.put(torch.ones(1)))
    goes_on = multiplies(runtime)
    text = f"{'known' if known else 'not known'}: {text}" + ("" if goes_on else "; then it computed wrongly")
    return goes_on and (bool(known) or env.accelerator not in HARDWARE), text


# The most telling first
_IN_ORDER = (opens, step, training, all_reduce, all_cores, attention_kernels, mshnet, replays, run_ahead)
CHECKS = {check.__name__: check for check in (*_IN_ORDER, precision, overflow, out_of_memory)}
ON_ALL_CORES = ("all_reduce", "all_cores")


# What they share


class Wide(Task):
    """A sum of squares of a network of large layers."""

    def model(self):
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        return nn.Sequential(*layers)

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), 1e-4)

    def loss(self, model, batch, epoch):
        return model(batch["x"]).square().mean()

    def example(self, count):
        return dict(x=np.ones((count, WIDTH), np.float32))


def relative_error(found: list[torch.Tensor], known: list[torch.Tensor]) -> float:
    """Return the norm of the difference of tensors, relative to that of the known ones."""
    mine, other = (torch.cat([value.double().flatten() for value in values]) for values in (found, known))
    return float((mine - other).norm() / other.norm())


def new_step(runtime: Runtime) -> tuple[TrainingStep, dict[str, Any]]:
    """Return a compiled training step of MNIST, from fresh weights, and a batch on the device."""
    torch.manual_seed(0)
    task = tpukit.MNIST(batch_size=8, channels=8)
    taken = TrainingStep(task, runtime, task.model().train())
    taken.compile()
    return taken, runtime.put(task.example(task.batch_size))


def train_digits(env: Environment, cores: int, precision="auto"):
    """Train MNIST on synthetic digits.

    Returns the losses on the way; whether it learned, by a step of one graph and nothing on the host; and
    what was found, in words."""
    with tempfile.TemporaryDirectory(prefix="tpukit-hardware-") as folder:
        data = make_synthetic("mnist", Path(folder) / "digits", size=1500 * env.cores)
        settings: Any = dict(epochs=2, channels=8, log_every=10, precision=precision)
        task = tpukit.MNIST(dataset_dir=data, batch_size=16 * env.cores, **settings)
        run = tpukit.Run.open(Path(folder) / "run", task)
        scores = tpukit.launch(tpukit.train, task, run, cores=cores, hang_timeout_s=CORES_LIMIT_S)
        records = run.records("train")
        graphs, refused = graphs_of(run.records("compile"))
    fallbacks = (records[-1]["speed"]["counters"] or {}).get("fallbacks", {})
    # Where CPU XLA devices reduce on the host, a step is two graphs.
    most = 2 if env.accelerator == "xla" and cores > 1 else 1
    holds = scores["accuracy"] > LEAST_ACCURACY and graphs <= most and not fallbacks and not refused
    text = f"accuracy {scores['accuracy']:.3f}; cores: {cores}, graphs of the step: {graphs}"
    if fallbacks:
        text += f"; ran on the CPU: {', '.join(fallbacks)}"
    return [record["loss"] for record in records], holds, text + refused


def graphs_of(events: list[dict[str, Any]]) -> tuple[int, str]:
    """Return how many graphs a step was compiled to, and why it was not captured, in words."""
    steps = [event for event in events if event["what"] == "step"]
    refused = [f"; not captured: {event['why'][0]}" for event in steps if not event["programs"]]
    return sum(event["programs"] for event in steps), "".join(refused)


def multiplies(runtime: Runtime) -> bool:
    """Return whether a product of ones on the device is right."""
    ones = runtime.put(torch.ones(64, 64))
    return bool(runtime.to_cpu(ones @ ones).sum() == 64**3)


def all_reduce_error() -> float:
    """On every core: return the relative difference between the mean of gradients over all cores, each of
    which has others, and the known one."""
    core = tpukit.core()
    samples = torch.randn(core.size * 8, 1000, generator=torch.Generator().manual_seed(0))
    weight = torch.nn.Parameter(torch.ones(1, 1000, device=core.device))
    part = samples.chunk(core.size)[core.rank].to(core.device)
    (part * weight).sum(1).mean().backward()  # not a matrix product, which a TPU rounds
    core.runtime.all_reduce_gradients(torch.optim.SGD([weight], 0.1))
    core.runtime.sync()
    mean, known = core.runtime.to_cpu(weight.grad).double(), samples.double().mean(0, keepdim=True)
    return float((mean - known).norm() / known.norm())


# The report


def check_hardware(env: Environment, path: Path, *, rehearse: bool = False) -> dict[str, Any]:
    """Check the accelerator of this machine, print what is found, and return the report.

    Args:
        env: what `detect` found here.
        path: gets the report after each check.
        rehearse: without an accelerator, try the checks themselves; the report says so.

    Raises TpukitError if there is nothing to check."""
    if env.accelerator not in HARDWARE and not rehearse:
        raise TpukitError(
            "found neither a TPU nor a GPU to check; --rehearse tries the checks themselves on the CPU"
            f" ({environment.TPU_MENU[env.host]})"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    report = describe(env)
    for number, (name, check) in enumerate(CHECKS.items(), 1):
        say(f"{number}/{len(CHECKS)} {name}: {check.__doc__}")
        began = time.monotonic()
        outcome, text = run_check(name, env)
        row = dict(
            name=name, outcome=outcome, text=causes.scrub(text), seconds=round(time.monotonic() - began, 1)
        )
        report["checks"].append(row)
        files.write_atomic(path, json.dumps(report, indent=1) + "\n")
        say(f"    {outcome} in {row['seconds']} s: {row['text']}")
    say(f"the report is {path}" + ("; nothing in it was seen on hardware" if report["rehearsal"] else ""))
    return report


def describe(env: Environment) -> dict[str, Any]:
    """Return a report without its checks. rehearsal: whether nothing in it was seen on hardware."""
    chip = find_chip(env.device_name)
    name, is_emulated = chip.name if chip else causes.scrub(env.device_name), EMULATED in os.environ
    return dict(
        format=FORMAT,
        tpukit=tpukit.__version__,
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        rehearsal=is_emulated or env.accelerator not in HARDWARE,
        host=env.host,
        accelerator=env.accelerator,
        backend=env.backend if env.accelerator in ("tpu", "xla") else None,
        chip=f"emulated {name}" if is_emulated else name,
        chips=env.cores,
        python=env.python,
        versions=env.versions,
        checks=[],
    )


def run_check(name: str, env: Environment) -> tuple[str, str]:
    """Run a check in a process of its own. Returns PASS, FAIL or SKIP, and what was found."""
    if name in ON_ALL_CORES and env.accelerator in HARDWARE and env.cores == 1:
        return SKIP, "one chip is here"
    if name == "attention_kernels" and env.backend != "torch_xla":
        return SKIP, "the kernels are for a TPU that is reached by torch_xla"
    if name == "attention_kernels" and EMULATED in os.environ:
        return SKIP, "a TPU's kernels cannot be emulated"
    if name == "mshnet" and env.backend != "torch_xla":
        return SKIP, "the network on tiles is for a TPU that is reached by torch_xla"
    if name == "overflow" and env.accelerator in ("tpu", "xla"):
        return SKIP, "a TPU computes in bf16, not in fp16"
    try:
        holds, text = subprocess_call.call(answer, name, timeout_s=LIMIT_S)
    except subprocess.TimeoutExpired as error:
        holds, text = (
            False,
            f"it did not end within {LIMIT_S} s and was stopped{causes.place_of(error.stderr)}",
        )
    except TpukitError as error:
        holds, text = False, f"its process ended without an answer: {error}"
    return PASS if holds else FAIL, text


def answer(name: str) -> Found:
    """In a check's process: return whether what it assumes holds, and what was found."""
    if name not in ON_ALL_CORES:  # a forked process would wait for the thread of this timer
        # For `run_check`, which stops the check; it began to count before this process had imported torch.
        faulthandler.dump_traceback_later(LIMIT_S - 60)
    Job.start_timeout_s = CORES_LIMIT_S
    try:
        return CHECKS[name](detect())
    except CoreFailed as error:
        return False, causes.cause_of_cores(str(error))
    except Exception as raised:
        # tpukit raised an error of the device's with its fix; here its place counts.
        error = raised.__cause__ if isinstance(raised, TpukitError) and raised.__cause__ else raised
        frame = traceback.extract_tb(error.__traceback__)[-1]
        at = f"{Path(frame.filename).name} line {frame.lineno}"
        return False, f"{type(error).__name__} in {at}: {first_line(error)}"
