"""The cost of tpukit's loop: the same steps of the same model by a bare hand-written loop, by tpukit,
Lightning and accelerate.

In every round each contender trains a new model for two epochs, in changing order, in one process, because
two processes differ by several percent; times are of the second epoch's steps alone, and a first round does
not count. The bare loop makes its batches in line; it does nothing but train. It starts from tpukit's weights
and takes tpukit's batches, because what is computed counts: max-pooling takes longer where its branches are
harder to predict. On a CPU all of them run with the memory kept that a step frees, as tpukit keeps it."""

import importlib.util
import logging
import random
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch

from benchmarks.rows import compare, print_row
from benchmarks.steps import open_runtime
from tpukit import MNIST, MSHNet, Run, train
from tpukit.data.datasets import make_synthetic


class Bare:
    """A loop by hand: the optimizer's state and the loss stay on the device, the loss is read
    once an epoch."""

    def __init__(self, task, device):
        self.task, self.device = task, device
        self.data, _ = task.datasets()

    def run(self):
        """Return the seconds of the second epoch."""
        torch.manual_seed(self.task.seed)
        model = self.task.model().to(self.device)
        optimizer = self.task.optimizer(model)
        self.train_epoch(model, optimizer, 0)
        started = time.perf_counter()
        self.train_epoch(model, optimizer, 1)
        return time.perf_counter() - started

    def train_epoch(self, model, optimizer, epoch):
        total = torch.zeros(1, device=self.device)
        seed, size = self.task.seed, self.task.batch_size
        order = np.random.default_rng((seed, epoch)).permutation(len(self.data))
        for step in range(len(self.data) // size):
            chosen = order[step * size : (step + 1) * size]
            numbers = np.random.default_rng((seed, epoch, step)).random((size, self.data.num_uniforms))
            arrays = self.data.batch(chosen, numbers)
            batch = {name: torch.as_tensor(values).to(self.device) for name, values in arrays.items()}
            optimizer.zero_grad(set_to_none=True)
            loss = self.task.loss(model, batch, epoch)
            loss.backward()
            optimizer.step()
            total += loss.detach()
            if self.device.type == "xla":
                import torch_xla

                torch_xla.sync()
        float(total)


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
    """Return (a torch.utils.data.DataLoader, the names of what its batches hold)."""
    data, _ = task.datasets()
    arrays = data.batch(np.arange(len(data)))
    tensors = torch.utils.data.TensorDataset(*map(torch.as_tensor, arrays.values()))
    batches = torch.utils.data.DataLoader(tensors, task.batch_size, shuffle=True, drop_last=True)
    return batches, list(arrays)


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


def contenders(device, model, folder):
    """Return name -> an object of a class above."""
    settings = dict(epochs=2, eval_every=9, log_every=999)
    if model == "mnist":
        task = MNIST(dataset_dir=make_synthetic("mnist", folder / "digits", size=8000), **settings)
    else:
        images = make_synthetic("IRSTD-1k", folder / "infrared", size=120)
        sizes = dict(batch_size=4, base_size=64, crop_size=64, num_workers=1)
        task = MSHNet(dataset_dir=images, **sizes, **settings)
    runtime = open_runtime(device, task.precision)
    found = dict(bare=Bare(task, runtime.device), tpukit=Ours(task, runtime))
    # Lightning takes no XLA device but a TPU; accelerate takes XLA's wherever torch_xla is installed
    name, kind = ("lightning", Lightning) if device == "cpu" else ("accelerate", Accelerate)
    if model == "mnist" and importlib.util.find_spec(name):
        found[name] = kind(task)
    return found


def main(device, model, rounds):
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        loops = contenders(device, model, Path(folder))
        steps = len(loops["bare"].data) // loops["bare"].task.batch_size
        step_s = {name: [] for name in loops}
        for _ in range(int(rounds) + 1):
            for name in random.sample(list(loops), len(loops)):
                step_s[name].append(loops[name].run() / steps)
    for name in loops:
        compared = compare(step_s[name][1:], step_s["bare"][1:])  # the first round compiles
        print_row(device=device, model=model, loop=name, **compared)


if __name__ == "__main__":
    main(*sys.argv[1:])
