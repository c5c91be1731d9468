"""A training step on a GPU as one CUDA graph: captured once, then launched as a whole.

PyTorch hands each operation of a step to the GPU on its own. For a network of a thousand operations that can
take the host longer than the GPU needs for the step. A CUDA graph holds all of them with the addresses of
their tensors, so that later steps copy their arguments to where the captured ones lay, and launch it.

    first calls      warm-up: run normally, on the stream of the capture; the last one is searched for what a
                     replay would not repeat
    the next call    capture: the operations are recorded and none runs; then the first replay
    later calls      replay: copy the arguments, launch, copy the result

All of these are steps of the training: a warm-up changes what a step changes, and a capture changes nothing
on the GPU, so there is nothing to undo. Where a step cannot be captured, all later ones run normally."""

import contextlib
import functools
import inspect
import random
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from tpukit.devices import recompiles
from tpukit.devices.optimizers import HostNumbers
from tpukit.devices.runtime import Runtime
from tpukit.host.environment import release
from tpukit.host.tables import GIB

WARM_UP = 3  # calls: cuDNN measures its algorithms, optimizers and libraries make their state
MEMORY_SHARE = 2  # a step may take 1 / MEMORY_SHARE of the memory, because its graph keeps that from all else
SYNC_WARNING = "called a synchronizing CUDA operation"  # torch's only way to say so


@functools.cache
def _capture_stream():
    """The stream on which this process captures: one for all trainings, because cuBLAS keeps memory for each
    stream."""
    return torch.cuda.Stream()


class CapturedStep:
    """`function` as a CUDA graph, where it can be captured.

    function: takes tensors (in any pytree) and numbers, returns one tensor, and may change the parameters and
    buffers of the model and the state of the optimizer that it mutates, in place, and the gradients. With
    another number among the arguments, another shape or another setting of the optimizer it is captured no
    more. It sets the gradients to None first, so that they are made in the graph's memory; they stay valid
    until the next call. What it does besides, a replay does not repeat: random numbers that it draws on the
    host are noticed, a counter in Python is not."""

    may_capture = True
    signature: dict[str, Any] | None = None  # of all calls, see `recompiles`
    warm_ups = 0  # calls so far
    # Once captured: the graph, what it returns, and what it does not change
    graph: torch.cuda.CUDAGraph | None = None
    result: Tensor | None = None
    host: HostNumbers

    def __init__(self, function: Callable, name: str, mutates: tuple[nn.Module, Optimizer], runtime: Runtime):
        self.function, self.name, self.runtime = function, name, runtime
        self.model, self.optimizer = mutates
        self.parameter_names = tuple(inspect.signature(function).parameters)
        self.stream = _capture_stream()
        self.pool = torch.cuda.graph_pool_handle()  # of the graph's memory
        self.inputs: list[Tensor] = []  # what the graph reads in place of the arguments
        runtime.allow_sync = False

    def __call__(self, *arguments) -> Tensor:
        if not self.may_capture:
            return self.function(*arguments)
        signature = recompiles.signature(self.parameter_names, arguments, (self.model, self.optimizer))
        self.signature = self.signature or signature
        if changes := recompiles.differences(self.signature, signature):
            self._refuse("; ".join(changes))
            return self.function(*arguments)
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        if self.warm_ups < WARM_UP:
            self.warm_ups += 1
            return self._warm_up(arguments, is_last=self.warm_ups == WARM_UP)
        if self.graph is None:
            started = time.monotonic()
            if self._refuse_if_any_rank(self._capture(arguments, tensors)):
                return self.function(*arguments)
            self.runtime.record_compilation(self.name, 1, time.monotonic() - started, [])
        return self._replay(tensors)

    def _refuse(self, reason):
        self.may_capture, self.runtime.allow_sync = False, True
        self.runtime.record_compilation(self.name, 0, 0.0, [reason])
        self.graph = self.result = None
        torch.cuda.empty_cache()  # of the graph's memory, and of the capture's stream
        torch.cuda.reset_peak_memory_stats()  # which may hold what cuDNN tried out

    def _refuse_if_any_rank(self, reason):
        """`_refuse` on every rank where one has a reason, and return whether it has: NCCL needs an all-reduce
        to be captured on all ranks or on none."""
        reasons = self.runtime.world.gather(reason or "")  # on rank 0 alone
        reason = self.runtime.world.broadcast(next(filter(None, reasons), ""))
        if reason:
            self._refuse(reason)
        return bool(reason)

    def _warm_up(self, arguments, *, is_last):
        """Run the step on the stream of the capture; the last time, look for what could not be replayed."""
        if is_last:
            torch.cuda.reset_peak_memory_stats()  # which held what cuDNN tried out in the first step
        addresses, random_numbers = self._addresses(), host_random_state()
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.cuda.stream(self.stream))
            waits = stack.enter_context(_waits_recorded()) if is_last else []
            result = self.function(*arguments)
        current.wait_stream(self.stream)
        reason = None
        if waits:
            reason = f"the host waits for the GPU in {waits[0]}"
        elif self._addresses() != addresses:
            reason = "it replaces parameters or buffers of the model instead of changing them"
        elif host_random_state() != random_numbers:
            reason = (
                "random numbers were drawn on the host, which would be the same in each replay: draw them"
                " on the GPU in a step, and from a generator of their own in threads that make batches"
            )
        if is_last:
            self._refuse_if_any_rank(reason)
        return result

    def _addresses(self):
        return [value.data_ptr() for value in (*self.model.parameters(), *self.model.buffers())]

    def _capture(self, arguments, tensors):
        """Record the step as `graph`, which runs nothing. Returns why that cannot be, or None."""
        for peak, total in self.runtime.memory():
            if peak > total / MEMORY_SHARE:
                return f"it takes {peak / GIB:.1f} of {total / GIB:.1f} GiB, which a graph would keep"
        self.inputs = [tensor.clone() for tensor in tensors]
        remaining = iter(self.inputs)
        arguments = tree_map_only(torch.Tensor, lambda _: next(remaining), arguments)
        host = HostNumbers(self.optimizer)
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
            if self.runtime.scaler is not None:  # as after its `update`: how far the broken step got
                self.runtime.scaler._per_optimizer_states.clear()
            if not isinstance(error, Exception):  # a signal
                raise
            return _first_cause(error)
        host.measure()
        is_replaced = host.were_replaced()
        counts = any(increment.any() for increment in host.increments)
        if isinstance(self.optimizer, torch.optim.Adagrad):  # which counts its steps for the decay alone
            counts = counts and any(group["lr_decay"] for group in self.optimizer.param_groups)
        host.restore()
        if is_replaced or counts:
            name = type(self.optimizer).__name__
            return f"{name} computes with numbers on the host that change at each step"
        self.graph, self.result, self.host = graph, result, host
        return None

    def _replay(self, tensors):
        torch._foreach_copy_(self.inputs, tensors)
        assert self.graph is not None and self.result is not None
        self.graph.replay()
        self.host.advance()
        return self.result.clone()  # because the next replay writes over it


