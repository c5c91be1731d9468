"""Scores of infrared small target detection: IoU, nIoU, pixel recall, Pd, Fa and ROC.

All of them are counts until `result()`, so batches of any size give the same scores. Shapes: B batch, H and
W image size."""

import math

import numpy as np
from scipy import ndimage, special

THRESHOLDS = np.arange(11) / 10  # of the ROC, on the sigmoid of the logits
MATCH_DISTANCE = 3  # pixels between centroids

Region = tuple[int, tuple[float, float]]  # area in pixels, (row, column) of the centroid


class Scores:
    """Counts over a set of images. A pixel is a target from a label of 0.5 on, and is predicted above a
    probability."""

    def __init__(self, threshold: float = 0.5) -> None:
        self.least = logit(threshold)
        self.images = self.pixels = 0
        self.intersection = self.predicted = self.labelled = 0  # pixels
        self.iou_per_image = []
        self.targets = self.detected = 0  # regions
        self.false_area = 0  # pixels of predicted regions that match no target
        self.true_positives = np.zeros(len(THRESHOLDS), np.int64)  # pixels, at each threshold
        self.false_positives = np.zeros(len(THRESHOLDS), np.int64)

    def add(self, logits: np.ndarray, target: np.ndarray, valid: np.ndarray | None = None) -> None:
        """logits: (B, 1, H, W), unbounded. target: (B, 1, H, W) in [0, 1]. valid: (B,) bool, False for
        padding."""
        for index in range(len(logits)):
            if valid is None or valid[index]:
                self._add_image(np.asarray(logits[index, 0], np.float32), np.asarray(target[index, 0]) >= 0.5)

    def _add_image(self, logits, label):  # (H, W) float32, (H, W) bool
        prediction = logits > self.least
        intersection, union = (np.count_nonzero(mask) for mask in (prediction & label, prediction | label))
        self.images += 1
        self.pixels += prediction.size
        self.intersection += intersection
        self.predicted += np.count_nonzero(prediction)
        self.labelled += np.count_nonzero(label)
        self.iou_per_image.append(intersection / union if union else 1.0)
        targets = regions(label)
        matched, unmatched = match(targets, regions(prediction))
        self.targets += len(targets)
        self.detected += len(matched)
        self.false_area += sum(area for area, _ in unmatched)
        above = predictions_at_thresholds(logits)
        self.true_positives += np.count_nonzero(above & label, (1, 2))
        self.false_positives += np.count_nonzero(above & ~label, (1, 2))

    def result(self) -> dict[str, float]:
        """dict of floats: iou, niou, pixel_recall, pd in [0, 1]; fa in false pixels per pixel; images,
        targets."""
        return dict(
            iou=self.intersection / max(self.predicted + self.labelled - self.intersection, 1),
            niou=float(np.mean(self.iou_per_image)) if self.iou_per_image else 0.0,
            pixel_recall=self.intersection / max(self.labelled, 1),
            pd=self.detected / max(self.targets, 1),
            fa=self.false_area / max(self.pixels, 1),
            images=self.images,
            targets=self.targets,
        )

    def roc(self) -> dict[str, list[float]]:
        """dict of lists over `THRESHOLDS`: tpr (= recall), fpr, precision. The 0.001 is published."""
        true, false = self.true_positives, self.false_positives
        return dict(
            tpr=(true / (self.labelled + 0.001)).tolist(),
            fpr=(false / (self.pixels - self.labelled + 0.001)).tolist(),
            precision=(true / (true + false + 0.001)).tolist(),
        )


def logit(probability: float) -> float:
    """The number whose sigmoid is a probability in (0, 1)."""
    return float(np.log(probability / (1 - probability)))


def predictions_at_thresholds(logits: np.ndarray) -> np.ndarray:
    """(H, W) logits -> (11, H, W) bool, for each of `THRESHOLDS`."""
    with np.errstate(over="ignore"):
        probability = 1 / (1 + np.exp(-logits))
    return probability > THRESHOLDS.astype(np.float32)[:, None, None]


def regions(mask: np.ndarray) -> list[Region]:
    """(H, W) bool -> (area, centroid) of its 8-connected regions, in scan order."""
    pixels = np.nonzero(mask)  # few: sums over them are faster than ndimage's over the image
    region = _labels(mask)[pixels] - 1
    areas = np.bincount(region)
    rows, columns = (np.bincount(region, weights=axis) / areas for axis in pixels)
    return [(int(area), (row, column)) for area, row, column in zip(areas, rows, columns)]


def _labels(mask):
    """(H, W) bool -> (H, W) int32: the number of each pixel's 8-connected region, from 1, and 0 for no
    region."""
    labels = np.zeros(mask.shape, np.int32)
    ndimage.label(mask, np.ones((3, 3)), output=labels)
    return labels


def boxes(logits: np.ndarray, threshold: float = 0.5) -> tuple[np.ndarray, list[dict]]:
    """(H, W) logits -> (the mask (H, W) bool of a probability above the threshold, a dict for each of its
    8-connected regions).

    Of a region: left, top, right, bottom (the last two exclusive) and pixels (their number); score, the mean
    probability of its pixels."""
    mask = logits > logit(threshold)
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
