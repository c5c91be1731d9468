"""The training loop: what it learns, and what a stopped, killed or resumed run keeps."""

import contextlib
import dataclasses
import gc
import math
import time
import types
import weakref

import pytest
import torch

from tests.conftest import SMALL, best_weights, checkpoint, exact, same
from tests.tasks.cdeit.small import Tiny
from tests.tasks.mshnet.small import Narrow
from tests.tpukit.training.conftest import DIGITS, train_in
from tests.tpukit.training.test_saver import interrupt_at
from tpukit import MNIST, ImageClassifier, LanguageModel, MSHNet, Run, TpukitError, train
from tpukit.reporting import display, figures, findings
from tpukit.reporting.findings import last_and_kept_table
from tpukit.runs import weights
from tpukit.runs.settings import setting
from tpukit.training import setup

TASKS = {  # the class, its data, its settings
    "mnist": (MNIST, "digits", {}),
    "mshnet": (MSHNet, "infrared", dict(warm_epoch=0, base_size=32, crop_size=32)),
    "cdeit": (Tiny, "tank", dict(lr=1e-3)),
    "images": (ImageClassifier, "shapes", dict(model_name="test_vit", image_size=32, lr=1e-3)),
    "text": (LanguageModel, "topics", dict(sequence_length=48, new_tokens=4, lr=1e-3)),
}


@pytest.mark.parametrize(
    "device, name",
    [
        *(("cpu", name) for name in TASKS),
        *(pytest.param("xla", name, marks=pytest.mark.slow) for name in TASKS if name != "mshnet"),
        pytest.param("xla", "mshnet", marks=[pytest.mark.slow, pytest.mark.nightly]),
    ],
)
def test_every_task_moves_its_weights_scores_and_shows(name, device, tmp_path, request, capsys):
    kind, data, settings = TASKS[name]
    kind = Narrow if kind is MSHNet and device == "xla" else kind
    runtime = request.getfixturevalue(device)
    task = kind(dataset_dir=request.getfixturevalue(data), epochs=2, **SMALL | settings)
    run = Run.open(tmp_path / "run", task)
    torch.manual_seed(task.seed)
    before = task.model().state_dict()
    scores = train(task, run, runtime=runtime, progress=False)
    after = checkpoint(run)["model"]
    still = [n for n in before if n.endswith("weight") and torch.equal(before[n], after[n])]
    assert not still and all(value.device.type == "cpu" for value in after.values())
    assert -6 <= scores[task.score] <= 1 and run.records("train")[-1]["grad_norm"] > 0
    display.show(task)
    display.show_samples(task)
    display.show(run)
    display.show_report(run)
    display.show_predictions(run, task)
    assert (run.path / "pictures/curves.png").stat().st_size > 5000
    assert (run.path / "pictures/predictions.png").stat().st_size > 3000
    assert f"It ran on {runtime}" in capsys.readouterr().out


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remembered(MNIST):
    """MNIST whose models can be asked for afterwards, and which may want more memory than there is."""

    models: list = dataclasses.field(default_factory=list)
    full_at: int = 99

    def model(self):
        model = super().model().insert(1, torch.nn.BatchNorm2d(4))
        self.models.append(weakref.ref(model))
        return model

    def loss(self, model, batch, epoch):
        if self.full_at < 99 and epoch >= self.full_at:  # on XLA the epoch is a tensor
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().loss(model, batch, epoch)


@pytest.fixture
def without_gc():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


ENDS = [dict(ema_decay=0.9), dict(batch_norm="frozen"), dict(epochs=2, full_at=1)]
# On XLA the epoch is a tensor: nothing can fail at its value.
ON_XLA = [pytest.param("xla", settings, marks=pytest.mark.slow) for settings in ENDS[:2]]


@pytest.mark.parametrize("device, settings", [*(("cpu", settings) for settings in ENDS), *ON_XLA], ids=str)
def test_the_model_of_a_training_is_freed_as_soon_as_it_ends_or_runs_out_of_memory_and_its_error_is_kept(
    device, settings, digits, tmp_path, request, without_gc
):
    task = Remembered(dataset_dir=digits, **DIGITS | dict(epochs=1) | settings)
    ends = pytest.raises(TpukitError, match="smaller batch_size")
    with ends if "full_at" in settings else contextlib.nullcontext() as kept:
        train_in(tmp_path, task, request.getfixturevalue(device))
    assert (kept is None or kept.value.__cause__ is not None) and task.models[0]() is None


