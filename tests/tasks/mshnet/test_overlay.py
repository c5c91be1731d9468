"""Pictures of targets: what is marked, in which colour, and where the window lies."""

import numpy as np
import pytest
from PIL import Image

from tpukit.tasks.mshnet.overlay import FALSE, FRAME, HIT, MISSED, RING, WINDOW, prediction_row, sample_row
from tpukit.tasks.mshnet.scores import Scores, match, regions

# Machado, Oliveira and Fernandes, "A physiologically-based model for simulation of color vision deficiency",
# IEEE TVCG 15(6), 2009, severity 1.0; for linear RGB.
PROTANOPIA = "0.152286 1.052583 -0.204868 0.114503 0.786281 0.099216 -0.003882 -0.048116 1.051998"
DEUTERANOPIA = "0.367322 0.860646 -0.227968 0.280085 0.672501 0.047413 -0.011820 0.042940 0.968881"


def is_colour(picture, colour):
    return (picture == colour).all(-1)


def as_mask(label):
    return np.where(label, 255, 0).astype(np.uint8)


def test_every_pixel_of_the_window_has_the_colour_of_what_it_is():
    label, predicted = np.zeros((2, 64, 64), bool)
    label[30:33, 30:33] = True  # 9 pixels, of which 6 are hit
    predicted[31:34, 30:33] = True  # and 3 false beside them
    grey = np.full((1, 64, 64), 100, np.uint8)
    _, (_, plain), (legend, pixels) = prediction_row(grey, as_mask(label), predicted)
    top = left = 31 - WINDOW // 2
    window = slice(top, top + WINDOW), slice(left, left + WINDOW)
    np.testing.assert_array_equal(is_colour(pixels, HIT), (label & predicted)[window])
    np.testing.assert_array_equal(is_colour(pixels, MISSED), (label & ~predicted)[window])
    np.testing.assert_array_equal(is_colour(pixels, FALSE), (predicted & ~label)[window])
    assert is_colour(pixels, (100, 100, 100)).sum() == WINDOW**2 - 12 and (plain == 100).all()
    assert legend == "blue hit, yellow missed, red false"


def test_rings_tell_hit_missed_and_false_regions_apart_and_a_dotted_frame_shows_the_window():
    label, predicted = np.zeros((2, 96, 96), bool)
    label[20:24, 20:24] = predicted[21:24, 20:24] = True  # hit, and the largest: the window
    label[70, 70] = predicted[70, 20] = True
    (title, marked), *_ = prediction_row(np.zeros((3, 96, 96), np.uint8), as_mask(label), predicted)
    for colour, (row, column) in ((HIT, (21.5, 21.5)), (MISSED, (70, 70)), (FALSE, (70, 20))):
        rows, columns = np.nonzero(is_colour(marked, colour))
        np.testing.assert_allclose(np.hypot(rows - row, columns - column), RING, atol=0.7)
        assert len(rows) > 25
    rows, columns = np.nonzero(is_colour(marked, FRAME))
    edges = 22 - WINDOW // 2, 22 + WINDOW // 2 - 1
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (*edges, *edges)
    assert title == f"IoU {12 / 18:.2f}: 1 of 2 hit, 1 false"


def check_title(label, predicted):
    """That the numbers of an image's title are those of its scores."""
    scores, mask = Scores(), np.where(label, 128, 127).astype(np.uint8)  # grey, either side of a half
    scores.add(np.where(predicted, 5.0, -5.0)[None, None], mask[None, None] / 255)
    _, false = match(regions(label), regions(predicted))
    (title, _), *_ = prediction_row(np.zeros((1, *label.shape), np.uint8), mask, predicted)
    iou = scores.iou_per_image[0]
    assert title == f"IoU {iou:.2f}: {scores.detected} of {scores.targets} hit, {len(false)} false"
    assert scores.false_area == sum(area for area, _ in false)
    return scores.detected, scores.targets, len(false)


