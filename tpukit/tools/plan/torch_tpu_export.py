"""Graphs of a TPU core as StableHLO, lowered by torch_tpu on a machine without one: for `tpukit plan
--backend torch_tpu`.

Without a TPU torch_tpu does not differentiate. So the CPU traces a step to ATen operations, forward, backward
and update, on tensors that have a shape and no memory; then torch_tpu lowers these operations. Attention is
traced as its plain mathematics, because the trace would hold the CPU's own kernel otherwise."""

import hashlib
import os
from collections.abc import Callable
from typing import Any

# That torch loads no other backend that is installed; that libtpu does not look for a TPU in Google's cloud,
# for minutes; and that two processes may load it.
os.environ.update(TORCH_DEVICE_BACKEND_AUTOLOAD="0", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")

import torch
from torch._decomp import get_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map_only

from tpukit.devices import optimizers, tensors, torch_tpu_private
from tpukit.devices.runtime import Runtime
from tpukit.host.errors import TpukitError

# A layer norm of bf16 values with float32 weights, as autocast leaves it, is traced as torch's own smaller
# operations, because torch_tpu 0.2 does not lower it forward, and gives its weights gradients in bf16 instead
# of float32.
DECOMPOSITIONS: dict[Any, Callable] = get_decompositions(
    [torch.ops.aten.native_layer_norm, torch.ops.aten.native_layer_norm_backward]
)


class TorchTPUExportRuntime(Runtime):
    """A TPU core whose graphs are exported instead of run. Needs torch_tpu, no TPU, and a fresh process.

    memory_size: of a core, in bytes. `graphs`, in the order of the calls: dicts of `name`, `stablehlo` (a
    portable artifact), `digest` (of the graph without source lines), and `kernels`, of which there are none.
    """

    compiles = has_graphs = True

    def __init__(self, precision: str = "auto", cores: int = 1, memory_size: int = 0, *, spmd: bool = False):
        if cores > 1 or spmd:
            raise TpukitError(
                "torch_tpu lowers collectives only between cores that run, so its graphs of several cores"
                " cannot be planned: choose a machine with one chip, and one core's share of the batch"
            )
        torch_tpu_private.load()
        tensors.XLA_DEVICES.add("cpu")  # which stands for the TPU while a graph is traced
        self.graphs, self._memory_size = [], memory_size
        self._fake = FakeTensorMode()
        super().__init__("cpu", "bf16" if precision == "auto" else precision)
        self.accelerator = "tpu"

    def memory_size(self):
        return self._memory_size

    def device_name(self):
        return "TPU through torch_tpu"

    def to_device(self, model, *, channels_last="no"):
        for module in model.modules():
            values: dict[str, Any]
            for values in (module._parameters, module._buffers):
                for name, value in values.items():
                    values[name] = None if value is None else self._fake.from_tensor(value)
        return model

    def torch_compile(self, model, mode):
        return model

    def put(self, arrays):
        return {name: self._fake.from_tensor(torch.as_tensor(value)) for name, value in arrays.items()}

    def put_dataset(self, arrays, *, sharded=False):
        return self.put(arrays)

    def init_optimizer_state(self, optimizer):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        with self._fake, torch_tpu_private.compiling():
            for p in parameters:
                p.grad = torch.zeros_like(p)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return True

    def compile(self, function, *, name=None, max_graphs=1, mutates=None):
        def export(*arguments):
            state = _state(*mutates) if mutates else []
            inputs = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
            result = None

            def traced(inputs, state):
                nonlocal result
                result = function(*arguments)
                outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
                gradients = [p.grad for p in mutates[0].parameters() if p.grad is not None] if mutates else []
                return [*outputs, *gradients, *state]

            with self._fake, torch_tpu_private.compiling(), sdpa_kernel(SDPBackend.MATH):
                graph = make_fx(traced, decomposition_table=DECOMPOSITIONS)(inputs, state)
            text, stablehlo = torch_tpu_private.lower(graph, [*inputs, *state])
            digest = hashlib.sha256(text.encode()).hexdigest()
            graph = dict(name=name or function.__name__, stablehlo=stablehlo, digest=digest, kernels=[])
            self.graphs.append(graph)
            return tree_map_only(torch.Tensor, self._fake.from_tensor, result)

        return export


def _state(model, optimizer):
    """The tensors that a step may change."""
    return [*model.parameters(), *model.buffers(), *optimizers.state_tensors(optimizer)]
