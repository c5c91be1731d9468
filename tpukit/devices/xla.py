"""The runtime of XLA devices: a TPU chip, the CPU XLA device, or by SPMD all devices of a host in one
graph."""

import collections
import contextlib
import functools
import os

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.debug.profiler as xp
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch.utils._pytree import tree_leaves, tree_map_only
from torch_xla import _XLAC

from tpukit.devices import lanes
from tpukit.devices.chips import V5E, find_chip
from tpukit.devices.optimizers import parameters_with_gradient, state_tensors
from tpukit.devices.runtime import Runtime
from tpukit.devices.xla_compile import CompiledFunction
from tpukit.host.errors import TpukitError

_STATE_STARTS_AT_ZERO = ("SGD", "Adam", "AdamW", "Adamax", "RAdam", "RMSprop", "Adadelta")


class XLARuntime(Runtime):
    """One XLA device in this process, or, with spmd_cores, one graph over that many of them.

    Under SPMD the batch axis of every batch is sharded over the devices; the model is written as for one
    device, the compiler inserts the all-reduces, and batch norm sees the whole global batch."""

    compiles = True
    runs_graphs = True  # a plan only exports them
    mesh = None

    def __init__(self, accelerator, precision="auto", world=None, spmd_cores=None):
        if precision == "fp16":
            raise TpukitError(
                "precision='fp16': XLA devices train in bf16, which needs no loss scaling; use 'bf16' or"
                " 'auto'"
            )
        self.spmd_cores, self.shards = spmd_cores, spmd_cores or 1
        self._last_scalars = {}  # type -> (number, its tensor)
        self.reset_statistics()
        super().__init__(accelerator, precision, world)
        self.cores = spmd_cores or self.world.size

    def _open_device(self):
        if self.spmd_cores:
            if self.accelerator == "xla":
                os.environ["CPU_NUM_DEVICES"] = str(self.spmd_cores)
            xr.use_spmd()
            found = xr.global_runtime_device_count()
            if found != self.spmd_cores:
                raise TpukitError(
                    f"asked for {self.spmd_cores} cores, found {found}: leave cores out to use all"
                )
            self.mesh = xs.Mesh(np.arange(found), (found,), ("data",))
        if self.accelerator == "tpu":
            # Otherwise a TPU rounds fp32 factors to bfloat16, also those that a bf16 training keeps in fp32,
            # as pixels that it augments. (`torch_xla.backends` does the same, with a warning at the first
            # time.)
            _XLAC._xla_set_mat_mul_precision("highest")
        return torch_xla.device()

    def _best_precision(self):
        return "bf16" if self.accelerator == "tpu" else "fp32"

    def device_name(self):
        return xm.xla_device_hw(self.device) + " through torch_xla"

    def device_names(self):
        return torch_xla.real_devices() if self.mesh is not None else super().device_names()

    def place(self, model, *, channels_last="no"):
        if not self.notes and hasattr(model, "prepare_for_xla"):
            self.notes = model.prepare_for_xla(self)  # a sentence: which of its ways it computes here
        buffers = [buffer.to("cpu", copy=True) for buffer in model.buffers()]
        model = model.to(self.device)  # whose compiler chooses its own layouts
        self._separate(model.buffers(), buffers)
        with torch.no_grad():
            # A tensor that was never written in place is traced differently the first time; and SPMD marks as
            # replicated what a graph wrote.
            for value in (*model.parameters(), *model.buffers()):
                value.copy_(value.clone())
        return model

    def separate(self, tensors):
        tensors = [tensor for tensor in tensors if tensor.device == self.device]
        self._separate(tensors, self.host(tensors))

    def _separate(self, tensors, values):
        # torch_xla uploads equal numbers once: the counts of all batch norms are one buffer. A step gives the
        # memory of its old state to the new one, this buffer several times, which crashes.
        for tensor, value in zip(tensors, values):
            if not tensor.dim():
                tensor.data = self._put(value)

    def put(self, arrays):
        return {name: self._put(torch.as_tensor(value)) for name, value in arrays.items()}

    def _put(self, tensor):
        # Of a tensor without dimensions `.to` makes a constant of the graph where it is 0 or 1; elsewhere it
        # shares the data of equal numbers in the graph.
        return (
            tensor.to(self.device) if tensor.dim() else xm.send_cpu_data_to_device([tensor], self.device)[0]
        )

    def put_batch(self, arrays):
        batch = self.put(arrays)
        return self._shard(batch) if self.mesh is not None else batch

    def put_dataset(self, arrays, *, sharded=False):
        rows = {
            name: torch.as_tensor(lanes.to_rows(values)).to(self.device) for name, values in arrays.items()
        }
        if sharded:
            self._shard(rows)
        return {name: lanes.Stored(rows[name], values.shape) for name, values in arrays.items()}

    def whole_nbytes(self, arrays):
        return sum(lanes.stored_nbytes(values) for values in arrays.values())

    def take(self, whole, index):
        return {name: lanes.take(stored, index) for name, stored in whole.items()}

    def scalar(self, number):
        if number is None:
            return None
        last, tensor = self._last_scalars.get(type(number), (None, None))
        if last != number:  # else the same one, as every step of an epoch asks for it
            tensor = self._put(torch.tensor(number))
            self._last_scalars[type(number)] = number, tensor
        return tensor

    def _shard(self, tensors):
        """Shard the first axis of each tensor over the mesh."""
        for value in tensors.values():
            # Not `xs.mark_sharding`, which tries to import torchax and jax at every call.
            _XLAC._xla_mark_sharding(
                value, self.mesh.get_op_sharding(("data",) + (None,) * (value.dim() - 1))
            )
        return tensors

    def host(self, tree):
        tree = self._whole(tree)
        # All in one call: one by one, each of a model's hundreds of tensors waits for a transfer of its own.
        on_device = [
            leaf for leaf in tree_leaves(tree) if torch.is_tensor(leaf) and leaf.device == self.device
        ]
        copied = iter(_XLAC._xla_get_cpu_tensors(on_device))

        def of(value):
            return (next(copied) if value.device == self.device else value.clone()).detach()

        return tree_map_only(torch.Tensor, of, tree)

    def to_cpu_async(self, tree):
        return functools.partial(self.host, self._whole(tree))

    def _whole(self, tree):
        """The tree with each of its sharded tensors whole on every device, by one graph: to read a sharded
        one, torch_xla compiles a program of its own, every time."""
        if self.mesh is None:
            return tree
        found = [leaf for leaf in tree_leaves(tree) if torch.is_tensor(leaf) and leaf.device == self.device]
        shardings = _XLAC._get_xla_sharding_specs(found)
        whole = {}
        for tensor, sharding in zip(found, shardings):
            if "devices=" in sharding:
                copy = whole[id(tensor)] = tensor.detach().clone()
                _XLAC._xla_annotate_custom_sharding(copy, self.mesh.get_op_sharding((None,) * copy.dim()))
        if whole:
            torch_xla.sync()
        return tree_map_only(torch.Tensor, lambda tensor: whole.get(id(tensor), tensor), tree)

    def torch_compile(self, model, mode, *, is_captured=False, accumulates=False):
        return model

    @property
    def reduces_on_the_host(self):
        """Whether the gradient all-reduce goes through host memory: CPU XLA devices of different processes
        share no link."""
        return self.world.size > 1 and self.accelerator != "tpu"

    def all_reduce_gradients(self, optimizer):
        if self.world.size == 1:
            return
        gradients = [p.grad for p in parameters_with_gradient(optimizer)]
        if not self.reduces_on_the_host:
            # All ranks run one program, so none needs its layouts pinned, which can cost a copy of each
            # gradient.
            xm.all_reduce(xm.REDUCE_SUM, gradients, scale=1 / self.world.size, pin_layout=False)
            return
        flat = torch.cat([g.reshape(-1) for g in gradients]).cpu()  # as one vector
        flat = (self.world.all_reduce(flat) / self.world.size).to(self.device)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients])):
            gradient.copy_(part.view_as(gradient))

    def barrier_after_gradients(self, optimizer, batch):
        if gradients := [p.grad for p in parameters_with_gradient(optimizer)]:
            batch = {
                name: values.clone() for name, values in batch.items()
            }  # of the step's own, to be changed
            xm.optimization_barrier_([*gradients, *batch.values()])
        return batch

    def init_optimizer_state(self, optimizer):
        """Create the optimizer's state before the first step; created in it, it would cost a second
        compilation.

        One step with zero gradients and no weight decay creates it; then it is set to zero, which is where
        the optimizers of `_STATE_STARTS_AT_ZERO` start. For others it returns False: their second step
        compiles once more."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        exists = all(optimizer.state.get(p) for p in parameters)  # Adagrad has made it already
        dampens = any(group.get("dampening") for group in optimizer.param_groups)
        if not exists and type(optimizer).__name__ in _STATE_STARTS_AT_ZERO and not dampens:
            _take_zero_step(optimizer, parameters)
            exists = True
        self.sync()  # so that this, and what `place` did, does not become part of the first step
        return exists

    def compile(self, function, *, name=None, max_graphs=1, changes=None):
        return CompiledFunction(function, name or function.__name__, max_graphs, self, changes)

    def reset_statistics(self):
        self.compile_events, self._fallbacks_before = [], _fallbacks()
        self.last_signatures = {}  # by function: what it was last called with

    def sync(self):
        torch_xla.sync(wait=True)

    def seed(self, number):
        super().seed(number)
        xm.set_rng_state(torch.initial_seed())

    def random_state(self):
        return {**super().random_state(), "xla": xm.get_rng_state()}

    def set_random_state(self, state):
        super().set_random_state(state)
        if "xla" in state:
            xm.set_rng_state(state["xla"])

    def compilations(self):
        return _timed("CompileTime")

    def counters(self):
        """dict, since this process started: compilations, executions (counts); compile_s, execute_s,
        to_device_s, from_device_s (seconds); and since `reset_statistics`: fallbacks, operation that XLA
        could not lower and the CPU ran instead -> count."""
        compilations, compile_s = self.compilations()
        executions, execute_s = map(
            sum, zip(_timed("ExecuteTime"), _timed("ExecuteReplicatedTime"))
        )  # the second: SPMD
        return dict(
            compilations=compilations,
            compile_s=compile_s,
            executions=executions,
            execute_s=execute_s,
            to_device_s=_timed("TransferToDeviceTime")[1],
            from_device_s=_timed("TransferFromDeviceTime")[1],
            fallbacks=dict(collections.Counter(_fallbacks()) - collections.Counter(self._fallbacks_before)),
        )

    @contextlib.contextmanager
    def traced(self, folder):
        xp.start_trace(str(folder))
        try:
            yield
        finally:
            xp.stop_trace()

    def hlo_of(self, step, model, optimizer):
        """The graph of a step as HLO, with the line of each operation. The step is traced and not run, which
        leaves its model and optimizer unusable."""
        _XLAC._set_ir_debug(True)
        outputs = [step(), *self.written_by_step(model, optimizer)]
        return _XLAC._get_xla_tensors_hlo(outputs)

    def written_by_step(self, model, optimizer):
        """What a traced step leaves behind: what it changed of the model and the optimizer, and the
        gradients."""
        kept = [*model.parameters(), *model.buffers(), *state_tensors(optimizer)]
        state = [v for v in kept if v.device.type == "xla"]
        changed = _XLAC._check_tensor_need_materialization(state)
        return [v for v, yes in zip(state, changed) if yes] + [
            p.grad for p in model.parameters() if p.grad is not None
        ]

    def memory(self):
        try:
            info = xm.get_memory_info(self.device)
        except RuntimeError:  # neither the CPU XLA device nor the one device of SPMD implements it
            return []
        return [(info.get("peak_bytes_used", info["bytes_used"]), info["bytes_limit"])]

    def memory_size(self):
        if self.accelerator == "tpu" and not self.memory():
            chip = find_chip(os.environ.get("TPU_ACCELERATOR_TYPE", ""))
            return chip.hbm_bytes if chip and chip.hbm_bytes else V5E.hbm_bytes  # the smallest
        return super().memory_size()


def _take_zero_step(optimizer, parameters):
    decays = [group.get("weight_decay", 0) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["weight_decay"] = 0
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for group, decay in zip(optimizer.param_groups, decays):
        group["weight_decay"] = decay
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
    optimizer.zero_grad(set_to_none=True)


def _fallbacks():
    return {n: met.counter_value(n) for n in met.counter_names() if n.startswith("aten::")}


def _timed(name):
    """(count, seconds) of one of torch_xla's timers."""
    data = met.metric_data(name)
    return (data[0], data[1] / 1e9) if data else (0, 0.0)
