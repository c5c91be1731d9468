"""The runtime of a GPU: its precisions, pinned copies, fused optimizers, captured steps."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tpukit.devices import cuda_graph
from tpukit.devices.distributed import World
from tpukit.devices.optimizers import (
    copy_flattened,
    count_steps_on_device,
    flattened,
    parameters_with_gradient,
    state_tensors,
)
from tpukit.devices.runtime import Runtime
from tpukit.host.errors import TpukitError


def check_cuda() -> None:
    """Raise TpukitError if torch cannot use this machine's GPU."""
    if not torch.cuda.is_available():
        raise TpukitError(
            f"this machine has a GPU, but torch {torch.__version__} cannot use it: "
            "it was built without CUDA, or the driver is too old. `tpukit doctor` shows which."
        )


class CUDARuntime(Runtime):
    """One GPU of this process: torch's current one.

    Steps are captured as CUDA graphs (`cuda_graph`). An optimizer updates all weights by one kernel if
    torch has one, and counts its steps on the device."""

    has_graphs = True
    generators = {**Runtime.generators, "cuda": (torch.cuda.get_rng_state, torch.cuda.set_rng_state)}

    def __init__(self, accelerator: str = "cuda", precision: str = "auto", world: World | None = None):
        super().__init__(accelerator, precision, world)
        if self.precision == "fp32":
            _multiply_in_fp32()

    @staticmethod
    def open_for_group(local_rank: int) -> str:
        if torch.backends.cuda.is_built():
            torch.cuda.set_device(local_rank)  # "cuda" means this GPU from here on
        check_cuda()  # second: after a fork from a process that has used CUDA it finds no GPU
        return "cpu:gloo,cuda:nccl"

    def _open_device(self) -> torch.device:
        check_cuda()
        torch.cuda.reset_peak_memory_stats()  # forget what this process did before
        torch.backends.cudnn.benchmark = True  # shapes are fixed; runs may differ by rounding
        return torch.device("cuda")

    def _best_precision(self) -> str:
        # An emulated bf16 (T4, V100) is slower than fp16.
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"

    def device_name(self) -> str:
        return torch.cuda.get_device_name()

    def _computes_faster_channels_last(self, model: nn.Module) -> bool:
        # Tensor cores take channels last, and would transpose all else.
        return self.precision != "fp32" and super()._computes_faster_channels_last(model)

    def _put(self, value: Any) -> Tensor:
        return torch.as_tensor(value).pin_memory().to(self.device, non_blocking=True)

    def compile(self, function, *, name=None, max_graphs=1, mutates=None):
        if mutates is None or not self.trusts_graphs:
            return function
        return cuda_graph.CapturedStep(function, name or function.__name__, mutates, self)

    def init_optimizer_state(self, optimizer: Optimizer) -> bool:
        # Not SGD, whose fused step fails if a gradient comes later.
        if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
            for group in optimizer.param_groups:
                if group["fused"] is None:
                    group["fused"] = True
            if all(group["fused"] for group in optimizer.param_groups):  # as torch's constructors do then
                vars(optimizer)["_step_supports_amp_scaling"] = True
        count_steps_on_device(optimizer)
        vars(optimizer)["_warned_capturable_if_run_uncaptured"] = True  # the first steps do run so
        return True

    def _step_unless_overflow(self, optimizer: Optimizer) -> None:
        """Update the weights, but leave everything on the device as it is if a gradient overflowed.

        torch's scaler reads on the host whether one did, unless the optimizer's kernel can skip by itself: a
        step that is captured cannot wait for that."""
        scaler, can_skip = self.scaler, getattr(optimizer, "_step_supports_amp_scaling", False)
        if can_skip or not scaler.is_enabled() or not torch.cuda.is_current_stream_capturing():
            scaler.step(optimizer)
            return
        [overflows] = scaler._found_inf_per_device(optimizer).values()  # as `unscale_` found
        written = _tensors_of_step(optimizer)  # all that there will be: the warm-ups made the state
        before = flattened(written)
        optimizer.step()
        for dtype, after in flattened(written).items():
            torch.where(overflows.bool(), before[dtype], after, out=after)
            copy_flattened([value for value in written if value.dtype == dtype], after)

    def sync(self) -> None:
        torch.cuda.synchronize()

    def memory(self) -> list[tuple[int, int]]:
        total = torch.cuda.get_device_properties(self.device).total_memory
        return [(torch.cuda.max_memory_allocated(), total)]


def _multiply_in_fp32() -> None:
    """Make fp32 mean fp32: by default convolutions on newer GPUs round their inputs to 10 bits (TF32)."""
    cudnn = torch.backends.cudnn
    with warnings.catch_warnings():
        # From 2.9 on torch has another interface next to this one, and reads of the older fail if the two
        # differ. So both are set, and the older first: it leaves the newer to what is set for all of torch.
        warnings.simplefilter("ignore")
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.allow_tf32 = cudnn.allow_tf32 = False
        for operation in ("conv", "rnn"):
            if hasattr(cudnn, operation):
                getattr(cudnn, operation).fp32_precision = "ieee"


def _tensors_of_step(optimizer: Optimizer) -> list[Tensor]:
    """Return what a step may change on the device: the parameters and their state."""
    return [*parameters_with_gradient(optimizer), *filter(_is_on_gpu, state_tensors(optimizer))]


def _is_on_gpu(value: Tensor) -> bool:
    return value.is_cuda  # counters may be on the host
