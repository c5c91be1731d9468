"""Graphs of a TPU core as StableHLO, traced on a machine without one: what `tpukit plan` compiles."""

import os

# The second: else an all-reduce over one visible core is left out.
os.environ.update(PJRT_DEVICE="CPU", XLA_ALWAYS_ALLREDUCE="1")

import torch
from torch.utils._pytree import tree_flatten

from tpukit.devices import xla_private
from tpukit.devices.distributed import World
from tpukit.devices.optimizers import state_tensors
from tpukit.devices.xla import XLARuntime
from tpukit.host.errors import TpukitError
from tpukit_tasks import kernel_counts


class ExportRuntime(XLARuntime):
    """A TPU core, alone or one of several, whose graphs are exported instead of run. Needs no TPU, but a
    fresh process, which ends without another `sync` once a training step is exported: that would run it.

    cores: of the machine. `graphs`, in the order of the calls: dicts of `stablehlo` (a portable artifact)
    and `kernels` (see `kernel_counts`)."""

    runs_graphs = False

    def __init__(self, precision="auto", cores=1):
        self.graphs = []
        super().__init__("tpu", precision, _OneOf(0, cores))

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
                outputs += _written_by_step(*mutates)
            artifact = xla_private.stablehlo(outputs, str(self.device), [], True)
            self.graphs.append(dict(stablehlo=artifact, kernels=kernels))
            return result

        return export


def _written_by_step(model, optimizer):
    """Return the tensors that a traced step writes: changed parameters, buffers and optimizer state."""
    kept = [*model.parameters(), *model.buffers(), *state_tensors(optimizer)]
    state = [value for value in kept if value.device.type == "xla"]
    return [value for value, is_pending in zip(state, xla_private.are_pending(state)) if is_pending]


class _OneOf(World):
    """One process of several, the others of which are imagined."""

    def all_gather(self, tree):
        return [tree] * self.size