def host_random_state() -> tuple:
    """The state of every random generator of the host that a step might draw from. To be compared."""
    _, numbers, position, *_ = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), np.asarray(numbers).tobytes(), position


@contextlib.contextmanager
def _waits_recorded():
    """Context manager: a list that gets the lines, "file.py line 3", at which the step waited for the GPU: in
    this thread, or in autograd's, which runs what is written in Python of a backward pass."""
    waits, mode, thread = [], torch.cuda.get_sync_debug_mode(), threading.get_ident()

    def record(message, category, filename, lineno, file=None, line=None):
        if filename.endswith("torch/nn/modules/_functions.py"):
            return  # SyncBatchNorm, which does not wait in a capture
        of_step = threading.get_ident() == thread or torch._C._current_autograd_node() is not None
        if SYNC_WARNING in str(message) and of_step:  # other threads copy batches meanwhile
            waits.append(f"{Path(filename).name} line {lineno}")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = record
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def _end_capture(graph, pool):
    """Tell torch that a capture is over: its allocator and generator may believe in one that CUDA ended by an
    error."""
    device = torch.cuda.current_device()
    try:
        graph.pool()
    except RuntimeError:  # CUDA ended it; of a capture that ended well the graph gives the memory back
        with contextlib.suppress(RuntimeError):  # which torch 2.12 has done
            torch._C._cuda_endAllocateToPool(device, pool)
        if release(torch.__version__) < (2, 14):  # whose graph gives back the memory of a broken capture too
            torch._C._cuda_releasePool(device, pool)
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())


def _first_cause(error):
    """The first line of the error that others followed."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}".splitlines()[0]
