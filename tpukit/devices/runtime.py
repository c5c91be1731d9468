"""What a training loop asks of a device: `Runtime`, which is plain PyTorch on a CPU or a GPU;
`xla.XLARuntime` overrides it.

A runtime is one process of a `World`: it takes its share of every global batch, and gradients are averaged
over all ranks."""

import contextlib
import ctypes
import functools
import os
import warnings

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from tpukit.devices import cuda_graph
from tpukit.devices.distributed import World
from tpukit.devices.optimizers import (
    copy_flattened,
    flattened,
    parameters_with_gradient,
    trainable_parameters,
    written_by_step,
)
from tpukit.devices.watchdog import Watchdog
from tpukit.host.environment import supports
from tpukit.host.errors import TpukitError

PRECISIONS = ("auto", "fp32", "bf16", "fp16")
EVALUATION_BATCH = 64
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_FUSED_ON_GPU = (
    torch.optim.Adam,
    torch.optim.AdamW,
)  # not SGD, whose fused step fails where a gradient comes later
_WITHOUT_GRAPHS = {
    "reduce-overhead": "default",
    "max-autotune": "max-autotune-no-cudagraphs",
}  # modes of torch.compile


def check_batch(batch_size, cores, what="cores", micro_batches=1):
    """Raise TpukitError, naming sizes that work, unless a global batch can be shared evenly. what: the word
    for `cores`."""
    if batch_size < 1:
        raise TpukitError(f"batch_size={batch_size}: it must be 1 or more")
    parts = cores * micro_batches
    if batch_size % parts:
        below = batch_size // parts * parts
        sizes = f"{below} or {below + parts}" if below else f"{parts}, or another multiple of it"
        workers = f"{cores} {what}"
        if micro_batches > 1:
            workers = f"{micro_batches} micro-batches" + (f" on each of {workers}" if cores > 1 else "")
        raise TpukitError(
            f"batch_size={batch_size} is the global batch, and {workers} cannot share it evenly: use {sizes}"
        )


def check_cuda():
    """Raise TpukitError where torch cannot use this machine's GPU."""
    if not torch.cuda.is_available():
        raise TpukitError(
            f"this machine has a GPU, but torch {torch.__version__} cannot use it: "
            "it was built without CUDA, or the driver is too old. `tpukit doctor` shows which."
        )


def keep_freed_memory():
    """Let glibc's malloc keep up to 2 GiB of freed memory in this process, instead of returning it to the
    system.

    By default malloc returns it to the system, and the next step waits while the system zeroes every page
    again. Does nothing where the environment configures malloc, or where malloc is not glibc's."""
    is_set = any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    )
    if is_set or not hasattr(libc := ctypes.CDLL(None), "mallopt"):
        return
    trim_threshold, mmap_threshold = -1, -3  # malloc.h
    libc.mallopt(trim_threshold, 2**31 - 1)
    if not libc.mallopt(mmap_threshold, 2**30):
        libc.mallopt(mmap_threshold, 2**25)  # all that older versions take


