"""Showing a run in a notebook or a shell: what is shown, where it is saved, what is predicted for it."""

import numpy as np
import pytest

from tests.conftest import refuses
from tests.reporting.hostile import strange_run
from tpukit import MNIST, MSHNet, Run
from tpukit.reporting import display, figures


@pytest.fixture
def shown(monkeypatch):
    """What a notebook shows."""
    things = []
    monkeypatch.setattr(display, "in_notebook", lambda: True)
    monkeypatch.setattr("IPython.display.display", things.append)
    return things


def test_a_run_is_shown_by_its_last_scores_and_its_curves(trained, shown):
    _, run = trained
    display.show(str(run.path))
    table, curves = shown
    last = run.records("evaluation")[-1]["scores"]
    assert "epoch 2" in table.title and ("accuracy", f"{last['accuracy']:.4f}") in table.rows
    assert curves.data.startswith(b"\x89PNG")
    assert (run.path / "pictures/curves.png").read_bytes() == curves.data


def test_the_scores_of_the_kept_weights_stand_below_the_last_ones_where_an_earlier_epoch_was_better(
    tmp_path, shown
):
    run = Run.open(tmp_path / "run", MNIST())
    for epoch, accuracy in enumerate((0.25, 0.75, 0.75, 0.5)):
        about = dict(scores=dict(accuracy=accuracy), kept=epoch < 2, speed=dict(seconds=1.0))
        run.log("evaluation", 2 * epoch + 2, epoch=epoch, **about)
    display.show(run)
    for table, epoch, score in zip(shown, ("epoch 4", "epoch 2"), ("0.5000", "0.7500")):
        assert epoch in table.title and table.rows == [("accuracy", score)]


def test_a_run_with_an_roc_shows_it_too_and_one_without_a_record_says_so(tmp_path, shown):
    run = Run.open(tmp_path / "run", MNIST())
    display.show(run)
    assert shown == [["This run has not started yet."]] and not (run.path / "pictures").exists()
    roc = dict(tpr=[1.0, 0.5], fpr=[1.0, 0.1], precision=[0.1, 0.9])
    run.log("evaluation", 2, epoch=0, scores=dict(accuracy=0.5, roc=roc), speed=dict(seconds=1.0))
    display.show(run)
    pictures = sorted(path.name for path in (run.path / "pictures").iterdir())
    assert len(shown) == 4 and pictures == ["curves.png", "roc.png"]


def test_in_a_shell_a_picture_is_named_and_where_it_cannot_be_saved_the_rest_is_shown(tmp_path, capsys):
    run = strange_run(tmp_path / "run", "word")
    display.show(run)
    assert str(run.path / "pictures/curves.png") in capsys.readouterr().out
    for file in (run.path / "pictures").iterdir():
        file.unlink()
    (run.path / "pictures").rmdir()
    (run.path / "pictures").write_text("no folder")
    display.show(run)
    output = capsys.readouterr().out
    assert "not saved" in output and "iou" in output


def test_a_run_of_an_earlier_version_is_shown_with_a_score_that_has_another_name_today(tmp_path, shown):
    run = Run.open(tmp_path, MSHNet())
    scores = dict(iou=0.5, pixel_accuracy=0.9)
    run.log("evaluation", 4, epoch=0, scores=scores, kept=True, speed=dict(seconds=1.0))
    display.show(run)
    assert ("pixel_accuracy", "0.9000") in shown[0].rows and shown[1].data.startswith(b"\x89PNG")


def test_a_run_with_a_damaged_config_still_shows_its_curves(trained, shown):
    _, run = trained
    (run.path / "config.json").write_text("[")
    display.show(run)
    assert shown[-1].data.startswith(b"\x89PNG")


def test_test_images_are_predicted_by_the_best_weights_evenly_over_the_set(trained):
    import torch

    from tpukit.runs import weights

    task, run = trained
    batch, predicted = display.predict_test_images(run, task, 20)
    indices = np.linspace(0, 39, 20).astype(int)
    whole = task.test_set().batch(indices)
    np.testing.assert_array_equal(batch["image"], whole["image"])
    assert batch["valid"].all() and len(batch["valid"]) == 20
    model = task.model().eval()
    weights.load(model, run.path / "best.safetensors")
    with torch.no_grad():
        expected = model(torch.as_tensor(whole["image"]).float() / 255).argmax(1)
    assert torch.equal(predicted, expected)


def test_a_run_without_best_weights_predicts_nothing(tmp_path):
    with refuses(tmp_path, "no best weights"):
        display.predict_test_images(Run(tmp_path), MNIST(), 4)


def test_a_figure_becomes_an_image_and_no_figure_nothing(shown):
    display.present_figure(None)
    assert not shown
    display.present_figure(figures.panels_figure([[("one", np.eye(4))]], "one"))
    assert len(shown) == 1 and shown[0].data.startswith(b"\x89PNG")
