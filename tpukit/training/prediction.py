"""Predict a test set, or test images to show.

All of it is `predict_batches`: batches of one size in, predictions on the CPU out, in their order."""

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map

from tpukit.devices.runtime import Runtime
from tpukit.host.errors import TpukitError
from tpukit.runs import weights
from tpukit.runs.run import Run
from tpukit.training.data import Batch, BatchLoader, evaluation_index_batches
from tpukit.training.task import Task

BATCH_SIZE = 16  # for predictions outside of a training run


def open_predictor(task: Task, best: Path, runtime: Runtime) -> Callable[[Batch], object]:
    """Return a function batch of tensors on the runtime's device -> predictions there, with the weights of
    the file `best`."""
    model = task.model().eval()
    weights.load(model, best)
    model = runtime.to_device(model)
    return task.predictor(model, runtime, weights.epoch_of(best))


def predict_batches(
    predictor: Callable[[Batch], object],
    batches: Iterable[Batch],
    runtime: Runtime,
    keys: Iterable[str] | None = None,
) -> Iterator[tuple[object, Batch]]:
    """Yield (prediction, batch) of each batch, both on the CPU, once the device has the next one to predict.

    batches: on the device, each with `valid`. keys: the arrays that are read back besides `valid`; None for
    all."""
    pending = collections.deque()
    for number, batch in enumerate(batches):
        runtime.seed_device(number)
        names = batch if keys is None else (*keys, "valid")
        pending.append((predictor(batch), {name: batch[name] for name in names}))
        runtime.world.heartbeat(runtime.world.step)
        if len(pending) > 1:
            yield runtime.to_cpu(pending.popleft())
    yield from map(runtime.to_cpu, pending)


# A test set


def predict_set(
    task: Task,
    model: nn.Module,
    loader: BatchLoader,
    runtime: Runtime,
    *,
    epoch: int | None,
    batch_size: int | None = None,
) -> Generator[list[tuple[object, Batch]], None, None]:
    """Yield, for each batch, the (prediction, batch) of every rank, on the CPU; on ranks other than 0 none.
    batch: the arrays in `task.evaluation_keys`.

    epoch: see `Task.predict`. batch_size: samples of a batch, over all ranks; None for the task's. Raises
    TpukitError if there are no samples."""
    if not len(loader.data):
        where = task.dataset_dir or type(task).__name__
        raise TpukitError(f"{where}: the test set is empty; add samples to it")
    predictor = task.predictor(model, runtime, epoch)
    compose = loader.compose if loader.resident is None else runtime.inference(loader.compose)
    model.eval()
    plan = evaluation_index_batches(len(loader.data), batch_size or task.batch_size)
    with contextlib.closing(loader.batches(plan)) as batches:
        for pair in predict_batches(predictor, map(compose, batches), runtime, task.evaluation_keys):
            yield runtime.world.gather(pair)


def predict_test_images(run: Run, task: Task, count: int) -> tuple[Batch, Any]:
    """Return (batch, predictions) of up to `count` test images, evenly spaced, by the run's best weights, on
    the CPU.

    Raises TpukitError if the run has no best weights yet."""
    # On a TPU the notebook's own process must not open the device: no cores could be launched from it later.
    best, runtime = run.best(), Runtime("cpu")
    task = dataclasses.replace(task, weights=best)
    data = task.test_set()
    indices = np.linspace(0, len(data) - 1, min(count, len(data))).astype(int)

    def batches() -> Iterator[Batch]:
        for first in range(0, len(indices), BATCH_SIZE):
            part = indices[first : first + BATCH_SIZE]
            arrays = data.batch(part) | dict(valid=np.ones(len(part), bool))
            yield runtime.put_batch(arrays)

    pairs = list(predict_batches(open_predictor(task, best, runtime), batches(), runtime))
    batch = _join([batch for _, batch in pairs])
    predictions = _join([prediction for prediction, _ in pairs])
    return batch, predictions


def _join(parts: list[Any]) -> Any:
    """Return pytrees of one structure as one: the tensors at each of its places are joined along the first
    axis."""
    return tree_map(lambda *tensors: torch.cat(tensors), *parts)
