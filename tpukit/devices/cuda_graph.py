"""A training step on a GPU as one CUDA graph: captured once, then launched as a whole.

PyTorch hands each operation of a step to the GPU on its own. For a network of a thousand operations that can
take the host longer than the GPU needs for the step. A CUDA graph holds all of them with the addresses of
their tensors, so that later steps copy their arguments to where the captured ones lay, and launch it.

    first calls      warm-up: run normally, on the stream of the capture
    the next call    capture: the operations are recorded and none runs; then the first replay
    later calls      replay: copy the arguments, launch, copy the result

All of these are steps of the training run: a warm-up changes what a step changes, and a capture changes
nothing on the GPU, so there is nothing to undo. If a step cannot be captured, all later ones run normally."""

import contextlib
import functools
import inspect
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from tpukit.devices import recompiles
from tpukit.devices.optimizers import HostNumbers
from tpukit.devices.runtime import Runtime
from tpukit.host.environment import release
from tpukit.host.text import GIB

WARM_UP = 3  # calls: cuDNN measures its algorithms, optimizers and libraries make their state
MEMORY_SHARE = 2  # a step may take 1 / MEMORY_SHARE of the memory, because its graph keeps that from all else


@functools.cache
def _capture_stream():
    """Return the stream on which this process captures: one for all training runs, because cuBLAS keeps
    memory for each stream."""
    return torch.cuda.Stream()


class CapturedStep:
    """`function` as a CUDA graph, if it can be captured.

    function: takes tensors (in any pytree) and numbers, returns one tensor, and may change the parameters and
    buffers of the model and the state of the optimizer, in place, and the gradients. It sets the gradients to
    None first, so that they are made in the graph's memory; they stay valid until the next call. If an
    argument's number or shape, or a setting of the optimizer, changes, later steps run uncaptured. A replay
    repeats nothing that the function does on the host (a counter in Python, random numbers)."""

    may_capture = True
    signature: dict[str, Any] | None = None  # the first call's, which all must have
    warm_ups = 0  # calls so far, without those that overflowed
    memory: list[tuple[int, int]] = []  # after the last warm-up: an evaluation may come before the capture
    # Once captured: the graph, what it returns, and what it does not change
    graph: torch.cuda.CUDAGraph | None = None
    result: Tensor | None = None
    host: HostNumbers

    def __init__(self, function: Callable, name: str, mutates: tuple[nn.Module, Optimizer], runtime: Runtime):
        self.function, self.name, self.runtime = function, name, runtime
        self.mutates = mutates
        self.parameter_names = tuple(inspect.signature(function).parameters)
        self.stream = _capture_stream()
        self.pool = torch.cuda.graph_pool_handle()  # holds the graph's memory
        self.inputs: list[Tensor] = []  # what the graph reads in place of the arguments

    def __call__(self, *arguments) -> Tensor:
        if not self.may_capture:
            return self.function(*arguments)
        signature = recompiles.signature(self.parameter_names, arguments, self.mutates)
        self.signature = self.signature or signature
        if changes := recompiles.differences(self.signature, signature):
            self._refuse("; ".join(changes))
            return self.function(*arguments)
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        if self.warm_ups < WARM_UP:
            return self._warm_up(arguments)
        if self.graph is None:
            started = time.monotonic()
            # NCCL needs an all-reduce to be captured on all ranks or on none.
            reasons = self.runtime.world.gather(self._capture(arguments, tensors))  # on rank 0 alone
            if reason := self.runtime.world.broadcast(next(filter(None, reasons), "")):
                self._refuse(reason)
                return self.function(*arguments)
            self._note(1, time.monotonic() - started, [])
        return self._replay(tensors)

    def _note(self, graphs, seconds, why):
        event = dict(what=self.name, programs=graphs, seconds=seconds, why=why, refused=False)
        self.runtime.compile_events.append(event)

    def _refuse(self, reason):
        self.may_capture = False
        self._note(0, 0.0, [reason])
        self.graph = self.result = None
        torch.cuda.empty_cache()  # free the graph's memory and the capture stream's

    def _warm_up(self, arguments):
        """Run the step on the stream of the capture. After the last time, `memory` is what a step takes."""
        torch.cuda.reset_peak_memory_stats()  # in the first step, cuDNN tried out algorithms
        scaler = self.runtime.scaler
        scale = scaler.get_scale()
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            result = self.function(*arguments)
        current.wait_stream(self.stream)
        self.memory = self.runtime.memory()
        # A step that overflowed (which halves the scale) has not made the optimizer's state: a captured one
        # would make it anew in every replay.
        if scaler.get_scale() >= scale:
            self.warm_ups += 1
        return result

    def _capture(self, arguments, tensors):
        """Record the step as `graph`, which runs nothing. Return why that cannot be, or ""."""
        for peak, total in self.memory:
            if peak > total / MEMORY_SHARE:
                return f"it takes {peak / GIB:.1f} of {total / GIB:.1f} GiB, which a graph would keep"
        self.inputs = [tensor.clone() for tensor in tensors]
        remaining = iter(self.inputs)
        arguments = tree_map_only(torch.Tensor, lambda _: next(remaining), arguments)
        _, optimizer = self.mutates
        host = HostNumbers(optimizer)
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # Only this thread: others make batches and compute scores meanwhile.
            with torch.cuda.graph(
                graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
            ):
                result = self.function(*arguments)
        except BaseException as error:  # the step that is not captured raises it again, if it is one
            torch.cuda.set_stream(current)
            _end_capture(graph, self.pool)
            host.restore()
            if self.runtime.scaler.is_enabled():  # as after its `update`: how far the broken step got
                self.runtime.scaler._per_optimizer_states.clear()
            if not isinstance(error, Exception):  # a signal
                raise
            return _first_cause(error)
        host.measure()
        is_replaced = host.were_replaced()
        counts = any(increment.any() for increment in host.increments)
        if isinstance(optimizer, torch.optim.Adagrad):  # it counts its steps only for the decay
            counts = counts and any(group["lr_decay"] for group in optimizer.param_groups)
        host.restore()
        if is_replaced or counts:
            return f"{type(optimizer).__name__} computes with numbers on the host that change at each step"
        self.graph, self.result, self.host = graph, result, host
        return ""

    def _replay(self, tensors):
        torch._foreach_copy_(self.inputs, tensors)
        assert self.graph is not None and self.result is not None
        self.graph.replay()
        self.host.advance()
        return self.result.clone()  # because the next replay writes over it


def _end_capture(graph, pool):
    """Tell torch's allocator and generator that a capture is over: they may not know if CUDA ended it with an
    error."""
    device = torch.cuda.current_device()
    try:
        graph.pool()
    except RuntimeError:  # CUDA ended it; after a good capture the graph gives the memory back
        with contextlib.suppress(RuntimeError):  # torch 2.12 has already done so
            torch._C._cuda_endAllocateToPool(device, pool)
        if release(torch.__version__) < (2, 14):  # from 2.14 on the graph does so
            torch._C._cuda_releasePool(device, pool)
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())


def _first_cause(error):
    """Return the first line of the error that others followed."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}".splitlines()[0]
