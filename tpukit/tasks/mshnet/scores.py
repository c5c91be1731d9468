"""Scores of infrared small target detection: IoU, nIoU, pixel recall, Pd, Fa and ROC.

All of them are counts until `result()`, so batches of any size give the same scores. Shapes: B batch, H and
W image size."""

import math
from typing import Any

import numpy as np
from scipy import ndimage, special

THRESHOLDS = np.arange(11) / 10  # of the ROC, on the sigmoid of the logits
MATCH_DISTANCE = 3  # pixels between centroids

Region = tuple[int, tuple[float, float]]  # area in pixels, (row, column) of the centroid


class Scores:
    """Counts over a set of images. A pixel is a target from a label of 0.5 on, and is predicted above a
    probability."""

    def __init__(self, threshold: float = 0.5) -> None:
        self.least = special.logit(threshold)
        self.counts = []  # of each image

    def add(self, logits: np.ndarray, target: np.ndarray, valid: np.ndarray | None = None) -> None:
        """logits: (B, 1, H, W), unbounded. target: (B, 1, H, W) in [0, 1]. valid: (B,) bool, False for
        padding."""
        for index in range(len(logits)):
            if valid is None or valid[index]:
                label = np.asarray(target[index, 0]) >= 0.5
                self.counts.append(self._count(np.asarray(logits[index, 0], np.float32), label))

    def _count(self, logits, label):  # (H, W) float32, (H, W) bool
        prediction, above = logits > self.least, predictions_at_thresholds(logits)
        targets = regions(label)
        matched, unmatched = match(targets, regions(prediction))
        return dict(
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

    def _sum(self, name) -> Any:
        return sum(image[name] for image in self.counts)

    def result(self) -> dict[str, float]:
        """dict of floats: iou, niou, pixel_recall, pd in [0, 1]; fa in false pixels per pixel; images,
        targets."""
        ious = [image["intersection"] / image["union"] if image["union"] else 1.0 for image in self.counts]
        return dict(
            iou=self._sum("intersection") / max(self._sum("union"), 1),
            niou=float(np.mean(ious)) if ious else 0.0,
            pixel_recall=self._sum("intersection") / max(self._sum("labelled"), 1),
            pd=self._sum("detected") / max(self._sum("targets"), 1),
            fa=self._sum("false_area") / max(self._sum("pixels"), 1),
            images=len(self.counts),
            targets=self._sum("targets"),
        )

    def roc(self) -> dict[str, list[float]]:
        """dict of lists over `THRESHOLDS`: tpr (= recall), fpr, precision. The 0.001 is published."""
        true, false, labelled = (self._sum(n) for n in ("true_positives", "false_positives", "labelled"))
        return dict(
            tpr=(true / (labelled + 0.001)).tolist(),
            fpr=(false / (self._sum("pixels") - labelled + 0.001)).tolist(),
            precision=(true / (true + false + 0.001)).tolist(),
        )


def predictions_at_thresholds(logits: np.ndarray) -> np.ndarray:
    """(H, W) logits -> (11, H, W) bool, for each of `THRESHOLDS`."""
    return special.expit(logits) > THRESHOLDS.astype(np.float32)[:, None, None]


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
    8-connected regions).

    Of a region: left, top, right, bottom (the last two exclusive) and pixels (their number); score, the mean
    probability of its pixels."""
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
        for prediction in unmatched:
            if math.dist(prediction[1], centre) < MATCH_DISTANCE:
                matched.append(prediction)
                unmatched.remove(prediction)
                break
    return matched, unmatched
