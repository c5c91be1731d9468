"""The runtime of a TPU chip through torch_tpu, Google's backend for torch 2.11 and newer; its device is
called "tpu".

Not yet run on a TPU. Tests run it on CPU tensors with a recording mock of the package, and compare its calls
with the package's own signatures; docs/TORCHTPU.md says what that leaves open."""

import torch

from tpukit.devices import torch_tpu_private
from tpukit.devices.runtime import Runtime
from tpukit.host.errors import TpukitError


class TorchTPURuntime(Runtime):
    """One TPU chip in this process. Models and predictions are compiled graphs; what is around them runs by
    operations.

    Ranks average their gradients as one vector, over the chips' own links.
    """

    compiles = True

    def __init__(self, accelerator="tpu", precision="auto", world=None):
        if precision == "fp16":
            raise TpukitError(
                "precision='fp16': TPUs train in bf16, which needs no loss scaling; use 'bf16' or 'auto'"
            )
        super().__init__(accelerator, precision, world)

    def _open_device(self):
        torch.set_float32_matmul_precision(
            "highest"
        )  # else a TPU rounds fp32 factors to bfloat16, in a bf16 training too
        return torch_tpu_private.open_device()

    def _best_precision(self):
        return "bf16"

    def device_name(self):
        return torch.tpu.get_device_name() + " through torch_tpu"

    def place(self, model, *, channels_last="no"):
        return model.to(self.device)  # whose compiler chooses its own layouts

    def compile(self, function, *, name=None, max_graphs=1, changes=None):
        # Of the step, which changes weights, the model alone is compiled: see `torch_compile`.
        return function if changes else torch.compile(function, dynamic=False)

    def torch_compile(self, model, mode, *, is_captured=False, accumulates=False):
        return torch.compile(model, dynamic=False)  # torch_tpu refuses modes

    def sync(self):
        torch.accelerator.synchronize()

    # `seed` is the base class's: torch.manual_seed seeds every device's generator

    def random_state(self):
        return {**super().random_state(), "tpu": torch_tpu_private.random_generator().get_state()}

    def set_random_state(self, state):
        super().set_random_state(state)
        if "tpu" in state:
            torch_tpu_private.random_generator().set_state(state["tpu"])

    def traced(self, folder):
        return torch_tpu_private.profile(folder)

    def memory_size(self):
        return (
            torch.tpu.get_device_properties().total_memory
        )  # torch_tpu reports no peak, so `memory` stays empty
