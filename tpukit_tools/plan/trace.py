"""Trace a training step, in a process of its own, because it opens torch_xla's CPU device."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpukit.host.errors import TpukitError
from tpukit_tools import subprocess_call
from tpukit_tools.plan import compiler
from tpukit_tools.subprocess_call import from_request, to_request

if TYPE_CHECKING:
    from tpukit.devices.runtime import Runtime
    from tpukit.training.data import Batch
    from tpukit.training.task import Task
    from tpukit_tools.plan.compiler import Machine


def trace_step(task: Task, size: int, machine: Machine, folder: Path) -> dict[str, Any]:
    """Return the graph of a training step at a global batch size: kernels (see `ExportRuntime`), path
    of its StableHLO in the folder, and resident_bytes, what a core keeps besides: the average of the
    weights, and the set that is not used."""
    request = to_request(task) | dict(
        size=size,
        cores=machine.chips,
        compiler=str(compiler.folder_of()),
        path=str(folder / "step.mlirbc"),
    )
    try:
        # The flags of this process are for its own device.
        return subprocess_call.call(answer, request, variables=dict(XLA_FLAGS=None, LIBTPU_INIT_ARGS=None))
    except TpukitError as error:
        what = f"the step of {task.name} at batch {size} cannot be traced: {error}"
        if "torch_xla" in what or "_XLAC" in what:
            what += "; in a separate environment: pip install torch==2.9.0 torch-xla==2.9.0"
        raise TpukitError(what) from error


# In the process that traces


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return what a request of `trace_step` asks for, and write the StableHLO of the last epoch's step."""
    from tpukit.training.schedule import lr_factor
    from tpukit.training.step import TrainingStep
    from tpukit_tools.plan.xla_export import ExportRuntime

    task = from_request(request)
    os.environ["PYTHONPATH"] = request["compiler"]  # jax, for the processes that lower kernels
    runtime = ExportRuntime(task.precision, request["cores"])
    # The average of the weights has a graph of its own.
    plain = dataclasses.replace(task, ema_decay=None, compile="auto")
    step = TrainingStep(plain, runtime, task.model().train())
    averaged_bytes = sum(v.nbytes for v in step.model.state_dict().values()) if task.ema_decay else 0
    batch, compose, resident_bytes = first_batch(task, runtime, request["size"])
    step.compile(compose)
    arguments = step.arguments(batch, task.epochs, lr_factor(task, 0, 1))
    runtime.sync()
    step.compiled(*arguments)
    (graph,) = runtime.graphs
    Path(request["path"]).write_bytes(graph.pop("stablehlo"))
    return graph | dict(path=request["path"], resident_bytes=averaged_bytes + resident_bytes)


def first_batch(task: Task, runtime: Runtime, size: int) -> tuple[Batch, Callable[[Batch], Batch], int]:
    """Return (a core's batch on the device, the function that composes it there, bytes of the test set)."""
    import numpy as np

    from tpukit.training.data import BatchLoader, BatchSpec, identity

    if not task.dataset_dir:
        return runtime.put_batch(task.example(size // runtime.world.size)), identity, 0
    sets = task.datasets()
    loader, unused = [BatchLoader(data, runtime, on=task.data_on, workers=0) for data in sets]
    numbers = np.random.default_rng(0).random((size, sets[0].num_uniforms))
    batch = next(loader.batches([BatchSpec(np.arange(size) % len(sets[0]), numbers)]))
    return batch, loader.compose, unused.resident_bytes
