"""The runtime of XLA devices: a TPU chip, or the CPU XLA device."""

import collections
import copy
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from tpukit.devices import lanes, xla_counters, xla_private
from tpukit.devices.distributed import World
from tpukit.devices.optimizers import (
    count_steps_on_device,
    gradients,
    parameters_of,
    parameters_with_gradient,
)
from tpukit.devices.runtime import Runtime, Stored
from tpukit.devices.tensors import move
from tpukit.devices.xla_graph import CompiledFunction, ReplayedStep

_STATE_STARTS_AT_ZERO = ("SGD", "Adam", "AdamW", "Adamax", "RAdam", "RMSprop", "Adadelta")


class XLARuntime(Runtime):
    """One XLA device in this process."""

    compiles = has_graphs = True
    runs_graphs = True  # a plan only exports them
    is_compiling = staticmethod(xla_counters.is_compiling)
    # A number that moves with each sync, exact where nothing is pending. `seed_device` replaces it.
    other_generators = {**Runtime.other_generators, "xla": (xm.get_rng_state, xm.set_rng_state)}

    def __init__(self, accelerator: str, precision: str = "auto", world: World | None = None):
        super().__init__(accelerator, precision, world)
        self._fallbacks_before = xla_counters.counters()["fallbacks"]
        # CPU XLA devices of different processes share no link.
        self.reduces_on_the_host = self.world.size > 1 and accelerator != "tpu"

    @staticmethod
    def is_open() -> bool:
        return xla_private.is_open()

    def _open_device(self) -> torch.device:
        if self.accelerator == "tpu":
            # Otherwise a TPU rounds fp32 factors to bfloat16, even those that a bf16 training run keeps in
            # fp32, such as pixels that it augments.
            xla_private.set_matmul_precision("highest")
        return torch_xla.device()

    def _best_precision(self) -> str:
        return "bf16" if self.accelerator == "tpu" else "fp32"

    def device_name(self) -> str:
        return xla_counters.device_name()

    # Moving

    def to_device(self, model: nn.Module) -> nn.Module:
        prepare: Any = getattr(model, "prepare_for_xla", None)
        if prepare and not self.notes:
            self.notes = prepare(self)  # a sentence: which of its ways it computes here
        values = [buffer.to("cpu", copy=True) for buffer in model.buffers()]
        model = move(model, self.device)  # the compiler chooses its own layouts
        self._separate(model.buffers(), values)
        with torch.no_grad():
            # A tensor that was never written in place is traced differently the first time.
            for value in (*model.parameters(), *model.buffers()):
                value.copy_(value.clone())
        return model

    def unalias(self, tensors: Iterable[Tensor]) -> None:
        on_device = self._on_device(list(tensors))
        self._separate(on_device, self.to_cpu(on_device))

    def _separate(self, tensors: Iterable[Tensor], values: Iterable[Tensor]) -> None:
        # torch_xla uploads equal numbers once: the counts of all batch norms are one buffer. A step gives the
        # memory of its old state to the new one, this buffer several times, which crashes.
        for tensor, value in zip(tensors, values):
            if not tensor.dim():
                tensor.data = self._put(value)

    def _put(self, value: Any) -> Tensor:
        tensor = torch.as_tensor(value)
        if tensor.dim():
            return tensor.to(self.device)
        # From a tensor without dimensions `.to` makes a constant of the graph if it is 0 or 1; elsewhere
        # it shares the data of equal numbers in the graph.
        sent: Any = xm.send_cpu_data_to_device([tensor], self.device)
        return sent[0]

    def put_dataset(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Stored]:
        rows = {name: torch.as_tensor(lanes.to_rows(array)).to(self.device) for name, array in arrays.items()}
        return {name: Stored(rows[name], array.shape) for name, array in arrays.items()}

    def _on_device(self, tree: Any) -> list[Tensor]:
        leaves = tree_leaves(tree)
        return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.device == self.device]

    def to_cpu(self, tree: Any) -> Any:
        # All in one call: one by one, each of a model's hundreds of tensors waits for a transfer of its own.
        copied = iter(xla_private.to_cpu(self._on_device(tree)))

        def on_cpu(value):
            return (next(copied) if value.device == self.device else value.clone()).detach()

        return tree_map_only(Tensor, on_cpu, tree)

    # Computing

    def compile(self, function, *, name=None, max_graphs=1, mutates=None):
        # An all-reduce on the host cuts the step into two graphs, which cannot be replayed.
        is_replayed = mutates is not None and self.trusts_graphs and not self.reduces_on_the_host
        kind = ReplayedStep if is_replayed else CompiledFunction
        return kind(function, name or function.__name__, max_graphs, self, mutates)

    def torch_compile(self, function, choice):
        return function

    def all_reduce_gradients(self, optimizer: Optimizer) -> None:
        if self.world.size == 1:
            return
        grads = gradients(optimizer)
        # Others take their places: torch_xla writes into a tensor behind torch's back, and what reads a
        # gradient by a view, as a clip does, would see the old one; that of a sum may be one number.
        if self.reduces_on_the_host:
            flat = torch.cat([g.reshape(-1) for g in grads]).cpu()  # as one vector
            flat = (self.world.all_reduce(flat) / self.world.size).to(self.device)
            parts = flat.split([g.numel() for g in grads])
            means = [part.view_as(grad).to(grad.dtype, copy=True) for part, grad in zip(parts, grads)]
        else:
            means = [grad.clone() for grad in grads]
            # All ranks run one program, so none needs its layouts pinned, which can cost a copy of each
            # gradient.
            xm.all_reduce(xm.REDUCE_SUM, means, scale=1 / self.world.size, pin_layout=False)
        for parameter, mean in zip(parameters_with_gradient(optimizer), means):
            parameter.grad = mean

    def even_out_gradients(self, optimizer: Optimizer) -> None:
        parameters = [p for p in parameters_of(optimizer) if p.requires_grad]
        ranks = self.world.all_gather([p.grad is not None for p in parameters])
        if all(rank == ranks[0] for rank in ranks):
            return
        for parameter, *exists in zip(parameters, *ranks):
            if parameter.grad is None and any(exists):
                parameter.grad = torch.zeros_like(parameter)
        # What was traced so far differs from rank to rank; cores that run different all-reduces would hang.
        self.end_traced_step()

    def init_optimizer_state(self, optimizer: Optimizer) -> bool:
        """Create the optimizer's state before the first step; created in it, it would cost a second
        compilation.

        See `zero_optimizer_state`. Where that makes none it returns False: the second step compiles once
        more."""
        # torch refuses that on XLA to Adadelta, and to updates of many tensors at once.
        has_foreach = any(group.get("foreach") for group in optimizer.param_groups)
        if not has_foreach and not isinstance(optimizer, torch.optim.Adadelta):
            count_steps_on_device(optimizer)
        parameters = [p for p in parameters_of(optimizer) if p.requires_grad]
        exists = self.zero_optimizer_state(optimizer) or all(optimizer.state.get(p) for p in parameters)
        self.sync()  # so that this, and what `to_device` did, does not become part of the first step
        return exists

    def zero_optimizer_state(self, optimizer: Optimizer) -> bool:
        dampens = any(group.get("dampening") for group in optimizer.param_groups)
        if type(optimizer).__name__ not in _STATE_STARTS_AT_ZERO or dampens:
            return False
        parameters = [p for p in parameters_of(optimizer) if p.requires_grad and not optimizer.state.get(p)]
        without_data = {p: nn.Parameter(torch.zeros_like(p, device="meta")) for p in parameters}
        for p in without_data.values():
            p.grad = torch.zeros_like(p)
        like = copy.copy(optimizer)
        like.state, like.param_groups = collections.defaultdict(dict), []
        for group in optimizer.param_groups:
            same = [without_data[p] for p in group["params"] if p in without_data]
            like.param_groups.append(group | dict(params=same, lr=1.0, capturable=False))
        step: Any = type(like).step
        step.__wrapped__(like)  # without the hooks of a step; it makes the names, shapes and types
        on_host = not any(group.get("capturable") for group in optimizer.param_groups)
        for p, other in without_data.items():
            for name, value in like.state[other].items():
                zeros = torch.zeros(value.shape, dtype=value.dtype)
                # Sent, so that they are no part of the first step's graph
                optimizer.state[p][name] = zeros if name == "step" and on_host else self._put(zeros)
        return True

    def sync(self) -> None:
        torch_xla.sync(wait=True)  # until the work is queued; it raises what goes wrong there
        xm.wait_device_ops()

    def end_traced_step(self) -> None:
        if xla_private.allows_execution():  # not within a step that torch_xla.compile ends itself
            torch_xla.sync()

    # Randomness

    def seed_device(self, *numbers: int) -> None:
        self.device_seed, self.device_calls = numbers, 0

    # What the device reports

    def counters(self) -> dict[str, Any]:
        """See `xla_counters.counters`; but the fallbacks are those since this runtime was opened."""
        counted = xla_counters.counters()
        return counted | dict(fallbacks=dict(counted["fallbacks"] - self._fallbacks_before))

    def memory(self) -> list[tuple[int, int]]:
        return xla_counters.memory()
