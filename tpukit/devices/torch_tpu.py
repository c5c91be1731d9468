"""A TPU chip through torch_tpu, Google's backend for torch 2.11 and newer; its device is called "tpu".

Not yet run on a TPU. Tests run it on CPU tensors with a mock of the package, and look the names that are used
here up in the package itself; docs/TPU_GUIDE.md, section 12, says what that leaves open. torch_tpu, which
adds torch.tpu, is imported within functions, because most machines lack it."""

# It is not installed where types are checked.
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false
import os

import torch
from torch import nn
from torch.optim import Optimizer

from tpukit.devices.optimizers import count_steps_on_device
from tpukit.devices.runtime import Runtime
from tpukit.devices.tensors import move
from tpukit.host.errors import TpukitError

BACKEND = "cpu:gloo,tpu:tpu_dist"  # for torch.distributed: host memory, and the links between chips


class TorchTPURuntime(Runtime):
    """One TPU chip in this process. Models and predictions are compiled graphs; what is around them runs by
    operations. Ranks average their gradients as one vector, over the chips' own links."""

    compiles = has_graphs = True
    # `torch.tpu.get_rng_state` refuses from torch 2.13 on.
    generators = {
        **Runtime.generators,
        "tpu": (lambda: random_generator().get_state(), lambda state: random_generator().set_state(state)),
    }

    @staticmethod
    def is_open() -> bool:
        import torch_tpu  # noqa: F401

        return torch.tpu.is_initialized()

    @staticmethod
    def set_launch_variables(processes: int) -> None:
        """Set those that are not set, so a session launches one number of processes. Raises TpukitError for
        another number, because the processes would wait for chips that nobody opens."""
        import torch_tpu  # noqa: F401
        from torch.tpu.distributed import set_tpu_launch_env

        set_tpu_launch_env(nproc_per_node=processes)
        addresses = os.environ.get("TORCH_TPU_SLICEBUILDER_ADDRESSES", "")
        chips = len(addresses.split(",")) if addresses else 0
        if chips != processes:
            raise TpukitError(
                f"TORCH_TPU_SLICEBUILDER_ADDRESSES names {chips} TPU chips, but {processes} processes were to"
                " run, one on each: unset it, or restart the session"
            )

    @staticmethod
    def open_for_group(local_rank: int) -> str:
        open_device()  # which makes its backend known to torch.distributed
        return BACKEND

    def _open_device(self) -> torch.device:
        # Else a TPU rounds fp32 factors to bfloat16, in a bf16 training run too.
        torch.set_float32_matmul_precision("highest")
        return open_device()

    def _best_precision(self) -> str:
        return "bf16"

    def device_name(self) -> str:
        return torch.tpu.get_device_name() + " through torch_tpu"

    def to_device(self, model: nn.Module) -> nn.Module:
        return move(model, self.device)  # the compiler chooses its own layouts

    def compile(self, function, *, name=None, max_graphs=1, mutates=None):
        # The step changes weights, so only its loss is compiled: see `torch_compile`.
        return function if mutates else torch.compile(function, dynamic=False)

    def torch_compile(self, function, choice):
        is_compiled = self.trusts_graphs and choice != "no"
        return torch.compile(function, dynamic=False) if is_compiled else function

    def init_optimizer_state(self, optimizer: Optimizer) -> bool:
        if self.device.type == "tpu":
            count_steps_on_device(optimizer)
        return True

    def sync(self) -> None:
        torch.accelerator.synchronize()


def random_generator() -> torch.Generator:
    return torch.tpu.default_generators[torch.accelerator.current_device_index()]


def open_device() -> torch.device:
    """Return the TPU of this process. Raises TpukitError if torch_tpu finds none."""
    import torch_tpu  # noqa: F401  registers the device, if there is one

    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != "tpu":
        raise TpukitError(
            f"torch_tpu finds no TPU here (torch's accelerator is {accelerator}): `tpukit doctor` shows why"
        )
    return torch.device("tpu")
