"""Total images per second of 1, 2 and 4 processes on this machine, and what share of a step the gradient all-reduce takes."""

import contextlib
import functools
import json
import statistics
import sys
import tempfile
import time

import numpy as np
import torch

from tpukit import MNIST, Run, launch
from tpukit.training.data import BatchLoader
from tpukit.training.metrics import new_sums
from tpukit.training.step import train_step

ROUNDS, STEPS = 7, 20


def leave_gradients(optimizer):
    """In place of `Runtime.all_reduce_gradients`."""


def timed(task, run, *, runtime):
    """Rounds of steps with and without the gradient all-reduce, in turn. Returns seconds per step of the slowest rank."""
    torch.manual_seed(0)
    data, _ = task.datasets()
    model = runtime.place(task.model())
    optimizer = task.optimizer(model)
    runtime.init_optimizer_state(optimizer)
    parallel = runtime.parallel(model)
    loader = BatchLoader(data, runtime, on="host", workers=1)
    step = runtime.compile(functools.partial(train_step, task, parallel, optimizer, runtime, loader.compose), name="step")
    sums = new_sums(runtime)
    plan = [(np.arange(task.batch_size), None, None)] * STEPS
    all_reduce = runtime.all_reduce_gradients
    seconds = {True: [], False: []}
    for round_number in range(2 * ROUNDS + 2):
        summed = round_number % 2 == 0
        runtime.all_reduce_gradients = all_reduce if summed else leave_gradients
        silent = parallel.no_sync() if hasattr(parallel, "no_sync") and not summed else contextlib.nullcontext()
        runtime.world.all_gather([0.0])
        started = time.perf_counter()
        with silent:
            for batch in loader.batches(plan):
                sums = step(batch, 0, sums)
        runtime.sync()
        slowest = max(row[0] for row in runtime.world.all_gather([time.perf_counter() - started]))
        if round_number > 1:
            seconds[summed].append(slowest / STEPS)
    return [seconds[True], seconds[False]]


def main(kind, count, digits):
    task = MNIST(dataset_dir=digits)
    with tempfile.TemporaryDirectory() as folder:
        summed, alone = launch(timed, task, Run.open(folder, task), cores=int(count))
    share = statistics.median(1 - b / a for a, b in zip(summed, alone)) if int(count) > 1 else 0.0
    row = dict(device=kind, processes=int(count), images_per_s=round(task.batch_size / statistics.median(summed)))
    print("ROW " + json.dumps(dict(row, gradient_all_reduce_share=round(share, 3), rounds=len(summed))))


if __name__ == "__main__":
    main(*sys.argv[1:])
