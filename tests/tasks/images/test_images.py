"""The task as a whole: its loss, scores, files, resuming, several cores, and one graph on XLA."""

import builtins
import csv
import dataclasses
import json
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import cross_entropy, one_hot

from tests.conftest import best_weights, refuses
from tests.tasks.images.small import make
from tests.tpukit.training.conftest import train_in
from tpukit import ImageClassifier, Run, detect, predict, show, train
from tpukit import test as score_run
from tpukit.devices.runtime import Runtime
from tpukit.inference.own import show_own
from tpukit.reporting.display import predictions_figure
from tpukit.runs import weights

pytest.importorskip("timm")
RESNET = dict(model_name="test_resnet", pretrained="no")
TINY = dict(model_name="test_vit", image_size=32, pretrained="no", batch_size=8, log_every=1, num_workers=1)


@pytest.fixture(scope="module")
def finished(shapes, tmp_path_factory):
    """(task, run, scores of its test) of two epochs, augmented, on one core."""
    # Without smoothing: on XLA a graph that no other test of this process has compiled.
    task = ImageClassifier(dataset_dir=shapes, epochs=2, lr=1e-3, label_smoothing=0.0, **TINY)
    run = train_in(tmp_path_factory.mktemp("finished") / "run", task, Runtime("cpu"))
    return task, run, score_run(task, run, runtime=Runtime("cpu"), progress=False)


# Loss and scores


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_the_loss_is_the_cross_entropy_with_smoothed_labels(smoothing):
    task = ImageClassifier(**TINY, label_smoothing=smoothing)
    batch = {name: torch.as_tensor(values) for name, values in task.example(4).items()}
    batch["label"] = torch.tensor([1, 4, 4, 0])
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    shares = torch.eye(6)[batch["label"]] * (1 - smoothing) + smoothing / 6  # (B, K) of the classes
    seen = []
    loss = task.loss(lambda images: (seen.append(images), logits)[1], batch, 0)
    torch.testing.assert_close(loss, cross_entropy(logits, shares))
    assert seen[0].shape == (4, 3, 32, 32) and abs(float(seen[0].mean())) < 1


