"""CUDA graphs on a machine without a GPU: `torch.cuda`'s calls, and what a graph does with memory, on CPU
tensors.

A capture records each operation with the memory of its inputs and outputs, and leaves all memory as it was;
what was made within it holds garbage. A replay runs the operations again on the same memory. The memory of
graphs that share a pool is worth nothing once another one of them was replayed. What torch's own CUDA code
does is told by `test_null_gpu`, without numbers."""

import contextlib
import os
import random
import sys
import warnings

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tpukit.devices import cuda_graph, optimizers
from tpukit.devices.runtime import Runtime

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal")  # operations whose result the host needs
TORCH = os.path.dirname(torch.__file__)
NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing"


def tensors_of(nest):
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, torch.Tensor)]


def memory_of(tensor):
    return tensor.untyped_storage()._cdata


class EmulatedGpu:
    """What stands for the driver. counts and settings are for tests to read and to change."""

    def __init__(self, monkeypatch):
        cuda_graph._capture_stream.cache_clear()
        self.default_stream = self.current_stream = Stream("default")
        self.graphs = []
        self.open_pools, self.held_pools, self.generator_captures = (
            set(),
            set(),
            False,
        )  # what a failed capture leaves behind
        self.ends_broken_captures = False  # as torch 2.12 does
        self.launches = 0
        self.sync_mode, self.sync_watch = 0, SyncWatch(self)
        self.fail_with = None  # an error to raise at the end of the next captured step, such as one of memory
        self.host = {}  # memory -> optimizer's counters, which a real GPU's optimizer keeps on the host
        self.hook = register_optimizer_step_pre_hook(self._note_counters)
        patched = dict(
            Stream=lambda: Stream("side"),
            current_stream=lambda device=None: self.current_stream,
            set_stream=self.set_stream,
            stream=self.stream,
            synchronize=lambda: None,
            graph_pool_handle=lambda: (0, 1),
            CUDAGraph=lambda: Graph(self),
            get_sync_debug_mode=lambda: self.sync_mode,
            set_sync_debug_mode=self.set_sync_debug_mode,
            current_device=lambda: 0,
            default_generators=(self,),
            reset_peak_memory_stats=lambda: None,
            empty_cache=lambda: None,
        )
        for name, value in patched.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", self.default_stream)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_allocate_to_pool, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", self.release_pool, raising=False)
        monkeypatch.setattr(
            torch._C, "_host_emptyCache", lambda: None, raising=False
        )  # which torch without CUDA lacks
        # The CPU's generator stands for the GPU's, which a replay moves on; random numbers of Python are the
        # host's.
        monkeypatch.setattr(cuda_graph, "host_random_state", random.getstate)
        monkeypatch.setattr(optimizers, "_is_beside", lambda value, parameter: not self.is_on_host([value]))
        monkeypatch.setattr(Runtime, "_open_device", lambda self: torch.device("cpu"))
        monkeypatch.setattr(Runtime, "_multiply_in_fp32", lambda self: None)
        monkeypatch.setattr(Runtime, "device_name", lambda self: "emulated")

    def _note_counters(self, optimizer, arguments, settings):
        for group in optimizer.param_groups:
            if not (group.get("capturable") or group.get("fused")):
                steps = [
                    optimizer.state[p]["step"]
                    for p in group["params"]
                    if "step" in optimizer.state.get(p, {})
                ]
                self.host |= {memory_of(step): step for step in tensors_of(steps)}

    def is_on_host(self, tensors):
        return any(memory_of(tensor) in self.host for tensor in tensors)

    def set_stream(self, stream):
        self.current_stream = stream

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current_stream = self.current_stream, stream
        yield
        self.current_stream = (
            before  # as in torch, nobody does so after an error within `torch.cuda.graph.__exit__`
        )

    def set_sync_debug_mode(self, mode):
        self.sync_mode = mode
        if mode == "warn":
            self.sync_watch.__enter__()
        else:
            self.sync_watch.__exit__(None, None, None)

    def end_allocate_to_pool(self, device, pool):
        if pool not in self.open_pools:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.open_pools.discard(pool)

    def release_pool(self, device, pool):
        assert pool not in self.open_pools
        self.held_pools.discard(pool)

    # of the generator

    def clone_state(self):
        return "a new state"

    def graphsafe_set_state(self, state):
        self.generator_captures = False