class Runtime:
    """Plain PyTorch on one device.

    device: torch.device. precision: "fp32", "bf16" or "fp16". compiles: whether steps become compiled graphs,
    as on XLA. cores: the number of devices that share a global batch, over all processes. shards: those of
    them in this process. notes: sentences for the run's log about how the placed model is computed, or "".
    allow_sync: for the device, within a step; not in one that is captured."""

    compiles = False
    notes = ""
    allow_sync = True
    shards = 1
    step = 0
    watchdog = None
    missing_gradients = (
        missing_everywhere
    ) = ()  # of the optimizer's parameters, by number: on this rank, and on all

    def __init__(self, accelerator, precision="auto", world=None):
        self.accelerator = accelerator
        self.world = world or World()
        self.compile_events = []
        self.device = self._open_device()
        self.cores = self.world.size
        self.precision = self._best_precision() if precision == "auto" else precision
        if self.precision == "fp32":
            self._multiply_in_fp32()
        self.scaler = torch.amp.GradScaler(self.device.type) if self.precision == "fp16" else None

    def _open_device(self):
        if self.accelerator == "cpu":
            keep_freed_memory()
        if self.accelerator == "cuda":
            check_cuda()
            torch.backends.cudnn.benchmark = (
                True  # shapes are fixed; the choice may differ from run to run by rounding
            )
            capability, built_for = torch.cuda.get_device_capability(), torch.cuda.get_arch_list()
            if not supports(capability, built_for):
                raise TpukitError(
                    f"{torch.cuda.get_device_name()} has compute capability {'.'.join(map(str, capability))},"
                    f" but torch {torch.__version__} was built for {', '.join(built_for)} only, and would"
                    " fail at its first kernel: choose another GPU, or a torch that was built for this one"
                )
        return torch.device(self.accelerator)

    def _multiply_in_fp32(self):
        """Make fp32 mean fp32: by default convolutions on newer GPUs round their inputs to 10 bits (TF32)."""
        if self.accelerator != "cuda":
            return
        cudnn = torch.backends.cudnn
        with warnings.catch_warnings():
            # From 2.9 on torch has another interface beside this one, and reads of the older fail where the
            # two differ. So both are set, and the older first: it leaves the newer to what is set for all of
            # torch.
            warnings.simplefilter("ignore")
            torch.set_float32_matmul_precision("highest")
            torch.backends.cuda.matmul.allow_tf32 = cudnn.allow_tf32 = False
            for operation in (getattr(cudnn, "conv", None), getattr(cudnn, "rnn", None)):
                if operation is not None:
                    operation.fp32_precision = "ieee"

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

    def place(self, model, *, channels_last="no"):
        """Move a model to the device. Build the optimizer from what this returns: on XLA its parameters are
        new objects.

        channels_last: the layout of images, "yes", "no", or "auto" for what is faster here, see
        `Task.channels_last`."""
        if channels_last == "auto":
            channels_last = "yes" if self._computes_faster_channels_last(model) else "no"
        return model.to(
            self.device,
            memory_format=torch.channels_last if channels_last == "yes" else torch.preserve_format,
        )

    def _computes_faster_channels_last(self, model):
        # A choice by rule, not by timing: a resumed run has to make the same one, to give the same numbers.
        sizes = [(p.numel(), p.dim() == 4) for p in model.parameters()]
        is_convolutional = 2 * sum(size for size, of_convolution in sizes if of_convolution) > sum(
            size for size, _ in sizes
        )
        if self.accelerator == "cuda":  # tensor cores take channels last, and would transpose all else
            return (
                is_convolutional and self.precision != "fp32" and torch.cuda.get_device_capability() >= (7, 0)
            )
        return is_convolutional

    def put(self, arrays):
        """dict of numpy arrays or CPU tensors -> dict of tensors on the device."""
        tensors = {name: torch.as_tensor(value) for name, value in arrays.items()}
        if self.device.type == "cuda":
            return {
                name: value.pin_memory().to(self.device, non_blocking=True) for name, value in tensors.items()
            }
        return {name: value.to(self.device) for name, value in tensors.items()}

    def put_batch(self, arrays):
        """`put` for this process's share of a batch: (B / world size, ...) each."""
        return self.put(arrays)

    def put_dataset(self, arrays, *, sharded=False):
        """`put` for a whole dataset, (N, ...) each, that stays, for `take`. sharded: over this process's
        `shards` devices."""
        # Copies, because torch warns of mapped files, which cannot be written. Not pinned: torch never frees
        # pinned memory.
        return {name: torch.as_tensor(np.array(values)).to(self.device) for name, values in arrays.items()}

    def whole_nbytes(self, arrays):
        """Bytes that a whole dataset takes on the device."""
        return sum(values.nbytes for values in arrays.values())

    def take(self, whole, index):
        """Samples of what `put_dataset` returned, (B, ...) each. index: (B,). To be called in a compiled
        function."""
        return {name: values.index_select(0, index) for name, values in whole.items()}

    def scalar(self, number):
        """A number that changes, or None, as an argument of a compiled function: on XLA, and on a GPU, which
        captures steps, a 0-d tensor, so that every value runs the same graph."""
        if number is None or not (self.compiles or self.accelerator == "cuda"):
            return number
        return self.put({"number": torch.tensor(number)})["number"]

    def host(self, tree):
        """The same nest of dicts, lists and tuples with every tensor copied to the CPU. Waits for the
        device."""
        return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), tree)

    def to_cpu_async(self, tree):
        """`host`, started now: a function that waits for the copy, but on a GPU not for later work, and
        returns it."""
        if self.device.type != "cuda":
            return functools.partial(self.host, tree)
        pinned = tree_map_only(
            torch.Tensor, lambda tensor: tensor.detach().to("cpu", non_blocking=True), tree
        )
        copied = torch.cuda.Event()
        copied.record()

        def wait():
            copied.synchronize()
            return self.host(pinned)  # out of the pinned memory, which is scarce

        return wait

    # Computing

    def autocast(self):
        """The context in which a model runs in this runtime's precision."""
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=_DTYPES[self.precision])

    def compile(self, function, *, name=None, max_graphs=1, changes=None):
        """`function`, as one compiled graph on devices that compile.

        name: for the compilation records; defaults to the function's. max_graphs: how many different graphs
        it may have. changes: (model, optimizer), if it changes these and nothing else: its graph is then
        captured and replayed, on XLA (see `xla_replay`) and on GPUs (see `cuda_graph`)."""
        if changes is None or self.accelerator != "cuda":
            return function
        return cuda_graph.CapturedStep(function, name, *changes, self)

    def init_optimizer_state(self, optimizer):
        """Make the optimizer's state before the first step where that matters. Returns whether it exists now.

        On a GPU, let the optimizer update all weights by one kernel where torch has one, and count its steps
        on the device."""
        if self.accelerator == "cuda":
            for group in optimizer.param_groups:
                if "capturable" in group:
                    group["capturable"] = True
                chosen = group.get("foreach") or group.get("differentiable")  # a fused step is neither
                if type(optimizer) in _FUSED_ON_GPU and group["fused"] is None and not chosen:
                    group["fused"] = True
            if type(optimizer) in _FUSED_ON_GPU and all(group["fused"] for group in optimizer.param_groups):
                optimizer._step_supports_amp_scaling = True  # as torch's constructors say of a fused one
            optimizer._warned_capturable_if_run_uncaptured = True  # the first steps do run so
        return True

    def separate(self, tensors):
        """To be called on state that was loaded, before a step changes it: no two tensors share their memory
        afterwards."""

    def torch_compile(self, model, mode, *, is_captured=False, accumulates=False):
        """The model, compiled by torch.compile in this mode; unchanged for "no".

        is_captured: the step around it is to become a CUDA graph, which cannot hold those that some modes
        make of the model. accumulates: several backward passes add to a gradient, which those graphs do not
        survive."""
        if accumulates or (is_captured and self.accelerator == "cuda"):
            mode = _WITHOUT_GRAPHS.get(mode, mode)
        return model if mode == "no" else torch.compile(model, mode=mode)

    @contextlib.contextmanager
    def broadcast_buffers(self, model):
        """Context manager: every rank's model has rank 0's buffers (the running statistics of batch norm):
        those are saved."""
        if self.world.size == 1:
            yield
            return
        # Exchanged, not overwritten: XLA would compile the next training step once more.
        kept = [dict(module._buffers) for module in model.modules()]
        shared = tree_map_only(
            torch.Tensor, lambda value: value.to(self.device), self.world.broadcast(self.host(kept))
        )
        for module, buffers in zip(model.modules(), shared):
            module._buffers.update(buffers)
        try:
            yield
        finally:
            for module, buffers in zip(model.modules(), kept):
                module._buffers.update(buffers)

    def inference(self, function):
        """`compile` for a function that needs no gradient, in this runtime's precision."""

        @functools.wraps(function)
        def without_gradient(*arguments):
            with torch.no_grad(), self.autocast():
                return function(*arguments)

        return self.compile(
            without_gradient, name=getattr(function, "func", function).__name__
        )  # of a partial, its function's

    # The parts of a training step, in their order; the gradients of the optimizer's parameters stay until the
    # next step

    def backward(self, loss, optimizer, *, is_last=True):
        """Add the gradients of a scalar loss. In fp16 the loss is scaled, and after the last micro-batch the
        gradients are scaled back."""
        if self.scaler is None:
            loss.backward()
            return
        self.scaler.scale(loss).backward()
        if is_last:
            self.scaler.unscale_(optimizer)

    def barrier_after_gradients(self, optimizer, batch):
        """The batch, a dict of tensors, such that what is computed from it starts after the gradients so far
        and can take the memory of what they were computed from. Only a compiler would start earlier."""
        return batch

    def all_reduce_gradients(self, optimizer):
        """Turn each rank's gradients into their mean over all ranks, where a missing one counts as zero; in
        fp16 an overflow of one rank becomes one of all. A parameter without a gradient on any rank stays
        without.

        They go as one vector of each type, and nothing waits for the device, so that a captured step can hold
        it. Whether a gradient that is missing here exists elsewhere only the host can tell: it looks at every
        step, but in one that is to be captured only when other gradients are missing than before."""
        if self.world.size == 1:
            return
        parameters = trainable_parameters(optimizer)
        exists = torch.ones(len(parameters), device=self.device)
        missing = [number for number, parameter in enumerate(parameters) if parameter.grad is None]
        for number in missing:
            parameters[number].grad = torch.zeros_like(parameters[number])
            exists[number].zero_()
        overflows = [] if self.scaler is None else [*self.scaler._found_inf_per_device(optimizer).values()]
        tensors = [*(parameter.grad for parameter in parameters), exists, *overflows]
        for dtype, vector in flattened(tensors).items():
            mean = self.world.all_reduce(vector).div_(self.world.size)
            copy_flattened([tensor for tensor in tensors if tensor.dtype == dtype], mean)
        for overflow in overflows:
            overflow.sign_()  # optimizers look for exactly 1
        if missing and (self.allow_sync or missing != self.missing_gradients):
            self.missing_gradients, found = missing, exists.tolist()
            self.missing_everywhere = [number for number in missing if not found[number]]
        for number in self.missing_everywhere if missing else ():
            parameters[number].grad = None

    def clip_gradients(self, optimizer, max_norm):
        """Scale gradients of a larger norm down to it. Returns the norm they had, a scalar on the device."""
        if max_norm is None:
            return None
        return torch.nn.utils.clip_grad_norm_(parameters_with_gradient(optimizer), max_norm)

    def optimizer_step(self, optimizer, lr_factor=None):
        """Update the weights, unless in fp16 a gradient overflowed. lr_factor: number or scalar tensor on the
        device that multiplies the learning rates in this step; None for 1.

        The update is multiplied, because torch's optimizers read a rate that is a tensor on the host. It
        comes to the same where the update is proportional to the rate: with SGD, Adam(W), Adagrad, RMSprop
        and most, but not Rprop and ASGD."""
        parameters = [] if lr_factor is None else parameters_with_gradient(optimizer)
        before = [parameter.detach().clone() for parameter in parameters]
        if self.scaler is None:
            optimizer.step()
        else:
            self._step_unless_overflow(optimizer)
            self.scaler.update()
        if parameters:
            with torch.no_grad():
                torch._foreach_sub_(parameters, before)
                torch._foreach_mul_(parameters, lr_factor)
                torch._foreach_add_(parameters, before)

    def _step_unless_overflow(self, optimizer):
        """Update the weights, but leave everything on the device as it is where a gradient overflowed."""
        if self.allow_sync or getattr(optimizer, "_step_supports_amp_scaling", False):
            self.scaler.step(
                optimizer
            )  # reads whether one did, unless the optimizer's kernel can skip by itself
            return
        [overflows] = self.scaler._found_inf_per_device(optimizer).values()  # as `unscale_` found
        written = written_by_step(optimizer)
        before = flattened(written.values())
        optimizer.step()
        written |= written_by_step(
            optimizer
        )  # in the same order; the state that this step has made comes last
        for dtype, after in flattened(written.values()).items():
            old = before.get(dtype, after[:0])
            if len(old) < len(after):
                old = torch.cat([old, after.new_zeros(len(after) - len(old))])
            torch.where(overflows.bool(), old, after, out=after)
            copy_flattened([value for value in written.values() if value.dtype == dtype], after)

    def gradient_norm(self, model):
        """(1,) device tensor: the norm of the last step's gradient, 0 where there was none. Not part of the
        step: only the last one before a metric sync is used."""
        gradients = [p.grad.float() for p in model.parameters() if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients).to(self.device).reshape(1)

    def sync(self):
        """Wait for all work that was queued on the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    # Randomness

    def seed(self, number):
        """Seed this rank's generators with a number or a tuple of them. Ranks get different seeds, so that
        dropout differs."""
        mixed = np.random.SeedSequence((*np.atleast_1d(number).tolist(), self.world.rank)).generate_state(1)
        torch.manual_seed(int(mixed[0]))

    def random_state(self):
        """The generators' state, as a dict of CPU tensors and integers."""
        on_gpu = {"cuda": torch.cuda.get_rng_state()} if self.device.type == "cuda" else {}
        return {"cpu": torch.get_rng_state(), **on_gpu}

    def set_random_state(self, state):
        """Restore what `random_state` returned; the state of another kind of device is ignored."""
        torch.set_rng_state(state["cpu"])
        if self.device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"])

    # Watchdog, and what the device reports

    def start_watchdog(self, timeout_s, stacks, *, kills_process, steps=None):
        """Have `Watchdog` guard this process from now on."""
        self.watchdog = Watchdog(timeout_s, stacks, kills_process=kills_process, steps=steps)
        self.heartbeat(0)

    def heartbeat(self, step):
        """Report that this rank is alive. step: the number of steps taken."""
        self.step = step
        if self.watchdog:
            self.watchdog.heartbeat(step)

    def compilations(self):
        """(number of graphs compiled, seconds it took) since the process started."""
        return 0, 0.0

    def pop_compile_events(self):
        """What was compiled of the functions given to `compile` since the last call, as a list of dicts.

        what: the function's name. programs: the number of compiled graphs. seconds: the time that took. why:
        sentences, see `recompiles`; none the first time. refused: whether it raised UnexpectedRecompilation.
        On a GPU `programs` counts captured graphs: 0 where the function cannot be captured, for the reason in
        `why`."""
        taken, self.compile_events = self.compile_events, []
        return taken

    def reset_statistics(self):
        """Reset this process's compile events, signatures and fallback counts, and on a GPU the peak of
        memory."""
        self.compile_events = []
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def counters(self):
        """The accelerator's own counters; empty where there are none. See `XLARuntime.counters`."""
        return {}

    def traced(self, folder):
        """Context manager: profile the device and this process, for TensorBoard, in `folder`."""
        from torch.profiler import profile, tensorboard_trace_handler

        return profile(on_trace_ready=tensorboard_trace_handler(str(folder)), record_shapes=True)

    def memory(self):
        """[(peak bytes, total bytes)] of each device of this process, or [] where that cannot be read."""
        if self.device.type != "cuda":
            return []
        total = torch.cuda.get_device_properties(self.device).total_memory
        return [(torch.cuda.max_memory_allocated(), total)]

    def evaluation_batch(self, batch_size):
        """How many samples to predict at once in a training of batches of `batch_size`: on one GPU up to
        EVALUATION_BATCH, as a few take the host longer than the GPU. They fit, as one predicted takes no more
        memory than one trained."""
        memory = self.memory()
        # Without a step the memory that one takes is unknown.
        if self.accelerator != "cuda" or self.world.size > 1 or self.step == 0 or not memory:
            return batch_size
        [(peak, total)] = memory
        return batch_size * max(
            min(EVALUATION_BATCH // batch_size, int(total / cuda_graph.MEMORY_SHARE / peak)), 1
        )

    def memory_size(self):
        """Bytes of memory of one device; of the host where that cannot be read or is the device."""
        found = self.memory()
        return found[0][1] if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
