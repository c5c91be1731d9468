"""The learning rate over a training run: a number on the host that the step gets as an argument."""

import math

from tpukit.training.task import Task


def lr_factor(task: Task, step: int, steps_per_epoch: int) -> float | None:
    """Return the factor of the optimizer's learning rates in a step; None if they never change.

    step: from 0. It depends on these arguments alone, so a resumed run continues where it was. As torch's
    LinearLR from 1 / (W + 1) over the W steps of the warm-up, then CosineAnnealingLR over all that remain."""
    if task.schedule == "constant" and not task.warmup_epochs:
        return None
    warm_up = round(task.warmup_epochs * steps_per_epoch)
    if task.schedule == "cosine" and step >= warm_up:
        done = (step - warm_up) / max(task.epochs * steps_per_epoch - warm_up, 1)
        return (1 + math.cos(math.pi * min(done, 1.0))) / 2
    return min(1.0, (step + 1) / (warm_up + 1))
