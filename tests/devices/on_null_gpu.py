"""What the tests of the null GPU run in processes of their own. `python -m tests.devices.on_null_gpu NAME
'{...}'` calls the function of that name with these arguments and prints what it returns as one line of
JSON."""

import ctypes
import dataclasses
import gc
import json
import math
import os
import random
import sys
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tpukit
from tests.tasks.cdeit.small import TINY
from tpukit import CDEIT, MNIST, ImageClassifier, MSHNet, Run, launch
from tpukit.devices import cuda_graph, trial
from tpukit.devices.cuda import CUDARuntime
from tpukit.host import environment
from tpukit.runs.signals import StopSignal
from tpukit.training import metrics
from tpukit.training.loop import Trainer

_NULL_GPU = ctypes.CDLL(None)
_NULL_GPU.null_gpu_take_counts.restype = ctypes.c_char_p


def take_counts():
    """What the process asked of the null GPU since the last call: dict of what -> how often, see cuda.cpp."""
    lines = _NULL_GPU.null_gpu_take_counts().decode().splitlines()
    return {what: int(number) for number, _, what in (line.partition(" ") for line in lines)}


def finite_sums(*arguments, of_device=metrics.sync, **how):
    """In place of `metrics.sync`: no kernel has computed a loss."""
    return dataclasses.replace(
        of_device(*arguments, **how), sums=dict(loss=1.0, steps=1.0, bad_step=-1.0, grad_norm=1.0)
    )


metrics.sync = finite_sums
trial.MAX_ERROR = dict.fromkeys(trial.MAX_ERROR, math.inf)  # nor what a trial compares


def small(kind, folder, **settings):
    """A small task of this kind."""
    folder = Path(folder)
    if kind == "mshnet":
        return MSHNet(dataset_dir=folder, **{**dict(base_size=32, crop_size=32, num_workers=1), **settings})
    if kind == "cdeit":
        return CDEIT(dataset_dir=folder, batch_size=4, num_workers=1, **TINY, **settings)
    if kind == "images":
        how = dict(model_name="resnet18", image_size=32, pretrained="no", batch_size=4, num_workers=1)
        return ImageClassifier(dataset_dir=folder, **how, **settings)
    kind = Breaking if kind == "breaking" else MNIST
    return kind(dataset_dir=folder, batch_size=8, num_workers=1, **settings)


def count_steps(task, run, *, runtime, count=7):
    """The counts of each of the first steps of a training, what was said of the capture, and the bytes of an
    eager step."""
    with StopSignal() as stop:
        trainer = Trainer(task, run, runtime, stop)
        trainer.model.of = trainer  # a cycle, as a model of a user's may have
        trainer.model.train()
        batches, counts = trainer.batches(endless=True), []
        for _ in range(count):
            batch = next(batches)
            take_counts()
            trainer.take_step(batch, 0)
            counts.append(take_counts())
        with Moved() as moved:
            trainer.step.eager(*trainer.step.arguments(next(batches), 0, trainer.lr_factor()))
        batches.close()
    why = [event["why"] for event in run.records("compile")]
    return dict(steps=counts, why=why, bytes=moved.bytes)


def steps(tasks, run):
    """`count_steps` of each of the tasks, arguments of `small`."""
    tasks = [small(**arguments) for arguments in tasks]
    runs = [Run.open(f"{run}-{number}", task) for number, task in enumerate(tasks)]
    return [
        count_steps(task, run, runtime=CUDARuntime("cuda", task.precision)) for task, run in zip(tasks, runs)
    ]


def steps_of_two(task, run):
    """`count_steps` of rank 0 of two GPUs; and what the launching process asked of CUDA."""
    found = dataclasses.replace(environment.detect(), accelerator="cuda", cores=2, device_name="null")
    environment.detect = lambda *_: found
    task = small(**task)
    run = Run.open(run, task)
    take_counts()
    counts = launch(count_steps, task, run, cores=2)
    return dict(counts, log=(run.path / "log.txt").read_text(), of_the_launching_process=take_counts())


ALLOCATES = ("empty", "empty_like", "empty_strided", "detach")


