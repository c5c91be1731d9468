"""What tpukit's loop takes away from a device that is fast: MSHNet's sizes, epochs of a second, scored every one.

The device is mocked: a step takes it 10 ms and a batch of the test set 4 ms, which it works off in order, with at most two
waiting, while the host sleeps as it would beside a real one. All else is real: MSHNet's 4 million weights with Adagrad's state
are copied and saved, 201 maps of 256x256 are read back and scored, and each epoch's weights are the best so far.
"""

import collections
import contextlib
import json
import statistics
import sys
import tempfile
import time
from unittest import mock

import torch

from tpukit import MSHNet, Run, train
from tpukit.devices.runtime import Runtime
from tpukit.training import evaluation, loop

STEP_S, PREDICT_S = 0.010, 0.004
RUNS, EPOCHS = 2, 6
IMAGES = 1005  # 804 to train are 100 steps of 8, 201 to test


class FastDevice(Runtime):
    """A device that works in order and answers with constants. ends: when each step will have ended, by its place."""

    compiles = True  # as on a TPU: the data lies on the device, and steps are handed over whole

    def __init__(self):
        super().__init__("cpu", "fp32")
        self.accelerator, self.queue, self.ends, self.evaluations_s = "fast", collections.deque(), [], 0.0
        self.free_at = 0.0

    def _work(self, seconds):
        """Queue work; waits where two are queued before it. Returns when it will have ended."""
        while len(self.queue) >= 2:
            self._wait(self.queue.popleft())
        self.free_at = max(self.free_at, time.monotonic()) + seconds
        self.queue.append(self.free_at)
        return self.free_at

    def _wait(self, until):
        time.sleep(max(0.0, until - time.monotonic()))

    def compile(self, function, *, name=None, max_graphs=1, changes=None):
        def step(batch, epoch, sums):
            self.ends.append(self._work(STEP_S))
            return sums + torch.tensor([0.1, 1.0, 0.0, 0.0])

        def predict(batch):
            self._work(PREDICT_S)
            return self.logits[len(self.ends) // 100 % len(self.logits)]

        def compose(batch):
            return dict(image=None, mask=self.mask, valid=batch["valid"])

        return dict(step=step, predict=predict, compose=compose)[name]

    def put_whole(self, arrays, *, sharded=False):
        noise = torch.randn(8, 1, 256, 256, generator=torch.Generator().manual_seed(0)) - 8
        self.mask = torch.zeros(8, 1, 256, 256, dtype=torch.uint8)
        for row, column in ((20, 30), (120, 90), (200, 220)):
            self.mask[..., row : row + 5, column : column + 5] = 255
        # Better from one epoch to the next, so that each writes the best weights.
        self.logits = [noise + self.mask * (0.032 + 0.0002 * epoch) for epoch in range(EPOCHS + 1)]
        return super().put_whole(arrays)

    def gradient_norm(self, model):
        return torch.ones(1)

    def host(self, tree):
        self._wait(self.free_at)
        return super().host(tree)

    def host_later(self, tree):
        ready_at = self.free_at

        def wait():
            self._wait(ready_at)
            return super(FastDevice, self).host(tree)

        return wait


@contextlib.contextmanager
def timed(spans, owner, name, part):
    """Context manager: add up in spans[part] what calls of owner.name take, without the timed calls within."""
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
    (loop.Trainer, "_save", "saves"),
    (evaluation.Evaluator, "collect", "scores"),
    (evaluation.Evaluator, "predict", "evaluation"),
    (Run, "log", "records"),
    (Run, "write_progress", "records"),
    (Run, "print", "records"),
)


def measure(folder, **settings):
    """One run: milliseconds an epoch that were lost, and how they split, from the end of the first epoch's steps on."""
    # As slow as a step would be: batches of 8.
    task = MSHNet(dataset_dir=folder, epochs=EPOCHS, batch_size=8, data_on="device", **settings)
    runtime, spans = FastDevice(), collections.Counter()
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        run = Run.open(place, task)
        run.echo = False
        if len(sys.argv) < 4:
            for part in PARTS:
                stack.enter_context(timed(spans, *part))
        train(task, run, runtime=runtime, progress=False)
        ended = time.monotonic()
    steps, batches = len(runtime.ends) // EPOCHS, -(-201 // 8)
    epoch_s = (runtime.ends[-1] - runtime.ends[steps - 1]) / (EPOCHS - 1)
    ideal_s = steps * STEP_S + batches * PREDICT_S
    lost = dict(lost_ms=epoch_s - ideal_s, end_ms=ended - runtime.ends[-1] - batches * PREDICT_S)
    lost |= {f"{part}_ms": spans[part] / EPOCHS for part in ("saves", "scores", "evaluation", "records")}
    lost["evaluation_ms"] -= batches * PREDICT_S
    return {name: 1e3 * seconds for name, seconds in lost.items()} | dict(percent=100 * (epoch_s / ideal_s - 1))


def main(folder):
    rows = [measure(folder) for _ in range(RUNS)]
    for name in rows[0]:
        values = [row[name] for row in rows]
        found = dict(what=name, median=round(statistics.median(values), 2), lowest=round(min(values), 2))
        print("ROW " + json.dumps(dict(found, highest=round(max(values), 2), runs=RUNS, epochs=EPOCHS)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
