"""Trace a plan's graphs, in a process of its own: `python -m tpukit.tools.plan_trace FOLDER`, with `plan`'s
request on stdin.

torch_xla's CPU device stands for the TPU, or torch_tpu lowers what the CPU traces. All its calls into
training are here."""

import functools
import json
import os
import sys
from pathlib import Path

from tpukit.host.errors import TpukitError
from tpukit.runs.run import settings_dict
from tpukit.training.task import from_request


def trace_graphs(request, folder):
    """The graphs of a request of `plan`, as numbered files, and traced.json about them."""
    if request["backend"] == "torch_tpu":
        from tpukit.devices.torch_tpu_export import TorchTPUExportRuntime as ExportRuntime
    else:
        from tpukit.devices.xla_export import ExportRuntime

        os.environ["PYTHONPATH"] = request[
            "compiler"
        ]  # jax, for the processes that lower kernels, and not for this one
    task, part, size = from_request(request), request["part"], request["size"]
    runtime = ExportRuntime(task.precision, request["cores"], request["memory_size"], spmd=request["spmd"])
    if part == "train":
        _, resident_bytes = _trace_step(task, runtime, size, task.epochs)
    elif part == "evaluate":
        resident_bytes = _trace_prediction(task, runtime, size)
    else:
        resident_bytes = _trace_session(task, runtime, size)
    for number, graph in enumerate(runtime.graphs):
        (folder / f"{number}.mlirbc").write_bytes(graph.pop("stablehlo"))
    (folder / "traced.json").write_text(
        json.dumps(dict(graphs=runtime.graphs, resident_bytes=resident_bytes))
    )


def _trace_step(task, runtime, size, epoch):
    """Trace the training step of an epoch. Returns (the model with its gradients, how many bytes a core keeps
    besides)."""
    from tpukit.training import layers, schedule
    from tpukit.training.metrics import new_sums
    from tpukit.training.step import train_step

    model = _place_model(task, runtime, training=True)
    averaged_bytes = sum(value.nbytes for value in model.state_dict().values()) if task.ema_decay else 0
    optimizer = layers.make_optimizer(task, model)
    runtime.init_optimizer_state(optimizer)
    batch, compose, resident_bytes = _first_batch(task, runtime, size, training=True)
    arguments = runtime.scalar(epoch), new_sums(runtime), runtime.scalar(schedule.lr_factor(task, 0, 1))
    runtime.sync()
    step = functools.partial(train_step, task, model, optimizer, runtime, compose)
    runtime.compile(step, name="step", changes=(model, optimizer))(batch, *arguments)
    return model, averaged_bytes + resident_bytes


def _trace_prediction(task, runtime, size, epoch=None):
    """Trace what predicts a batch with the weights of an epoch. Returns how many bytes a core keeps
    besides."""
    model = _place_model(task, runtime, training=False)
    batch, compose, resident_bytes = _first_batch(task, runtime, size, training=False)
    runtime.sync()
    if task.dataset_dir:
        batch = runtime.inference(compose)(batch)
    task.predictor(model, runtime, epoch)(batch)
    return resident_bytes


def _trace_session(task, runtime, size):
    """Trace every graph that `train` compiles, in all phases of the task. Returns how many bytes a core keeps
    besides."""
    from tpukit.training import ema, metrics

    runtime.exports_pending = True
    epochs = sorted({0, *task.milestones(settings_dict(task)), task.epochs})
    for epoch in epochs:
        model, resident_bytes = _trace_step(task, runtime, size, epoch)
        clipped = task.clip_norm is not None
        metrics.sync(
            metrics.new_sums(runtime), model, runtime, clipped=clipped, stop_signal=None, save_due=False
        )
    if task.ema_decay:
        ema.WeightEMA(_place_model(task, runtime, training=True), task.ema_decay, runtime).step(ema.EVERY)
    for epoch in epochs:
        _trace_prediction(task, runtime, size, epoch)
    return resident_bytes


def _place_model(task, runtime, *, training):
    from tpukit.training import batch_norm, layers

    model = task.model().train(training)
    if task.batch_norm == "frozen":
        batch_norm.freeze(model)
    layers.freeze(task, model)
    return runtime.place(model)


def _first_batch(task, runtime, size, *, training):
    """(a core's batch on the device, the function that composes it there, bytes of the sets that it does not
    use)."""
    import numpy as np

    from tpukit.training.data import BatchLoader, BatchSpec, identity

    if not task.dataset_dir:
        return runtime.put_batch(task.example(size // runtime.world.size)), identity, 0
    data, *others = task.datasets() if training else [task.test_set()]
    others_bytes = sum(
        BatchLoader(other, runtime, on=task.data_on, workers=0).bytes_per_core for other in others
    )
    loader = BatchLoader(data, runtime, on=task.data_on, workers=0)
    numbers = np.random.default_rng(0).random((size, data.num_uniforms)) if training else None
    batch = next(loader.batches([BatchSpec(np.arange(size) % len(data), numbers)]))
    return batch, loader.compose, others_bytes


if __name__ == "__main__":
    try:
        trace_graphs(json.loads(sys.stdin.read()), Path(sys.argv[1]))
    except TpukitError as error:
        sys.exit(str(error))
    sys.stdout.flush()
    os._exit(0)  # the graphs hold the whole step unfinished; an orderly exit would run it