def test_the_numbers_of_the_title_are_those_of_the_scores():
    random, counts = np.random.default_rng(0), []
    for density in np.linspace(0, 0.05, 40):
        label = random.random((48, 40)) < density
        noise = random.random(label.shape) < density / 2
        counts.append(check_title(label, np.roll(label, random.integers(-2, 3, 2), (0, 1)) ^ noise))
    detected, targets, false = np.array(counts).T
    assert (detected < targets).sum() > 10 and (detected > 0).sum() > 10 and (false > 0).sum() > 10


def test_the_numbers_of_the_title_are_those_of_the_scores_on_real_masks_shifted_by_one_pixel(real_data):
    paths = sorted((real_data / "IRSTD-1k/masks").glob("*.png"))[::50]
    labels = [np.asarray(Image.open(path).convert("L")) >= 128 for path in paths]
    detected, targets, _ = np.array([check_title(label, np.roll(label, 1, (0, 1))) for label in labels]).T
    assert len(paths) > 15 and targets.sum() > len(paths)
    assert (detected == targets).all()  # 1.4 pixels are within 3


@pytest.mark.parametrize("size", [(1, 1), (1, 40), (20, 20), (32, 32), (33, 100), (256, 256), (512, 300)])
def test_the_window_is_a_square_within_an_image_of_any_size_and_holds_the_target(size):
    height, width = size
    image, side = np.zeros((1, height, width), np.uint8), min(WINDOW, height, width)
    for row in {0, height // 2, height - 1}:
        for column in {0, width // 2, width - 1}:
            label = np.zeros(size, bool)
            label[row, column] = True
            mask = as_mask(label)
            ways = [(mask, label), (np.zeros_like(mask), label), (None, label), (mask, ~label)]
            for panels in (sample_row(image, mask), *(prediction_row(image, *way) for way in ways)):
                whole, zoomed, pixels = (picture for _, picture in panels)
                assert whole.shape == (height, width, 3) and zoomed.shape == (side, side, 3)
                assert pixels.shape[:2] == (side, side)
            assert is_colour(prediction_row(image, mask, label)[2][1], HIT).sum() == 1


def test_a_large_target_gets_a_larger_window_and_an_empty_image_one_in_its_middle():
    label = np.zeros((256, 256), np.uint8)
    label[100:120, 100:120] = 255
    assert sample_row(np.zeros((1, 256, 256), np.uint8), label)[1][1].shape == (80, 80, 3)
    ramp = np.arange(64, dtype=np.uint8)[None, :, None].repeat(64, 2)
    (title, _), (_, zoomed), _ = prediction_row(ramp, np.zeros((64, 64)), np.zeros((64, 64), bool))
    assert title == "IoU 1.00: 0 of 0 hit, 0 false" and zoomed[0, 0, 0] == 16 and zoomed[-1, 0, 0] == 47


def test_without_labels_what_was_found_is_counted_and_blue():
    predicted = np.zeros((64, 64), bool)
    predicted[10, 10] = predicted[40:42, 40:42] = True
    (title, marked), _, (_, pixels) = prediction_row(np.zeros((1, 64, 64), np.uint8), None, predicted)
    assert title == "2 found" and is_colour(marked, HIT).sum() > 50 and is_colour(pixels, HIT).sum() == 4


@pytest.mark.parametrize("deficiency", ["1 0 0 0 1 0 0 0 1", PROTANOPIA, DEUTERANOPIA])
def test_the_three_colours_differ_for_the_colour_blind_from_each_other_and_from_black_and_white(deficiency):
    colour = pytest.importorskip("skimage.color")
    given = np.array([HIT, MISSED, FALSE, (0, 0, 0), (255, 255, 255)]) / 255
    linear = np.where(given <= 0.04045, given / 12.92, ((given + 0.055) / 1.055) ** 2.4)
    seen = (linear @ np.array(deficiency.split(), float).reshape(3, 3).T).clip(0, 1)
    lab = colour.rgb2lab(np.where(seen <= 0.0031308, 12.92 * seen, 1.055 * seen ** (1 / 2.4) - 0.055))
    for first in range(3):
        for second in range(first + 1, 5):
            assert colour.deltaE_ciede2000(lab[first], lab[second]) >= 20, (first, second)
