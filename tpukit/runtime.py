"""The seam between a training loop and its devices. Only this file, `replaying.py` and `launching.py` name `torch_xla`.

`Runtime` is plain PyTorch on the CPU or one GPU; `XLARuntime` is one XLA device (a TPU chip, or the CPU XLA device), or,
by SPMD, all devices of a host in one program. Each is one process of a `World`: it takes its share of every global batch, and
`update` sums the gradients over all ranks.
"""

import contextlib
import faulthandler
import functools
import inspect
import os
import time

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from tpukit import causes, storage
from tpukit.errors import TpukitError
from tpukit.replaying import Replayed
from tpukit.world import World

PRECISIONS = ("auto", "fp32", "bf16", "fp16")
GUARDED_CALLS = 3
# What a program may use of one TPU core's memory, by the beginning of TPU_ACCELERATOR_TYPE, where the runtime does not tell.
HBM_BYTES = {"v5litepod": 15.75 * 2**30, "v5e": 15.75 * 2**30, "v6e": 31.25 * 2**30}
_STATE_STARTS_AT_ZERO = ("SGD", "Adam", "AdamW", "Adamax", "RAdam", "RMSprop", "Adadelta")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def open_runtime(env, precision="auto", *, world=None, spmd_cores=None):
    """The runtime of the accelerator that `environment.detect()` found. This is where a device is first touched.

    world: this process among others, alone unless given. spmd_cores: run one program over so many XLA devices.
    """
    if precision not in PRECISIONS:
        raise TpukitError(f"precision={precision!r}: choose one of {', '.join(PRECISIONS)}")
    if env.accelerator in ("tpu", "xla"):
        return XLARuntime(env.accelerator, precision, world, spmd_cores)
    return Runtime(env.accelerator, precision, world)


def check_batch(batch_size, cores):
    """Raise TpukitError, naming the sizes that do, unless a global batch can be shared evenly by the cores."""
    if batch_size % cores:
        below = batch_size // cores * cores
        sizes = f"{below} or {below + cores}" if below else f"{cores}, or another multiple of it"
        raise TpukitError(f"batch_size={batch_size} is the global batch, and {cores} cores cannot share it evenly: use {sizes}")


