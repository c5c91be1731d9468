"""`Runtime`: what the training loop needs from a device. The base class is the CPU; what other kinds of
device do in their own way is in the modules that `devices.RUNTIMES` names.

A runtime is one process of a `World`: it takes its share of every global batch, and gradients are averaged
over all ranks. Shapes: B samples of a batch, N of a dataset."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import random
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.utils._pytree import tree_map, tree_map_only

from tpukit.devices.distributed import World
from tpukit.devices.optimizers import (
    copy_flattened,
    flattened,
    parameters_of,
    parameters_with_gradient,
)
from tpukit.host.errors import TpukitError

Batch = dict[str, Tensor]
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_batch(batch_size: int, cores: int, micro_batches: int = 1) -> None:
    """Raise TpukitError, naming sizes that work, unless a global batch can be shared evenly."""
    parts = cores * micro_batches
    if batch_size > 0 and batch_size % parts == 0:
        return
    below = batch_size // parts * parts
    sizes = f"{below} or {below + parts}" if below > 0 else str(parts)
    each = f", each in {micro_batches} micro-batches" if micro_batches > 1 else ""
    raise TpukitError(
        f"batch_size={batch_size} is the global batch of {cores} cores{each}, so it must be a multiple of"
        f" {parts}: use {sizes}"
    )


class Stored(NamedTuple):
    """An array of samples on the device."""

    rows: Tensor
    """The array itself, or its rows as `lanes.to_rows` makes them."""
    shape: tuple[int, ...]
    """The array's shape, (N, ...)."""

    def take(self, index: Tensor) -> Tensor:
        """Return samples of the array, (B, ...). index: (B,). Call it in a compiled function."""
        if self.rows.shape == self.shape:
            return self.rows.index_select(0, index)
        parts = len(self.rows) // self.shape[0]
        if parts > 1:
            index = (index[:, None] * parts + torch.arange(parts, device=index.device)).flatten()
        samples = self.rows.index_select(0, index).view(len(index) // parts, -1)
        return samples[:, : math.prod(self.shape[1:])].view(-1, *self.shape[1:])


def _numpy_state() -> dict[str, Any]:
    return tree_map_only(np.ndarray, np.ndarray.tolist, np.random.get_state(legacy=False))


class Runtime:
    """One device of this process.

    device: torch.device. precision: "fp32", "bf16" or "fp16". scaler: of the loss; enabled in fp16 only.
    compiles: whether steps become compiled graphs, as on XLA. has_graphs: whether they become compiled or
    captured graphs. cores: the number of devices that share a global batch, over all processes. notes:
    sentences for the run's log about how the placed model is computed, or "".
    trusts_graphs: whether training steps may be captured and replayed, or their loss compiled; False if a
    trial found them wrong (see `trial`). reduces_on_the_host: whether gradients are averaged in host memory.
    compile_events: dicts of what (the name of a function given to `compile`), programs (graphs compiled; on
    a GPU captured, 0 if it cannot be), seconds, why (sentences, see `recompiles`; none the first time),
    refused (whether it raised UnexpectedRecompilation). Whoever records them empties the list."""

    compiles = False
    has_graphs = False
    notes = ""
    trusts_graphs = True
    reduces_on_the_host = False
    device_seed: tuple[int, ...] = ()  # see `seed_device`
    device_calls = 0  # calls of compiled functions since then
    # Random number generators: name -> (function that returns the state, a pytree of CPU tensors, numbers and
    # strings; function that sets it)
    generators: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        "cpu": (torch.get_rng_state, torch.set_rng_state),
    }
    # Those that a loop of one's own may draw from, too
    other_generators = {
        "python": (random.getstate, random.setstate),
        "numpy": (_numpy_state, np.random.set_state),
    }

    def __init__(self, accelerator: str = "cpu", precision: str = "auto", world: World | None = None):
        if precision == "fp16" and self.compiles:
            raise TpukitError(
                "precision='fp16': TPUs train in bf16, which needs no loss scaling; use 'bf16' or 'auto'"
            )
        self.accelerator = accelerator
        self.world = world or World()
        self.compile_events: list[dict] = []
        self._last_inputs: dict[str, tuple[float, Tensor]] = {}  # by name, see `as_graph_input`
        self.device = self._open_device()
        self.cores = self.world.size
        self.precision = self._best_precision() if precision == "auto" else precision
        self.scaler = GradScaler(self.device.type, enabled=self.precision == "fp16")

    # What a launch asks of the class, before there is a runtime

    @staticmethod
    def is_open() -> bool:
        """Return whether this process has opened the XLA device or the TPU, which processes forked from it
        then cannot use. For CUDA only a forked process can tell: see `CUDARuntime.open_for_group`."""
        return False

    @staticmethod
    def is_compiling() -> bool:
        """Return whether a graph is being compiled just now."""
        return False

    @staticmethod
    def set_launch_variables(processes: int) -> None:
        """Set the variables by which processes that this one forks find each other and their devices."""

    @staticmethod
    def open_for_group(local_rank: int) -> str:
        """Open the device of a process that is about to join a group, if that needs it. Return the group's
        backend, a name of torch.distributed."""
        return "gloo"

    def _open_device(self) -> torch.device:
        keep_freed_memory()
        return torch.device("cpu")

    def _best_precision(self) -> str:
        return "fp32"

    def __str__(self) -> str:
        several = f"{self.cores} x " if self.cores > 1 else ""
        return f"{several}{self.accelerator} ({self.device_name()}), {self.precision}"

    def device_name(self) -> str:
        """Return the name of this process's device."""
        return "host processor"

    # Moving

    def to_device(self, model: nn.Module) -> nn.Module:
        """Move a model to the device, with the channels of images innermost in memory if that is faster.
        Build the optimizer from what this returns: on XLA its parameters are new objects."""
        if adapt := getattr(model, "adapt_to", None):  # a network may keep what is frozen in the precision
            adapt(_DTYPES.get(self.precision, torch.float32))
        layout = torch.channels_last if self._computes_faster_channels_last(model) else torch.preserve_format
        return model.to(self.device, memory_format=layout)  # pyright: ignore[reportCallIssue] (no stub)

    def _computes_faster_channels_last(self, model: nn.Module) -> bool:
        """Return whether most weights are convolutions'. By rule, not by timing: a resumed run has to make
        the same choice, to give the same numbers."""
        parameters = list(model.parameters())
        in_convolutions = sum(p.numel() for p in parameters if p.dim() == 4)
        return 2 * in_convolutions > sum(p.numel() for p in parameters)

    def put(self, tree: Any) -> Any:
        """Return a pytree of numpy arrays or CPU tensors as tensors on the device."""
        return tree_map(self._put, tree)

    def _put(self, value: Any) -> Tensor:
        return torch.as_tensor(value).to(self.device)

    def put_batch(self, arrays: Mapping[str, Any]) -> Batch:
        """Put this process's share of a batch on the device: (B / world size, ...) each."""
        return {name: self._put(values) for name, values in arrays.items()}

    def put_dataset(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Stored]:
        """Put a whole dataset on the device, where it stays: (N, ...) each."""
        # Copies, because torch warns of mapped files, which cannot be written. Not pinned: torch never frees
        # pinned memory.
        copies = {name: torch.as_tensor(np.array(values)) for name, values in arrays.items()}
        return {name: Stored(copy.to(self.device), copy.shape) for name, copy in copies.items()}

    def as_graph_input(self, name: str, number: float | None) -> Any:
        """Return a number that changes, or None, as an argument of a compiled function: if steps are graphs a
        0-d tensor, so that every value runs the same one. name: of the argument; its last tensor is kept, as
        every step of an epoch asks for the same."""
        if number is None or not self.has_graphs:
            return number
        last, tensor = self._last_inputs.get(name, (None, None))
        if last != number:
            tensor = self.put(torch.tensor(number))
            self._last_inputs[name] = number, tensor
        return tensor

    def to_cpu(self, tree: Any) -> Any:
        """Return the same pytree with every tensor copied to the CPU. Waits for the device."""
        return tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), tree)

    def unalias(self, tensors: Iterable[Tensor]) -> None:
        """Give each tensor its own memory. Call it after loading state, before the first step."""

    # Computing

    def autocast(self) -> contextlib.AbstractContextManager:
        """Return the context in which a model runs in this runtime's precision."""
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=_DTYPES[self.precision])

    def compile(
        self,
        function: Callable,
        *,
        name: str | None = None,
        max_graphs: int = 1,
        mutates: tuple[nn.Module, Optimizer] | None = None,
    ) -> Callable:
        """Return the function, as one compiled graph on devices that compile.

        name: for the compilation records; defaults to the function's. max_graphs: how many different graphs
        it may have. mutates: (model, optimizer), if it changes these and nothing else: its graph is then
        captured and replayed, on XLA (see `xla_graph`) and on GPUs (see `cuda_graph`)."""
        return function

    def init_optimizer_state(self, optimizer: Optimizer) -> bool:
        """Make the optimizer's state before the first step if that matters. Returns whether it exists
        now."""
        return True

    def zero_optimizer_state(self, optimizer: Optimizer) -> bool:
        """Make the state that the optimizer's first step would make, where the device compiles that step and
        the state starts at zero. Returns whether it does."""
        return True

    def torch_compile(self, function: Callable, choice: str) -> Callable:
        """Return the function, compiled by torch.compile if `Task.compile` says so. Inductor keeps its code
        in the cache folder, so that a later session starts in seconds."""
        if choice != "yes":
            return function
        from tpukit.host import cache  # here: a plain function's launch does not need it

        with contextlib.suppress(OSError, TpukitError):  # without the folder Inductor has one of its own
            folder = cache.entry("inductor")  # it holds code that is run
            folder.mkdir(0o755, exist_ok=True)
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
        return torch.compile(function)

    def inference(self, function: Callable) -> Callable:
        """`compile` for a function that needs no gradient, in this runtime's precision."""

        @functools.wraps(function)
        def without_gradient(*arguments):
            with torch.no_grad(), self.autocast():
                return function(*arguments)

        name = getattr(function, "func", function).__name__  # for a partial, its function's
        return self.compile(without_gradient, name=name)

    # The parts of a training step after the backward pass, in their order; the gradients of the optimizer's
    # parameters stay until the next step

    def even_out_gradients(self, optimizer: Optimizer) -> None:
        """Let a parameter that has a gradient on one rank have one on all, where
        `all_reduce_gradients` needs that."""

    def all_reduce_gradients(self, optimizer: Optimizer) -> None:
        """Turn each rank's gradients into their mean over all ranks, as one vector of each type, in which a
        missing one counts as zero; in fp16 an overflow of one rank becomes one of all. A parameter without a
        gradient on any rank stays without, as on one core: to tell, the host waits for the device, so such a
        step cannot be captured."""
        if self.world.size == 1:
            return
        parameters = [p for p in parameters_of(optimizer) if p.requires_grad]
        exists = torch.ones(len(parameters), device=self.device)
        missing = [number for number, parameter in enumerate(parameters) if parameter.grad is None]
        for number in missing:
            parameters[number].grad = torch.zeros_like(parameters[number])
            exists[number].zero_()
        overflows: list[Tensor] = []
        if self.scaler.is_enabled():
            overflows += self.scaler._found_inf_per_device(optimizer).values()
        tensors = [*(parameter.grad for parameter in parameters), exists, *overflows]
        for dtype, vector in flattened(tensors).items():
            mean = self.world.all_reduce(vector).div_(self.world.size)
            copy_flattened([tensor for tensor in tensors if tensor.dtype == dtype], mean)
        for overflow in overflows:
            overflow.sign_()  # optimizers look for exactly 1
        if missing:
            is_somewhere = exists.tolist()
            for number in missing:
                if not is_somewhere[number]:
                    parameters[number].grad = None

    def copy_weights_of_rank_0(self, optimizer: Optimizer) -> bool:
        """Give an optimizer's parameters rank 0's values on all ranks. Returns whether they differed."""
        if self.world.size == 1 or len(set(self.world.all_gather(self.checksum(optimizer)))) == 1:
            return False
        weights = parameters_of(optimizer)
        values = self.world.broadcast(self.to_cpu(weights) if self.world.rank == 0 else None)
        with torch.no_grad():
            torch._foreach_copy_(weights, values)
        return True

    def checksum(self, optimizer: Optimizer) -> int:
        """Return the CRC-32 of an optimizer's parameters."""
        weights = [w for w in self.to_cpu(parameters_of(optimizer)) if type(w) is Tensor]  # no DTensor
        parts = (weight.reshape(-1).view(torch.uint8).numpy().data for weight in weights)
        return functools.reduce(lambda number, part: zlib.crc32(part, number), parts, 0)

    def optimizer_step(self, optimizer: Optimizer, lr_factor: float | Tensor | None = None) -> None:
        """Update the weights, unless in fp16 a gradient overflowed. lr_factor: number or scalar tensor on the
        device that multiplies the learning rates in this step; None for 1.

        Fused optimizers read a rate on the device. Others read it on the host, so their update is multiplied
        instead. The result is the same if the update is proportional to the rate: with SGD, Adam(W), Adagrad,
        RMSprop and most others, but not with Rprop and ASGD."""
        groups = optimizer.param_groups
        if lr_factor is None:
            self._update(optimizer)
        elif all(group.get("fused") for group in groups):
            rates = [group["lr"] for group in groups]
            try:
                for group, rate in zip(groups, rates):
                    group["lr"] = lr_factor * rate
                self._update(optimizer)
            finally:
                for group, rate in zip(groups, rates):
                    group["lr"] = rate
        else:
            parameters = parameters_with_gradient(optimizer)
            before = [parameter.detach().clone() for parameter in parameters]
            self._update(optimizer)
            with torch.no_grad():
                torch._foreach_sub_(parameters, before)
                torch._foreach_mul_(parameters, lr_factor)
                torch._foreach_add_(parameters, before)

    def _update(self, optimizer: Optimizer) -> None:
        self._step_unless_overflow(optimizer)
        self.scaler.update()

    def _step_unless_overflow(self, optimizer: Optimizer) -> None:
        self.scaler.step(optimizer)

    def sync(self) -> None:
        """Wait for all work that was queued on the device."""

    def end_traced_step(self) -> None:
        """Start, on XLA, what Python has traced since the last call; without waiting for it."""

    # Randomness

    def seed(self, number: int | tuple[int, ...]) -> None:
        """Seed this rank's generators with a number or a tuple of them. Ranks get different seeds, so that
        dropout differs."""
        mixed = np.random.SeedSequence((*np.atleast_1d(number).tolist(), self.world.rank)).generate_state(1)
        torch.manual_seed(int(mixed[0]))

    def seed_device(self, *numbers: int) -> None:
        """Start anew the random numbers that compiled functions draw on the device: from these numbers, the
        rank, and which call it is since. Does nothing where a checkpoint keeps the state of the device (see
        `generators`)."""

    def random_states(self, others: bool = False) -> list[dict[str, Any]]:
        """Return, on rank 0, the states of the `generators` of all ranks, and with `others` those of
        `other_generators`; elsewhere []. Collective."""
        generators = {**self.generators, **(self.other_generators if others else {})}
        return self.world.gather({name: state() for name, (state, _) in generators.items()})

    def set_random_states(self, saved: list[dict[str, Any]]) -> None:
        """Set this rank's generators as `random_states` returned them. If the number of ranks has changed
        since, torch's are seeded from that, each rank's otherwise."""
        generators = {**self.generators, **self.other_generators}
        for name, state in saved[self.world.rank % len(saved)].items():
            if name in generators:  # not that of another kind of device
                generators[name][1](state)
        if len(saved) != self.world.size:
            self.seed(int(torch.randint(2**31, ())))

    # What the device reports

    def counters(self) -> dict[str, Any]:
        """Return the accelerator's own counters; empty if there are none. See `XLARuntime.counters`."""
        return {}

    def memory(self) -> list[tuple[int, int]]:
        """Return [(peak bytes, total bytes)] of each device of this process, or [] if that cannot be read."""
        return []


def keep_freed_memory() -> None:
    """Let glibc's malloc keep up to 2 GiB of freed memory in this process, instead of returning it to the
    system, which zeroes every page again while the next step waits. Does nothing if the environment
    configures malloc, or if malloc is not glibc's."""
    has_tunables = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    is_configured = has_tunables or any(name.startswith("MALLOC_") for name in os.environ)
    libc = ctypes.CDLL(None)
    if is_configured or not hasattr(libc, "mallopt"):
        return
    trim_threshold, mmap_threshold = -1, -3  # malloc.h
    libc.mallopt(trim_threshold, 2**31 - 1)
    if not libc.mallopt(mmap_threshold, 2**30):
        libc.mallopt(mmap_threshold, 2**25)  # all that older versions take
