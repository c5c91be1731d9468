"""Pictures of targets: what is marked, in which colour, and where the window lies."""

import numpy as np
import pytest

from tpukit_tasks.mshnet.overlay import FALSE, HIT, MISSED, WINDOW, row
from tpukit_tasks.mshnet.scores import count, match, regions, summary


def is_colour(picture, colour):
    return (picture == colour).all(-1)


def test_every_pixel_of_the_window_has_the_colour_of_what_it_is():
    label, predicted = np.zeros((2, 64, 64), bool)
    label[30:33, 30:33] = True  # 9 pixels, of which 6 are hit
    predicted[31:34, 30:33] = True  # and 3 false beside them
    _, (_, plain), (legend, pixels) = row(np.full((1, 64, 64), 100, np.uint8), label, predicted)
    top = left = 31 - WINDOW // 2
    window = slice(top, top + WINDOW), slice(left, left + WINDOW)
    np.testing.assert_array_equal(is_colour(pixels, HIT), (label & predicted)[window])
    np.testing.assert_array_equal(is_colour(pixels, MISSED), (label & ~predicted)[window])
    np.testing.assert_array_equal(is_colour(pixels, FALSE), (predicted & ~label)[window])
    assert is_colour(pixels, (100, 100, 100)).sum() == WINDOW**2 - 12 and (plain == 100).all()
    assert legend == "blue hit, yellow missed, orange false"


def test_the_numbers_of_the_title_are_those_of_the_scores():
    random, hits = np.random.default_rng(0), []
    for density in np.linspace(0, 0.05, 40):
        label = random.random((48, 40)) < density
        noise = random.random(label.shape) < density / 2
        predicted = np.roll(label, random.integers(-2, 3, 2), (0, 1)) ^ noise
        counts = count(np.where(predicted, 5.0, -5.0), label)
        _, false = match(regions(label), regions(predicted))
        (title, _), *_ = row(np.zeros((1, *label.shape), np.uint8), label, predicted)
        found = f"{counts['detected']} of {counts['targets']} hit, {len(false)} false"
        assert title == f"IoU {summary([counts])['iou'] if label.any() else 1:.2f}: {found}"
        hits.append((counts["detected"], counts["targets"] - counts["detected"], len(false)))
    assert (np.count_nonzero(hits, 0) > 10).all()


@pytest.mark.parametrize("size", [(1, 1), (1, 40), (32, 32), (33, 100), (512, 300)])
def test_the_window_is_a_square_within_an_image_of_any_size_and_holds_the_target(size):
    height, width = size
    image, side = np.zeros((1, height, width), np.uint8), min(WINDOW, height, width)
    for place in {(0, 0), (height // 2, width - 1), (height - 1, width // 2)}:
        target = np.zeros(size, bool)
        target[place] = True
        for masks in ([target], [target, target], [np.zeros_like(target), target], [target, ~target]):
            shapes = [picture.shape for _, picture in row(image, *masks)]
            assert shapes == [(height, width, 3), (side, side, 3), (side, side, 3)]
        assert is_colour(row(image, target, target)[2][1], HIT).sum() == 1


def test_labels_or_predictions_alone_are_counted_and_blue():
    targets = np.zeros((64, 64), bool)
    targets[10, 10] = targets[40:42, 40:42] = True
    (title, marked), _, (_, pixels) = row(np.zeros((1, 64, 64), np.uint8), targets)
    assert title == "2 targets" and is_colour(marked, HIT).sum() > 50 and is_colour(pixels, HIT).sum() == 4
