"""Scores against counts by hand, and where they differ from the published ones."""

import numpy as np
import pytest
import torch
from scipy import special

from tests.tasks.mshnet.published import published_scores
from tpukit import MSHNet
from tpukit.reporting import findings
from tpukit_tasks.mshnet.scores import THRESHOLDS, count, regions


def square(size, corner, side):
    image = np.zeros((size, size), bool)
    image[tuple(slice(start, start + side) for start in corner)] = True
    return image


def scores_of(prediction, target, valid=None):
    """Of predictions (B, H, W) bool and targets (B, H, W) in [0, 1]: (ours, the published ones)."""
    logits, target = np.where(prediction, 5.0, -5.0)[:, None], np.asarray(target, float)[:, None]
    valid = torch.ones(len(target), dtype=bool) if valid is None else torch.tensor(valid)
    mask = torch.as_tensor(np.ceil(255 * target)).byte()  # 0.5 is the first level of the upper half
    ours = MSHNet().evaluate([(torch.as_tensor(logits), dict(mask=mask, valid=valid))])
    return ours, published_scores(logits, target)


def test_a_false_region_as_large_as_a_matched_one_counts_here_but_not_in_the_published_code():
    target = square(32, (4, 4), 3)
    prediction = target | square(32, (20, 20), 3) | square(32, (10, 25), 2)
    ours, published = scores_of(prediction[None], target[None])
    assert ours["fa"] == (9 + 4) / 32**2 and published["fa"] == 4 / 32**2
    assert ours["pd"] == published["pd"] == 1


def test_grey_labels_count_from_one_half_here_and_only_at_one_in_the_published_intersection():
    target = np.zeros((1, 8, 8))
    target[0, 2, 2:6] = [1, 0.6, 0.5, 0.4]
    ours, published = scores_of(target > 0, target)
    assert ours["iou"] == 3 / 4 and published["iou"] == 1 / (4 + 3 - 1)
    assert ours["pixel_recall"] == 3 / 3 and published["pixel_recall"] == 1 / 4
    # At the threshold 1, where nothing is predicted, and at 0.5, where all four grey pixels are.
    assert ours["roc"]["tpr"][10] == published["tpr"][10] == 0
    assert ours["roc"]["tpr"][5] == 3 / 3.001 and ours["roc"]["fpr"][5] == 1 / 61.001
    assert published["tpr"][5] == 1 / 1.001 and published["fpr"][5] == 3 / 63.001


def test_padding_is_left_out_niou_is_the_mean_of_the_images_and_iou_their_sum():
    target = np.stack([square(16, (2, 2), 4), square(16, (2, 2), 2), square(16, (2, 2), 4)])
    prediction = np.stack([square(16, (2, 2), 4)] * 3)
    ours, _ = scores_of(prediction, target, valid=[True, True, False])
    assert ours["niou"] == (1 + 4 / 16) / 2 and ours["iou"] == (16 + 4) / (16 + 16)
    assert ours["images"] == ours["targets"] == 2


def test_a_table_has_the_fields_spelling_of_the_scores():
    ours, _ = scores_of(square(16, (2, 2), 2)[None], square(16, (2, 2), 2)[None])
    rows = findings.scores_table(ours, MSHNet.score_names).rows
    names = [name.partition(",")[0] for name, _ in rows]
    assert names == ["IoU", "nIoU", "pixel recall", "Pd", "Fa", "images", "targets"]


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


@pytest.mark.parametrize("scale, shift", [(1, -8), (3, 0), (60, -90), (0, 5), (0, -5)])
def test_pixels_above_each_threshold_are_those_whose_sigmoid_is(scale, shift):
    """Counted plainly, over all pixels."""
    rng = np.random.default_rng(0)
    for spoil in (None, np.nan, -np.inf, np.inf):
        logits = (rng.normal(size=(24, 32)) * scale + shift).astype(np.float32)
        label = square(32, (4, 6), 5)[:24]
        logits[label] += 10
        if spoil is not None:
            logits[3, 3] = spoil
        above = special.expit(logits) > THRESHOLDS[:, None, None]
        found = count(logits, label)
        assert found["true_positives"].tolist() == (above & label).sum((1, 2)).tolist()
        assert found["false_positives"].tolist() == (above & ~label).sum((1, 2)).tolist()
