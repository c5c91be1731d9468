"""One optimizer step, from a batch to the new metric sums. On XLA all of it is one compiled graph.

Each part is the device's: clipping, the loss scaler and the all-reduce are in `devices/runtime.py` and
`devices/xla.py`. On XLA the function is only traced, once; `devices/xla_replay.py` writes the new weights. On
a GPU it is captured, by `devices/cuda_graph.py`, and then no longer called. docs/CONTRIBUTING.md shows what
wraps it on each kind of device."""

from tpukit.training import metrics


def train_step(task, model, optimizer, runtime, compose, batch, epoch, sums, lr_factor=None):
    """Take one optimizer step and return the new sums, a tensor as `metrics.new_sums` makes it.

    model: as `Runtime.torch_compile` returned it. compose: `BatchLoader.compose`. batch: dict of tensors on
    the device, as `BatchLoader.batches` yields them. epoch: from 0, as `Runtime.scalar` gives it. lr_factor:
    of `schedule.lr_factor`, given in the same way. The gradients stay until the next step, so that their norm
    can be computed when the metrics are synced."""
    batch = compose(batch)  # gathers and augments on the device
    optimizer.zero_grad(set_to_none=True)
    loss = add_gradients(task, model, optimizer, runtime, batch, epoch)
    runtime.all_reduce_gradients(optimizer)  # SPMD has done so in backward
    grad_norm = runtime.clip_gradients(optimizer, task.clip_norm)  # None where clip_norm is None
    runtime.optimizer_step(optimizer, lr_factor)
    return metrics.accumulate(sums, loss, grad_norm, overflow_is_skipped=runtime.scaler is not None)


def add_gradients(task, model, optimizer, runtime, batch, epoch):
    """Compute the gradients of a batch, all of it at once or in micro-batches. Returns the loss, a scalar
    without gradient."""
    count, losses = task.micro_batches, []
    for number in range(count):
        is_last = number == count - 1
        part = runtime.barrier_after_gradients(optimizer, micro_batch(batch, number, count))
        with runtime.autocast():
            loss = task.loss(model, part, epoch).float()
        loss = loss if count == 1 else loss / count
        runtime.backward(loss, optimizer, is_last=is_last)  # scales the loss in fp16
        losses.append(loss.detach())
    return sum(losses[1:], start=losses[0])


def micro_batch(batch, number, count):
    """The samples number, number + count, number + 2 count, ... of a batch, a dict of tensors (B, ...).

    Not one after the other: so each core of SPMD, which has the batch in contiguous shares, keeps its own
    samples."""
    if count == 1:
        return batch
    return {name: values.unflatten(0, (-1, count))[:, number] for name, values in batch.items()}
