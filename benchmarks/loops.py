"""The cost of tpukit's loop: the same steps of the same model by a bare hand-written loop, with and without
torch.compile, by tpukit, Fabric, Lightning's Trainer and accelerate: `python -m benchmarks.loops DEVICE MODEL
ROUNDS`.

In every round each contender trains a new model for two epochs, in random order, in one process, because two
processes differ by several percent; the second epoch's steps alone are timed, and a first round does not
count. On a CPU, and on XLA's CPU device, the time is the CPU's, of the process, on one thread of torch, so
that other processes matter less; on a GPU it is the wall's. Rows are printed after the first round that
counts and after the last, so that a run which is cut leaves figures.

The bare loop makes its batches in line; it does nothing but train. It starts from tpukit's weights and takes
tpukit's batches, because what is computed counts: max-pooling takes longer where its branches are harder to
predict. On a CPU all of them run with the memory kept that a step frees, as tpukit keeps it."""

import dataclasses
import importlib.util
import logging
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks.rows import compare, print_row
from benchmarks.steps import open_runtime
from tpukit import MNIST, MSHNet, Run, Task, train
from tpukit.data.datasets import make_synthetic


def clock_of(device: str) -> Callable[[], float]:
    """Return the clock of a device, in seconds."""
    return time.perf_counter if device == "cuda" else time.process_time


class Arrays:
    """A dataset of random samples, made at once."""

    num_uniforms = 0

    def __init__(self, size: int, shape: tuple[int, ...], classes: int) -> None:
        rng = np.random.default_rng(0)
        images = rng.normal(size=(size, *shape)).astype(np.float32)
        self.arrays = dict(image=images, label=rng.integers(0, classes, size))

    def __len__(self) -> int:
        return len(self.arrays["label"])

    def batch(self, indices, numbers=None) -> dict[str, np.ndarray]:
        return {name: values[indices] for name, values in self.arrays.items()}

    def device_arrays(self) -> dict[str, np.ndarray]:
        return self.arrays

    def device_nbytes(self) -> int:
        return sum(values.nbytes for values in self.arrays.values())

    def sample_parameters(self, indices, numbers) -> dict[str, np.ndarray]:
        return {}

    def compose(self, rows, parameters):
        return rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiny(Task):
    """Two small layers, whose step takes half a millisecond: the loop is seen."""

    name = "tiny"
    score = "accuracy"
    batch_size: int = 8
    shape: tuple[int, ...] = (16,)
    steps: int = 200

    def datasets(self):
        return Arrays(self.batch_size * self.steps, self.shape, 4), Arrays(self.batch_size, self.shape, 4)

    def model(self):
        return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def loss(self, model, batch, epoch):
        return nn.functional.cross_entropy(model(batch["image"]).float(), batch["label"])

    def predict(self, model, batch, epoch=None):
        return model(batch["image"]).argmax(1)

    def evaluate(self, predictions):
        return dict(accuracy=float(np.mean([one == batch["label"] for one, batch in predictions])))


class ResNet50(Tiny):
    def model(self):
        import torchvision

        return torchvision.models.resnet50(num_classes=4)


class Bare:
    """A loop by hand: the optimizer's state and the loss stay on the device, the loss is read
    once an epoch."""

    def __init__(self, task, device, compiled=False):
        self.task, self.device, self.clock = task, device, clock_of(device.type)
        self.data, _ = task.datasets()
        self.loss = torch.compile(task.loss) if compiled else task.loss

    def run(self):
        """Return the seconds of the second epoch."""
        torch.manual_seed(self.task.seed)
        model = self.task.model().to(self.device)
        optimizer = self.task.optimizer(model)
        self.train_epoch(model, optimizer, 0)
        started = self.clock()
        self.train_epoch(model, optimizer, 1)
        return self.clock() - started

    def train_epoch(self, model, optimizer, epoch):
        total = torch.zeros(1, device=self.device)
        for arrays in batches_of(self.task, self.data, epoch):
            batch = {name: torch.as_tensor(values).to(self.device) for name, values in arrays.items()}
            optimizer.zero_grad(set_to_none=True)
            loss = self.loss(model, batch, 0)
            loss.backward()
            optimizer.step()
            total += loss.detach()
            if self.device.type == "xla":
                import torch_xla

                torch_xla.sync()
        float(total)


