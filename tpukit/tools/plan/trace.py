"""Trace the graphs of a step, in a process of its own, because it opens torch_xla's CPU device."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpukit.host.errors import TpukitError
from tpukit.tools import child
from tpukit.tools.plan import compiler
from tpukit.training.task import from_request, to_request

if TYPE_CHECKING:
    from tpukit.devices.chips import Machine
    from tpukit.devices.runtime import Runtime
    from tpukit.training.data import Batch
    from tpukit.training.task import Task


def trace_graphs(
    task: Task, part: str, size: int, machine: Machine, folder: Path
) -> tuple[list[dict[str, Any]], int]:
    """Return (graphs, resident bytes) of a part of `plan` at a global batch size.

    A graph is a dict: name, digest, kernels (see `ExportRuntime`), path of its StableHLO in the folder, and
    times, how often a batch runs it. Resident bytes: what a core keeps beside them, which is the average of
    the weights, and the set that is not used."""
    request = to_request(task) | dict(
        part=part,
        size=size,
        cores=machine.chips,
        memory_size=int(machine.chip.hbm_bytes),
        compiler=str(compiler.folder_of()),
        target=str(folder),
    )
    try:
        # The flags of this process are for its own device.
        traced = child.call(answer, request, variables=dict(XLA_FLAGS=None, LIBTPU_INIT_ARGS=None))
    except TpukitError as error:
        if "No module named 'torch_xla'" in str(error) or "_XLAC" in str(error):
            raise TpukitError(
                f"a plan needs a torch_xla that matches torch, to trace the step ({error}). In a separate"
                " environment: pip install torch==2.9.0 torch-xla==2.9.0"
            ) from error
        raise TpukitError(
            f"the {part} step of {task.name} at batch {size} cannot be traced: {error}"
        ) from error
    different: dict[str, dict[str, Any]] = {}
    for number, graph in enumerate(traced["graphs"]):
        graph |= dict(path=folder / f"{number}.mlirbc", times=0)
        different.setdefault(graph["digest"], graph)["times"] += 1
    return list(different.values()), traced["resident_bytes"]


# In the process that traces


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return what a request of `trace_graphs` asks for, and write the graphs as numbered files."""
    from tpukit.tools.plan.xla_export import ExportRuntime

    task, size = from_request(request), request["size"]
    os.environ["PYTHONPATH"] = request["compiler"]  # jax, for the processes that lower kernels
    runtime = ExportRuntime(task.precision, request["cores"], request["memory_size"])
    trace_part = trace_step if request["part"] == "train" else trace_prediction
    resident_bytes = trace_part(task, runtime, size)
    for number, graph in enumerate(runtime.graphs):
        Path(request["target"], f"{number}.mlirbc").write_bytes(graph.pop("stablehlo"))
    return dict(graphs=runtime.graphs, resident_bytes=resident_bytes)


def trace_step(task: Task, runtime: Runtime, size: int) -> int:
    """Trace the training step of the last epoch. Return how many bytes a core keeps besides."""
    from tpukit.training.schedule import lr_factor
    from tpukit.training.step import TrainingStep

    # The average of the weights has a graph of its own.
    step = TrainingStep(dataclasses.replace(task, ema_decay=None), runtime, task.model().train())
    averaged_bytes = sum(v.nbytes for v in step.model.state_dict().values()) if task.ema_decay else 0
    batch, compose, resident_bytes = first_batch(task, runtime, size, training=True)
    step.compile(compose)
    arguments = step.arguments(batch, task.epochs, lr_factor(task, 0, 1))
    runtime.sync()
    step.compiled(*arguments)
    return averaged_bytes + resident_bytes


def trace_prediction(task: Task, runtime: Runtime, size: int) -> int:
    """Trace what predicts a batch. Return how many bytes a core keeps besides."""
    from tpukit.training.step import place_model

    model = place_model(task, runtime, task.model().eval())
    batch, compose, resident_bytes = first_batch(task, runtime, size, training=False)
    runtime.sync()
    if task.dataset_dir:
        batch = runtime.inference(compose)(batch)
    task.predictor(model, runtime, None)(batch)
    return resident_bytes


def first_batch(
    task: Task, runtime: Runtime, size: int, *, training: bool
) -> tuple[Batch, Callable[[Batch], Batch], int]:
    """Return (a core's batch on the device, the function that composes it there, bytes of the sets that it
    does not use)."""
    import numpy as np

    from tpukit.training.data import BatchLoader, BatchSpec, identity

    if not task.dataset_dir:
        return runtime.put_batch(task.example(size // runtime.world.size)), identity, 0
    sets = task.datasets() if training else [task.test_set()]
    loader, *others = [BatchLoader(data, runtime, on=task.data_on, workers=0) for data in sets]
    numbers = np.random.default_rng(0).random((size, sets[0].num_uniforms)) if training else None
    batch = next(loader.batches([BatchSpec(np.arange(size) % len(sets[0]), numbers)]))
    return batch, loader.compose, sum(other.resident_bytes for other in others)
