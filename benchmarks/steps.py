"""MSHNet's training step as one would write it by hand, in plain PyTorch and with what PyTorch has to make it
faster, and as tpukit takes it; each takes turns with its device's first one."""

import contextlib
import functools
import statistics
import sys
import time

import torch

from benchmarks import by_hand
from benchmarks.literal import literal_layers
from benchmarks.rows import compare, print_row
from tpukit import MSHNet
from tpukit.devices.cuda import CUDARuntime
from tpukit.devices.runtime import Runtime
from tpukit.training.step import TrainingStep

STEPS = dict(cpu=1, xla=3, cuda=10)  # of a round
# The ways of a device: name -> settings. The first is what the others are compared with.
WAYS = {
    "cpu": {
        "plain": dict(plain=True),
        "plain, torch.compile": dict(plain=True, mode="default"),
        "tpukit": {},
        "tpukit, bf16": dict(precision="bf16"),
        "tpukit, compile yes": dict(compile="yes"),
    },
    "xla": {
        "whole images, traced": dict(literal=True, compile="no"),
        "tpukit, traced": dict(compile="no"),
        "tpukit": {},
    },
    "cuda": {
        "plain": dict(plain=True),
        "plain, half precision": dict(plain=True, half=True),
        "plain, half precision, torch.compile": dict(plain=True, half=True, mode="default"),
        # Three ways to capture: torch.compile's own, a graph forward and one backward, the whole step
        "plain, half precision, reduce-overhead": dict(plain=True, half=True, mode="reduce-overhead"),
        "plain, half precision, make_graphed_callables": dict(plain=True, half=True, mode="graphs"),
        "tpukit": {},
        "tpukit, compile no": dict(compile="no"),
        "tpukit, compile yes": dict(compile="yes"),
        "tpukit, fp32": dict(precision="fp32"),
    },
}


def open_runtime(device, precision):
    if device == "xla":
        from tpukit.devices.xla import XLARuntime

        return XLARuntime("xla", precision)
    return CUDARuntime(device, precision) if device == "cuda" else Runtime(device, precision)


class Plain:
    """The step of a script without tpukit, which reads the loss after every step as most do. In fp32 it
    leaves torch's settings for GPUs as they are: convolutions in TF32, by the first algorithm that cuDNN
    suggests. In half precision it has autocast, channels last, and the algorithm that cuDNN finds fastest;
    no loss scaler.

    mode: of torch.compile; "graphs": CUDA graphs of model and loss."""

    def __init__(self, device, task, *, half=False, mode=None):
        flags = dict(enabled=True, benchmark=half, allow_tf32=True)
        cudnn = functools.partial(torch.backends.cudnn.flags, **flags)
        self.settings = cudnn if device == "cuda" else contextlib.nullcontext
        self.dtype = torch.bfloat16 if device == "cpu" or torch.cuda.is_bf16_supported(False) else torch.half
        self.device, self.half = device, half
        torch.manual_seed(0)
        layout = torch.channels_last if half else torch.preserve_format
        loss = by_hand.Loss().to(device, memory_format=layout)
        self.optimizer = torch.optim.Adagrad(loss.parameters(), lr=task.lr)
        example = task.example(task.batch_size)
        self.batch = [torch.as_tensor(example[name]).to(device) for name in ("image", "mask")]
        started = time.perf_counter()
        if mode == "graphs":
            with self.autocast():
                self.loss = torch.cuda.make_graphed_callables(loss, tuple(self.batch))
        else:
            self.loss = torch.compile(loss, mode=mode) if mode else loss
        self.seconds()
        self.first_s = time.perf_counter() - started
        for _ in range(3):
            self.seconds()

    def autocast(self):
        return torch.autocast(self.device, self.dtype, enabled=self.half, cache_enabled=False)

    def seconds(self):
        """Return the seconds of one step: until its loss is read, and until the host has handed it over."""
        with self.settings():
            started = time.perf_counter()
            with self.autocast():
                loss = self.loss(*self.batch)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            handed_over = time.perf_counter()
            float(loss.detach())
            return time.perf_counter() - started, handed_over - started


class Ours:
    """tpukit's step. literal: on XLA, MSHNet on whole images."""

    def __init__(self, device, task, *, literal=False):
        self.layers = literal_layers if literal else contextlib.nullcontext
        self.runtime = open_runtime(device, task.precision)
        torch.manual_seed(0)
        self.step = TrainingStep(task, self.runtime, task.model().train())
        self.step.compile()
        self.batch, self.epoch = self.runtime.put(task.example(task.batch_size)), task.epochs
        self.first_s, _ = self.seconds()
        for _ in range(4):  # these are watched or captured, and slower
            self.seconds()
        for event in self.runtime.compile_events:
            if not event["programs"]:
                sys.exit(f"the step is not captured, because {event['why'][0]}")

    def seconds(self):
        """Return the seconds of one step: until the device has done it, and until the host has handed it
        over."""
        with self.layers():
            started = time.perf_counter()
            self.step(self.batch, self.epoch)
            handed_over = time.perf_counter()
        self.runtime.sync()
        float(self.step.sums[0])
        return time.perf_counter() - started, handed_over - started


def contender(device, task, *, plain=False, **how):
    return Plain(device, task, **how) if plain else Ours(device, task, **how)


def main(device, size, batch_size, rounds):
    first = None
    for name, settings in WAYS[device].items():
        how = {part: value for part, value in settings.items() if part not in ("precision", "compile")}
        sizes = dict(base_size=int(size), crop_size=int(size), batch_size=int(batch_size))
        task = MSHNet(**sizes, **{part: settings[part] for part in settings.keys() - how.keys()})
        try:
            way = contender(device, task, **how)
        except RuntimeError as error:  # of torch.compile or a capture; the other ways are measured
            print(f"{name}: {error}", file=sys.stderr)
            continue
        first = first or way
        taken = {one: [] for one in (first, way)}  # way -> rounds -> what `seconds` returns of each step
        for number in range(int(rounds)):
            for one in list(taken)[:: (-1) ** number]:
                taken[one].append([one.seconds() for _ in range(STEPS[device])])
        step_s = {}
        for one, of_rounds in taken.items():
            step_s[one] = [statistics.median(whole for whole, _ in steps) for steps in of_rounds]
        host_s = statistics.median(handed_over for steps in taken[way] for _, handed_over in steps)
        print_row(
            device=device,
            size=size,
            batch=batch_size,
            way=name,
            **compare(step_s[way], step_s[first]),
            host_ms=round(1e3 * host_s, 2),
            first_step_s=round(way.first_s, 1),
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
