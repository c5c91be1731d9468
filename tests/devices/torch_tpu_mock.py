"""torch_tpu on CPU tensors: a mock that records what is called of the package, for machines without a TPU.

`python -m tests.devices.torch_tpu_mock '{"run": ..., "data": ..., "cores": [8, ...], "accident": ...}'`
launches a training on mock chips, once for each number of cores, and prints one JSON line; under torchrun, of
each rank."""

import atexit
import contextlib
import json
import os
import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist

from tpukit.devices import torch_tpu_private
from tpukit.host import environment

VERSIONS = dict(torch="2.13.0+cpu", torch_tpu="0.2.0", libtpu="0.0.52")
# Without these the package opens no chip in a process that has a WORLD_SIZE.
OF_A_RANK = (
    "RANK",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCH_TPU_SLICEBUILDER_ADDRESSES",
    "TORCH_TPU_TOPOLOGY",
)


class Recorder:
    """calls: (dotted name, arguments, keywords) of everything that was called through `record`."""

    def __init__(self):
        self.calls = []

    def record(self, name, result=None):
        def call(*arguments, **keywords):
            self.calls.append((name, arguments, keywords))
            return result(*arguments, **keywords) if callable(result) else result

        return call

    def names(self):
        return {name for name, _, _ in self.calls}


def install(replace=setattr):
    """Put the names of torch_tpu into this process, on CPU tensors. Returns the Recorder. replace: as
    setattr."""
    recorder = Recorder()
    record = recorder.record
    tpu = types.ModuleType("torch.tpu")
    tpu.get_device_name = record("torch.tpu.get_device_name", "TPU v5 lite")
    tpu.get_device_properties = record(
        "torch.tpu.get_device_properties", types.SimpleNamespace(total_memory=16 * 2**30)
    )
    tpu.is_initialized = record("torch.tpu.is_initialized", False)
    tpu.default_generators = (torch.Generator(),)
    tpu._shutdown_runtime = shut_down
    tpu.distributed = types.ModuleType("torch.tpu.distributed")
    package, internal = types.ModuleType("torch_tpu"), types.ModuleType("torch_tpu._internal")
    internal.env_utils = types.SimpleNamespace(_resolved_values={})

    def set_launch_variables(nproc_per_node):
        addresses = ",".join(f"localhost:{8470 + index}" for index in range(nproc_per_node))
        for name, value in dict(
            TORCH_TPU_SLICEBUILDER_ADDRESSES=addresses, TORCH_TPU_TOPOLOGY="2,4,1"
        ).items():
            if name not in os.environ:
                os.environ[name] = internal.env_utils._resolved_values.setdefault(name, value)

    tpu.distributed.set_tpu_launch_env = record(
        "torch.tpu.distributed.set_tpu_launch_env", set_launch_variables
    )
    internal.profiler = types.ModuleType("torch_tpu._internal.profiler")
    internal.profiler.profile = record(
        "torch_tpu._internal.profiler.profile", lambda **_: contextlib.nullcontext()
    )
    internal.profiler.xprof_trace_handler = record(
        "torch_tpu._internal.profiler.xprof_trace_handler", lambda dir_name: dir_name
    )
    for module in (tpu, tpu.distributed, package, internal, internal.profiler):
        sys.modules[module.__name__] = module
    replace(torch, "tpu", tpu)
    replace(torch, "compile", record("torch.compile", lambda function, dynamic: function))
    replace(torch, "set_float32_matmul_precision", record("torch.set_float32_matmul_precision"))
    for name, result in dict(synchronize=None, current_device_index=0).items():
        replace(torch.accelerator, name, record(f"torch.accelerator.{name}", result))
    replace(torch_tpu_private, "open_device", open_device)
    replace(torch_tpu_private, "BACKEND", "gloo")
    return recorder


def open_device():
    missing = [name for name in OF_A_RANK if name not in os.environ and "WORLD_SIZE" in os.environ]
    if missing:
        raise RuntimeError(
            f"missing required environment variables for distributed training: {', '.join(missing)}"
        )
    return torch.device("cpu")


def shut_down():
    """What the package does when a process ends."""
    if dist.is_initialized():
        dist.barrier()


def remove():
    """Take the mock's modules away again."""
    for name in [
        name for name in sys.modules if name.partition(".")[0] == "torch_tpu" or name.startswith("torch.tpu")
    ]:
        del sys.modules[name]


def machine(cores):
    """The Environment of a machine with so many chips and torch_tpu."""
    found = dict(
        host="kaggle",
        accelerator="tpu",
        cores=cores,
        device_name="v5litepod-8",
        python="3.12",
        versions=VERSIONS,
    )
    return environment.Environment(
        **found, outputs=Path.cwd(), drive=None, inputs=Path("inputs"), variables={}
    )


def main(run, data, cores, accident="", **settings):
    from tests.launching.launched import Watched
    from tpukit import Run, TpukitError, launch, train

    atexit.register(shut_down)
    recorder, ends = install(), []
    for number, count in enumerate(cores):
        environment.detect = lambda: machine(max(count, 1))
        task = Watched(
            dataset_dir=Path(data), accident=accident if number == 0 else "", precision="fp32", **settings
        )
        try:
            ends.append(dict(result=launch(train, task, Run.open(Path(run), task), cores=count)))
        except TpukitError as error:
            ends.append(dict(error=str(error)))
    launches = [keywords for name, _, keywords in recorder.calls if name.endswith("set_tpu_launch_env")]
    about = dict(rank=int(os.environ.get("RANK", 0)), visible=os.environ.get("TPU_VISIBLE_DEVICES"))
    print("DONE " + json.dumps(dict(about, ends=ends, launches=launches)))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
