"""Graphs of a TPU core as StableHLO, traced on a machine without one: what `tpukit plan` compiles."""

import os

os.environ.update(PJRT_DEVICE="CPU", XLA_ALWAYS_ALLREDUCE="1")  # else an all-reduce over one visible core is left out

import torch
from torch.utils._pytree import tree_flatten, tree_map_only
from torch_xla import _XLAC

from tpukit.devices.distributed import World
from tpukit.devices.xla import XLARuntime
from tpukit.host.errors import TpukitError


class ExportRuntime(XLARuntime):
    """A TPU core, alone or one of several, whose graphs are exported instead of run. Needs no TPU, but a fresh process.

    memory_size: of the core, in bytes. `graphs`: each as a StableHLO portable artifact, in the order of the calls.
    """

    def __init__(self, precision="auto", cores=1, memory_size=0):
        self.graphs, self._memory_size = [], memory_size
        super().__init__("tpu", precision, World(0, cores))

    def memory_size(self):
        return self._memory_size

    def compile(self, function, *, name=None, max_graphs=1, changes=None):
        def export(*arguments):
            _XLAC._set_ir_debug(True)  # so that the graph names the line of each operation
            before = self.counters()["fallbacks"]
            result = function(*arguments)
            if fallbacks := sorted(self.counters()["fallbacks"].keys() - before.keys()):
                raise TpukitError(f"not one graph: torch_xla runs {', '.join(fallbacks)} on the host")
            outputs = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor)]
            if changes:
                outputs += self.written_by_step(*changes)
            self.graphs.append(_XLAC._get_stablehlo(outputs, str(self.device), [], True))
            return tree_map_only(torch.Tensor, self._zeros_like, result)

        return export

    def _zeros_like(self, tensor):
        """A constant in the shape of a graph's result, so that the next graph does not contain this one."""
        return torch.zeros(tensor.shape, dtype=tensor.dtype).to(self.device)
