"""Graphs of a TPU core as StableHLO, traced on a machine without one: what `tpukit plan` compiles."""

import gc
import hashlib
import os

# The second: else an all-reduce over one visible core is left out.
os.environ.update(PJRT_DEVICE="CPU", XLA_ALWAYS_ALLREDUCE="1")

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from tpukit.devices import kernel_counts, xla_private
from tpukit.devices.distributed import World
from tpukit.devices.xla import XLARuntime
from tpukit.host.errors import TpukitError


class ExportRuntime(XLARuntime):
    """A TPU core, alone or one of several, whose graphs are exported instead of run. Needs no TPU, but a
    fresh process.

    cores: of the machine; one graph over all of them if `spmd`. memory_size: of a core, in bytes.
    exports_pending: whether what runs outside `compile` is exported too. `graphs`, in the order of the calls:
    dicts of `name`, `stablehlo` (a portable artifact), `digest` (of the graph without source lines), and
    `kernels` (see `kernel_counts`)."""

    exports_pending = False
    runs_graphs = False

    def __init__(self, precision="auto", cores=1, memory_size=0, *, spmd=False):
        self.graphs, self._memory_size = [], memory_size
        if spmd:
            os.environ["CPU_NUM_DEVICES"] = str(cores)
        super().__init__("tpu", precision, None if spmd else _OneOf(0, cores), cores if spmd else None)

    def memory_size(self):
        return self._memory_size

    def init_optimizer_state(self, optimizer):
        super().init_optimizer_state(optimizer)
        return True  # the update is in the step's graph in any case

    def compile(self, function, *, name=None, max_graphs=1, mutates=None):
        def export(*arguments):
            self.sync()
            xla_private.name_lines(True)
            before = self.counters()["fallbacks"]
            with kernel_counts.recorded() as kernels:
                result = function(*arguments)
            if fallbacks := sorted(self.counters()["fallbacks"].keys() - before.keys()):
                raise TpukitError(f"not one graph: torch_xla runs {', '.join(fallbacks)} on the host")
            outputs = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor)]
            if mutates:
                outputs += self.written_by_step(*mutates)
            self._export(name or function.__name__, outputs or _pending_tensors(), kernels)
            if mutates:
                xla_private.discard_pending(str(self.device))  # else the next `sync` would run the step
                for parameter in mutates[0].parameters():
                    parameter.grad = None if parameter.grad is None else self._zeros_like(parameter.grad)
            elif not outputs:
                XLARuntime.sync(self)  # what it changed in place may be read
            return tree_map_only(torch.Tensor, self._zeros_like, result)

        return export

    def sync(self):
        self._export_pending("setup")
        super().sync()

    def to_cpu(self, tree):
        self._export_pending("read by the host")
        return super().to_cpu(tree)

    def _export_pending(self, name):
        if self.exports_pending and (pending := _pending_tensors()):
            self._export(name, pending)

    def _export(self, name, outputs, kernels=()):
        text = xla_private.stablehlo(outputs, str(self.device), [], False)
        artifact = xla_private.stablehlo(outputs, str(self.device), [], True)
        digest = hashlib.sha256(text).hexdigest()
        self.graphs.append(dict(name=name, stablehlo=artifact, digest=digest, kernels=list(kernels)))

    def _zeros_like(self, tensor):
        """A constant in the shape of a graph's result, so that the next graph does not contain this one."""
        return torch.zeros(tensor.shape, dtype=tensor.dtype).to(self.device)


def _pending_tensors():
    """The tensors of this process whose values are still to be computed, in the order of their creation."""
    tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
    found = sorted((one for one in tensors if one.device.type == "xla"), key=xla_private.tensor_id)
    return [one for one, is_pending in zip(found, xla_private.are_pending(found)) if is_pending]


class _OneOf(World):
    """One process of several, the others of which are imagined."""

    def all_gather(self, values):
        return [values] * self.size
