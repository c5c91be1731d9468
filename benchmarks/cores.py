"""Several cores: images per second of 1, 2 and 4 processes on this machine, and what share of a step the
gradient all-reduce takes; and what the host does for a step of MSHNet on eight TPU cores, traced and
replayed."""

import functools
import json
import os
import statistics
import sys
import tempfile
import time

import numpy as np
import torch

from tpukit import MNIST, MSHNet, Run, launch
from tpukit.devices.distributed import World
from tpukit.tasks.mshnet.model import MSHNetModel
from tpukit.training.data import BatchLoader, identity
from tpukit.training.metrics import new_sums
from tpukit.training.step import train_step

ROUNDS, STEPS = 7, 20


def leave_gradients(optimizer):
    """In place of `Runtime.all_reduce_gradients`."""


def timed(task, run, *, runtime):
    """Rounds of steps with and without the gradient all-reduce, in turn. Returns seconds per step of the
    slowest rank."""
    torch.manual_seed(0)
    data, _ = task.datasets()
    model = runtime.to_device(task.model())
    optimizer = task.optimizer(model)
    runtime.init_optimizer_state(optimizer)
    loader = BatchLoader(data, runtime, on="host", workers=1)
    step = runtime.compile(
        functools.partial(train_step, task, model, optimizer, runtime, loader.compose), name="step"
    )
    sums = new_sums(runtime)
    plan = [(np.arange(task.batch_size), None, None)] * STEPS
    all_reduce = runtime.all_reduce_gradients
    seconds = {True: [], False: []}
    for round_number in range(2 * ROUNDS + 2):
        summed = round_number % 2 == 0
        runtime.all_reduce_gradients = all_reduce if summed else leave_gradients
        runtime.world.all_gather([0.0])
        started = time.perf_counter()
        for batch in loader.batches(plan):
            sums = step(batch, 0, sums)
        runtime.sync()
        slowest = max(row[0] for row in runtime.world.all_gather([time.perf_counter() - started]))
        if round_number > 1:
            seconds[summed].append(slowest / STEPS)
    return [seconds[True], seconds[False]]


class OneOf(World):
    """One process of several, without the others."""

    def all_gather(self, values):
        return [values] * self.size


def time_host(parallel, cores=8, size=16, samples=4):
    """What the host of a TPU takes to hand a step of MSHNet to its cores, in rounds of traced and replayed
    steps in turn.

    The graphs run on the CPU XLA device, which a TPU's would not do, so wall_ms includes that the device and
    the host share the processor; host_ms is the processor time of the Python thread alone. The size of the
    images does not matter. SPMD has one block a level and 16 channels: over eight virtual devices a step of
    the whole network takes minutes."""
    # else an all-reduce over one visible core is left out
    os.environ.update(PJRT_DEVICE="CPU", XLA_ALWAYS_ALLREDUCE="1")
    os.environ.update(XLA_FLAGS="--xla_llvm_disable_expensive_passes=true --xla_backend_optimization_level=0")
    from tpukit.devices.xla import XLARuntime

    if parallel == "spmd":
        runtime = XLARuntime("xla", "fp32", spmd_cores=cores)
    else:
        runtime = XLARuntime("tpu", "fp32", OneOf(0, cores))
    task = MSHNet(base_size=size, crop_size=size, batch_size=samples * runtime.shards)
    torch.manual_seed(0)
    network = MSHNetModel((16,) * 5, (1,) * 5) if parallel == "spmd" else task.model()
    model = runtime.to_device(network.train())
    optimizer = task.optimizer(model)
    runtime.init_optimizer_state(optimizer)
    batch, sums = runtime.put_batch(task.example(task.batch_size)), new_sums(runtime)

    def step(batch, sums):
        return train_step(task, model, optimizer, runtime, identity, batch, task.epochs, sums)

    ways = dict(traced=runtime.compile(step), replayed=runtime.compile(step, mutates=(model, optimizer)))
    wall, host = {way: [] for way in ways}, {way: [] for way in ways}
    for round_number in range(ROUNDS + 1):
        for way, compiled in ways.items():
            for number in range(6):
                started, used = time.perf_counter(), time.thread_time()
                sums = compiled(batch, sums)
                used, taken = time.thread_time() - used, time.perf_counter() - started
                runtime.sync()
                float(sums[0])
                # the first round compiles; the first step of a way waits for the other's memory
                if round_number and number:
                    wall[way].append(1e3 * taken)
                    host[way].append(1e3 * used)
    for way in ways:
        row = dict(parallel=parallel, way=way, host_ms=round(statistics.median(host[way]), 1))
        row |= dict(lowest=round(min(host[way]), 1), highest=round(max(host[way]), 1), steps=len(host[way]))
        row |= dict(wall_ms=round(statistics.median(wall[way]), 1))
        row["times_traced"] = round(statistics.median(host[way]) / statistics.median(host["traced"]), 3)
        print("ROW " + json.dumps(row), flush=True)


def main(kind, *arguments):
    if kind == "host":
        time_host(*arguments)
    else:
        compare_processes(kind, *arguments)


def compare_processes(kind, count, digits):
    task = MNIST(dataset_dir=digits)
    with tempfile.TemporaryDirectory() as folder:
        summed, alone = launch(timed, task, Run.open(folder, task), cores=int(count))
    share = statistics.median(1 - b / a for a, b in zip(summed, alone)) if int(count) > 1 else 0.0
    row = dict(
        device=kind, processes=int(count), images_per_s=round(task.batch_size / statistics.median(summed))
    )
    print("ROW " + json.dumps(dict(row, gradient_all_reduce_share=round(share, 3), rounds=len(summed))))


if __name__ == "__main__":
    main(*sys.argv[1:])
