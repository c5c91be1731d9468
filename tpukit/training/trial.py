"""Self-test on a small network: are captured and replayed training steps right on this hardware?

A training run on a TPU or GPU begins with it, once per machine: the cache folder keeps that it passed."""

import contextlib
import copy
import re
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from tpukit.devices.optimizers import state_tensors
from tpukit.devices.runtime import Runtime
from tpukit.host import cache, environment
from tpukit.host.errors import TpukitError, first_line
from tpukit.training.step import TrainingStep
from tpukit.training.task import Task

STEPS = 8  # on a GPU 3 of them warm up and 1 is captured
# On a CPU, with the batches of 12 ranks, a lost update made an error of 0.2 or more; rounding to bf16 one of
# 0.022 or less.
MAX_ERROR = 0.05


class Small(Task):
    """Four classes of images of 8 x 8 pixels."""

    def model(self):
        # Not a ReLU, which makes much of rounding: a number on the other side of 0 has another gradient.
        convolved = [nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Tanh()]
        return nn.Sequential(*convolved, nn.Flatten(), nn.Linear(288, 4))

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)

    def loss(self, model, batch, epoch):
        return nn.functional.cross_entropy(model(batch["image"]), batch["label"])


def try_out(runtime: Runtime, say: Callable[[str], None] = print) -> str:
    """Test the steps of a TPU or GPU if no earlier training run did; if they are wrong, this one takes its
    steps one operation after another. say: prints a line before the test. Return what is wrong, in a sentence
    for the log, or "". Collective."""
    if runtime.accelerator not in ("tpu", "cuda"):
        return ""
    env = environment.detect()
    facts = ["trial", env.device_name, *env.versions.values(), runtime.precision, str(runtime.cores)]
    passed = None
    with contextlib.suppress(TpukitError):  # without a cache folder the next training run tries again
        passed = cache.entry(re.sub(r"[^\w.]+", "-", " ".join(facts)))
    if runtime.world.broadcast(passed is not None and passed.exists()):
        return ""
    say("self-test, once on this machine: compiling two small graphs, which can take a minute")
    try:
        error = step_error(runtime)
        why = "" if error <= MAX_ERROR else f"the results were off by {error:.1%}"
    except Exception as failure:  # torch, torch_xla and their compilers raise many types
        why = first_line(failure)
    why = runtime.world.broadcast(next(filter(None, runtime.world.gather(why)), ""))
    if not why:
        with contextlib.suppress(OSError):
            if passed is not None:
                passed.touch(0o644)
        return ""
    runtime.trusts_graphs = False
    why = f"in a trial on this hardware {why}; please report it (`tpukit doctor --hardware`)"
    return f"training steps do not run as one captured graph, which is slower, because {why}"


def step_error(runtime: Runtime) -> float:
    """Take a small network's steps as in a training run (captured on a GPU, replayed on XLA), and again one
    operation after another. Return the largest relative difference: of the sum of the losses, the weights,
    the statistics or the optimizer's state; NaN if any of them is. Collective."""
    pairs = zip(_take_steps(runtime, trusts_graphs=True), _take_steps(runtime, trusts_graphs=False))
    return float(torch.stack([(ours - expected).norm() / expected.norm() for ours, expected in pairs]).max())


def _take_steps(runtime: Runtime, *, trusts_graphs: bool) -> list[Tensor]:
    """Return the sum of the losses, then the tensors of the model and of the optimizer's state, on the CPU.
    The learning rate and the batches change from step to step."""
    runtime = copy.copy(runtime)
    runtime.trusts_graphs, runtime.compile_events = trusts_graphs, []
    # torch's starts at 65536, with which some ranks' gradients overflow: a skipped step.
    is_scaled = runtime.scaler.is_enabled()
    runtime.scaler = GradScaler(runtime.device.type, init_scale=1024.0, enabled=is_scaled)
    torch.manual_seed(0)
    task = Small()
    step = TrainingStep(task, runtime, task.model())
    step.compile()
    numbers = torch.Generator().manual_seed(runtime.world.rank)
    for number in range(STEPS):
        image = torch.randn(8, 1, 8, 8, generator=numbers)
        label = image[:, 0, 1, 1:5].argmax(1)  # so that there is something to learn
        step(runtime.put_batch({"image": image, "label": label}), 0, 1 - number / STEPS / 2)
    state = [*step.model.state_dict().values(), *state_tensors(step.optimizer)]
    return [value.double() for value in runtime.to_cpu([step.sums[:1], *state])]
