"""Scores of weights: all samples once, in the order of one device, recorded in one order."""

import dataclasses
import itertools
import time

import pytest
import torch

from tpukit import MNIST, MSHNet, Run, TpukitError, train
from tpukit.devices.runtime import Runtime
from tpukit.training.evaluation import evaluate


def test_a_test_set_without_samples_is_an_error_that_says_so(digits, cpu):
    task = MNIST(dataset_dir=digits)
    empty = task.test_set()
    empty.images, empty.labels = empty.images[:0], empty.labels[:0]
    with pytest.raises(TpukitError, match=f"{task.dataset_dir}.* test set"):
        evaluate(task, task.model(), empty, cpu)


@pytest.mark.slow
def test_scores_counted_while_the_next_epoch_trains_are_recorded_in_the_same_order(infrared, cpu, tmp_path, monkeypatch):
    task = MSHNet(dataset_dir=infrared, base_size=32, crop_size=32, batch_size=4, epochs=3, log_every=2, data_on="host")
    order = []
    for name, delay in (("fast", 0), ("slow", 0.5)):
        count = MSHNet.evaluate
        monkeypatch.setattr(MSHNet, "evaluate", lambda self, found: (time.sleep(delay), count(self, found))[1])
        run = Run.open(tmp_path / name, task)
        assert train(task, run, runtime=cpu, progress=False) == run.records("evaluation")[-1]["scores"]
        monkeypatch.undo()
        order.append([(r["kind"], r["step"], r.get("scores")) for r in run.records() if r["kind"] != "start"])
    assert order[0] == order[1]
    assert [kind for kind, _, _ in order[0]] == ["train", "train", "epoch", "evaluation"] * 3


def test_evaluation_scores_do_not_depend_on_the_batch_size(infrared, cpu):
    task = MSHNet(dataset_dir=infrared, base_size=32, crop_size=32, batch_size=1)
    torch.manual_seed(0)
    model, (_, data) = task.model(), task.datasets()
    one = evaluate(task, model, data, cpu)
    three = evaluate(dataclasses.replace(task, batch_size=3), model, data, cpu)
    assert one == three and one["images"] == 4


def test_predictions_are_copied_before_the_next_batch_is_asked_for_and_waited_for_after_it(digits, cpu, monkeypatch):
    order, count = [], itertools.count(1)

    class Event:
        def __init__(self):
            self.number = next(count)

        def record(self):
            order.append(f"copy {self.number}")

        def synchronize(self):
            order.append(f"wait {self.number}")

    class Told(MNIST):
        def predict(self, model, batch, epoch=None):
            order.append("predict")
            return super().predict(model, batch, epoch)

    task = Told(dataset_dir=digits, batch_size=16)  # 40 test samples are 3 batches
    model, data = task.model(), task.test_set()
    wanted, order[:] = evaluate(task, model, data, cpu), []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    host_later = Runtime.host_later

    def on_a_gpu(self, tree):
        self.device = torch.device("cuda")
        waited = host_later(self, tree)
        self.device = torch.device("cpu")
        return waited

    monkeypatch.setattr(Runtime, "host_later", on_a_gpu)
    assert evaluate(task, model, data, cpu) == wanted
    assert order == "predict,copy 1,predict,copy 2,wait 1,predict,copy 3,wait 2,wait 3".split(",")
