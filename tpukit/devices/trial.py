"""Whether a device computes what it should, tried on a small network: in seconds, at the start of a training
on hardware that nobody has reported from.

`seen.json` lists the reports: [{"chip": "TPU v5e", "torch": "2.9", "torch_xla": "2.9" or null, "passed":
["step", "all_reduce", "attention"]}, ...]."""

import contextlib
import copy
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional as F

from tpukit.devices.chips import find_chip
from tpukit.devices.optimizers import state_tensors
from tpukit.devices.runtime import Runtime
from tpukit.host import environment
from tpukit.host.errors import TpukitError, first_line

REPORTS = Path(__file__).with_name("seen.json")
STEPS = 8  # on a GPU 3 of them warm up and 1 is captured
SAMPLES, SIDE = 8, 8  # of a batch of one core, and of an image in pixels
SCALE = 1024.0  # of the loss in fp16: by torch's 65536 some ranks' gradients overflow, and a step is skipped
# On a CPU, with the batches of 12 ranks, a lost update made an error of 0.2 or more; and steps in bf16 beside
# ones in fp32 one of 0.022 or less.
MAX_ERROR = {"fp32": 1e-3, "bf16": 0.05, "fp16": 0.05}

_failed: dict[tuple, dict[str, str]] = {}  # what failed in the trials of this process, and why


def try_out(runtime: Runtime) -> str:
    """Try on a TPU or GPU without a report whether gradients are averaged and steps are taken right, and let
    the runtime do what is wrong in its other, slower way. Collective: all ranks do the same.

    A process tries once. Returns what was found, in a sentence for the log; "" where nothing is to be tried.
    Raises TpukitError where gradients are averaged wrong and there is no other way."""
    if runtime.accelerator not in ("tpu", "cuda"):
        return ""
    names = ["all_reduce", "step"] if runtime.cores > 1 else ["step"]
    # All or none: a report of one core says nothing of steps with an all-reduce. Of GPUs that differ, rank
    # 0's decides.
    if runtime.world.broadcast(all(seen(runtime, name) for name in names)):
        return ""
    here, started = hardware(runtime), time.monotonic()
    key = (*here.values(), runtime.precision, runtime.cores)
    known, failed = _failed.get(key), {}
    for name in names:
        if why := _why_not(runtime, name) if known is None else known.get(name):
            failed[name] = why
            _do_without(runtime, name, why)
    _failed[key] = failed
    outcome = "the steps of a small network are right"
    if failed:
        slower = [f"{_WITHOUT[name]}, which is slower, because {why}" for name, why in failed.items()]
        outcome = "; ".join([*slower, "please report it (`tpukit doctor --hardware`)"])
    facts = [f"{name} {here[name]}" for name in ("torch", "torch_xla") if here[name]]
    took = f"{time.monotonic() - started:.1f} s"
    return f"tried on this hardware ({', '.join([str(here['chip']), *facts, took])}): {outcome}"


_WITHOUT = {
    "all_reduce": "gradients are averaged in the host's memory",
    "step": "training steps are not captured, replayed or compiled as a whole",
}


def _why_not(runtime, name):
    """Why something cannot be trusted on some rank, "" where it can on all."""
    measure, max_error = step_error, MAX_ERROR[runtime.precision]
    if name == "all_reduce":
        measure, max_error = all_reduce_error, MAX_ERROR["fp32"]  # gradients have the weights' type
    try:
        error = measure(runtime)
        why = "" if error <= max_error else f"what they gave was off by {error:.1%}"
    except Exception as error:  # torch, torch_xla and their compilers raise many types
        why = first_line(error)
    return runtime.world.broadcast(next(filter(None, runtime.world.gather(why)), ""))


def _do_without(runtime, name, why):
    if name == "step":
        runtime.trusts_graphs = False
    elif runtime.world.size > 1:
        runtime.reduces_on_the_host = True
    else:
        raise TpukitError(
            f"the {runtime.cores} cores average their gradients wrong ({why}): train on one, with"
            " `--cores 1`, or with parallel='processes', and please report it"
        )


def hardware(runtime: Runtime) -> dict[str, str | None]:
    """dict(chip, torch, torch_xla): what reports are about, the versions as "2.9"."""
    chip = runtime.device_name()
    if runtime.accelerator == "tpu":
        accelerator_type = environment.detect().device_name
        known = find_chip(accelerator_type)
        chip = known.name if known else accelerator_type
    torch_xla = environment.version_of("torch_xla") if runtime.device.type == "xla" else None
    versions = {"torch": torch.__version__, "torch_xla": torch_xla}
    minor = {name: text and ".".join(map(str, environment.release(text))) for name, text in versions.items()}
    return {"chip": chip, **minor}