class DrawsARandomSplit(MNIST):
    def datasets(self):
        torch.rand(7)
        return super().datasets()


def test_datasets_that_draw_random_numbers_do_not_change_the_weights(digits, tmp_path, cpu):
    runs = [
        train_in(tmp_path / kind.__name__, kind(dataset_dir=digits, epochs=1, **DIGITS), cpu)
        for kind in (MNIST, DrawsARandomSplit)
    ]
    assert exact(runs[0]) == exact(runs[1])


# Early stopping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scripted(MNIST):
    """Its evaluations have these scores, each after a while."""

    accuracies: tuple[float, ...] = (0.5, 0.4, 0.6, 0.6, 0.1, 0.7, 0.7, 0.65, 0.2, 0.9)
    evaluated: list = setting(None, free=True)

    def evaluate(self, predictions):
        time.sleep(0.02)
        self.evaluated.append(1)
        return dict(super().evaluate(predictions), accuracy=self.accuracies[len(self.evaluated) - 1])


def scripted(folder, cpu, digits, earlier=0, **settings):
    """(run, epochs that were trained) of a training that follows `earlier` evaluations."""
    settings = DIGITS | dict(epochs=10, batch_size=100) | settings
    run = train_in(folder, Scripted(dataset_dir=digits, evaluated=[1] * earlier, **settings), cpu)
    return run, len(run.records("epoch"))


@pytest.mark.parametrize("patience, epochs", [(None, 10), (1, 2), (3, 9), (4, 10)])
def test_a_training_ends_with_the_first_evaluation_that_exhausts_its_patience(
    patience, epochs, digits, tmp_path, cpu
):
    run, trained = scripted(tmp_path, cpu, digits, patience=patience)
    assert trained == epochs == len(run.records("evaluation"))
    assert checkpoint(run)["state"]["step"] == 2 * epochs
    stopped = [(r["step"], r["epoch"], r["patience"]) for r in run.records("stopped")]
    assert stopped == ([(2 * epochs, epochs - 1, patience)] if epochs < 10 else [])
    assert (run.path / "log.txt").read_text().count("stopped early") == (epochs < 10)


def test_only_evaluations_count_and_the_best_weights_are_those_of_the_best_one(digits, tmp_path, cpu):
    scores = (0.3, 0.5, 0.4, 0.5, 0.9)
    run, epochs = scripted(tmp_path, cpu, digits, patience=2, eval_every=2, accuracies=scores)
    assert epochs == 8 and weights.metadata(run.path / "best.safetensors")["epoch"] == "3"


def test_a_run_that_stopped_early_says_so_trains_on_with_more_patience_and_equals_one_that_had_it(
    digits, tmp_path, cpu
):
    straight, _ = scripted(tmp_path / "straight", cpu, digits, patience=3)
    run, epochs = scripted(tmp_path / "parted", cpu, digits, patience=2)
    stopped = checkpoint(run)["model"]
    _, again = scripted(tmp_path / "parted", cpu, digits, earlier=5, patience=2)
    assert again == epochs == 5 and same(checkpoint(run)["model"], stopped)
    assert (run.path / "log.txt").read_text().count("stopped early after epoch 5") == 2
    _, more = scripted(tmp_path / "parted", cpu, digits, earlier=5, patience=3)
    assert more == 9 and same(best_weights(run), best_weights(straight))
    assert [r for r in exact(run) if r["step"] != 10 or r["kind"] != "stopped"] == exact(straight)


# Steps in place of epochs


STEPPED = dict(schedule="cosine", warmup_epochs=0.2, max_steps=33, eval_every_steps=10, log_every=7)


