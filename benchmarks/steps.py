"""MSHNet's training step with each way of making it faster; each takes turns with its device's first one."""

import contextlib
import functools
import json
import statistics
import sys
import time

import torch

from benchmarks import by_hand
from benchmarks.literal import literal_layers
from tpukit import MSHNet
from tpukit.devices.cuda import CUDARuntime
from tpukit.devices.runtime import Runtime
from tpukit.training.data import identity
from tpukit.training.metrics import new_sums
from tpukit.training.step import train_step

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


def main(device, size, batch_size, rounds):
    first = None
    for name, settings in WAYS[device].items():
        settings = dict(settings)
        if settings.get("precision") == "half":  # of this GPU: fp16 on a T4
            settings["precision"] = open_runtime(device, "auto").precision
        how = {part: settings.pop(part) for part in ("by_hand", "tiled", "replayed") if part in settings}
        sizes = dict(base_size=int(size), crop_size=int(size), batch_size=int(batch_size))
        way = contender(device, MSHNet(**sizes, **settings), **how)
        first = first or way
        taken = {one: [] for one in (first, way)}
        for number in range(int(rounds)):
            for one in list(taken)[:: (-1) ** number]:
                taken[one].append([one.seconds() for _ in range(STEPS[device])])
        row = dict(device=device, size=size, batch=batch_size, way=name, **compare(taken, way, first))
        print("ROW " + json.dumps(row), flush=True)


def compare(taken, way, first):
    """Return how a way compares with the first one.

    taken: way -> rounds -> [(seconds of a step, seconds until the host has handed it over)]."""
    ms, first_ms = (
        [1e3 * statistics.median(whole for whole, _ in steps) for steps in taken[one]] for one in (way, first)
    )
    ratios = [one / other for one, other in zip(ms, first_ms)]
    host_s = statistics.median(handed_over for steps in taken[way] for _, handed_over in steps)
    return dict(
        ms_per_step=round(statistics.median(ms), 1),
        times_first=round(statistics.median(ms) / statistics.median(first_ms), 2),
        lowest=round(min(ratios), 2),
        highest=round(max(ratios), 2),
        host_ms=round(1e3 * host_s, 1),
        first_step_s=round(way.first_s, 1),
        rounds=len(ms),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
