"""Trace a plan's graphs, in a process of its own: `python -m tpukit.tools.plan.trace FOLDER`, with the
request of `compiler.trace` on stdin."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tpukit.host.errors import TpukitError
from tpukit.training.task import from_request

if TYPE_CHECKING:
    from torch import nn

    from tpukit.devices.runtime import Runtime
    from tpukit.training.data import Batch
    from tpukit.training.task import Task


def trace_graphs(request: dict, folder: Path) -> None:
    """The graphs of a request, as numbered files, and traced.json about them."""
    task, part, size = from_request(request), request["part"], request["size"]
    if request["backend"] == "torch_tpu":
        from tpukit.tools.plan.torch_tpu_export import TorchTPUExportRuntime as ExportRuntime
    else:
        from tpukit.tools.plan.xla_export import ExportRuntime

        # jax, for the processes that lower kernels, and not for this one
        os.environ["PYTHONPATH"] = request["compiler"]
    runtime = ExportRuntime(task.precision, request["cores"], request["memory_size"], spmd=request["spmd"])
    if part == "train":
        _, resident_bytes = trace_step(task, runtime, size, task.epochs)
    elif part == "evaluate":
        resident_bytes = trace_prediction(task, runtime, size)
    else:
        resident_bytes = trace_session(task, runtime, size)
    for number, graph in enumerate(runtime.graphs):
        (folder / f"{number}.mlirbc").write_bytes(graph.pop("stablehlo"))
    traced = dict(graphs=runtime.graphs, resident_bytes=resident_bytes)
    (folder / "traced.json").write_text(json.dumps(traced))


def trace_step(task: Task, runtime: Runtime, size: int, epoch: int) -> tuple[nn.Module, int]:
    """Trace the training step of an epoch. Returns (the model with its gradients, how many bytes a core keeps
    besides)."""
    from tpukit.training.schedule import lr_factor
    from tpukit.training.step import TrainingStep

    # The average of the weights has a graph of its own.
    step = TrainingStep(dataclasses.replace(task, ema_decay=None), runtime, task.model().train())
    averaged_bytes = sum(v.nbytes for v in step.model.state_dict().values()) if task.ema_decay else 0
    batch, compose, resident_bytes = first_batch(task, runtime, size, training=True)
    step.compile(compose)
    arguments = step.arguments(batch, epoch, lr_factor(task, 0, 1))
    runtime.sync()
    step.compiled(*arguments)
    return step.model, averaged_bytes + resident_bytes


def trace_prediction(task: Task, runtime: Runtime, size: int, epoch: int | None = None) -> int:
    """Trace what predicts a batch with the weights of an epoch. Returns how many bytes a core keeps
    besides."""
    from tpukit.training.step import place_model

    model = place_model(task, runtime, task.model().eval())
    batch, compose, resident_bytes = first_batch(task, runtime, size, training=False)
    runtime.sync()
    if task.dataset_dir:
        batch = runtime.inference(compose)(batch)
    task.predictor(model, runtime, epoch)(batch)
    return resident_bytes


def trace_session(task: Task, runtime: Runtime, size: int) -> int:
    """Trace every graph that `train` compiles, in all phases of the task. Returns how many bytes a core keeps
    besides."""
    from tpukit.tools.plan.xla_export import ExportRuntime
    from tpukit.training import ema, metrics
    from tpukit.training.step import place_model

    assert isinstance(runtime, ExportRuntime)  # a session of torch_tpu is refused
    runtime.exports_pending = True
    epochs = sorted({0, task.epochs})
    for epoch in epochs:
        model, resident_bytes = trace_step(task, runtime, size, epoch)
        clipped, sums = task.clip_norm is not None, metrics.new_sums(runtime)
        metrics.sync(sums, model, runtime, clipped=clipped)
    if task.ema_decay:
        model = place_model(task, runtime, task.model().train())
        ema.WeightEMA(model, task.ema_decay, runtime).step(ema.EVERY)
    for epoch in epochs:
        trace_prediction(task, runtime, size, epoch)
    return resident_bytes


def first_batch(
    task: Task, runtime: Runtime, size: int, *, training: bool
) -> tuple[Batch, Callable[[Batch], Batch], int]:
    """(a core's batch on the device, the function that composes it there, bytes of the sets that it does not
    use)."""
    import numpy as np

    from tpukit.training.data import BatchLoader, BatchSpec, identity

    if not task.dataset_dir:
        return runtime.put_batch(task.example(size // runtime.world.size)), identity, 0
    sets = task.datasets() if training else [task.test_set()]
    loader, *others = [BatchLoader(data, runtime, on=task.data_on, workers=0) for data in sets]
    numbers = np.random.default_rng(0).random((size, sets[0].num_uniforms)) if training else None
    batch = next(loader.batches([BatchSpec(np.arange(size) % len(sets[0]), numbers)]))
    return batch, loader.compose, sum(other.resident_bytes for other in others)


if __name__ == "__main__":
    try:
        trace_graphs(json.loads(sys.stdin.read()), Path(sys.argv[1]))
    except TpukitError as error:
        sys.exit(str(error))
    sys.stdout.flush()
    os._exit(0)  # the graphs hold the whole step unfinished; an orderly exit would run it
