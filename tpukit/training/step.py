"""One optimizer step, from a batch to the new metric sums; and `TrainingStep`, all that it is made of, on the
device. On XLA a step is one compiled graph.

What differs by device is the device's: the loss scaler and the all-reduce are in `devices/runtime.py` and
`devices/xla.py`. On XLA the function is only traced, once; `devices/xla_graph.py` writes the new weights. On
a GPU it is captured, by `devices/cuda_graph.py`, and then no longer called. docs/CONTRIBUTING.md shows what
wraps it on each kind of device."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tpukit.devices.optimizers import gradients, parameters_with_gradient, separate_gradients
from tpukit.devices.runtime import Runtime
from tpukit.devices.tensors import after_gradients
from tpukit.training import batch_norm, layers, metrics
from tpukit.training.data import Batch, identity
from tpukit.training.ema import WeightEMA
from tpukit.training.task import Task

Loss = Callable[[nn.Module, Batch, int | Tensor], Tensor]


def train_step(
    task: Task,
    loss: Loss,
    model: nn.Module,
    optimizer: Optimizer,
    runtime: Runtime,
    compose: Callable[[Batch], Batch],
    batch: Batch,
    epoch: int | Tensor,
    sums: Tensor,
    lr_factor: float | Tensor | None = None,
) -> Tensor:
    """Take one optimizer step. Returns the new sums, a tensor as `metrics.new_sums` makes it.

    loss: `task.loss`, or what torch.compile made of it. compose: `BatchLoader.compose`.
    batch: dict of tensors on the device, as `BatchLoader.batches` yields them.
    epoch: from 0, as `Runtime.as_graph_input` gives it.
    lr_factor: of `schedule.lr_factor`, given in the same way.

    The gradients stay until the next step, so that their norm can be computed when the metrics are synced;
    but not of a compiled graph, whose outputs cost memory: it returns their norm."""
    batch = compose(batch)  # gathers and augments on the device
    optimizer.zero_grad(set_to_none=True)
    value = add_gradients(task, loss, model, optimizer, runtime, batch, epoch)
    runtime.all_reduce_gradients(optimizer)
    grad_norm = clip_gradients(optimizer, task.clip_norm)  # None if clip_norm is None
    runtime.optimizer_step(optimizer, lr_factor)
    if runtime.compiles:
        grad_norm = metrics.gradient_norm(model)[0] if grad_norm is None else grad_norm
        optimizer.zero_grad(set_to_none=True)
    return metrics.accumulate(sums, value, grad_norm, overflow_is_skipped=runtime.scaler.is_enabled())


def clip_gradients(optimizer: Optimizer, max_norm: float | None) -> Tensor | None:
    """Scale gradients of a larger norm down to it. Returns the norm they had, a scalar on the device."""
    if max_norm is None:
        return None
    return nn.utils.clip_grad_norm_(parameters_with_gradient(optimizer), max_norm)


def add_gradients(
    task: Task,
    loss: Loss,
    model: nn.Module,
    optimizer: Optimizer,
    runtime: Runtime,
    batch: Batch,
    epoch: int | Tensor,
) -> Tensor:
    """Compute the gradients of a batch, all of it at once or in micro-batches. Returns the loss, a scalar
    without gradient."""
    count, losses = task.micro_batches, []
    for number in range(count):
        part = batch
        if count > 1:  # every count-th sample
            part = {name: values.unflatten(0, (-1, count))[:, number] for name, values in batch.items()}
        part = after_gradients(part, gradients(optimizer))
        with runtime.autocast():
            value = loss(model, part, epoch).float()
        value = value if count == 1 else value / count
        runtime.scaler.scale(value).backward()  # scaled in fp16 only
        separate_gradients(optimizer)
        losses.append(value.detach())
    runtime.scaler.unscale_(optimizer)
    return sum(losses[1:], start=losses[0])


class TrainingStep:
    """A task's training step on a runtime's device: the model, the optimizer, and the step as the device runs
    it. The one assembly: for the loop, and for tools that plan, trace or try a step.

    model: of `task.model()`, on the CPU; its batch norms and frozen parts become those that the task sets.
    ema: the `WeightEMA`, or None. sums: (4,), of the steps since they were last reset. parts: what a
    checkpoint holds the state of, by name, or None."""

    def __init__(self, task: Task, runtime: Runtime, model: nn.Module) -> None:
        self.task, self.runtime = task, runtime
        if task.batch_norm == "frozen":
            batch_norm.freeze(model)
        layers.freeze(model, task.freeze, task.head)
        self.model = runtime.to_device(model)
        self.ema = WeightEMA(self.model, task.ema_decay, runtime) if task.ema_decay else None
        self.optimizer = task.optimizer(self.model)  # on XLA, placing made new parameters
        self.has_optimizer_state = runtime.init_optimizer_state(self.optimizer)
        self.sums = metrics.new_sums(runtime)
        averaged = self.ema.model if self.ema else None
        parts = dict(model=self.model, optimizer=self.optimizer, scaler=runtime.scaler, averaged=averaged)
        self.parts = parts

    def compile(self, compose: Callable[[Batch], Batch] = identity) -> None:
        """Make `compiled`, the step as the device runs it, and `eager`, the same one operation at a time.

        compose: what completes a batch on the device, of a `BatchLoader`. To be called once the state is that
        which the first step starts from."""
        task, runtime = self.task, self.runtime
        loss = runtime.torch_compile(task.loss, task.compile)
        self.eager = functools.partial(train_step, task, loss, self.model, self.optimizer, runtime, compose)
        # Without the optimizer's state the second step has more inputs than the first: one more graph.
        self.max_graphs = 1 if self.has_optimizer_state else 2
        is_captured = self.has_optimizer_state and task.compile != "no"
        self.compiled = runtime.compile(
            self.eager,
            name="step",
            max_graphs=self.max_graphs,
            mutates=(self.model, self.optimizer) if is_captured else None,
        )

    def arguments(self, batch: Batch, epoch: int, lr_factor: float | None = None) -> tuple:
        """Return the arguments of `compiled` and `eager`. batch: on the device. epoch: from 0."""
        number = self.runtime.as_graph_input("epoch", epoch)
        if self.task.compile == "yes":  # on a CPU, too: torch.compile compiles anew for another number
            number = torch.as_tensor(number)
        return batch, number, self.sums, self.runtime.as_graph_input("lr_factor", lr_factor)

    def __call__(self, batch: Batch, epoch: int, lr_factor: float | None = None) -> None:
        """Take a step, and add its metrics to `sums`."""
        self.sums = self.compiled(*self.arguments(batch, epoch, lr_factor))