def seen(runtime: Runtime, name: str) -> bool:
    """Whether a report says that this, "step", "all_reduce" or "attention", passed on this hardware."""
    here = hardware(runtime)
    reports = json.loads(REPORTS.read_text(encoding="utf-8"))
    return any(here.items() <= report.items() and name in report["passed"] for report in reports)


def step_error(runtime: Runtime) -> float:
    """The largest relative difference between a small network's steps as the runtime takes those of a
    training (captured on a GPU, replayed on XLA) and the same steps one operation after another: of their
    losses, of the weights and statistics that they lead to, and of the optimizer's state. NaN counts as
    infinite. Raises TpukitError where the steps of a GPU cannot be captured. Collective.

    The learning rate and the batches change from step to step."""
    taken = []
    for as_graph in (True, False):
        with _separate(runtime) as own:  # each has a loss scaler of its own, which starts anew
            taken.append(_take_steps(own, as_graph=as_graph))
    return max(map(_relative_error, *taken))


def all_reduce_error(runtime: Runtime) -> float:
    """The relative difference between the mean of gradients over all cores, each of which has others, and the
    known one. NaN counts as infinite. Collective."""
    numbers = torch.Generator().manual_seed(0)
    samples = torch.randn(runtime.cores * SAMPLES, 1000, generator=numbers)
    samples *= torch.arange(1, len(samples) + 1)[:, None]  # so that cores differ
    with _separate(runtime) as own:
        model: Any = own.to_device(nn.Linear(1000, 1, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        batch = own.put_batch({"x": samples.chunk(own.world.size)[own.world.rank]})
        # Not `model(x)`, whose gradient would be a product: this one's is the mean of the samples.
        own.backward((batch["x"] * model.weight).sum(1).mean(), optimizer)
        own.all_reduce_gradients(optimizer)
        own.sync()
        return _relative_error(own.to_cpu(model.weight.grad), samples.mean(0, keepdim=True))


@contextlib.contextmanager
def _separate(runtime: Runtime):
    """Context manager: the same device for a trial. What that counts, records, scales and draws is no part of
    a training."""
    state = runtime.random_state()
    own = copy.copy(runtime)
    own.reset_statistics()
    own._last_inputs = {}
    if own.scaler is not None:
        own.scaler = GradScaler(own.device.type, init_scale=SCALE)
    try:
        yield own
    finally:
        runtime.set_random_state(state)


def _take_steps(runtime, *, as_graph):
    """The loss of each step, then the tensors of the model and of the optimizer's state, on the CPU."""
    torch.manual_seed(0)
    # Not a ReLU, which makes much of rounding: a number on the other side of 0 has another gradient
    layers = [nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Tanh(), nn.Flatten()]
    model = runtime.to_device(nn.Sequential(*layers, nn.Linear(8 * (SIDE - 2) ** 2, 4)))
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    runtime.init_optimizer_state(optimizer)
    called = runtime.torch_compile(model, "no") if as_graph else model  # which torch_tpu compiles

    def step(batch, lr_factor):
        optimizer.zero_grad(set_to_none=True)
        with runtime.autocast():
            loss = F.cross_entropy(called(batch["image"]), batch["label"]).float()
        runtime.backward(loss, optimizer)
        runtime.all_reduce_gradients(optimizer)
        runtime.optimizer_step(optimizer, lr_factor)
        return loss.detach().reshape(1)

    compiled = runtime.compile(step, name="trial", mutates=(model, optimizer)) if as_graph else step
    numbers, losses = torch.Generator().manual_seed(runtime.world.rank), []
    for number in range(STEPS):
        samples = SAMPLES * runtime.cores // runtime.world.size  # by SPMD one process has those of all cores
        image = torch.randn(samples, 1, SIDE, SIDE, generator=numbers)
        label = image[:, 0, 1, 1:5].argmax(1)  # so that there is something to learn
        batch = runtime.put_batch({"image": image, "label": label})
        losses.append(compiled(batch, runtime.as_graph_input(1 - number / STEPS / 2)))
        if not as_graph:
            runtime.sync()  # else XLA makes one graph of several steps
    for event in runtime.pop_compile_events():
        if not event["programs"]:
            raise TpukitError(f"a step cannot be captured, because {event['why'][0]}")
    return runtime.to_cpu([*losses, *model.state_dict().values(), *state_tensors(optimizer)])


def _relative_error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.double(), expected.double()
    error = float((found - expected).norm() / expected.norm())
    return error if error == error else float("inf")