class Runtime:
    """Plain PyTorch on one device.

    device: torch.device. precision: "fp32", "bf16" or "fp16". compiles: whether steps become programs, as on XLA.
    world: this process among those of the training. cores: how many devices share a global batch, over all processes. shards: how many
    of them are this process's.
    """

    compiles = False
    shards = 1
    step = 0
    _watch, _steps, _watched_at = None, None, float("-inf")

    def __init__(self, accelerator, precision="auto", world=None):
        self.accelerator = accelerator
        self.world = world or World()
        self.device = self._open_device()
        self.cores = self._count_cores()
        self.precision = self._best_precision() if precision == "auto" else precision
        self.scaler = torch.amp.GradScaler(self.device.type) if self.precision == "fp16" else None

    def _open_device(self):
        if self.accelerator == "cuda" and not torch.cuda.is_available():
            raise TpukitError(
                f"a GPU is here, but torch {torch.__version__} cannot use it: "
                "this torch was built without CUDA, or the driver is too old. `tpukit doctor` says which."
            )
        return torch.device(self.accelerator)

    def _count_cores(self):
        return self.world.size

    def _best_precision(self):
        if self.accelerator != "cuda":
            return "fp32"
        # An emulated bf16 (T4, V100) is slower than fp16.
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"

    def __str__(self):
        several = f"{self.cores} x " if self.cores > 1 else ""
        return f"{several}{self.accelerator} ({self.device_name()}), {self.precision}"

    def device_name(self):
        return torch.cuda.get_device_name() if self.accelerator == "cuda" else "host processor"

    def device_names(self):
        """One line for every device that this process uses."""
        return [self.device_name()]

    # Moving

    def place(self, model, *, channels_last=False):
        """Move a model to the device. Build the optimizer from what this returns: on XLA its parameters are new objects."""
        return model.to(self.device, memory_format=torch.channels_last if channels_last else torch.preserve_format)

    def put(self, arrays):
        """dict of numpy arrays or CPU tensors -> dict of tensors on the device."""
        tensors = {name: torch.as_tensor(value) for name, value in arrays.items()}
        if self.device.type == "cuda":
            return {name: value.pin_memory().to(self.device, non_blocking=True) for name, value in tensors.items()}
        return {name: value.to(self.device) for name, value in tensors.items()}

    def put_batch(self, arrays):
        """`put` for this process's share of a batch: (B / world size, ...) each."""
        return self.put(arrays)

    def put_whole(self, arrays, *, sharded=False):
        """`put` for a whole set, (N, ...) each, that stays. sharded: a part on each of this process's `shards` devices."""
        return self.put(
            {name: np.array(values) for name, values in arrays.items()}
        )  # copies: mapped files cannot be written, and torch warns

    def host(self, tree):
        """The same nest of dicts, lists and tuples with every tensor copied to the CPU. Waits for the device."""
        if isinstance(tree, torch.Tensor):
            return tree.detach().cpu().clone() if tree.device.type == "cpu" else tree.detach().cpu()
        if isinstance(tree, dict):
            return {key: self.host(value) for key, value in tree.items()}
        if isinstance(tree, (list, tuple)):
            return type(tree)(self.host(value) for value in tree)
        return tree

    def totals(self, sums, *more):
        """(N,) device tensor -> list of N floats for every rank, each followed by that rank's `more` floats.

        The one place in the loop that waits for the device, and for the other ranks.
        """
        return self.world.everyone([*self.host(sums).tolist(), *more])

    # Computing

    def autocast(self):
        """The context in which a model runs in this runtime's precision."""
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=_DTYPES[self.precision])

    def compile(self, function, graphs=1, *, model=None, optimizer=None):
        """Make `function` one program on devices that compile. graphs: how many variants it is allowed to have. model, optimizer: what it
        changes, where it changes nothing else: see `replaying.Replayed`."""
        return function

    def prime(self, optimizer):
        """Make the optimizer's state before the first step where that matters. Returns whether it has its state now."""
        return True

    def compiled(self, model, mode):
        """The model to compute with, made faster by torch.compile in a mode of it, or "no"."""
        return model if mode == "no" else torch.compile(model, mode=mode)

    def parallel(self, model):
        """The model to compute a loss with, so that its gradients are those of the global batch."""
        if self.world.size == 1:
            return model
        # find_unused: a phase of the training may leave parameters out. Buffers: see `buffers_of_rank_0`.
        return torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True, broadcast_buffers=False)

    @contextlib.contextmanager
    def buffers_of_rank_0(self, model):
        """Within it, the model of every rank has rank 0's buffers (the running statistics of batch norm): the ones that are saved."""
        own = [(module, name) for module in model.modules() for name, value in module._buffers.items() if value is not None]
        if self.world.size == 1 or not own:
            yield
            return
        # Exchanged, not overwritten: XLA would compile the next training step once more.
        kept = [module._buffers[name] for module, name in own]
        shared = self.world.share(self.host(kept))
        for (module, name), value in zip(own, shared):
            module._buffers[name] = value.to(self.device)
        try:
            yield
        finally:
            for (module, name), value in zip(own, kept):
                module._buffers[name] = value

    def _sum_gradients(self, gradients):
        """Turn each rank's gradients into their mean over all ranks. DistributedDataParallel has done it in backward."""

    def inference(self, function):
        """`compile` for a function that needs no gradient, in this runtime's precision."""

        @functools.wraps(function)
        def without_gradient(*arguments):
            with torch.no_grad(), self.autocast():
                return function(*arguments)

        without_gradient.__name__ = getattr(function, "func", function).__name__  # of a partial, that of what it calls
        return self.compile(without_gradient)

    def update(self, loss, optimizer, clip_norm=None):
        """Backward, gradient sum and optimizer step. The gradients stay until the next one.

        clip_norm: scale gradients of a larger norm down to it. Returns then the norm that they had, a scalar on the device.
        """
        norm = None
        optimizer.zero_grad(set_to_none=True)
        if self.scaler is None:
            loss.backward()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._sum_gradients([p.grad for p in parameters])
        if clip_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()
        return norm

    def gradient_norm(self, model):
        """(1,) device tensor: the norm of the last step's gradient, 0 where there was none.

        Not a part of the step, because only the last one before a reading is looked at.
        """
        norms = [torch.linalg.vector_norm(p.grad.float()) for p in model.parameters() if p.grad is not None]
        if not norms:
            return self.put({"zero": torch.zeros(1)})["zero"]
        return torch.linalg.vector_norm(torch.stack(norms)).reshape(1)

    def sync(self):
        """Wait until the device has done what was asked of it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    # Randomness

    def seed(self, number):
        """Start the generators of this rank from a number or a tuple of them. Ranks differ, so that their dropout does."""
        mixed = np.random.SeedSequence((*np.atleast_1d(number).tolist(), self.world.rank)).generate_state(1)
        torch.manual_seed(int(mixed[0]))

    def random_state(self):
        """The generators' state, as a dict of CPU tensors and integers."""
        state = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def set_random_state(self, state):
        """Set what `random_state` gave; a state of another kind of device is left out."""
        torch.set_rng_state(state["cpu"])
        if self.device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"])

    # Looking

    def watch(self, timeout_s, stacks, *, ends, steps=None):
        """From now on, when no `beat` comes for so many seconds, write every thread's Python stack to the open file `stacks`,
        and end this process if it `ends`. steps: an open file that always holds the number of the last beat."""
        self._watch, self._steps = dict(timeout=timeout_s, file=stacks, exit=ends), steps
        self.beat(0)

    def beat(self, step):
        """Say that this rank is alive, after so many steps."""
        self.step = step
        if self._steps:
            os.pwrite(self._steps.fileno(), b"%20d" % step, 0)
        now = time.monotonic()
        # At most once a second: arming it starts a thread.
        if self._watch and now - self._watched_at > 1:
            self._watched_at = now
            faulthandler.dump_traceback_later(**self._watch)

    def compilations(self):
        """(programs compiled, seconds that took) since the start."""
        return 0, 0.0

    def take_compiled(self):
        """Which functions given to `compile` were compiled since this was last asked: a list of dict(what, programs, seconds, why, refused).

        what: the function's name. why: sentences, see `causes`; none the first time. refused: whether it was one program too many.
        """
        return []

    def counters(self):
        """What the accelerator's own counters say since the start; empty where there are none. See `XLARuntime.counters`."""
        return {}

    @contextlib.contextmanager
    def traced(self, folder):
        """Within it, the device's and this process's work is recorded, and left in `folder` in a form that TensorBoard opens."""
        from torch.profiler import profile, tensorboard_trace_handler

        with profile(on_trace_ready=tensorboard_trace_handler(str(folder)), record_shapes=True):
            yield

    def memory(self):
        """[(peak bytes, total bytes)] of each device of this process, or [] where that cannot be read."""
        if self.device.type != "cuda":
            return []
        total = torch.cuda.get_device_properties(self.device).total_memory
        return [(torch.cuda.max_memory_allocated(), total)]

    def memory_size(self):
        """Bytes of memory of one device; of the host where that cannot be read or is the device."""
        found = self.memory()
        return found[0][1] if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class XLARuntime(Runtime):
    """One XLA device in this process, or, with spmd_cores, one program over so many of them.

    Under SPMD the batch axis of every batch is sharded over the devices; the model is written as for one device, the compiler
    adds the sums, and batch norm sees the whole global batch.
    """

    compiles = True
    mesh = None

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
        # A second runtime of this process finds it set; programs that ran before it was set are not kept.
        if self.keeps_programs and not torch_xla._XLAC._xla_computation_cache_is_initialized():
            # Programs of earlier sessions of this machine; other processes may be writing theirs.
            folder = storage.cache_folder() / f"programs-{self.world.rank}"
            with contextlib.suppress(OSError):  # without a folder of our own they are compiled every time
                storage.make_private(folder.parent)
                xr.initialize_cache(str(folder), readonly=False)
        return torch_xla.device()

    @property
    def keeps_programs(self):
        """Whether compiled programs are kept on disk. torch_xla can read them back on a TPU only."""
        return self.accelerator == "tpu"

    def _count_cores(self):
        return self.spmd_cores or self.world.size

    @property
    def shards(self):
        return self.spmd_cores or 1

    def _best_precision(self):
        return "bf16" if self.accelerator == "tpu" else "fp32"

    def __init__(self, accelerator, precision="auto", world=None, spmd_cores=None):
        if precision == "fp16":
            raise TpukitError("precision='fp16': XLA devices train in bf16, which needs no loss scaling; use 'bf16' or 'auto'")
        self.spmd_cores = spmd_cores
        self._compiled_lately = []
        super().__init__(accelerator, precision, world)

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
        import torch_xla.distributed.spmd as xs

        for value in tensors.values():
            xs.mark_sharding(value, self.mesh, ("data", *[None] * (value.dim() - 1)))

    def put_whole(self, arrays, *, sharded=False):
        whole = super().put_whole(arrays)
        if sharded:
            self._shard(whole)
        return whole

    def compiled(self, model, mode):
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
        flat = (self.world.sum(flat) / self.world.size).to(self.device)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients])):
            gradient.copy_(part.view_as(gradient))

    def prime(self, optimizer):
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
            replayed = Replayed(function, graphs, model, optimizer, self.device)
        checked = self._checked(function, graphs, replayed)
        groups = optimizer.param_groups if optimizer else []
        names, last = tuple(inspect.signature(function).parameters), {}

        def watched(*arguments):
            nonlocal last
            now = causes.described(names, arguments)
            for number, group in enumerate(groups):
                of = f" of group {number}" if len(groups) > 1 else ""
                now |= {f"the optimizer's {name}{of}": value for name, value in group.items() if name != "params"}
            before, refused = self.compilations(), False
            try:
                return checked(*arguments)
            except RuntimeError as error:
                refused = "different graphs" in str(error)
                why = causes.changes(last, now) if last else []
                if why and refused:  # first, because torch_xla's own words are long
                    raise RuntimeError(f"{'; '.join(why)}\n{error}") from error
                raise
            finally:
                programs, seconds = (b - a for a, b in zip(before, self.compilations()))
                if programs or refused:
                    why = causes.changes(last, now) if last else []
                    if last and replayed and replayed.new_operation:
                        why.append(f"first new operation: {replayed.new_operation}")
                    what = dict(what=function.__name__.strip("_"), programs=programs, seconds=seconds)
                    self._compiled_lately.append(dict(what, why=why, refused=refused))
                last = now

        return watched

    def take_compiled(self):
        taken, self._compiled_lately = self._compiled_lately, []
        return taken

    def _checked(self, function, graphs, replayed):
        """The function as one program a call, which raises where a call would need one more than `graphs` of them."""
        import torch_xla

        if self.world.size > 1 and self.accelerator != "tpu":  # the gradient sum cuts the step in two

            def stepped(*arguments):
                result = function(*arguments)
                torch_xla.sync()
                return result

            return stepped
        # full_graph: a hidden `.item()` raises instead of cutting the step; graphs: so does a batch of another shape. Both make the host
        # wait for the device before it traces the next step, so only the first calls are guarded; the others are counted.
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
                    f"call {calls} of {function.__name__} was compiled once more: maximum number of different graphs exceeded: {graphs}"
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
        """dict: compilations, executions (counts); compile_s, execute_s, to_device_s, from_device_s (seconds, summed);
        fallbacks: operation that XLA could not lower and the CPU ran instead -> count."""
        import torch_xla.debug.metrics as met

        compilations, compile_s = self.compilations()
        executions, execute_s = _timed("ExecuteTime")
        return dict(
            compilations=compilations,
            compile_s=compile_s,
            executions=executions,
            execute_s=execute_s,
            to_device_s=_timed("TransferToDeviceTime")[1],
            from_device_s=_timed("TransferFromDeviceTime")[1],
            fallbacks={n: met.counter_value(n) for n in met.counter_names() if n.startswith("aten::")},
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
        """The program of a step as HLO, with the line of each operation. The step is traced and not run: its model and optimizer are of no use then."""
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

    memory_size: of the core, in bytes. `programs`: each as a StableHLO portable artifact, in the order in which they were asked for.
    """

    keeps_programs = False

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


def recomputed(block, *inputs):
    """block(*inputs), a module without randomness whose activations are computed again in the backward pass instead of being kept."""
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


def _timed(name):
    """(count, seconds) of one of torch_xla's timers."""
    import torch_xla.debug.metrics as met

    data = met.metric_data(name)
    return (data[0], data[1] / 1e9) if data else (0, 0.0)
