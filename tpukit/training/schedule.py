"""The learning rate over a training run: a number on the host that the step gets as an argument."""

import math

from tpukit.training.task import Task


def planned_epochs(task: Task, steps_per_epoch: int) -> float:
    """Return how many passes over the training set a task plans: of `max_steps` not always a whole number."""
    return task.epochs if task.max_steps is None else task.max_steps / steps_per_epoch


def lr_factor(task: Task, step: int, steps_per_epoch: int, epochs: float | None = None) -> float | None:
    """Return the factor of the optimizer's learning rates in a step; None if they never change.

    step: from 0. epochs: in place of those that the task plans. It depends on these arguments alone, so a
    resumed run continues where it was. As torch's LinearLR from 1 / (W + 1) over the W steps of the warm-up,
    then CosineAnnealingLR over all that remain."""
    if task.schedule == "constant" and not task.warmup_epochs:
        return None
    warm_up = round(task.warmup_epochs * steps_per_epoch)
    if task.schedule == "cosine" and step >= warm_up:
        epochs = planned_epochs(task, steps_per_epoch) if epochs is None else epochs
        done = (step - warm_up) / max(round(epochs * steps_per_epoch) - warm_up, 1)
        return (1 + math.cos(math.pi * min(done, 1.0))) / 2
    return min(1.0, (step + 1) / (warm_up + 1))


def note(task: Task, step: int, steps_per_epoch: int, planned: float) -> str:
    """Return a sentence if a resumed run has other learning rates than it was `planned` with, in epochs; else
    an empty one."""
    epochs = planned_epochs(task, steps_per_epoch)
    if task.schedule == "constant" or planned == epochs:
        return ""
    before, now = (lr_factor(task, step, steps_per_epoch, one) for one in (planned, epochs))
    return (
        f"the {task.schedule} schedule was planned for {planned:g} epochs and is now for {epochs:g}: in step"
        f" {step + 1} the learning rate is {now:.1%} of lr instead of {before:.1%}"
    )


def moment(step: int, epochs: float) -> str:
    """Name a moment of a training run: epoch 3, or step 500 within an epoch. epochs: that have passed."""
    return f"epoch {epochs:.0f}" if epochs == int(epochs) else f"step {step}"
