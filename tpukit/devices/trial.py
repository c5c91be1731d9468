"""Self-test on a small network: are captured and replayed training steps right on this hardware?

A training on a TPU or GPU begins with it, once per machine: the cache folder keeps that it passed."""

import contextlib
import copy
import re

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional as F

from tpukit.devices.optimizers import state_tensors
from tpukit.devices.runtime import Runtime
from tpukit.host import environment, files
from tpukit.host.errors import first_line

STEPS = 8  # on a GPU 3 of them warm up and 1 is captured
SAMPLES, SIDE = 8, 8  # of a batch of one core, and of an image in pixels
SCALE = 1024.0  # of the loss in fp16: by torch's 65536 some ranks' gradients overflow, and a step is skipped
# On a CPU, with the batches of 12 ranks, a lost update made an error of 0.2 or more; and steps in bf16 beside
# ones in fp32 one of 0.022 or less.
MAX_ERROR = {"fp32": 1e-3, "bf16": 0.05, "fp16": 0.05}


def try_out(runtime: Runtime) -> str:
    """Test the steps of a TPU or GPU where no earlier training did, and take those of this training one
    operation after another if they are wrong. Collective: all ranks do the same.

    Returns what is wrong, in a sentence for the log, or ""."""
    if runtime.accelerator not in ("tpu", "cuda"):
        return ""
    versions = [environment.version_of(name) or "" for name in ("torch", "torch_xla", "torch_tpu")]
    facts = [environment.detect().device_name, *versions, runtime.precision, str(runtime.cores)]
    passed = files.cache_folder() / "trials" / re.sub(r"[^\w.]+", "-", " ".join(facts))
    if runtime.world.broadcast(passed.exists()):
        return ""
    try:
        error = step_error(runtime)
        why = "" if error <= MAX_ERROR[runtime.precision] else f"what they gave was off by {error:.1%}"
    except Exception as failure:  # torch, torch_xla and their compilers raise many types
        why = first_line(failure)
    why = runtime.world.broadcast(next(filter(None, runtime.world.gather(why)), ""))
    if not why:
        with contextlib.suppress(OSError):  # without a cache folder the next training tries again
            files.make_private(passed.parent.parent)
            passed.parent.mkdir(exist_ok=True)
            passed.touch()
        return ""
    runtime.trusts_graphs = False
    return (
        "training steps are not captured, replayed or compiled as a whole, which is slower, because in a"
        f" trial on this hardware {why}; please report it (`tpukit doctor --hardware`)"
    )


def step_error(runtime: Runtime) -> float:
    """Return the largest relative difference between a small network's steps as the runtime takes those of a
    training (captured on a GPU, replayed on XLA) and the same steps one operation after another: of losses,
    weights, statistics and the optimizer's state. NaN counts as infinite. Collective."""
    errors = []
    for measured, expected in zip(_take_steps(runtime, as_graph=True), _take_steps(runtime, as_graph=False)):
        error = (measured.double() - expected.double()).norm() / expected.double().norm()
        errors.append(float(error.nan_to_num(nan=float("inf"))))
    return max(errors)


def _take_steps(runtime: Runtime, *, as_graph: bool) -> list[Tensor]:
    """Return the loss of each step, then the tensors of the model and of the optimizer's state, on the CPU.
    The learning rate and the batches change from step to step."""
    runtime = copy.copy(runtime)  # what it counts, records and scales is no part of a training
    runtime.reset_statistics()
    runtime._last_inputs = {}
    if runtime.scaler is not None:
        runtime.scaler = GradScaler(runtime.device.type, init_scale=SCALE)
    torch.manual_seed(0)
    # Not a ReLU, which makes much of rounding: a number on the other side of 0 has another gradient
    layers = [nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Tanh(), nn.Flatten()]
    model = runtime.to_device(nn.Sequential(*layers, nn.Linear(8 * (SIDE - 2) ** 2, 4)))
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    runtime.init_optimizer_state(optimizer)

    def loss(model, batch):
        return F.cross_entropy(model(batch["image"]), batch["label"]).float()

    compiled_loss = runtime.torch_compile(loss, "auto") if as_graph else loss  # by torch_tpu

    def step(batch, lr_factor):
        optimizer.zero_grad(set_to_none=True)
        with runtime.autocast():
            value = compiled_loss(model, batch)
        runtime.backward(value, optimizer)
        runtime.all_reduce_gradients(optimizer)
        runtime.optimizer_step(optimizer, lr_factor)
        return value.detach().reshape(1)

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
    return runtime.to_cpu([*losses, *model.state_dict().values(), *state_tensors(optimizer)])