class Moved(TorchDispatchMode):
    """Adds up the bytes of what each operation reads and writes."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs, name = function(*args, **(kwargs or {})), function.overloadpacket.__name__
        if function.namespace == "aten" and not function.is_view and name not in ALLOCATES:
            leaves = tree_leaves((args, kwargs, None if name == "copy_" else outputs))
            tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_cuda}
            self.bytes += sum(map(bytes_of, tensors.values()))
        return outputs


def bytes_of(tensor):
    """Of its memory: axes along which it repeats itself count once."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride()) if stride]
    return math.prod(sizes) * tensor.element_size()


def trained(task, run):
    """What was said of the captures of a whole training, and how often their graphs were launched."""
    run = Run.open(run, task)
    take_counts()
    try:
        tpukit.train(task, run, runtime=CUDARuntime("cuda", task.precision), progress=False)
        ending = "done"
    except BaseException as error:
        ending = type(error).__name__
    counts = take_counts()
    refused = [what for what in counts if what.startswith("refused")]
    why = [event["why"] for event in run.records("compile")]
    peaks = [entry["speed"]["memory"][0][0] / SEARCHED for entry in run.records("train")]
    gc.collect()
    torch.cuda.empty_cache()
    memory = take_counts()["memory"]
    launches = counts.get("cudaGraphLaunch", 0)
    return dict(ending=ending, why=why, launches=launches, refused=refused, memory=memory, peaks=peaks)


def trainings(tasks, run):
    """`trained` of the tasks, arguments of `small`, one after another in one process; they continue one
    run."""
    return [trained(small(**arguments), run) for arguments in tasks]


# Captures that break


class BackwardWaits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss, at_step):
        ctx.waits = at_step
        return loss * 1

    @staticmethod
    def backward(ctx, gradient):
        if ctx.waits:
            gradient.sum().item()
        return gradient, None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Breaking(MNIST):
    """Does what a capture does not survive, in the captured step or in every one, on all ranks or on one. Its
    first step and first prediction need SEARCHED bytes more, as where cuDNN tries its algorithms."""

    what: str = ""
    always: bool = False
    rank: str | None = None

    def optimizer(self, model):
        if self.what == "decay":  # the length of a step is computed on the host
            return torch.optim.Adagrad(model.parameters(), self.lr, lr_decay=0.1)
        optimizer = super().optimizer(model)
        if self.what == "settings":  # another one at each step
            optimizer.register_step_pre_hook(lambda made, *_: made.param_groups[0].update(seen=len(_calls)))
        return optimizer

    def predict(self, model, batch, epoch=None):
        if not _predicted:
            _predicted.append(batch)
            torch.empty(SEARCHED, dtype=torch.uint8, device=batch["image"].device)
        return super().predict(model, batch, epoch)

    def loss(self, model, batch, epoch):
        loss = super().loss(model, batch, epoch)
        if not _calls:
            torch.empty(SEARCHED, dtype=torch.uint8, device=loss.device)
        _calls.append(loss)
        if self.what == "buffer":  # a new one at each step
            model.register_buffer("count", torch.zeros(len(_calls), device=loss.device))
        is_due = self.always or len(_calls) == cuda_graph.WARM_UP + 1
        is_due = is_due and self.rank in (None, os.environ.get("RANK"))
        if self.what == "backward":
            return BackwardWaits.apply(loss, is_due)
        if is_due and self.what in _BREAKS:
            _BREAKS[self.what](loss)
        return loss


def _fail(loss):
    raise ValueError("mine")


def _interrupt(loss):
    raise KeyboardInterrupt


SEARCHED = 2**30
_calls, _predicted = [], []
_BREAKS = dict(
    forward=lambda loss: loss.item(),
    copy=lambda loss: torch.tensor([1.0, 2.0], device=loss.device),
    error=_fail,
    interrupt=_interrupt,
    draw=lambda loss: random.random(),
)


def broken(folder, run, ways):
    """For each way to break a capture, (what, always): `trained`, and `trained` of a sound training after it
    in the same process."""
    trial.seen = lambda *_: True  # only the trainings' captures are counted
    found = []
    how = dict(dataset_dir=Path(folder), batch_size=8, num_workers=1, epochs=1)
    for number, (what, always) in enumerate(ways):
        _calls.clear(), _predicted.clear()
        mine = trained(Breaking(what=what, always=always, **how | dict(epochs=2)), f"{run}-broken-{number}")
        found.append(dict(broken=mine, sound=trained(MNIST(**how), f"{run}-sound-{number}")))
    return found


def main(name, arguments):
    print("RESULT " + json.dumps(globals()[name](**arguments)))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
