"""The learning rate over a training run: a number on the host that the step gets as an argument."""

import math

from tpukit.training.task import Task


def lr_factor(task: Task, step: int, steps_per_epoch: int, epochs: int | None = None) -> float | None:
    """Return the factor of the optimizer's learning rates in a step; None if they never change.

    step: from 0. epochs: in place of the task's. It depends on these arguments alone, so a resumed run
    continues where it was. As torch's LinearLR from 1 / (W + 1) over the W steps of the warm-up, then
    CosineAnnealingLR over all that remain."""
    if task.schedule == "constant" and not task.warmup_epochs:
        return None
    warm_up = round(task.warmup_epochs * steps_per_epoch)
    if task.schedule == "cosine" and step >= warm_up:
        epochs = task.epochs if epochs is None else epochs
        done = (step - warm_up) / max(epochs * steps_per_epoch - warm_up, 1)
        return (1 + math.cos(math.pi * min(done, 1.0))) / 2
    return min(1.0, (step + 1) / (warm_up + 1))


def note(task: Task, step: int, steps_per_epoch: int, planned: int) -> str:
    """Return a sentence if a resumed run has other learning rates than it was `planned` with, in epochs; else
    an empty one."""
    if task.schedule == "constant" or planned == task.epochs:
        return ""
    before, now = (lr_factor(task, step, steps_per_epoch, epochs) for epochs in (planned, task.epochs))
    return (
        f"the {task.schedule} schedule was planned for {planned} epochs and is now for {task.epochs}: in step"
        f" {step + 1} the learning rate is {now:.1%} of lr instead of {before:.1%}"
    )
