"""Scores against counts by hand, and where they differ from the published ones."""

import numpy as np
import pytest

from tests.tasks.mshnet.published import published_scores
from tpukit.tasks.mshnet.scores import Scores, regions


def square(size, corner, side):
    image = np.zeros((size, size), bool)
    image[tuple(slice(start, start + side) for start in corner)] = True
    return image


def scores_of(logits, target, **more):
    scores = Scores()
    scores.add(logits, target, **more)
    return scores


def test_a_false_region_as_large_as_a_matched_one_counts_here_but_not_in_the_published_code():
    target = square(32, (4, 4), 3)
    prediction = target | square(32, (20, 20), 3) | square(32, (10, 25), 2)
    logits, target = np.where(prediction, 5.0, -5.0)[None, None], target[None, None].astype(float)
    ours, published = scores_of(logits, target).result(), published_scores(logits, target)
    assert ours["fa"] == (9 + 4) / 32**2
    assert published["fa"] == 4 / 32**2
    assert ours["pd"] == published["pd"] == 1


def test_the_share_of_labelled_pixels_that_are_predicted_is_called_a_recall():
    target = square(32, (20, 20), 3)[None, None].astype(float)
    # All is predicted, and nearly all wrongly.
    scores = scores_of(np.full(target.shape, 5.0), target).result()
    assert scores["pixel_recall"] == 1 and scores["iou"] == 9 / 32**2
    assert not [name for name in scores if "accuracy" in name]


def test_grey_labels_count_from_one_half_here_and_only_at_one_in_the_published_intersection():
    target = np.zeros((1, 1, 8, 8))
    target[0, 0, 2, 2:6] = [1, 0.6, 0.5, 0.4]
    logits = np.where(target > 0, 1.0, -1.0)
    scores, published = scores_of(logits, target), published_scores(logits, target)
    assert scores.result()["iou"] == 3 / 4
    assert published["iou"] == 1 / (4 + 3 - 1)
    assert scores.result()["pixel_recall"] == 3 / 3 and published["pixel_recall"] == 1 / 4
    # ROC at threshold 0.9, where nothing is predicted, and at 0.5, where all four grey pixels are.
    ours = scores.roc()
    assert ours["tpr"][9] == published["tpr"][9] == 0
    assert ours["tpr"][5] == 3 / 3.001 and ours["fpr"][5] == 1 / 61.001
    assert published["tpr"][5] == 1 / 1.001 and published["fpr"][5] == 3 / 63.001


def test_each_evaluation_starts_its_counts_at_zero_and_leaves_padding_out():
    target = square(16, (4, 4), 3)[None, None].repeat(2, 0).astype(float)
    logits = np.where(target > 0, 5.0, -5.0)
    once, padded = scores_of(logits[:1], target[:1]), scores_of(logits, target, valid=np.array([True, False]))
    assert once.result() == padded.result() and once.roc() == padded.roc() and once.result()["targets"] == 1


def test_niou_is_the_mean_of_the_images_and_iou_their_sum():
    target = np.stack([square(16, (2, 2), 4), square(16, (2, 2), 2)])[:, None].astype(float)
    prediction = np.stack([square(16, (2, 2), 4), square(16, (2, 2), 4)])[:, None]
    scores = scores_of(np.where(prediction, 1.0, -1.0), target)
    assert scores.result()["niou"] == (1 + 4 / 16) / 2
    assert scores.result()["iou"] == (16 + 4) / (16 + 16)


def test_regions_equal_those_of_skimage():
    measure, rng = pytest.importorskip("skimage.measure"), np.random.default_rng(0)
    count = 0
    for density in (0, 0.02, 0.1, 0.3, 0.5, 0.9, 1) * 4:
        mask = rng.random((40, 56)) < density
        found, wanted = regions(mask), measure.regionprops(measure.label(mask, connectivity=2))
        for (area, centroid), region in zip(found, wanted, strict=True):
            assert area == region.area and centroid == pytest.approx(region.centroid, rel=1e-12)
        count += len(found)
    assert count > 1000
