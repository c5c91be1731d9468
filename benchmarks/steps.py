"""MSHNet's training step with each way of making it faster, one by one, and an epoch of tpukit.train around it."""

import contextlib
import dataclasses
import json
import statistics
import sys
import tempfile
import time

import torch

from benchmarks.literal import literal_layers
from tpukit import MSHNet, Run, train
from tpukit.devices.runtime import Runtime
from tpukit.host.tables import GIB
from tpukit.training.data import already_composed
from tpukit.training.metrics import new_sums
from tpukit.training.step import train_step

ROUNDS, STEPS = 5, 4
# The ways of a device: name -> settings. The first is what the others are compared with.
WAYS = {
    "cpu": {
        "fp32": {},
        "bf16": dict(precision="bf16"),
        "channels last": dict(channels_last="yes"),
        "torch.compile": dict(torch_compile="default"),
    },
    "xla": {"traced": {}, "tiled, traced": dict(tiled=True), "tiled, replayed": dict(tiled=True, replayed=True)},
    "cuda": {
        "fp32": dict(precision="fp32"),
        "bf16": dict(precision="bf16"),
        "bf16, channels last": dict(precision="bf16", channels_last="yes"),
        "bf16, CUDA graphs of the model": dict(precision="bf16", torch_compile="reduce-overhead"),
        "bf16, captured": dict(precision="bf16", replayed=True),
        "bf16, channels last, captured": dict(precision="bf16", channels_last="yes", replayed=True),
        "bf16, channels last, torch.compile, captured": dict(
            precision="bf16", channels_last="yes", torch_compile="default", replayed=True
        ),
    },
}


def open_runtime(device, precision):
    if device == "xla":
        from tpukit.devices.xla import XLARuntime

        return XLARuntime("xla", precision)
    return Runtime(device, precision)


def seconds_per_step(device, task, tiled, replayed):
    """Seconds: until the first step is done, of a later one (median), and of it what the host takes to hand it over."""
    runtime = open_runtime(device, "fp32" if task.precision == "auto" else task.precision)
    torch.manual_seed(0)
    model = runtime.place(task.model().train(), channels_last=task.channels_last)
    optimizer = task.optimizer(model)
    runtime.init_optimizer_state(optimizer)
    faster = runtime.torch_compile(model, task.torch_compile, is_captured=replayed)
    batch, sums = runtime.put(task.example(task.batch_size)), new_sums(runtime)

    def step(batch, sums):
        return train_step(task, faster, optimizer, runtime, already_composed, batch, task.epochs, sums)

    compiled_step = runtime.compile(step, name="step", changes=(model, optimizer) if replayed else None)
    with contextlib.nullcontext() if tiled else literal_layers():
        started = time.perf_counter()
        sums = compiled_step(batch, sums)
        runtime.sync()
        first, times, host = time.perf_counter() - started, [], []
        for _ in range(4 + ROUNDS * STEPS):  # the first ones are watched or captured, and slower
            started = time.perf_counter()
            sums = compiled_step(batch, sums)
            host.append(time.perf_counter() - started)
            runtime.sync()
            float(sums[0])
            times.append(time.perf_counter() - started)
    refusals = [event["why"][0] for event in runtime.take_compile_events() if replayed and not event["programs"]]
    if refusals:
        sys.exit(f"the step is not captured, because {refusals[0]}")
    return first, statistics.median(times[4:]), statistics.median(host[4:])


def steps(device, size, batch_size):
    base = None
    for name, settings in WAYS[device].items():
        settings = dict(settings)
        how = [settings.pop(part, False) for part in ("tiled", "replayed")]
        task = MSHNet(base_size=size, crop_size=size, batch_size=batch_size, **settings)
        first, later, host = seconds_per_step(device, task, *how)
        base = base or later
        row = dict(device=device, way=name, ms_per_step=round(1e3 * later, 1), times_first=round(later / base, 2))
        row |= dict(host_ms=round(1e3 * host, 1), first_step_s=round(first, 1), steps=ROUNDS * STEPS)
        print("ROW " + json.dumps(row), flush=True)


def epochs(device, size, batch_size, folder):
    """Two epochs of a training, the second one measured."""
    runtime = open_runtime(device, "auto")
    for on in ("device", "host"):
        task = MSHNet(
            dataset_dir=folder, base_size=size, crop_size=size, batch_size=batch_size, epochs=2, warm_epoch=-1, data_on=on
        )
        with tempfile.TemporaryDirectory() as place:
            run = Run.open(place, dataclasses.replace(task, log_every=10**6))
            run.echo = False
            started = time.time()
            train(task, run, runtime=runtime, progress=False)
            last, evaluation = run.records("train")[-1]["speed"], run.records("evaluation")[-1]["speed"]
            compiled = [r for r in run.records("compile") if r["what"] == "step"]
            late = sum(r["programs"] for r in compiled if r["step"] > 2)
            first = [r["time"] - started for r in compiled][:1]
        row = dict(device=device, data_on=on, images_per_s=round(last["images_per_s"], 1), epoch_s=round(last["seconds"], 2))
        row |= dict(wait_share=round(last["wait_s"] / last["seconds"], 4), compiled_late=late)
        row |= dict(eval_s=round(evaluation["seconds"], 2), scoring_s=round(evaluation["scoring_s"], 2))
        row |= dict(first_step_s=round(first[0], 1) if first else None)
        row |= dict(peak_gib=round(last["memory"][0][0] / GIB, 2) if last["memory"] else None)
        print("ROW " + json.dumps(row), flush=True)


def main(what, device, size, batch_size, folder=None):
    if what == "steps":
        steps(device, int(size), int(batch_size))
    else:
        epochs(device, int(size), int(batch_size), folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
