"""One optimizer step, from a batch to the new metric sums. On XLA all of it is one compiled graph.

Each part is the device's: clipping, the loss scaler and the all-reduce are in `devices/runtime.py` and `devices/xla.py`. On
XLA the function is only traced, once; `devices/xla_replay.py` writes the new weights. On one GPU it is captured, by
`devices/cuda_graph.py`, and then no longer called. docs/CONTRIBUTING.md shows what wraps it on each kind of device.
"""

from tpukit.training import metrics


def train_step(task, model, optimizer, runtime, compose, batch, epoch, sums):
    """Take one optimizer step and return the new sums, a tensor as `metrics.new_sums` makes it.

    model: what `Runtime.parallel` returned. compose: `BatchLoader.compose`. batch: dict of tensors on the device, as
    `BatchLoader.batches` yields them. epoch: from 0, as `Runtime.scalar` gives it. The gradients stay until the next step, so
    that their norm can be computed when the metrics are synced.
    """
    batch = compose(batch)  # gathers and augments on the device
    optimizer.zero_grad(set_to_none=True)
    with runtime.autocast():
        loss = task.loss(model, batch, epoch).float()
    runtime.backward(loss, optimizer)  # scales the loss in fp16
    runtime.all_reduce_gradients(optimizer)  # DDP and SPMD have done so in backward
    grad_norm = runtime.clip_gradients(optimizer, task.clip_norm)  # None where clip_norm is None
    runtime.optimizer_step(optimizer)
    return metrics.accumulate(sums, loss.detach(), grad_norm, overflow_is_skipped=runtime.scaler is not None)