def some_predictions(classes=12):
    """(logits, labels) of 41 samples in padded batches of 8, and the same without padding. A sample has no
    numbers, as of a model that diverged."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (41,), generator=generator)
    logits = torch.randn(41, classes, generator=generator) + one_hot(labels, classes)
    logits[3] = float("nan")
    place = torch.arange(48)
    parts = zip(place.clamp(max=40).split(8), (place < 41).split(8))
    return [(logits[i], dict(label=labels[i], valid=valid)) for i, valid in parts], logits, labels


def test_the_accuracy_is_the_share_of_images_whose_class_is_the_most_probable():
    batches, logits, labels = some_predictions()
    hits = (logits.argmax(1) == labels).double()
    hits[3] = 0
    scores = ImageClassifier().evaluate(batches)
    assert scores["accuracy"] == hits.mean()
    counts = np.array(scores["confusion"]["counts"])
    assert scores["images"] == 41 and scores["not_finite"] == counts[:, 12].sum() == 1
    assert np.array_equal(counts.sum(1), np.bincount(labels, minlength=13))
    assert json.loads(json.dumps(scores)) == scores
    assert "confusion" not in ImageClassifier().evaluate(some_predictions(classes=31)[0])


def test_the_table_of_a_test_says_what_was_taken_for_what(finished):
    task, run, scores = finished
    predicted = list(csv.DictReader(open(run.path / "predictions/predictions.csv")))
    right = [row["class"] == row["predicted"] for row in predicted]
    assert len(predicted) == 18 and np.mean(right) == pytest.approx(scores["accuracy"])
    assert all(row["file"].startswith(f"test/{row['class']}/") for row in predicted)
    loss = [float(row["loss"]) for row in predicted]
    assert loss == sorted(loss, reverse=True)
    pairs = [(row["class"], row["predicted"]) for row in predicted]
    names = task.class_names
    assert scores["confusion"]["counts"] == [[pairs.count((a, b)) for b in names] for a in names]
    batch, logits = task.load_predictions(run.path / "predictions")
    assert len(logits) == 16 and batch["image"].shape == (16, 3, 32, 32)
    wrong_first = sorted(predicted, key=lambda row: row["class"] == row["predicted"])[:16]
    assert list(batch["name"]) == [row["file"] for row in wrong_first]
    titles = [panels[0][0] for panels in task.panels(batch, logits)]
    for title, row in zip(titles, wrong_first, strict=True):
        mark = "✓" if row["class"] == row["predicted"] else "✗"
        assert title.startswith(f"{mark} {row['class']}, predicted {row['predicted']} ")
    figure = predictions_figure(run, task, 16)
    wrong = sum(title.startswith("✗") for title in titles)
    assert figure.get_suptitle().endswith(f": {wrong} of 16 shown are wrong")
    assert [axis.get_title().split("\n")[0] for axis in figure.axes] == titles


def test_a_mistake_stands_before_what_is_right_with_a_larger_loss(tmp_path):
    logits = torch.tensor([[0.1, 0, 0, 0, 0, 0], [1, 0.9, -9, -9, -9, -9]])  # losses of 1.7 and 0.7
    batch = dict(label=torch.tensor([0, 1]), valid=torch.ones(2, dtype=torch.bool))
    images = np.zeros((2, 3, 4, 4), np.uint8)
    data = SimpleNamespace(classes=list("ab=def"), names=["=1.png", "wrong.png"], images=images)
    ImageClassifier(**TINY).save_predictions(tmp_path, [(logits, batch)], data)
    saved, _ = ImageClassifier(**TINY).load_predictions(tmp_path)
    assert list(saved["name"]) == ["wrong.png", "=1.png"]
    rows = list(csv.DictReader(open(tmp_path / "predictions.csv")))
    assert [row["file"] for row in rows] == ["'=1.png", "wrong.png"]  # for a spreadsheet no formula


def test_a_run_shows_its_confusion_matrix(finished):
    task, run, _ = finished
    show(run)
    assert (run.path / "pictures/confusion.png").stat().st_size > 5000
    shown = run.records("evaluation")[-1]["scores"]["confusion"]
    assert shown["classes"] == task.class_names and np.sum(shown["counts"]) == 18


# Weights and classes of a run


def test_weights_without_names_of_classes_are_used_with_a_sentence_about_their_order(tmp_path):
    for name in ("c1", "c2", "c10"):
        for split in ("train", "test"):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(2):
                colour = len(name) * 60, number * 9, ord(name[-1])
                Image.new("RGB", (32, 32), colour).save(tmp_path / split / name / f"{number}.png")
    task = ImageClassifier(dataset_dir=tmp_path, **TINY)
    state = task.model().state_dict()
    torch.save(state, tmp_path / "w.pth")
    named = dict(task="images", classes=json.dumps(["c1", "c10", "c2"]))
    (tmp_path / "named.safetensors").write_bytes(b"".join(weights.serialize(state, named)))
    for setting in (dict(weights=tmp_path / "w.pth"), dict(pretrained=str(tmp_path / "w.pth"))):
        train_set, _ = dataclasses.replace(task, **setting).datasets()
        [told] = [notice for notice in train_set.notices if "does not name its classes" in notice]
        assert "taken as c1, c10, c2 " in told and "timm's own training has the order c1, c2, c10" in told
        assert ("3 outputs is kept" in told) == ("pretrained" in setting)
    scored = dataclasses.replace(task, weights=tmp_path / "w.pth").test_set()
    assert sum("does not name its classes" in notice for notice in scored.notices) == 1
    for setting in (
        dict(weights=tmp_path / "named.safetensors"),
        dict(pretrained=str(tmp_path / "named.safetensors")),
        {},
    ):
        notices = dataclasses.replace(task, **setting).datasets()[0].notices
        assert not [notice for notice in notices if "name its classes" in notice]


def test_a_head_of_as_many_but_other_classes_is_no_start_for_these(shapes, tmp_path):
    task = ImageClassifier(dataset_dir=shapes, **TINY)
    state = {name: values + 1 for name, values in task.model().state_dict().items()}
    heads = task.head(task.model())
    classes = task.class_names
    for names in (classes, classes[::-1]):
        (tmp_path / "w.safetensors").write_bytes(
            b"".join(weights.serialize(state, dict(classes=json.dumps(names))))
        )
        started = dataclasses.replace(task, pretrained=str(tmp_path / "w.safetensors")).model().state_dict()
        kept = {name for name in state if torch.equal(started[name], state[name])}
        assert heads and kept == {*state} - (set() if names == classes else {*heads})


def test_a_run_predicts_own_files_by_the_names_of_its_classes_without_the_dataset(finished, shapes):
    task, run, _ = finished
    away = dataclasses.replace(task, dataset_dir=None)
    paths = sorted(shapes.glob("test/ring/*.png"))[:2]
    found = predict(run, paths, task=away, progress=False)
    model = task.model().eval()
    weights.load(model, run.path / "best.safetensors")
    batch, _ = task.read_files(paths, None)
    with torch.no_grad():
        logits = task.predict(model, {name: torch.as_tensor(values) for name, values in batch.items()})
    assert [one["name"] for one in found] == [path.name for path in paths]
    for one, shares in zip(found, logits.softmax(1), strict=True):
        assert one["class"] == task.class_names[shares.argmax()]
        assert one["probability"] == pytest.approx(float(shares.max()), rel=1e-4)
    show_own(run, away, paths)
    rows = list(csv.DictReader(open(run.path / "own/predictions.csv")))
    assert [row["class"] for row in rows] == [one["class"] for one in found]


def test_weights_of_a_run_with_other_classes_are_refused_with_the_way_out(finished, shapes, tmp_path, cpu):
    task, run, _ = finished
    best = run.path / "best.safetensors"
    for split in ("train", "test"):
        (tmp_path / "two" / split).mkdir(parents=True)
        for name in ("ring", "bar"):
            (tmp_path / "two" / split / name).symlink_to(shapes / split / name)
    other = dataclasses.replace(task, dataset_dir=tmp_path / "two", weights=best)
    with refuses("6 classes", "2 classes", "pretrained=PATH"):
        train_in(tmp_path / "other", other, cpu)
    tuned = dataclasses.replace(task, dataset_dir=tmp_path / "two", pretrained=str(best)).model().state_dict()
    assert tuned["head.weight"].shape[0] == 2
    assert torch.equal(tuned["norm.weight"], best_weights(run)["norm.weight"])


def test_a_file_that_claims_to_be_of_a_run_but_names_no_classes_is_refused(tmp_path):
    for number, classes in enumerate(({}, dict(classes="["), dict(classes="7"))):
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(b"".join(weights.serialize(dict(a=torch.zeros(1)), dict(task="images", **classes))))
        with refuses(path.name, "classes"):
            ImageClassifier(weights=path).model()


@pytest.mark.parametrize("name, value", dict(crop=0.0, image_size=0).items())
def test_a_setting_out_of_its_range_is_refused_by_its_name(name, value):
    with refuses(f"{name}={value:g}"):
        ImageClassifier(**{name: value})


# Training


# What is said of the labels before training


@pytest.mark.parametrize("dogs", [14, 4])
def test_classes_with_few_images_are_named(dogs, tmp_path):
    make(tmp_path, "train/cat", "test/cat", "test/dog", count=12)
    make(tmp_path, "train/dog", count=dogs)
    task = ImageClassifier(dataset_dir=tmp_path, **TINY)
    data, _ = task.datasets()
    sentences, indices = task.check_labels(data)
    assert f"{min(12, dogs)} of" in sentences[0] and len(sentences) == 1 + (dogs == 4)
    assert "dog" in sentences[-1] and data.labels[indices].tolist() == [0, 1]


# Settings that nobody gave


def pictures_of(folder, count, side):
    """Two classes of so many images."""
    for number in range(2 * count):
        name = folder / f"{'ab'[number % 2]}/{number:04d}.png"
        name.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (side, side + number % 7), number % 256).save(name)
    return folder


def chosen(**settings):
    task = ImageClassifier(**settings, **RESNET).choose_settings(detect())
    return task.batch_size, task.epochs


@pytest.mark.parametrize(  # 0.8 of each class train
    "count, batch_size, epochs", [(30, 8, 34), (5, 4, 100), (800, 64, 10)]
)
def test_batch_and_epochs_fit_the_number_of_images(count, batch_size, epochs, tmp_path):
    assert chosen(dataset_dir=pictures_of(tmp_path / "set", count, 8)) == (batch_size, epochs)
    assert 1.6 * count // batch_size * epochs >= 200


def test_a_setting_that_was_given_stays_and_the_others_fit_it(tmp_path):
    folder = pictures_of(tmp_path / "set", 40, 40)
    assert chosen(dataset_dir=folder, batch_size=16) == (16, 50)  # of 4 steps
    assert chosen(dataset_dir=folder, batch_size=64, epochs=2) == (64, 2)
    assert chosen() == (64, 10), "for a large set, as in a plan without one"
    assert chosen(dataset_dir=folder) == (8, 25)
    data, _ = ImageClassifier(dataset_dir=folder, **RESNET).datasets()
    assert data.batch([0])["image"].shape == (1, 3, 160, 160)  # what test_resnet is made for
    assert chosen(dataset_dir=pictures_of(tmp_path / "more", 250, 8)) == (32, 17)


def settle(folder):
    """Let the folders below one look as if they had changed long ago, because younger times prove nothing."""
    for path in (folder, *folder.rglob("*")):
        os.utime(path, ns=(10**18, 10**18))


@pytest.fixture
def reads(monkeypatch):
    """The folders that are read, in order."""
    found, scan = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: found.append(str(path)) or scan(path))
    return found


def test_a_task_is_constructed_without_a_look_at_its_data(tmp_path, monkeypatch):
    folder = pictures_of(tmp_path / "set", 10, 40)

    def refuse(path, *arguments, **keywords):
        raise AssertionError(f"{path} is read")

    with monkeypatch.context() as patch:
        for owner, name in ((os, "scandir"), (os, "listdir"), (os, "stat"), (builtins, "open")):
            patch.setattr(owner, name, refuse)
        task = ImageClassifier(dataset_dir=folder, **RESNET)
        again = dataclasses.replace(task, lr=1e-4)
    assert (again.batch_size, again.epochs) == (None, None)


def test_each_folder_is_read_once_when_a_run_opens_and_not_again_before_one_of_them_changes(
    tmp_path, reads, cpu
):
    folder = pictures_of(tmp_path / "set", 10, 40)
    settle(folder)
    reads.clear()
    task = ImageClassifier(dataset_dir=folder, image_size=32, **RESNET)
    run = Run.open(tmp_path / "run", task)
    assert sorted(path for path in reads if path.startswith(str(folder))) == [
        str(path) for path in (folder, folder / "a", folder / "b")
    ]
    reads.clear()
    train(dataclasses.replace(task, epochs=1), run, runtime=cpu, progress=False)
    score_run(task, run, runtime=cpu, progress=False)
    assert dataclasses.replace(task, seed=1).class_names == ["a", "b"]
    assert not [path for path in reads if path.startswith(str(folder))]
    resumed = Run.open(run.path, ImageClassifier(dataset_dir=folder, image_size=32, **RESNET))
    assert not [path for path in reads if path.startswith(str(folder))], "the run keeps what was chosen"
    assert resumed.config["settings"] == run.config["settings"]
    assert resumed.config["chosen"] == ["epochs", "batch_size"]
    Image.new("L", (40, 40)).save(folder / "b/new.png")
    data, held_out = task.datasets()
    assert "b/new.png" in data.names + held_out.names


def test_a_set_that_cannot_be_trained_on_is_refused_before_a_run_has_a_folder(tmp_path):
    folder = pictures_of(tmp_path / "set", 10, 40)
    shutil.rmtree(folder / "a")
    with refuses("no images in", "of two classes, only of b"):
        Run.open(tmp_path / "run", ImageClassifier(dataset_dir=folder, **RESNET))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kept, size", [(dict(image_size="64"), 64), ({}, 160)])
def test_weights_bring_their_size_along_into_the_run_that_they_start(kept, size, tmp_path):
    path = tmp_path / "best.safetensors"
    metadata = dict(task="images", classes='["a", "b"]', **kept)
    path.write_bytes(b"".join(weights.serialize(dict(a=torch.zeros(1)), metadata)))
    task = ImageClassifier(dataset_dir=pictures_of(tmp_path / "set", 10, 40), weights=path, **RESNET)
    train_set, _ = task.datasets()
    assert train_set.images.shape[-1] == task.example(1)["image"].shape[-1] == size
    assert task.metadata(train_set)["image_size"] == size  # which its own predictions go by


def test_chosen_settings_are_stored_taken_up_again_and_a_changed_set_is_named(tmp_path, cpu):
    folder = pictures_of(tmp_path / "set", 10, 40)
    task = ImageClassifier(dataset_dir=folder, image_size=32, **RESNET)
    run = Run.open(tmp_path / "run", task)
    train(dataclasses.replace(task, epochs=1), run, runtime=cpu, progress=False)
    assert [run.config["settings"][name] for name in ("batch_size", "epochs")] == [8, 100]
    again = ImageClassifier(dataset_dir=folder, image_size=32, **RESNET)
    train(dataclasses.replace(again, epochs=2), Run.open(run.path, again), runtime=cpu, progress=False)
    assert len(run.records("start")) == 2 and run.records("start")[1]["step"] == 2
    with refuses("batch_size: the run has 8, the task 16"):
        Run.open(run.path, dataclasses.replace(again, batch_size=16))
    pictures_of(folder, 200, 40)
    grown = Run.open(run.path, again)
    with refuses("file names and labels"):
        train(again, grown, runtime=cpu, progress=False)


@pytest.mark.parametrize("is_drawn", [True, False])
def test_a_box_says_that_a_set_is_not_the_users_and_that_weights_are_random(
    is_drawn, shapes, tmp_path, monkeypatch
):
    from tpukit.host.tables import Notice
    from tpukit.reporting import display

    shown = []
    monkeypatch.setattr(display, "present", shown.append)
    folder = shapes if is_drawn else pictures_of(tmp_path / "set", 10, 40)
    task = ImageClassifier(dataset_dir=folder, **TINY)
    display.show_labels(task, count=1)
    (notice,) = [thing for thing in shown if isinstance(thing, Notice)]
    assert ("not your data" in notice[0]) == is_drawn and "random weights" in notice[-1]
    assert notice._repr_html_().startswith("<div style='border:")