def batches_of(task, data, epoch):
    """Generate the batches that tpukit makes in an epoch, on the host."""
    seed, size = task.seed, task.batch_size
    order = np.random.default_rng((seed, epoch)).permutation(len(data))
    for step in range(len(data) // size):
        numbers = np.zeros((size, 0))
        if data.num_uniforms:
            numbers = np.random.default_rng((seed, epoch, step)).random((size, data.num_uniforms))
        yield data.batch(order[step * size : (step + 1) * size], numbers)


class Timed(Run):
    """A run that keeps when each of its intervals was recorded."""

    def log(self, kind, step, **values):
        if kind == "train":
            self.times.append(self.clock())
        super().log(kind, step, **values)


class Ours:
    """tpukit.train; the time between the records of the two epochs."""

    def __init__(self, task, runtime):
        self.task, self.runtime, self.clock = task, runtime, clock_of(runtime.device.type)

    def run(self):
        with tempfile.TemporaryDirectory() as folder:
            run = Timed.open(folder, self.task)
            run.echo, run.times, run.clock = False, [], self.clock
            train(self.task, run, runtime=self.runtime, progress=False)
            first, second = run.times
            return second - first


class Peer:
    """A library's loop over the batches of a DataLoader. MSHNet's are made as tpukit's are, in line."""

    def __init__(self, task, device):
        self.task, self.device, self.clock = task, device, clock_of(device.type)
        self.data, _ = task.datasets()
        self.names = list(self.data.batch(np.arange(2), np.zeros((2, self.data.num_uniforms))))
        self.kind = dict(cpu="cpu", cuda="gpu").get(device.type, "auto")

    def batches(self):
        """Return a torch.utils.data.DataLoader of tuples of tensors in the order of `names`."""
        if self.data.num_uniforms:
            made = [batch.values() for batch in batches_of(self.task, self.data, 0)]
            return torch.utils.data.DataLoader([tuple(map(torch.as_tensor, one)) for one in made], None)
        tensors = map(torch.as_tensor, self.data.batch(np.arange(len(self.data))).values())
        dataset = torch.utils.data.TensorDataset(*tensors)
        return torch.utils.data.DataLoader(dataset, self.task.batch_size, shuffle=True, drop_last=True)

    def loss(self, model, batch):
        values = (tensor.to(self.device) for tensor in batch)
        return self.task.loss(model, dict(zip(self.names, values)), 0)

    def run(self):
        """Return the seconds of the second epoch."""
        torch.manual_seed(self.task.seed)
        model, optimizer, batches, backward = self.prepare()
        for _ in range(2):
            started, total = self.clock(), torch.zeros(1, device=self.device)
            for batch in batches:
                optimizer.zero_grad()
                loss = self.loss(model, batch)
                backward(loss)
                optimizer.step()
                total += loss.detach()
            float(total)
        return self.clock() - started


class DataLoader(Peer):
    """No library, but the batches of all peers."""

    def prepare(self):
        model = self.task.model().to(self.device)
        return model, self.task.optimizer(model), self.batches(), torch.Tensor.backward


class Accelerate(Peer):
    def prepare(self):
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=self.device.type == "cpu")
        model = self.task.model().to(accelerator.device)
        prepared = accelerator.prepare(model, self.task.optimizer(model), self.batches())
        return *prepared, accelerator.backward


class Fabric(Peer):
    def prepare(self):
        import lightning

        fabric = lightning.Fabric(accelerator=self.kind, devices=1)
        model = self.task.model()
        model, optimizer = fabric.setup(model, self.task.optimizer(model))
        return model, optimizer, fabric.setup_dataloaders(self.batches()), fabric.backward


class Lightning(Peer):
    def run(self):
        import lightning

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        peer = self

        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.inner = peer.task.model()

            def training_step(self, batch, index):
                return peer.loss(self.inner, batch)

            def configure_optimizers(self):
                return peer.task.optimizer(self.inner)

            def on_train_epoch_start(self):
                self.started = peer.clock()

            def on_train_epoch_end(self):
                self.seconds = peer.clock() - self.started

        torch.manual_seed(self.task.seed)
        module = Module()
        quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        settings = dict(accelerator=self.kind, devices=1, max_epochs=2, **dict.fromkeys(quiet, False))
        lightning.Trainer(**settings).fit(module, self.batches())
        return module.seconds  # of the second epoch


def task_of(model: str, device: str, folder: Path) -> Task:
    """Return the task of a model, with its data in a folder."""
    settings = dict(epochs=2, eval_every=9, log_every=999, precision="fp32")
    if model == "tiny":
        return Tiny(**settings)
    if model == "resnet50":
        return ResNet50(
            batch_size=8, shape=(3, 224, 224) if device == "cuda" else (3, 64, 64), steps=5, **settings
        )
    if model == "mnist":
        return MNIST(dataset_dir=make_synthetic("mnist", folder / "digits", size=8000), **settings)
    images = make_synthetic("IRSTD-1k", folder / "infrared", size=60)
    return MSHNet(dataset_dir=images, batch_size=4, base_size=64, crop_size=64, num_workers=0, **settings)


def contenders(task: Task, device: str) -> dict:
    """Return name -> an object of a class above."""
    runtime = open_runtime(device, task.precision)
    found = {"bare": Bare(task, runtime.device), "tpukit": Ours(task, runtime)}
    if device != "xla":  # which Lightning takes on a TPU alone, and torch.compile hands to another compiler
        found["bare, DataLoader"] = DataLoader(task, runtime.device)
        found["bare, torch.compile"] = Bare(task, runtime.device, compiled=True)
        found["tpukit, compile yes"] = Ours(dataclasses.replace(task, compile="yes"), runtime)
        if importlib.util.find_spec("lightning"):
            found |= {"Fabric": Fabric(task, runtime.device), "Lightning": Lightning(task, runtime.device)}
    if importlib.util.find_spec("accelerate"):
        found["accelerate"] = Accelerate(task, runtime.device)
    return found


def main(device, model, rounds):
    warnings.simplefilter("ignore")
    if device != "xla":
        os.environ["USE_TORCH_XLA"] = "false"  # else accelerate takes the XLA device
    if device != "cuda":
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        task = task_of(model, device, Path(folder))
        loops = contenders(task, device)
        steps = len(loops["bare"].data) // task.batch_size
        step_s = {name: [] for name in loops}
        for number in range(int(rounds) + 1):
            for name in random.sample(list(loops), len(loops)):
                try:
                    step_s[name].append(loops[name].run() / steps)
                except Exception as error:  # of a peer or a compiler; the others are measured
                    if name in ("bare", "tpukit"):
                        raise
                    print(f"{name}: {type(error).__name__}: {error}"[:300], file=sys.stderr)
                    del loops[name], step_s[name]
            if number in (1, int(rounds)):  # the first round compiles
                for name in step_s:
                    compared = compare(step_s[name][1:], step_s["bare"][1:])
                    print_row(device=device, model=model, loop=name, **compared)


if __name__ == "__main__":
    main(*sys.argv[1:])
