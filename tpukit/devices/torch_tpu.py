"""The runtime of a TPU chip through torch_tpu, Google's backend for torch 2.11 and newer; its device is
called "tpu".

Not yet run on a TPU. Tests run it on CPU tensors with a mock of the package, and look the names that are used
here up in the package itself; docs/TPU_GUIDE.md, section 12, says what that leaves open."""

from pathlib import Path

# torch_tpu, which adds torch.tpu, is not installed where types are checked.
# pyright: reportAttributeAccessIssue=false
import torch
from torch import nn

from tpukit.devices import torch_tpu_private
from tpukit.devices.runtime import Runtime


class TorchTPURuntime(Runtime):
    """One TPU chip in this process. Models and predictions are compiled graphs; what is around them runs by
    operations.

    Ranks average their gradients as one vector, over the chips' own links. `seed` is the base class's:
    torch.manual_seed seeds every device's generator. torch_tpu reports no peak of memory."""

    compiles = has_graphs = True
    has_fp16 = False
    generators = {
        **Runtime.generators,
        "tpu": (
            lambda: torch_tpu_private.random_generator().get_state(),
            lambda state: torch_tpu_private.random_generator().set_state(state),
        ),
    }

    def _open_device(self) -> torch.device:
        # Else a TPU rounds fp32 factors to bfloat16, in a bf16 training too.
        torch.set_float32_matmul_precision("highest")
        return torch_tpu_private.open_device()

    def _best_precision(self) -> str:
        return "bf16"

    def device_name(self) -> str:
        return torch.tpu.get_device_name() + " through torch_tpu"

    def to_device(self, model: nn.Module, *, channels_last: str = "no") -> nn.Module:
        return model.to(self.device)  # whose compiler chooses its own layouts

    def compile(self, function, *, name=None, max_graphs=1, mutates=None):
        # In the step, which changes weights, the model alone is compiled: see `torch_compile`.
        return function if mutates else torch.compile(function, dynamic=False)

    def torch_compile(self, model, mode):
        # torch_tpu refuses modes
        return torch.compile(model, dynamic=False) if self.trusts_graphs else model

    def sync(self) -> None:
        torch.accelerator.synchronize()

    def traced(self, folder: Path):
        return torch_tpu_private.profile(folder)

    def memory_size(self) -> float:
        return torch.tpu.get_device_properties().total_memory
