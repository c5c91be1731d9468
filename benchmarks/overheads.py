"""What tpukit's loop takes away from a device that is fast: MSHNet's sizes, epochs of a second, scored every
one.

The device is mocked: a step takes it 10 ms and a batch of the test set 4 ms, which it works off in order,
with at most two waiting, while the host sleeps as it would beside a real one. All else is real: MSHNet's 4
million weights with Adagrad's state are copied and saved, 201 maps of 256x256 are read back and scored, and
each epoch's weights are the best so far."""

import collections
import contextlib
import json
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch

from tpukit import MSHNet, Run, train
from tpukit.devices.runtime import Runtime
from tpukit.tasks.datasets import make_synthetic
from tpukit.training import evaluation, loop

STEP_S, PREDICT_S = 0.010, 0.004
RUNS, EPOCHS, BATCH = 5, 12, 8
IMAGES, STEPS, BATCHES = 1005, 100, 26  # as many as IRSTD-1k has: 804 to train, 201 to test


class FastDevice(Runtime):
    """A device that works in order and answers with constants. ends: when each step will have ended, by its
    place."""

    compiles = has_graphs = True  # as on a TPU: the data lies on the device, and steps are handed over whole

    def __init__(self):
        super().__init__("cpu", "fp32")
        self.accelerator, self.queue, self.ends, self.free_at = "fast", collections.deque(), [], 0.0

    def _work(self, seconds):
        """Queue work; waits where two are queued before it. Returns when it will have ended."""
        while len(self.queue) >= 2:
            self._wait(self.queue.popleft())
        self.free_at = max(self.free_at, time.monotonic()) + seconds
        self.queue.append(self.free_at)
        return self.free_at

    def _wait(self, until):
        time.sleep(max(0.0, until - time.monotonic()))

    def compile(self, function, *, name=None, max_graphs=1, mutates=None):
        def step(batch, epoch, sums, lr_factor):
            self.ends.append(self._work(STEP_S))
            return sums + torch.tensor([0.1, 1.0, 0.0, 0.0])

        def predict(batch):
            self._work(PREDICT_S)
            return self.logits[len(self.ends) // STEPS % len(self.logits)]

        def compose(batch):
            return dict(image=None, mask=self.mask, valid=batch["valid"])

        return dict(step=step, predict=predict, compose=compose)[name]

    def put_dataset(self, arrays, *, sharded=False):
        noise = torch.randn(BATCH, 1, 256, 256, generator=torch.Generator().manual_seed(0)) - 8
        self.mask = torch.zeros(BATCH, 1, 256, 256, dtype=torch.uint8)
        for row, column in ((20, 30), (120, 90), (200, 220)):
            self.mask[..., row : row + 5, column : column + 5] = 255
        # Better from one epoch to the next, so that each writes the best weights.
        self.logits = [noise + self.mask * (0.032 + 0.0002 * epoch) for epoch in range(EPOCHS + 1)]
        return super().put_dataset(arrays)

    def gradient_norm(self, model):
        return torch.ones(1)

    def to_cpu(self, tree):
        self._wait(self.free_at)
        return super().to_cpu(tree)

    def to_cpu_async(self, tree):
        ready_at = self.free_at

        def wait():
            self._wait(ready_at)
            return super(FastDevice, self).to_cpu(tree)

        return wait


@contextlib.contextmanager
def timed(spans, owner, name, part):
    """Context manager: add up in spans[part] what calls of owner.name take, without the timed calls
    within."""
    whole = getattr(owner, name)

    def call(*args, **how):
        began, within = time.perf_counter(), spans["within"]
        spans["within"] = 0.0
        try:
            return whole(*args, **how)
        finally:
            took = time.perf_counter() - began
            spans[part] += took - spans["within"]
            spans["within"] = within + took

    with mock.patch.object(owner, name, call):
        yield


PARTS = (
    (loop.Trainer, "save", "saves"),
    (evaluation.Evaluator, "collect", "scores"),
    (evaluation.Evaluator, "evaluate", "evaluation"),
    (Run, "log", "records"),
    (Run, "write_progress", "records"),
    (Run, "print", "records"),
)
# Each against the first. A checkpoint a minute would seldom fall into these runs: the second way writes one
# in every epoch.
WAYS = {"as it is": {}, "a checkpoint every second": dict(save_every_s=1.0), "not scored": dict(scored=False)}


def measure_bare():
    """The same device in a loop that only hands over its work: what this machine itself loses."""
    runtime = FastDevice()
    step, predict = (runtime.compile(None, name=name) for name in ("step", "predict"))
    runtime.put_dataset({})
    sums = torch.zeros(4)
    for _ in range(EPOCHS):
        for _ in range(STEPS):
            sums = step(None, 0, sums, 1.0)
        for _ in range(BATCHES):
            predict(None)
        runtime.to_cpu(sums)
    return dict(lost(runtime), saves_ms=0.0, scores_ms=0.0, evaluation_ms=0.0, records_ms=0.0, end_ms=0.0)


def lost(runtime):
    """What the epochs took longer than the device needed. The first one counts for nothing: it starts the
    threads."""
    ideal_s = STEPS * STEP_S + BATCHES * PREDICT_S
    epoch_s = (runtime.ends[-1] - runtime.ends[STEPS - 1]) / (EPOCHS - 1)
    return dict(lost_percent=100 * (epoch_s / ideal_s - 1), lost_ms=1e3 * (epoch_s - ideal_s))


def measure(folder, scored=True, **settings):
    """One run: milliseconds that an epoch loses, in all and in each part of the loop, and once at the end."""
    task = MSHNet(dataset_dir=folder, epochs=EPOCHS, batch_size=BATCH, data_on="device", **settings)
    runtime, spans = FastDevice(), collections.Counter()
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        run = Run.open(place, task)
        run.echo = False
        for part in PARTS:
            stack.enter_context(timed(spans, *part))
        if not scored:
            stack.enter_context(mock.patch.object(MSHNet, "evaluate", lambda self, found: dict(iou=0.0)))
        train(task, run, runtime=runtime, progress=False)
        ended = time.monotonic()
    found = lost(runtime)
    found |= {
        f"{part}_ms": 1e3 * spans[part] / EPOCHS for part in ("saves", "scores", "evaluation", "records")
    }
    found["evaluation_ms"] -= 1e3 * BATCHES * PREDICT_S
    return dict(found, end_ms=1e3 * (ended - runtime.ends[-1] - BATCHES * PREDICT_S))


def main():
    found = {way: [] for way in ("bare loop", *WAYS)}
    with tempfile.TemporaryDirectory() as place:
        folder = make_synthetic("IRSTD-1k", Path(place) / "infrared", size=IMAGES)
        for _ in range(RUNS):
            found["bare loop"].append(measure_bare())
            for way, settings in WAYS.items():
                found[way].append(measure(folder, **settings))
    for way, rows in found.items():
        row = {name: round(statistics.median(row[name] for row in rows), 2) for name in rows[0]}
        percents = [row["lost_percent"] for row in rows]
        row |= dict(
            way=way, lowest=round(min(percents), 2), highest=round(max(percents), 2), runs=RUNS, epochs=EPOCHS
        )
        print("ROW " + json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
