"""The cost of tpukit's loop: the same steps of the same model by a bare hand-written loop, by tpukit,
Lightning and accelerate.

In every round each contender trains a new model for two epochs, in changing order, each in a process of its
own, which is started anew a few times; times are of the second epoch's steps alone, and the first round does
not count. The bare loop makes its batches in line; it does nothing but train. It starts from tpukit's weights
and takes tpukit's batches, because what is computed counts: max-pooling takes longer where its branches are
harder to predict. On a CPU it also runs with the memory kept as tpukit keeps it; what tpukit's takes longer
than that, the cost of its loop, is measured in one process: `both`."""

import concurrent.futures
import dataclasses
import itertools
import json
import logging
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
import warnings

import numpy as np
import torch

from tpukit import MNIST, MSHNet, Run, train
from tpukit.devices.runtime import Runtime

ROUNDS = 5  # each is noisy on a shared machine
# where a process's memory lies makes it faster or slower for all its rounds on a CPU
LAUNCHES = dict(cpu=3, xla=1)


class Bare:
    """What one would write by hand: the optimizer's state and the loss stay on the device, the loss is read
    once an epoch."""

    def __init__(self, task, device):
        self.task, self.device = task, device
        self.data, _ = task.datasets()

    def run(self):
        steps = self.steps()
        for _ in range(2):
            started = time.perf_counter()
            self.take(steps, steps_per_epoch(self.task, self.data))
            seconds = time.perf_counter() - started
        return seconds

    def take(self, steps, count):
        for total in itertools.islice(steps, count):
            pass
        float(total)

    def steps(self):
        """Generate the sum of the losses so far, on the device, after each step of an endless training."""
        torch.manual_seed(self.task.seed)
        model = self.task.model().to(self.device)
        optimizer, total = self.task.optimizer(model), torch.zeros(1, device=self.device)
        seed, size = self.task.seed, self.task.batch_size
        for epoch in itertools.count():
            order = np.random.default_rng((seed, epoch)).permutation(len(self.data))
            for step in range(steps_per_epoch(self.task, self.data)):
                chosen = order[step * size : (step + 1) * size]
                numbers = np.random.default_rng((seed, epoch, step)).random((size, self.data.num_uniforms))
                batch = {
                    name: torch.as_tensor(v).to(self.device)
                    for name, v in self.data.batch(chosen, numbers).items()
                }
                optimizer.zero_grad(set_to_none=True)
                loss = self.task.loss(model, batch, epoch)
                loss.backward()
                optimizer.step()
                total += loss.detach()
                if self.device.type == "xla":
                    import torch_xla

                    torch_xla.sync()
                yield total


def steps_per_epoch(task, data):
    return len(data) // task.batch_size


class Ours:
    """tpukit.train; the time is what the run's own records say."""

    def __init__(self, task, runtime):
        self.task, self.runtime = task, runtime

    def run(self):
        with tempfile.TemporaryDirectory() as folder:
            run = Run.open(folder, self.task)
            run.echo = False
            train(self.task, run, runtime=self.runtime, progress=False)
            _, second = run.records("train")
            return second["speed"]["seconds"]


def loader(task):
    data, _ = task.datasets()
    arrays = data.batch(np.arange(len(data)))
    return torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*map(torch.as_tensor, arrays.values())),
        task.batch_size,
        shuffle=True,
        drop_last=True,
    ), list(arrays)


class Lightning:
    def __init__(self, task):
        import lightning

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        self.batches, names = loader(task)

        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.inner = task.model()

            def training_step(self, batch, index):
                return task.loss(self.inner, dict(zip(names, batch)), 0)

            def configure_optimizers(self):
                return task.optimizer(self.inner)

            def on_train_epoch_start(self):
                self.started = time.perf_counter()

            def on_train_epoch_end(self):
                self.seconds = time.perf_counter() - self.started

        self.task, self.module, self.trainer = task, Module, lightning.Trainer

    def run(self):
        torch.manual_seed(self.task.seed)
        module = self.module()
        quiet = dict(
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
        )
        self.trainer(accelerator="cpu", max_epochs=2, **quiet).fit(module, self.batches)
        return module.seconds  # of the second epoch


class Accelerate:
    def __init__(self, task):
        from accelerate import Accelerator

        self.task, self.accelerator = task, Accelerator()
        self.batches, self.names = loader(task)

    def run(self):
        torch.manual_seed(self.task.seed)
        model = self.task.model().to(self.accelerator.device)
        prepared = self.accelerator.prepare(model, self.task.optimizer(model), self.batches)
        for _ in range(2):
            seconds = self.train_epoch(*prepared)
        return seconds

    def train_epoch(self, model, optimizer, batches):
        started, total = time.perf_counter(), torch.zeros(1, device=self.accelerator.device)
        for batch in batches:
            optimizer.zero_grad()
            loss = self.task.loss(model, dict(zip(self.names, batch)), 0)
            self.accelerator.backward(loss)
            optimizer.step()
            total += loss.detach()
        float(total)
        return time.perf_counter() - started


