"""Scores and predictions over the threshold, by hand and by the sliders of a page."""

import numpy as np
import pytest
from scipy.special import logit

from tests.conftest import refuses
from tests.tasks.mshnet.small import Narrow
from tpukit import MNIST, Run
from tpukit.training import prediction
from tpukit_tasks.mshnet import explore


@pytest.fixture
def drawn(monkeypatch):
    """Two images of 32 x 32 with a target of 2 x 2 each: the first is predicted with 0.8 and beside it, far
    away, a false region of 3 pixels with 0.4; of the second, two pixels with 0.6. Returns (task, run, what
    `threshold_figure` got)."""
    import torch

    label, probability = np.zeros((2, 1, 32, 32), np.uint8), np.full((2, 1, 32, 32), 0.01)
    label[0, 0, 4:6, 4:6] = label[1, 0, 10:12, 4:6] = 255
    probability[0, 0, 4:6, 4:6] = 0.8
    probability[0, 0, 20, 20:23] = 0.4
    probability[1, 0, 10, 4:6] = 0.6
    image = torch.zeros((2, 1, 32, 32), dtype=torch.uint8)
    batch = dict(image=image, mask=torch.as_tensor(label), valid=torch.ones(2, dtype=torch.bool))
    predicted = batch, torch.as_tensor(logit(probability), dtype=torch.float32)
    monkeypatch.setattr(prediction, "predict_test_images", lambda *_: predicted)
    calls, draw = [], explore.threshold_figure
    monkeypatch.setattr(explore, "threshold_figure", lambda *given: calls.append(given) or draw(*given))
    return Narrow(), predicted, calls


def test_the_scores_at_a_threshold_are_those_of_the_pixels_above_it(drawn, tmp_path):
    task, (batch, predicted), calls = drawn
    explore.explore(Run(tmp_path), task)
    [(scores, _, threshold, panels)] = calls
    assert threshold == 0.5 and scores[0.5] == task.evaluate([(predicted, batch)])
    found = {at: [round(scores[at][name], 9) for name in ("iou", "pd", "fa")] for at in (0.3, 0.5, 0.7, 0.9)}
    pixels = 2 * 32 * 32
    assert found[0.3] == [round(6 / 11, 9), 1.0, round(3 / pixels, 9)]  # 4 + 2 found, 3 false, 8 labelled
    assert found[0.5] == [6 / 8, 1.0, 0.0]
    assert found[0.7] == [4 / 8, 0.5, 0.0]
    assert found[0.9] == [0.0, 0.0, 0.0]
    assert panels[0][0] == "IoU 1.00: 1 of 1 hit, 0 false"
    with refuses("mnist"):  # it has no threshold
        explore.explore(Run(tmp_path), MNIST())


def test_a_slider_that_is_moved_redraws_the_picture_in_place(drawn, page, tmp_path):
    task, _, calls = drawn
    explore.explore(Run(tmp_path), task)
    _, box, _ = page.shown  # after a style
    threshold, image = box.children
    threshold.value = 0.3
    assert calls[-1][2] == 0.3 and calls[-1][3][0][0] == "IoU 0.57: 1 of 1 hit, 1 false"
    image.value = 2
    assert calls[-1][2] == 0.3 and calls[-1][3][0][0] == "IoU 0.50: 1 of 1 hit, 0 false"
    assert len(page.shown) == 3 and len(page.updates) == 2 and image.max == 2


def test_the_picture_says_that_its_scores_are_computed_again(drawn, monkeypatch, tmp_path):
    task, _, _ = drawn
    figures = []
    monkeypatch.setattr(explore, "show_with_controls", lambda draw, **_: figures.append(draw(0.5, 1)))
    explore.explore(Run(tmp_path), task)
    assert "recomputed on the CPU" in figures[0].get_suptitle()
