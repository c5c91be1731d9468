"""MSHNet's training step with each way of making it faster, and an epoch of tpukit.train around it."""

import contextlib
import dataclasses
import functools
import json
import statistics
import sys
import tempfile
import time

import torch

from benchmarks import by_hand
from benchmarks.literal import literal_layers
from tpukit import MSHNet, Run, train
from tpukit.devices import cuda_graph
from tpukit.devices.cuda import CUDARuntime
from tpukit.devices.runtime import Runtime
from tpukit.host.tables import GIB
from tpukit.training.data import identity
from tpukit.training.metrics import new_sums
from tpukit.training.step import train_step

ROUNDS = 7
STEPS = dict(cpu=1, xla=3, cuda=10)  # of a round
# The ways of a device: name -> settings. The first is what the others are compared with.
WAYS = {
    "cpu": {
        "by hand": dict(by_hand=True),
        "by hand, channels last": dict(by_hand=True, channels_last="yes"),
        "tpukit": {},
        "tpukit, channels outermost": dict(channels_last="no"),
        "tpukit, bf16": dict(precision="bf16"),
        "tpukit, torch.compile": dict(torch_compile="default"),
    },
    "xla": {
        "traced": {},
        "tiled, traced": dict(tiled=True),
        "tiled, replayed": dict(tiled=True, replayed=True),
    },
    "cuda": {
        "by hand": dict(by_hand=True),
        "by hand, channels last": dict(by_hand=True, channels_last="yes"),
        "fp32": dict(precision="fp32"),
        "fp32, captured": dict(precision="fp32", replayed=True),
        "half precision, channels outermost": dict(precision="half", channels_last="no"),
        "half precision": dict(precision="half"),
        "half precision, captured": dict(precision="half", replayed=True),
        "half precision, torch.compile, captured": dict(
            precision="half", torch_compile="default", replayed=True
        ),
    },
}


def open_runtime(device, precision):
    if device == "xla":
        from tpukit.devices.xla import XLARuntime

        return XLARuntime("xla", precision)
    return CUDARuntime(device, precision) if device == "cuda" else Runtime(device, precision)


class ByHand:
    """The step of a script without tpukit, which reads the loss after every step as most do, and leaves
    torch's settings for GPUs as they are: convolutions in TF32, by the first algorithm that cuDNN
    suggests."""

    def __init__(self, device, task):
        self.runtime = open_runtime(device, "fp32")
        defaults = functools.partial(
            torch.backends.cudnn.flags, enabled=True, benchmark=False, allow_tf32=True
        )
        self.settings = defaults if device == "cuda" else contextlib.nullcontext
        torch.manual_seed(0)
        self.batch = self.runtime.put(task.example(task.batch_size))
        self.train = by_hand.Step(self.runtime.device, task.channels_last == "yes")
        self.first_s, _ = self.seconds()

    def seconds(self):
        """Of one step: until its loss is read, and until the host has handed it over."""
        with self.settings():
            started = time.perf_counter()
            loss = self.train(self.batch)
            handed_over = time.perf_counter()
            float(loss)
            return time.perf_counter() - started, handed_over - started


class Ours:
    """tpukit's step. tiled: on XLA, MSHNet as it is there. replayed: captured once, on XLA or a GPU."""

    def __init__(self, device, task, *, tiled=False, replayed=False):
        self.layers = contextlib.nullcontext if tiled or device != "xla" else literal_layers
        self.runtime = runtime = open_runtime(device, "fp32" if task.precision == "auto" else task.precision)
        torch.manual_seed(0)
        model = runtime.to_device(task.model().train(), channels_last=task.channels_last)
        optimizer = task.optimizer(model)
        runtime.init_optimizer_state(optimizer)
        faster = runtime.torch_compile(model, task.torch_compile)
        self.batch, self.sums = runtime.put(task.example(task.batch_size)), new_sums(runtime)

        def step(batch, sums):
            return train_step(task, faster, optimizer, runtime, identity, batch, task.epochs, sums)

        self.train = runtime.compile(step, name="step", mutates=(model, optimizer) if replayed else None)
        self.first_s, _ = self.seconds()
        for _ in range(4):  # these are watched or captured, and slower
            self.seconds()
        refusals = [
            event["why"][0] for event in runtime.pop_compile_events() if replayed and not event["programs"]
        ]
        if refusals:
            sys.exit(f"the step is not captured, because {refusals[0]}")

    def seconds(self):
        """Of one step: until the device has done it, and until the host has handed it over."""
        with self.layers():
            started = time.perf_counter()
            self.sums = self.train(self.batch, self.sums)
            handed_over = time.perf_counter()
        self.runtime.sync()
        float(self.sums[0])
        return time.perf_counter() - started, handed_over - started


def contender(device, task, by_hand=False, **how):
    return ByHand(device, task) if by_hand else Ours(device, task, **how)


def steps(device, size, batch_size):
    """Each way takes turns with the first one, so that both meet the same noise."""
    first = None
    for name, settings in WAYS[device].items():
        settings = dict(settings)
        if settings.get("precision") == "half":  # of this GPU: fp16 on a T4
            settings["precision"] = open_runtime(device, "auto").precision
        how = {part: settings.pop(part) for part in ("by_hand", "tiled", "replayed") if part in settings}
        way = contender(
            device, MSHNet(base_size=size, crop_size=size, batch_size=batch_size, **settings), **how
        )
        first = first or way
        rounds = {one: [] for one in (first, way)}
        for number in range(ROUNDS):
            for one in list(rounds)[:: (-1) ** number]:
                rounds[one].append([one.seconds() for _ in range(STEPS[device])])
        host = statistics.median(handed_over for part in rounds[way] for _, handed_over in part)
        ms, base_ms = (
            [1e3 * statistics.median(whole for whole, _ in part) for part in rounds[one]]
            for one in (way, first)
        )
        ratios = [one / base for one, base in zip(ms, base_ms)]
        row = dict(device=device, way=name, ms_per_step=round(statistics.median(ms), 1))
        row |= dict(times_first=round(statistics.median(ms) / statistics.median(base_ms), 2))
        row |= dict(lowest=round(min(ratios), 2), highest=round(max(ratios), 2), host_ms=round(1e3 * host, 1))
        row |= dict(first_step_s=round(way.first_s, 1), rounds=ROUNDS)
        print("ROW " + json.dumps(row), flush=True)


def epochs(device, size, batch_size, folder):
    """Two epochs of a training, the second one measured."""
    runtime = open_runtime(device, "auto")
    for on in ("device", "host"):
        task = MSHNet(
            dataset_dir=folder,
            base_size=size,
            crop_size=size,
            batch_size=batch_size,
            epochs=2,
            warm_epoch=-1,
            data_on=on,
        )
        with tempfile.TemporaryDirectory() as place:
            run = Run.open(place, dataclasses.replace(task, log_every=10**6))
            run.echo = False
            started = time.time()
            train(task, run, runtime=runtime, progress=False)
            last, evaluation = run.records("train")[-1]["speed"], run.records("evaluation")[-1]["speed"]
            compiled = [r for r in run.records("compile") if r["what"] == "step"]
            late = sum(r["programs"] for r in compiled if r["step"] > cuda_graph.WARM_UP + 1)
            # whose graph is made at a later step
            first = [r["time"] - started for r in compiled if device != "cuda"][:1]
        row = dict(
            device=device,
            data_on=on,
            images_per_s=round(last["images_per_s"], 1),
            epoch_s=round(last["seconds"], 2),
        )
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