def contender(name, device, model, digits, infrared):
    """An object of a class above."""
    settings = dict(epochs=2, eval_every=9, log_every=999)
    if model == "mnist":
        task = MNIST(dataset_dir=digits, **settings)
    else:
        task = MSHNet(
            dataset_dir=infrared, batch_size=4, base_size=64, crop_size=64, num_workers=1, **settings
        )
    if name in ("lightning", "accelerate"):
        return (Lightning if name == "lightning" else Accelerate)(task)
    if device == "xla":
        from tpukit.devices.xla import XLARuntime

        runtime = XLARuntime("xla")
    else:
        runtime = None if name == "bare" else Runtime("cpu")  # which keeps freed memory
    if name == "tpukit":
        return Ours(task, runtime)
    return Bare(task, runtime.device if runtime else torch.device("cpu"))


def serve(connection, *which):
    """In a contender's process: answer every message with the seconds that a step of one more round took."""
    warnings.simplefilter("ignore")
    loop = contender(*which)
    steps = steps_per_epoch(loop.task, loop.task.datasets()[0])
    while connection.recv():
        connection.send(loop.run() / steps)


def main(device, model, *folders):
    loops = ["bare", "tpukit"]
    if device == "cpu":
        loops[1:1] = ["bare, memory kept"]
    # Lightning takes no XLA device but a TPU; accelerate takes XLA's wherever torch_xla is installed
    if model == "mnist":
        loops.append("lightning" if device == "cpu" else "accelerate")
    rounds = [found for _ in range(LAUNCHES[device]) for found in launch(loops, device, model, *folders)]
    rows = [dict(loop=name, **compare(rounds, name, "bare")) for name in loops]
    if device == "cpu":
        rounds = []
        for _ in range(LAUNCHES[device]):
            with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                rounds += process.submit(both, device, model, *folders).result()
        rows.append(dict(loop="tpukit, in one process with bare", **compare(rounds, "tpukit", "bare")))
    for row in rows:
        print("ROW " + json.dumps(dict(device=device, model=model, **row)), flush=True)


def both(*which):
    """tpukit and the bare loop in one process: after each interval of tpukit's training the bare loop takes
    the same steps with a model of its own, so that they differ in nothing but the loop. [{loop: seconds per
    step} of an interval]"""
    warnings.simplefilter("ignore")
    ours = contender("tpukit", *which)
    task = dataclasses.replace(ours.task, epochs=12, eval_every=99, log_every=26)
    bare, intervals, taken = Bare(task, ours.runtime.device), [], 0
    steps = bare.steps()
    with tempfile.TemporaryDirectory() as folder:
        run = Run.open(folder, task)
        run.echo = False

        def log(kind, step, *, log=run.log, **values):
            nonlocal taken
            log(kind, step, **values)
            if kind == "train":
                count, taken, started = step - taken, step, time.perf_counter()
                bare.take(steps, count)
                seconds = dict(tpukit=values["speed"]["seconds"], bare=time.perf_counter() - started)
                intervals.append({loop: found / count for loop, found in seconds.items()})

        run.log = log
        train(task, run, runtime=ours.runtime, progress=False)
    return intervals[4:]  # the first two epochs warm up


def launch(loops, *which):
    """Let every loop run ROUNDS times, in turn, in a process of its own: [{loop: seconds per step} of a
    round]."""
    context, ends, processes = multiprocessing.get_context("spawn"), {}, []
    for name in loops:
        ends[name], end = context.Pipe()
        processes.append(context.Process(target=serve, args=(end, name, *which), daemon=True))
        processes[-1].start()
        end.close()  # so that a process that fails ends this one, too
    rounds = []
    for _ in range(ROUNDS + 1):
        seconds = {}
        for name in random.sample(loops, len(loops)):
            ends[name].send(True)
            seconds[name] = ends[name].recv()
        rounds.append(seconds)
    for end, process in zip(ends.values(), processes):
        end.send(False)
        process.join()
    return rounds[1:]  # the first one compiles


def compare(rounds, name, other):
    """The columns of a row: one loop against another."""
    ratios = [seconds[name] / seconds[other] for seconds in rounds]
    medians = {loop: statistics.median(seconds[loop] for seconds in rounds) for loop in (name, other)}
    row = dict(ms_per_step=round(1e3 * medians[name], 2), times_bare=round(medians[name] / medians[other], 3))
    return row | dict(lowest=round(min(ratios), 3), highest=round(max(ratios), 3), rounds=len(rounds))


if __name__ == "__main__":
    main(*sys.argv[1:])
