"""What the tests of `launch` run in processes of their own: a task that watches itself, and a program that
launches it.

`python -m tests.tpukit.launching.launched '{"data": ..., "launches": [{"run": ..., ...}, ...]}'`
launches one after
another, as one kernel does, and prints one JSON line: what each gave."""

import contextlib
import dataclasses
import io
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # noqa: F401  seconds, which each core would take in its first step
from torch import nn

from tpukit import MNIST, Run, TpukitError, launch, train
from tpukit.host import environment
from tpukit.runs.settings import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watched(MNIST):
    """A small network with batch norm and, if asked for, dropout, or an accident in one step of one rank."""

    epochs: int = setting(2, free=True)
    batch_size: int = 8
    lr: float = 0.1
    dropout: float = 0.0
    accident: str = setting("", free=True)
    accident_at: int = setting(30, free=True)
    """the number of the step, counted from where this launch started or resumed"""

    def model(self):
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(self.dropout),
            nn.Flatten(), nn.Linear(676, 10),
        )  # fmt: skip
        model.register_buffer("absent", None)  # like the statistics that a batch norm does not track
        return model

    def loss(self, model, batch, epoch):
        calls = count(self)
        if self.accident and calls == self.accident_at and os.environ.get("RANK") == "1":
            cause(self.accident)
        return super().loss(model, batch, epoch)


# Its losses are the same on any number of cores: batch norm is frozen, and the rest is what must not differ.
RECIPE = dict(batch_norm="frozen", batch_size=16, epochs=9, patience=1, schedule="cosine", warmup_epochs=0.5)
RECIPE |= dict(micro_batches=2, freeze=("0",), clip_norm=0.5)


_calls = {}


def count(task):
    _calls[id(task)] = _calls.get(id(task), 0) + 1
    return _calls[id(task)]


def cause(accident):
    if accident == "raise":
        raise ValueError("sample 7 is broken")
    if accident == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if accident == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if accident == "hang":
        time.sleep(600)


def machine(accelerator, cores, host="kaggle", **variables):
    """An environment that is not this machine's; of a TPU, one that torch_xla reaches."""
    found = environment.detect(variables)
    versions = {name: version for name, version in found.versions.items() if name != "torch_tpu"}
    here = dict(accelerator=accelerator, cores=cores, host=host, versions=versions)
    return dataclasses.replace(found, device_name="mock", **here)


def children(pid):
    """The pids of the processes that a process started and that are not gone."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# What a launch can run instead of a training: each returns a row of every rank


def noise(task, run, *, runtime):
    """Two random numbers."""
    runtime.seed(task.seed)
    return runtime.world.all_gather(torch.rand(2).tolist())


def mapped_memory(task, run, *, runtime):
    """The sum of the mapped images; what they take of memory, in bytes: proportional, whole, and written."""
    data, _ = task.datasets()
    total = sum(int(image.sum()) for image in data.images)  # touches every page
    runtime.world.all_gather([0.0])  # all have it
    sizes = dict.fromkeys(("Pss:", "Rss:", "Private_Dirty:"), 0)
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if "-" in name:
            inside = "images.npy" in line
        elif inside and name in sizes:
            sizes[name] += int(values[0]) * 1024
    rows = runtime.world.all_gather([total, *sizes.values()])
    return [[int(value) for value in row] for row in rows]


FUNCTIONS = dict(train=train, noise=noise, mapped_memory=mapped_memory)


def main(data, launches):
    done = []
    for settings in launches:
        function = FUNCTIONS[settings.pop("function", "train")]
        how = {name: settings.pop(name) for name in ("cores", "hang_timeout_s") if name in settings}
        run = settings.pop("run")
        task = Watched(dataset_dir=Path(data), log_every=1, num_workers=1, **settings)
        started = time.monotonic()
        with contextlib.redirect_stdout(io.StringIO()) as out:
            try:
                outcome = dict(result=launch(function, task, Run.open(run, task), **how))
            except (TpukitError, KeyboardInterrupt) as error:
                outcome = dict(error=type(error).__name__, message=str(error))
        left = children(os.getpid())
        done.append(dict(outcome, seconds=time.monotonic() - started, left=left, out=out.getvalue()))
    print("DONE " + json.dumps(done))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
