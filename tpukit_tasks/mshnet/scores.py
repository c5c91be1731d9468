"""Scores of infrared small target detection: IoU, nIoU, pixel recall, Pd, Fa and ROC.

They are counts of each image until `summary`, so batches of any size give the same scores. Shapes: H and W
image size."""

import math
from typing import Any

import numpy as np
from scipy import ndimage, special

THRESHOLDS = (np.arange(11) / 10).astype(np.float32)  # for the ROC, on the sigmoid of the logits
MATCH_DISTANCE = 3  # pixels between centroids
FAINT = -2.3  # a logit whose sigmoid is below all thresholds but 0
LOWEST = -80.0  # a logit whose sigmoid is still more than 0 in float32

Region = tuple[int, tuple[float, float]]  # area in pixels, (row, column) of the centroid


def count(logits: np.ndarray, label: np.ndarray, threshold: float = 0.5) -> dict[str, Any]:
    """Return the counts of one image, which `summary` adds up. logits: (H, W), unbounded. label: (H, W) bool.
    A pixel is predicted above the threshold of its probability, in (0, 1). An image with a logit that is not
    finite is wrong in every pixel, and finds no target."""
    prediction, is_finite = logits > special.logit(threshold), bool(np.isfinite(logits).all())
    if not is_finite:
        prediction = ~label
    targets = regions(label)
    true, false = _positives(logits, label)
    matched, unmatched = match(targets if is_finite else [], regions(prediction))
    return dict(
        images=1,
        not_finite=int(not is_finite),
        pixels=label.size,
        intersection=np.count_nonzero(prediction & label),
        union=np.count_nonzero(prediction | label),
        labelled=np.count_nonzero(label),
        targets=len(targets),
        detected=len(matched),
        false_area=sum(area for area, _ in unmatched),  # pixels of regions that match no target
        true_positives=true,
        false_positives=false,
    )


def _positives(logits, label):
    """(11,), (11,): the pixels above each threshold that are labelled, and that are not."""
    is_bright = logits > FAINT  # few, and the sigmoid of all takes most of the time
    chosen = is_bright if logits.min() > LOWEST else np.full(label.shape, True)
    above = special.expit(logits[chosen]) > THRESHOLDS[:, None]  # (11, pixels)
    labelled = label[chosen]
    true, false = np.count_nonzero(above & labelled, 1), np.count_nonzero(above & ~labelled, 1)
    if chosen is is_bright:  # all the others are above 0
        count = np.count_nonzero(label)
        true[0], false[0] = count, label.size - count
    return true, false


def summary(counts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the scores of the counts of all images: iou, niou, pixel_recall, pd in [0, 1]; fa in false
    pixels per pixel; images, targets; not_finite, the images with NaN or infinite logits, if there are any;
    roc, a dict of lists over `THRESHOLDS`: tpr (= recall), fpr, precision."""
    total: dict[str, Any] = {name: sum(image[name] for image in counts) for name in counts[0]}
    true, false, labelled = total["true_positives"], total["false_positives"], total["labelled"]
    rates = dict(  # the 0.001 is published
        tpr=true / (labelled + 0.001),
        fpr=false / (total["pixels"] - labelled + 0.001),
        precision=true / (true + false + 0.001),
    )
    not_finite = dict(not_finite=total["not_finite"]) if total["not_finite"] else {}
    ious = [image["intersection"] / image["union"] if image["union"] else 1.0 for image in counts]
    return dict(
        iou=total["intersection"] / max(total["union"], 1),
        niou=float(np.mean(ious)),
        pixel_recall=total["intersection"] / max(labelled, 1),
        pd=total["detected"] / max(total["targets"], 1),
        fa=total["false_area"] / total["pixels"],
        images=total["images"],
        targets=total["targets"],
        **not_finite,
        roc={name: rate.tolist() for name, rate in rates.items()},
    )


def regions(mask: np.ndarray) -> list[Region]:
    """(H, W) bool -> (area, centroid) of its 8-connected regions, in scan order."""
    pixels = np.nonzero(mask)  # few: sums over them are faster than ndimage's over the image
    region = _labels(mask)[pixels] - 1
    areas = np.bincount(region)
    rows, columns = (np.bincount(region, weights=axis) / areas for axis in pixels)
    return [(int(area), (row, column)) for area, row, column in zip(areas, rows, columns)]


def _labels(mask):
    """(H, W) bool -> (H, W) int32: the number of each pixel's 8-connected region from 1, or 0."""
    labels = np.zeros(mask.shape, np.int32)
    rows, columns = (np.flatnonzero(mask.any(axis)) for axis in (1, 0))
    if len(rows):  # inside the box that holds them all, which takes a fraction of the time
        box = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)
        ndimage.label(mask[box], np.ones((3, 3)), output=labels[box])
    return labels


def brightest(image: np.ndarray) -> np.ndarray:
    """(H, W) -> the largest value of each 8-connected region that is not 0, in scan order."""
    labels = _labels(image > 0)
    return np.asarray(ndimage.maximum(image, labels, np.arange(1, labels.max() + 1)))


def boxes(logits: np.ndarray, threshold: float = 0.5) -> tuple[np.ndarray, list[dict]]:
    """(H, W) logits -> (the mask (H, W) bool of a probability above the threshold, a dict for each of its
    8-connected regions): left, top, right, bottom (the last two exclusive), pixels (their number), and score,
    the mean probability of its pixels."""
    mask = logits > special.logit(threshold)
    labels = _labels(mask)
    found = []
    for number, (rows, columns) in enumerate(ndimage.find_objects(labels), 1):
        inside = logits[rows, columns][labels[rows, columns] == number].astype(np.float64)
        box = dict(left=columns.start, top=rows.start, right=columns.stop, bottom=rows.stop)
        score = round(float(special.expit(inside).mean()), 4)
        found.append(dict(box, pixels=len(inside), score=score))
    return mask, found


def match(targets: list[Region], predictions: list[Region]) -> tuple[list[Region], list[Region]]:
    """Return (matched predictions, unmatched predictions): each target takes the first unused prediction
    whose centroid is closer than 3 pixels."""
    unmatched, matched = list(predictions), []
    for _, centre in targets:
        near = (region for region in unmatched if math.dist(region[1], centre) < MATCH_DISTANCE)
        if taken := next(near, None):
            matched.append(taken)
            unmatched.remove(taken)
    return matched, unmatched