def test_max_steps_and_evaluations_count_in_steps_and_the_last_step_is_evaluated(digits, tmp_path, cpu):
    """Of epochs of 25 steps: the second ends within."""
    task = MNIST(dataset_dir=digits, epochs=1, **DIGITS | STEPPED)
    run = train_in(tmp_path, task, cpu)
    places = [(r["step"], r["epoch"]) for r in run.records("evaluation")]
    assert places == [(10, 0), (20, 0), (30, 1), (33, 1)]
    assert [(r["step"], r["epoch"]) for r in run.records("epoch")] == [(25, 0)]
    last = task.lr * (1 + math.cos(math.pi * 27 / 28)) / 2  # after 5 steps of warm-up
    assert run.records("train")[-1]["lr"] == pytest.approx(last)
    log = (run.path / "log.txt").read_text()
    assert "step 10: loss" in log and "epoch 1: loss" in log and "step 33: loss" in log
    train_in(tmp_path, task, cpu)
    assert "already has 1.32 epochs; 1.32 were requested" in (run.path / "log.txt").read_text()
    display.show(run)
    assert figures.live_figure(run.records(), findings.NO_LABELS).axes[0].get_xlim()[1] > 1.32


def test_evaluations_in_steps_change_no_step_and_whole_epochs_in_steps_are_those_epochs(
    digits, tmp_path, cpu
):
    settings = dict(DIGITS, dataset_dir=digits, schedule="cosine", log_every=1)
    names = ("epochs", "steps", "evaluated")
    ways = (dict(epochs=2), dict(epochs=9, max_steps=50), dict(epochs=2, eval_every_steps=7))
    runs = [train_in(tmp_path / name, MNIST(**settings, **way), cpu) for name, way in zip(names, ways)]
    assert exact(runs[0]) == exact(runs[1])
    steps = [[record for record in exact(run) if record["kind"] == "train"] for run in runs]
    assert steps[0] == steps[2] and len(steps[0]) == 50
    losses = [record["loss"] for record in exact(runs[0]) if record["kind"] == "train"]
    line = (runs[2].path / "log.txt").read_text().partition("step 35: loss ")[2]
    assert float(line.partition(",")[0]) == pytest.approx(sum(losses[25:35]) / 10, abs=1e-4), "of its epoch"


@pytest.mark.parametrize("stops_at", [9, 10, 11, 25, 30, 33])
def test_a_run_that_counts_in_steps_is_the_same_if_it_is_interrupted(
    stops_at, digits, tmp_path, cpu, monkeypatch
):
    task = MNIST(dataset_dir=digits, **DIGITS | STEPPED)
    straight = train_in(tmp_path / "straight", task, cpu)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_at(patch, stops_at)
        train_in(tmp_path / "run", task, cpu)
    run = train_in(tmp_path / "run", task, cpu)
    assert exact(run) == exact(straight) and same(best_weights(run), best_weights(straight))
    assert same(checkpoint(run)["model"], checkpoint(straight)["model"])
    assert checkpoint(run)["state"] == checkpoint(straight)["state"]


def test_patience_counts_evaluations_within_an_epoch(digits, tmp_path, cpu):
    run, _ = scripted(tmp_path, cpu, digits, patience=1, batch_size=8, eval_every_steps=10)
    assert [record["step"] for record in run.records("evaluation")] == [10, 20]
    assert [(r["step"], r["epoch"]) for r in run.records("stopped")] == [(20, 0)]
    _, epochs = scripted(tmp_path, cpu, digits, earlier=2, patience=1, batch_size=8, eval_every_steps=10)
    assert (run.path / "log.txt").read_text().count("stopped early after step 20") == 2 and not epochs
    title = last_and_kept_table(run.records(), {}).title
    assert title.startswith("Scores after step 20 (last) and step 10 (kept)")


def test_progress_is_shown_ten_times_a_second_and_at_the_end_of_each_epoch(
    digits, tmp_path, cpu, monkeypatch
):
    now, shown, take_step = [100.0], [], setup.Trainer.take_step

    def step_of_40_ms(self, batch, epoch):
        take_step(self, batch, epoch)
        now[0] += 0.04

    monkeypatch.setattr(setup, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(setup.Trainer, "take_step", step_of_40_ms)
    monkeypatch.setattr(Run, "write_progress", lambda self, step, **values: shown.append(step))
    train_in(tmp_path, MNIST(dataset_dir=digits, epochs=2, **DIGITS), cpu)  # of 25 steps
    assert shown == [*range(1, 50, 3), 50]
