"""Scores of weights: all samples once, in the order of one device, recorded in one order."""

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.conftest import refuses, scores_of
from tests.tasks.mshnet.small import Narrow
from tests.tpukit.training.conftest import DIGITS, train_in
from tpukit import MNIST, TpukitError
from tpukit.devices.distributed import World
from tpukit.host.text import GIB
from tpukit.runs import weights
from tpukit.training import evaluation


def test_a_set_without_samples_is_an_error_that_says_which(digits, tmp_path, cpu, monkeypatch):
    task = MNIST(dataset_dir=digits)
    empty = task.test_set()
    empty.images, empty.labels = empty.images[:0], empty.labels[:0]
    with pytest.raises(TpukitError, match=f"{task.dataset_dir}.* test set"):
        scores_of(task, task.model(), empty, cpu)
    monkeypatch.setattr(MNIST, "datasets", lambda task: (empty, empty))
    with refuses("batch_size=128", "training set", "0 samples"):
        train_in(tmp_path, task, cpu)


def trained_with_scores(scores, digits, cpu, folder, monkeypatch, **settings):
    """A run of MNIST whose evaluations return these, one after the other."""
    remaining = iter(scores)
    monkeypatch.setattr(MNIST, "evaluate", lambda self, found: next(remaining))
    task = MNIST(dataset_dir=digits, **dict(DIGITS, epochs=len(scores), **settings))
    return train_in(folder, task, cpu)


def test_scores_of_numpy_and_torch_are_recorded_as_plain_numbers(digits, cpu, tmp_path, monkeypatch):
    scores = [dict(accuracy=np.float32(0.5), of=dict(each=np.arange(2), one=torch.tensor(3)))]
    [record] = trained_with_scores(scores, digits, cpu, tmp_path, monkeypatch).records("evaluation")
    assert record["scores"] == dict(accuracy=0.5, of=dict(each=[0, 1], one=3)) and record["kept"]


@pytest.mark.parametrize(
    "names, printed",
    [
        (dict(accuracy="Acc, share of images"), "Acc 0.5"),
        ({}, "accuracy 0.5, pixel_recall 0.25"),
    ],
)
def test_an_epochs_line_has_the_scores_of_the_charts_by_their_names(
    names, printed, digits, cpu, tmp_path, monkeypatch
):
    monkeypatch.setattr(MNIST, "score_names", names)
    run = trained_with_scores([dict(accuracy=0.5, pixel_recall=0.25)], digits, cpu, tmp_path, monkeypatch)
    [line] = re.findall("epoch 1: loss [0-9.]+, (.*)", (run.path / "log.txt").read_text())
    assert line == printed


@pytest.mark.parametrize(
    "scores", [dict(loss=1.0), dict(accuracy="high"), dict(accuracy=1j), [0.5], None], ids=str
)
def test_scores_that_cannot_be_recorded_or_do_not_decide_are_refused(
    scores, digits, cpu, tmp_path, monkeypatch
):
    with pytest.raises(TpukitError, match="evaluate"):
        trained_with_scores([scores], digits, cpu, tmp_path, monkeypatch)


def test_a_score_that_is_not_a_number_is_kept_only_until_there_is_one(digits, cpu, tmp_path, monkeypatch):
    scores = [dict(accuracy=value) for value in (math.nan, 0.2, math.nan, 0.1, 0.3)]
    run = trained_with_scores(scores, digits, cpu, tmp_path, monkeypatch)
    kept = [record["kept"] for record in run.records("evaluation")]
    assert kept == [True, True, False, False, True] and weights.epoch_of(run.best()) == 4


def test_scores_that_are_never_a_number_end_a_training_with_patience(digits, cpu, tmp_path, monkeypatch):
    run = trained_with_scores([dict(accuracy=math.nan)] * 9, digits, cpu, tmp_path, monkeypatch, patience=2)
    assert len(run.records("evaluation")) == 3


@pytest.mark.parametrize(
    "batch_size, gib, ranks, resident, wanted",
    [
        (4, 8, 1, True, 32),
        (5, 80, 1, True, 32),
        (2, 80, 1, True, 16),  # eight times what trains, which takes ten times the memory
        (128, 80, 1, True, 128),
        (4, 7.9, 1, True, 4),
        (4, 80, 2, True, 4),
        (4, 80, 1, False, 4),
    ],
)
def test_one_gpu_predicts_32_samples_of_a_set_on_it_at_once(batch_size, gib, ranks, resident, wanted, cpu):
    memory = [(1, gib * GIB)]
    gpu = SimpleNamespace(device=torch.device("cuda"), world=World(0, ranks), memory=lambda: memory)
    loader = SimpleNamespace(runtime=gpu, resident={} if resident else None)
    assert evaluation.evaluation_batch(batch_size, loader) == wanted
    loader.runtime = cpu
    assert evaluation.evaluation_batch(batch_size, loader) == batch_size


class Noted(Narrow):
    """Notes how many samples it predicts at once."""

    def predict(self, model, batch, epoch=None):
        sizes.append(len(batch["image"]))
        return super().predict(model, batch, epoch)


sizes = []


def test_an_epoch_is_predicted_in_the_evaluators_batches_with_the_same_scores(
    infrared, cpu, tmp_path, monkeypatch
):
    sizes.clear()
    task = Noted(dataset_dir=infrared, base_size=32, crop_size=32, batch_size=1, epochs=1, data_on="device")
    plain = train_in(tmp_path / "plain", task, cpu).records("evaluation")[0]["scores"]
    monkeypatch.setattr(evaluation, "evaluation_batch", lambda batch_size, loader: 3 * batch_size)
    large = train_in(tmp_path / "large", task, cpu).records("evaluation")[0]["scores"]
    assert sizes == [1, 1, 1, 1, 3, 3] and large == plain
