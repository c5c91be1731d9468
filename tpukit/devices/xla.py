"""The runtimes of XLA devices. Only this file, `replaying.py` and `launching.py` import `torch_xla`.

`XLARuntime` is one XLA device (a TPU chip, or the CPU XLA device), or, by SPMD, all devices of a host in one program.
`RecordingRuntime` writes a TPU core's programs down, without a TPU.
"""

import collections
import contextlib
import inspect
import os

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from tpukit.devices import recompiles
from tpukit.devices.chips import HBM_BYTES
from tpukit.devices.distributed import World
from tpukit.devices.runtime import Runtime
from tpukit.devices.xla_replay import GraphReplay
from tpukit.host.errors import TpukitError

GUARDED_CALLS = 3
_STATE_STARTS_AT_ZERO = ("SGD", "Adam", "AdamW", "Adamax", "RAdam", "RMSprop", "Adadelta")


class XLARuntime(Runtime):
    """One XLA device in this process, or, with spmd_cores, one program over so many of them.

    Under SPMD the batch axis of every batch is sharded over the devices; the model is written as for one device, the compiler
    adds the sums, and batch norm sees the whole global batch.
    """

    compiles = True
    mesh = None

    def __init__(self, accelerator, precision="auto", world=None, spmd_cores=None):
        if precision == "fp16":
            raise TpukitError("precision='fp16': XLA devices train in bf16, which needs no loss scaling; use 'bf16' or 'auto'")
        self.spmd_cores = spmd_cores
        self.reset_statistics()
        super().__init__(accelerator, precision, world)

    def _open_device(self):
        import torch_xla
        import torch_xla.runtime as xr

        if self.spmd_cores:
            import torch_xla.distributed.spmd as xs

            if self.accelerator == "xla":
                os.environ["CPU_NUM_DEVICES"] = str(self.spmd_cores)
            xr.use_spmd()
            found = xr.global_runtime_device_count()
            if found != self.spmd_cores:
                raise TpukitError(f"asked for {self.spmd_cores} cores, found {found}: leave cores out to take all")
            self.mesh = xs.Mesh(np.arange(found), (found,), ("data",))
        return torch_xla.device()

    def _multiply_in_fp32(self):
        if self.accelerator == "tpu":
            from torch_xla import _XLAC

            # Otherwise a TPU rounds them to bfloat16. (`torch_xla.backends` does the same, with a warning at the first time.)
            _XLAC._xla_set_mat_mul_precision("highest")

    def _count_cores(self):
        return self.spmd_cores or self.world.size

    @property
    def shards(self):
        return self.spmd_cores or 1

    def _best_precision(self):
        return "bf16" if self.accelerator == "tpu" else "fp32"

    def device_name(self):
        import torch_xla.core.xla_model as xm

        return xm.xla_device_hw(self.device) + " through torch_xla"

    def device_names(self):
        import torch_xla

        return torch_xla.real_devices() if self.mesh is not None else super().device_names()

    def place(self, model, *, channels_last=False):
        model = model.to(self.device)  # whose compiler chooses its own layouts
        with torch.no_grad():
            # What was never written in place is traced differently, once; and SPMD marks as replicated what a program wrote.
            for value in (*model.parameters(), *model.buffers()):
                value.copy_(value.clone())
        self.sync()
        return model

    def put_batch(self, arrays):
        batch = self.put(arrays)
        if self.mesh is not None:
            self._shard(batch)
        return batch

    def _shard(self, tensors):
        from torch_xla import _XLAC

        for value in tensors.values():
            # Not `xs.mark_sharding`, which tries to import torchax and jax at every call.
            _XLAC._xla_mark_sharding(value, self.mesh.get_op_sharding(("data", *[None] * (value.dim() - 1))))

    def put_whole(self, arrays, *, sharded=False):
        whole = super().put_whole(arrays)
        if sharded:
            self._shard(whole)
        return whole

    def torch_compile(self, model, mode):
        return model

    def parallel(self, model):
        return model

    def _sum_gradients(self, gradients):
        if self.world.size == 1:
            return
        if self.accelerator == "tpu":
            import torch_xla.core.xla_model as xm

            xm.all_reduce(xm.REDUCE_SUM, gradients, scale=1 / self.world.size)
            return
        # CPU XLA devices of different processes share no link: through host memory, as one vector.
        flat = torch.cat([g.reshape(-1) for g in gradients]).cpu()
        flat = (self.world.all_reduce(flat) / self.world.size).to(self.device)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients])):
            gradient.copy_(part.view_as(gradient))

    def init_optimizer_state(self, optimizer):
        """Make the optimizer's state before the first step; born within it, it would cost a second program.

        One step with zero gradients and no weight decay creates it; then it is set to zero, which is where the optimizers
        of `_STATE_STARTS_AT_ZERO` start. Others are left alone: False, their second step compiles once more.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.sync()  # Adagrad has made its state already, which is to be no part of the first step
        if all(optimizer.state.get(p) for p in parameters):
            return True
        if type(optimizer).__name__ not in _STATE_STARTS_AT_ZERO or any(g.get("dampening") for g in optimizer.param_groups):
            return False
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
        self.sync()
        return True

    def compile(self, function, graphs=1, *, model=None, optimizer=None):
        replayed = None
        if model is not None and self.world.size == 1 and self.mesh is None:
            replayed = GraphReplay(function, graphs, model, optimizer, self.device)
        checked = self._checked(function, graphs, replayed)
        groups = optimizer.param_groups if optimizer else []
        name, names = function.__name__.strip("_"), tuple(inspect.signature(function).parameters)
        bound = getattr(inspect.unwrap(function), "keywords", {})  # of a partial, which is made anew for other values
        if not bound:
            self._called_with.pop(name, None)  # of another function

        def watched(*arguments):
            last = self._called_with.get(name)
            now = recompiles.described(names, arguments) | bound
            for number, group in enumerate(groups):
                of = f" of group {number}" if len(groups) > 1 else ""
                now |= {f"the optimizer's {name}{of}": value for name, value in group.items() if name != "params"}
            before, refused = self.compilations(), False
            try:
                return checked(*arguments)
            except RuntimeError as error:
                refused = "different graphs" in str(error)
                why = recompiles.changes(last, now) if last else []
                if why and refused:  # first, because torch_xla's own words are long
                    raise RuntimeError(f"{'; '.join(why)}\n{error}") from error
                raise
            finally:
                programs, seconds = (b - a for a, b in zip(before, self.compilations()))
                if programs or refused:
                    why = recompiles.changes(last, now) if last else []
                    if last and replayed and replayed.new_operation:
                        why.append(f"first new operation: {replayed.new_operation}")
                    event = dict(what=name, programs=programs, seconds=seconds, why=why, refused=refused)
                    self._compiled_lately.append(event)
                self._called_with[name] = now

        return watched

    def take_compile_events(self):
        taken, self._compiled_lately = self._compiled_lately, []
        return taken

    def reset_statistics(self):
        self._compiled_lately, self._fallbacks_before = [], _fallbacks()
        self._called_with = {}  # by the function's name: what it was last called with, as `causes` describes it

    def _checked(self, function, graphs, replayed):
        """The function as one program a call, which raises where a call would need one more than `graphs` of them."""
        import torch_xla

        if self.world.size > 1 and self.accelerator != "tpu":  # the gradient sum cuts the step in two

            def stepped(*arguments):
                result = function(*arguments)
                torch_xla.sync()
                return result

            return stepped
        # full_graph: a hidden `.item()` raises instead of cutting the step; graphs: so does a batch of another shape. Both make
        # the host wait for the device before it traces the next step, so only the first calls are guarded; the others are
        # counted.
        guarded = torch_xla.compile(function, full_graph=True, max_different_graphs=graphs)
        calls, left = 0, graphs - 1

        def checked(*arguments):
            nonlocal calls, left
            calls += 1
            if replayed is not None and replayed.works is not False:
                return replayed(*arguments)
            if calls <= GUARDED_CALLS:
                return guarded(*arguments)
            before, _ = self.compilations()
            result = function(*arguments)
            torch_xla.sync()
            left -= self.compilations()[0] - before
            if left < 0:
                raise RuntimeError(
                    f"call {calls} of {function.__name__} was compiled once more: maximum number of different graphs "
                    f"exceeded: {graphs}"
                )
            return result

        return checked

    def sync(self):
        import torch_xla

        torch_xla.sync(wait=True)

    def seed(self, number):
        import torch_xla.core.xla_model as xm

        super().seed(number)
        xm.set_rng_state(torch.initial_seed())

    def random_state(self):
        import torch_xla.core.xla_model as xm

        return {**super().random_state(), "xla": xm.get_rng_state()}

    def set_random_state(self, state):
        import torch_xla.core.xla_model as xm

        super().set_random_state(state)
        if "xla" in state:
            xm.set_rng_state(state["xla"])

    def compilations(self):
        return _timed("CompileTime")

    def counters(self):
        """dict, since this process started: compilations, executions (counts); compile_s, execute_s, to_device_s, from_device_s
        (seconds, summed); fallbacks, since `forget`: operation that XLA could not lower and the CPU ran instead -> count."""
        compilations, compile_s = self.compilations()
        executions, execute_s = map(sum, zip(_timed("ExecuteTime"), _timed("ExecuteReplicatedTime")))  # the second: SPMD
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
        import torch_xla.debug.profiler as xp

        xp.start_trace(str(folder))
        try:
            yield
        finally:
            xp.stop_trace()

    def hlo_of(self, step, model, optimizer):
        """The program of a step as HLO, with the line of each operation. The step is traced and not run: its model and
        optimizer are of no use then."""
        from torch_xla import _XLAC

        _XLAC._set_ir_debug(True)
        outputs = [step(), *self._written(model, optimizer)]
        return _XLAC._get_xla_tensors_hlo(outputs)

    def _written(self, model, optimizer):
        """What a step that was traced leaves behind: what it changed of the model and the optimizer, and the gradients."""
        from torch_xla import _XLAC

        kept = [v for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v)]
        state = [v for v in (*model.parameters(), *model.buffers(), *kept) if v.device.type == "xla"]
        changed = _XLAC._check_tensor_need_materialization(state)
        return [v for v, yes in zip(state, changed) if yes] + [p.grad for p in model.parameters() if p.grad is not None]

    def memory(self):
        import torch_xla.core.xla_model as xm

        try:
            info = xm.get_memory_info(self.device)
        except RuntimeError:  # neither the CPU XLA device nor the one device of SPMD implements it
            return []
        return [(info.get("peak_bytes_used", info["bytes_used"]), info["bytes_limit"])]

    def memory_size(self):
        if self.accelerator == "tpu" and not self.memory():
            kind = os.environ.get("TPU_ACCELERATOR_TYPE", "")
            return next((size for name, size in HBM_BYTES.items() if kind.startswith(name)), min(HBM_BYTES.values()))
        return super().memory_size()


class RecordingRuntime(XLARuntime):
    """A TPU core, alone or one of several, whose programs are written down instead of run; needs no TPU, but a fresh process.

    memory_size: of the core, in bytes. `programs`: each as a StableHLO portable artifact, in the order in which they were asked
    for.
    """

    def __init__(self, precision="auto", cores=1, memory_size=0):
        os.environ.update(PJRT_DEVICE="CPU", XLA_ALWAYS_ALLREDUCE="1")  # which would be left out where one core is seen
        self.programs, self._memory_size = [], memory_size
        super().__init__("tpu", precision, World(0, cores))

    def memory_size(self):
        return self._memory_size

    def compile(self, function, graphs=1, *, model=None, optimizer=None):
        import torch_xla

        def recorded(*arguments):
            before = self.counters()["fallbacks"]
            result = function(*arguments)
            if fallbacks := sorted(self.counters()["fallbacks"].keys() - before.keys()):
                raise TpukitError(f"not one program: torch_xla runs {', '.join(fallbacks)} on the host")
            outputs = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor)]
            if model is not None:
                outputs += self._written(model, optimizer)
            self.programs.append(torch_xla._XLAC._get_stablehlo(outputs, str(self.device), [], True))
            return tree_map_only(torch.Tensor, self._blank, result)

        return recorded

    def _blank(self, tensor):
        """Zeros in the shape of what a program gives, so that the next one does not contain it."""
        return torch.zeros(tensor.shape, dtype=tensor.dtype).to(self.device)


def checkpointed(block, *inputs):
    """block(*inputs), a module without randomness whose activations are computed again in the backward pass instead of being
    kept."""
    if inputs[0].device.type == "xla":
        # torch's own looks for a module torch.xla; this one also keeps XLA from merging the two computations.
        from torch_xla.utils.checkpoint import checkpoint

        return checkpoint(block, *inputs, preserve_rng_state=False)
    from torch.utils.checkpoint import checkpoint

    return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)


def on_one_xla_core(tensor):
    """Whether a tensor lies on an XLA device that has a program of its own, as opposed to one program over several (SPMD)."""
    if tensor.device.type != "xla":
        return False
    import torch_xla.runtime as xr

    return not xr.is_spmd()


def _fallbacks():
    import torch_xla.debug.metrics as met

    return {n: met.counter_value(n) for n in met.counter_names() if n.startswith("aten::")}


def _timed(name):
    """(count, seconds) of one of torch_xla's timers."""
    import torch_xla.debug.metrics as met

    data = met.metric_data(name)
    return (data[0], data[1] / 1e9) if data else (0, 0.0)
