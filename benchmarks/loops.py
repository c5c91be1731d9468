"""The cost of tpukit's loop: the same steps of the same model by a bare hand-written loop, by tpukit, Lightning and accelerate.

Every contender runs the same number of steps in every round, in changing order, in one process on one device; times are of
training steps alone, after a first round that compiles. The bare loop makes its batches in line; it does nothing but train.
"""

import json
import logging
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

ROUNDS = 11  # each is noisy on a shared machine


class Bare:
    """What one would write by hand: the optimizer's state and the loss stay on the device, the loss is read once a round."""

    def __init__(self, task, device):
        self.task, self.device = task, device
        self.data, _ = task.datasets()
        torch.manual_seed(0)
        self.model = task.model().to(device)
        self.optimizer = task.optimizer(self.model)

    def run(self, steps):
        order = np.random.default_rng(0).permutation(len(self.data))
        size, total = self.task.batch_size, torch.zeros(1, device=self.device)
        started = time.perf_counter()
        for step in range(steps):
            chosen = order[step * size : (step + 1) * size]
            numbers = np.random.default_rng((0, 0, step)).random((size, self.data.num_draws)) if self.data.num_draws else None
            batch = {name: torch.as_tensor(v).to(self.device) for name, v in self.data.batch(chosen, numbers).items()}
            self.optimizer.zero_grad(set_to_none=True)
            loss = self.task.loss(self.model, batch, 0)
            loss.backward()
            self.optimizer.step()
            total += loss.detach()
            if self.device.type == "xla":
                import torch_xla

                torch_xla.sync()
        float(total)
        return time.perf_counter() - started


class Ours:
    """tpukit.train for one epoch; the time is what the run's own records say the steps took."""

    def __init__(self, task, runtime):
        self.task, self.runtime = task, runtime

    def run(self, steps):
        with tempfile.TemporaryDirectory() as folder:
            run = Run.open(folder, self.task)
            run.echo = False
            train(self.task, run, runtime=self.runtime, progress=False)
            record = run.records("train")[0]
            if record["step"] != steps:
                sys.exit(f"an epoch has {record['step']} steps, and the other loops make {steps}")
            return record["speed"]["seconds"]


def loader(task):
    data, _ = task.datasets()
    arrays = data.batch(np.arange(len(data)))
    return torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*map(torch.as_tensor, arrays.values())), task.batch_size, shuffle=True, drop_last=True
    ), list(arrays)


class Lightning:
    def __init__(self, task):
        import lightning

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        batches, names = loader(task)

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

        self.batches, self.module, self.lightning = batches, Module(), lightning

    def run(self, steps):
        quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        trainer = self.lightning.Trainer(accelerator="cpu", max_epochs=1, max_steps=steps, **quiet)
        trainer.fit(self.module, self.batches)
        return self.module.seconds


class Accelerate:
    def __init__(self, task):
        from accelerate import Accelerator

        self.task, self.accelerator = task, Accelerator()
        batches, self.names = loader(task)
        model = task.model().to(self.accelerator.device)
        self.model, self.optimizer, self.batches = self.accelerator.prepare(model, task.optimizer(model), batches)

    def run(self, steps):
        started, total = time.perf_counter(), torch.zeros(1, device=self.accelerator.device)
        for _, batch in zip(range(steps), self.batches):
            self.optimizer.zero_grad()
            loss = self.task.loss(self.model, dict(zip(self.names, batch)), 0)
            self.accelerator.backward(loss)
            self.optimizer.step()
            total += loss.detach()
        float(total)
        return time.perf_counter() - started


def main(device, model, digits, infrared):
    warnings.simplefilter("ignore")
    if device == "xla":
        from tpukit.devices.xla import XLARuntime

    runtime = XLARuntime("xla") if device == "xla" else Runtime("cpu")
    if model == "mnist":
        task = MNIST(dataset_dir=digits, epochs=1, eval_every=9, log_every=50, num_workers=1)
        steps = 50
    else:
        settings = dict(batch_size=4, base_size=64, crop_size=64, log_every=24, num_workers=1)
        task, steps = MSHNet(dataset_dir=infrared, epochs=1, eval_every=9, **settings), 24
    contenders = dict(bare=Bare(task, runtime.device), tpukit=Ours(task, runtime))
    if model == "mnist" and device == "cpu":  # its XLA strategy takes TPUs only
        contenders["lightning"] = Lightning(task)
    elif model == "mnist":  # it takes the XLA device wherever torch_xla is installed, so it has no CPU case here
        contenders["accelerate"] = Accelerate(task)
    rounds, order = [], list(contenders)
    for _ in range(ROUNDS + 1):
        random.shuffle(order)
        rounds.append({name: contenders[name].run(steps) / steps for name in order})
    rounds = rounds[1:]
    for name in contenders:
        ratios = [r[name] / r["bare"] for r in rounds]
        medians = {loop: statistics.median(r[loop] for r in rounds) for loop in (name, "bare")}
        row = dict(device=device, model=model, loop=name, ms_per_step=round(1e3 * medians[name], 2))
        row |= dict(times_bare=round(medians[name] / medians["bare"], 3))
        row |= dict(lowest=round(min(ratios), 3), highest=round(max(ratios), 3))
        print("ROW " + json.dumps(dict(row, rounds=len(rounds))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
