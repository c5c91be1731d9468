"""torch_tpu on CPU tensors: a mock of what tpukit calls of the package, for machines without a TPU.

`python -m tests.tpukit.devices.torch_tpu_mock RUN DATA` launches a training on two mock chips."""

import os
import sys
from pathlib import Path
from types import ModuleType

import torch

from tpukit.devices import torch_tpu
from tpukit.host import environment

VERSIONS = dict(torch="2.13.0+cpu", torch_tpu="0.2.0", libtpu="0.0.52")
TRAINING = dict(batch_norm="frozen", precision="fp32")  # whose losses are the same on any number of cores
# Without these the package opens no chip in a process that has a WORLD_SIZE.
OF_A_RANK = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
OF_A_RANK += ("TORCH_TPU_SLICEBUILDER_ADDRESSES", "TORCH_TPU_TOPOLOGY")


def install(replace=setattr):
    """Put the names of torch_tpu into this process, on CPU tensors. Returns a list that gets the name and the
    arguments of each call that matters. replace: as setattr."""
    calls = []

    def recorded(name):
        return lambda *arguments, **keywords: calls.append((name, arguments, keywords))

    def set_tpu_launch_env(nproc_per_node):
        addresses = ",".join(f"localhost:{8470 + index}" for index in range(nproc_per_node))
        found = dict(TORCH_TPU_SLICEBUILDER_ADDRESSES=addresses, TORCH_TPU_TOPOLOGY="2,4,1")
        for name in found.keys() - os.environ.keys():
            os.environ[name] = found[name]

    def compiled(function, dynamic):
        name = getattr(function, "__name__", type(function).__name__)
        calls.append(("compile", (name,), dict(dynamic=dynamic)))
        return function

    names = {
        "torch_tpu": {},
        "torch.tpu": dict(
            get_device_name=lambda: "TPU v5 lite",
            is_initialized=lambda: False,
            default_generators=(torch.Generator(),),
        ),
        "torch.tpu.distributed": dict(set_tpu_launch_env=set_tpu_launch_env),
    }
    for name, members in names.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(members)
    replace(torch, "tpu", sys.modules["torch.tpu"])
    replace(torch.tpu, "distributed", sys.modules["torch.tpu.distributed"])
    replace(torch, "compile", compiled)
    replace(torch, "set_float32_matmul_precision", recorded("set_float32_matmul_precision"))
    replace(torch.accelerator, "synchronize", recorded("synchronize"))
    replace(torch.accelerator, "current_device_index", lambda: 0)
    replace(torch_tpu, "open_device", open_device)
    replace(torch_tpu, "BACKEND", "gloo")
    return calls


def open_device():
    missing = [name for name in OF_A_RANK if name not in os.environ and "WORLD_SIZE" in os.environ]
    if missing:
        raise RuntimeError(f"missing required environment variables: {', '.join(missing)}")
    return torch.device("cpu")


def machine(cores):
    """The Environment of a machine with so many chips and torch_tpu."""
    return environment.Environment(
        host="kaggle",
        accelerator="tpu",
        cores=cores,
        device_name="v5litepod-8",
        python="3.12",
        versions=VERSIONS,
        outputs=Path.cwd(),
        drive=None,
        inputs=Path("inputs"),
    )


def main(run, data):
    from tests.tpukit.launching.launched import Watched
    from tpukit import Run, launch, train

    install()
    environment.detect = lambda: machine(2)
    task = Watched(dataset_dir=Path(data), log_every=1, num_workers=1, **TRAINING)
    launch(train, task, Run.open(Path(run), task))


if __name__ == "__main__":
    main(*sys.argv[1:])
