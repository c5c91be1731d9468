"""Scores of infrared small target detection: IoU, nIoU, pixel recall, Pd, Fa and ROC.

They are counts of each image until `summary`, so batches of any size give the same scores. Shapes: H and W
image size."""

import math
from typing import Any

import numpy as np
from scipy import ndimage, special

THRESHOLDS = (np.arange(11) / 10).astype(np.float32)  # of the ROC, on the sigmoid of the logits
MATCH_DISTANCE = 3  # pixels between centroids

Region = tuple[int, tuple[float, float]]  # area in pixels, (row, column) of the centroid


def count(logits: np.ndarray, label: np.ndarray, threshold: float = 0.5) -> dict[str, Any]:
    """The counts of one image, which `summary` adds up. logits: (H, W), unbounded. label: (H, W) bool. A
    pixel is predicted above the threshold of its probability, in (0, 1)."""
    prediction = logits > special.logit(threshold)
    above = special.expit(logits) > THRESHOLDS[:, None, None]  # (11, H, W)
    targets = regions(label)
    matched, unmatched = match(targets, regions(prediction))
    return dict(
        images=1,
        pixels=label.size,
        intersection=np.count_nonzero(prediction & label),
        union=np.count_nonzero(prediction | label),
        labelled=np.count_nonzero(label),
        targets=len(targets),
        detected=len(matched),
        false_area=sum(area for area, _ in unmatched),  # pixels of regions that match no target
        true_positives=np.count_nonzero(above & label, (1, 2)),  # pixels, at each threshold
        false_positives=np.count_nonzero(above & ~label, (1, 2)),
    )


def summary(counts: list[dict[str, Any]]) -> dict[str, Any]:
    """The scores of the counts of all images: iou, niou, pixel_recall, pd in [0, 1]; fa in false pixels per
    pixel; images, targets; roc, a dict of lists over `THRESHOLDS`: tpr (= recall), fpr, precision."""
    total: dict[str, Any] = {name: sum(image[name] for image in counts) for name in counts[0]}
    true, false, labelled = total["true_positives"], total["false_positives"], total["labelled"]
    rates = dict(  # the 0.001 is published
        tpr=true / (labelled + 0.001),
        fpr=false / (total["pixels"] - labelled + 0.001),
        precision=true / (true + false + 0.001),
    )
    ious = [image["intersection"] / image["union"] if image["union"] else 1.0 for image in counts]
    return dict(
        iou=total["intersection"] / max(total["union"], 1),
        niou=float(np.mean(ious)),
        pixel_recall=total["intersection"] / max(labelled, 1),
        pd=total["detected"] / max(total["targets"], 1),
        fa=total["false_area"] / total["pixels"],
        images=total["images"],
        targets=total["targets"],
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
    ndimage.label(mask, np.ones((3, 3)), output=labels)
    return labels


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
    """Each target takes the first unused prediction whose centroid is closer than 3 pixels.

    Returns (matched predictions, unmatched predictions)."""
    unmatched, matched = list(predictions), []
    for _, centre in targets:
        near = (region for region in unmatched if math.dist(region[1], centre) < MATCH_DISTANCE)
        if taken := next(near, None):
            matched.append(taken)
            unmatched.remove(taken)
    return matched, unmatched
