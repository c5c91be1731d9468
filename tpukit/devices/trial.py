"""Whether a device computes what it should, tried on a small network, in seconds: a training's first steps on
hardware that nobody has reported from.

`seen.json` lists the reports: [{"chip": "TPU v5e", "torch": "2.9", "torch_xla": "2.9" or null, "passed":
["step", "all_reduce"]}, ...]. Nothing is tried where one says that it passed."""

import contextlib
import copy

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional as F

from tpukit.devices.optimizers import state_tensors
from tpukit.devices.runtime import Runtime
from tpukit.host.errors import TpukitError

STEPS = 8  # on a GPU 3 of them warm up and 1 is captured
SAMPLES, SIDE = 8, 8  # of a batch of one core, and of an image in pixels


def step_error(runtime: Runtime) -> float:
    """The largest relative difference between a small network's steps as the runtime takes those of a
    training (captured on a GPU, replayed on XLA) and the same steps one operation after another: of their
    losses, of the weights and statistics that they lead to, and of the optimizer's state. NaN counts as
    infinite. Raises TpukitError where the steps of a GPU cannot be captured. Collective.

    The learning rate and the batches change from step to step."""
    with _separate(runtime) as own:
        computed, expected = _take_steps(own, as_graph=True), _take_steps(own, as_graph=False)
    return max(map(_relative_error, computed, expected))


def all_reduce_error(runtime: Runtime) -> float:
    """The relative difference between the mean of gradients over all cores, each of which has others, and the
    known one. NaN counts as infinite. Collective."""
    numbers = torch.Generator().manual_seed(0)
    samples = torch.randn(runtime.cores * SAMPLES, 1000, generator=numbers)
    samples *= torch.arange(1, len(samples) + 1)[:, None]  # so that cores differ
    with _separate(runtime) as own:
        model = own.to_device(nn.Linear(1000, 1, bias=False))
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
        own.scaler = GradScaler(own.device.type)
    try:
        yield own
    finally:
        runtime.set_random_state(state)


def _take_steps(runtime, *, as_graph):
    """The loss of each step, then the tensors of the model and of the optimizer's state, on the CPU."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()]
    model = runtime.to_device(nn.Sequential(*layers, nn.Linear(8 * (SIDE - 2) ** 2, 4)))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
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
        image = torch.randn(runtime.shards * SAMPLES, 1, SIDE, SIDE, generator=numbers)
        label = image[:, 0, 1, 1:5].argmax(1)  # so that there is something to learn
        batch = runtime.put_batch({"image": image, "label": label})
        losses.append(compiled(batch, runtime.as_graph_input(1 - number / STEPS)))
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