class Stream:
    def __init__(self, name):
        self.name, self.waited_for = name, []

    def wait_stream(self, stream):
        self.waited_for.append(stream.name)


class SyncWatch(TorchDispatchMode):
    """torch's sync debug mode "warn"."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in WAITS and not self.gpu.is_on_host(tensors_of(args)):
            caller = sys._getframe(1)
            while caller.f_code.co_filename.startswith(TORCH):  # newer versions wrap this method
                caller = caller.f_back
            where = caller.f_code.co_filename, caller.f_lineno
            warnings.warn_explicit(
                "called a synchronizing CUDA operation (Triggered internally)", UserWarning, *where
            )
        return function(*args, **(kwargs or {}))


class Graph(TorchDispatchMode):
    """torch.cuda.CUDAGraph."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu
        self.operations = []  # (function, args, kwargs, outputs, memory of the inputs)
        self.outside = {}  # memory -> (storage, its content before), touched but not made here
        self.inside = {}  # memory -> storage, made here
        self.is_broken = self.has_ended = False

    def capture_begin(self, pool=None, capture_error_mode="global", **of_newer_versions):
        assert self.gpu.current_stream is not self.gpu.default_stream, (
            "must be captured on a non-default stream"
        )
        self.memory, self.seed = pool, torch.get_rng_state()
        self.gpu.open_pools.add(pool)
        self.gpu.held_pools.add(pool)
        self.gpu.generator_captures = True
        self.__enter__()

    def pool(self):
        if not self.has_ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self.memory

    def capture_end(self):
        error, self.gpu.fail_with = self.gpu.fail_with, None
        self.__exit__(None, None, None)
        torch.set_rng_state(self.seed)
        for storage, content in self.outside.values():
            storage.copy_(content)
        for storage in self.inside.values():
            storage.fill_(0xFF)  # NaN
        if self.is_broken:
            if self.gpu.ends_broken_captures:
                self.gpu.open_pools.discard(self.memory)
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self.has_ended = True
        self.gpu.open_pools.discard(self.memory)
        self.gpu.held_pools.discard(self.memory)  # its own from now on, and given back with it
        self.gpu.generator_captures = False
        if error is not None:
            raise error
        self.gpu.graphs.append(self)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, inputs = kwargs or {}, tensors_of((args, kwargs))
        if self.gpu.is_on_host(inputs):
            outputs = function(
                *args, **kwargs
            )  # the host computes at once, and the graph knows nothing of it
            self.gpu.host |= {memory_of(output): output for output in tensors_of(outputs)}
            return outputs
        if function.overloadpacket.__name__ in WAITS:
            self.is_broken = True
            raise RuntimeError(NOT_PERMITTED)
        for tensor in inputs:
            if memory_of(tensor) not in self.inside and memory_of(tensor) not in self.outside:
                self.outside[memory_of(tensor)] = (tensor.untyped_storage(), tensor.untyped_storage().clone())
        outputs = function(*args, **kwargs)
        known = {memory_of(tensor) for tensor in inputs}
        for tensor in tensors_of(outputs):
            if memory_of(tensor) not in known:
                self.inside[memory_of(tensor)] = tensor.untyped_storage()
        if function.namespace != "profiler":
            self.operations.append((function, args, kwargs, outputs, known))
        return outputs

    def replay(self):
        assert not self.gpu.generator_captures
        self.gpu.launches += 1
        with _disable_current_modes(), torch.no_grad():
            for graph in self.gpu.graphs:
                if graph is not self and graph.memory == self.memory:
                    for storage in graph.inside.values():
                        storage.fill_(0xFF)
            for function, args, kwargs, outputs, known in self.operations:
                again = function(*args, **kwargs)
                for kept, new in zip(tensors_of(outputs), tensors_of(again)):
                    if memory_of(kept) not in known:  # neither a view nor changed in place
                        kept.copy_(new)


class Dispatched(TorchDispatchMode):
    """Counts the operations that Python hands to PyTorch, without views."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        if function.namespace == "aten" and not function.is_view:
            self.names.append(str(function))
        return outputs
