"""What a captured CUDA graph does with memory, on CPU tensors.

A capture records each operation with the memory of its inputs and outputs, and leaves all memory as it was;
what was made within it holds garbage. A replay runs the operations again on the same memory."""

import contextlib

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tpukit.devices import cuda, cuda_graph
from tpukit.devices.cuda import CUDARuntime
from tpukit.devices.runtime import Runtime

WAITS = ("_local_scalar_dense", "nonzero")  # operations whose result the host needs


class EmulatedRuntime(Runtime):
    """A GPU's way to compute, on CPU tensors."""

    compile, has_graphs = CUDARuntime.compile, True
    init_optimizer_state = CUDARuntime.init_optimizer_state
    _step_unless_overflow = CUDARuntime._step_unless_overflow

    def __init__(self, precision="fp32"):
        super().__init__("cuda", precision)


class Stream:
    def wait_stream(self, stream):
        pass


class EmulatedGpu:
    """What stands for the driver. graphs: those that were captured. launches: how often one was replayed."""

    def __init__(self, monkeypatch):
        self.graphs, self.launches, self.is_capturing = [], 0, False
        self.host = {}  # memory -> an optimizer's counter, which a real GPU's optimizer keeps on the host
        self.hook = register_optimizer_step_pre_hook(self._note_counters)
        for name, value in dict(
            CUDAGraph=lambda: Graph(self), graph=self.capture, current_stream=Stream
        ).items():
            monkeypatch.setattr(torch.cuda, name, value)
        for name in ("set_stream", "graph_pool_handle", "reset_peak_memory_stats", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: None)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        monkeypatch.setattr(cuda_graph, "_capture_stream", Stream)
        monkeypatch.setattr(cuda_graph, "_end_capture", lambda *_: None)
        monkeypatch.setattr(cuda, "_is_on_gpu", lambda value: not self.is_on_host([value]))

    def _note_counters(self, optimizer, arguments, settings):
        for group in optimizer.param_groups:
            for parameter in () if group.get("capturable") or group.get("fused") else group["params"]:
                for step in tensors_of(optimizer.state.get(parameter, {}).get("step")):
                    self.host[memory_of(step)] = step

    def is_on_host(self, tensors):
        return any(memory_of(tensor) in self.host for tensor in tensors)

    @contextlib.contextmanager
    def capture(self, graph, **settings):
        self.is_capturing = True
        try:
            with graph.capturing():
                yield
        finally:
            self.is_capturing = False
        self.graphs.append(graph)


class Graph(TorchDispatchMode):
    """torch.cuda.CUDAGraph."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu
        self.operations = []  # (function, args, kwargs, outputs, memory of the inputs)
        self.outside = {}  # memory -> (storage, its content before), touched but not made here
        self.inside = {}  # memory -> storage, made here

    @contextlib.contextmanager
    def capturing(self):
        seed = torch.get_rng_state()
        try:
            with self:
                yield
        finally:
            torch.set_rng_state(seed)
            for storage, content in self.outside.values():
                storage.copy_(content)
            for storage in self.inside.values():
                storage.fill_(0xFF)  # NaN

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = tensors_of((args, kwargs))
        if self.gpu.is_on_host(inputs):  # the host computes at once, and the graph knows nothing of it
            outputs = function(*args, **kwargs)
            self.gpu.host |= {memory_of(output): output for output in tensors_of(outputs)}
            return outputs
        if function.overloadpacket.__name__ in WAITS:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        known = {memory_of(tensor): tensor.untyped_storage() for tensor in inputs}
        for memory in known.keys() - self.inside.keys() - self.outside.keys():
            self.outside[memory] = (known[memory], known[memory].clone())
        outputs = function(*args, **kwargs)
        made = {memory_of(tensor): tensor.untyped_storage() for tensor in tensors_of(outputs)}
        self.inside |= {memory: made[memory] for memory in made.keys() - known.keys()}
        if function.namespace != "profiler":
            self.operations.append((function, args, kwargs, outputs, known.keys()))
        return outputs

    def replay(self):
        self.gpu.launches += 1
        with _disable_current_modes(), torch.no_grad():
            for function, args, kwargs, outputs, known in self.operations:
                again = function(*args, **kwargs)
                for kept, new in zip(tensors_of(outputs), tensors_of(again)):
                    if memory_of(kept) not in known:  # neither a view nor changed in place
                        kept.copy_(new)


def tensors_of(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def memory_of(tensor):
    return tensor.untyped_storage()._cdata
