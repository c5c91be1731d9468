"""Scores of infrared small target detection: IoU, nIoU, pixel accuracy, Pd, Fa, ROC.

Everything is a count until `result()` is called, so batches of any size give the same scores, and counts of several
processes add up.
"""

import numpy as np
from skimage import measure

THRESHOLDS = np.arange(11) / 10  # on the sigmoid of the logits
MATCH_DISTANCE = 3  # pixels between centroids


class Scores:
    """Counts over a set of images. `result()` gives the scores, `published()` what the published code would report.

    The two differ in three places. False alarm area: the published code drops every false region whose area equals the
    area of a matched region of that image. Grey labels (between 0 and 1): here a label pixel counts from 0.5 on; the
    published code counts it from 0.5 on in the union, above 0 as labelled, and only at exactly 1 in the intersection and
    in the regions.
    Counts: the published code goes on counting over epochs; here each evaluation starts at zero.
    """

    def __init__(self):
        self.images = self.pixels = 0
        self.intersection = self.predicted = self.labelled = 0
        self.published_intersection = self.published_labelled = 0
        self.iou_per_image = []
        self.targets = self.detected = self.false_area = 0
        self.published_targets = self.published_detected = self.published_false_area = 0
        # For each threshold: true positives, false positives, positives, negatives.
        self.roc_counts, self.published_roc_counts = np.zeros((4, 11), np.int64), np.zeros((4, 11), np.int64)

    def add(self, logits, target, valid=None):
        """logits: (B, 1, H, W), unbounded. target: (B, 1, H, W) in [0, 1]. valid: (B,) bool, padding is left out."""
        for index in range(len(logits)):
            if valid is None or valid[index]:
                self._add_image(np.asarray(logits[index, 0], np.float32), np.asarray(target[index, 0], np.float32))

    def _add_image(self, logits, target):
        prediction, label, exact = logits > 0, target >= 0.5, target >= 1
        intersection = int((prediction & label).sum())
        union = int((prediction | label).sum())
        self.images += 1
        self.pixels += prediction.size
        self.intersection += intersection
        self.published_intersection += int((prediction & exact).sum())
        self.predicted += int(prediction.sum())
        self.labelled += int(label.sum())
        self.published_labelled += int((target > 0).sum())
        self.iou_per_image.append(intersection / union if union else 1.0)
        self._add_regions(prediction, label, exact)
        with np.errstate(over="ignore"):
            probability = 1 / (1 + np.exp(-logits))
        passed = np.searchsorted(THRESHOLDS.astype(np.float32), probability)  # (H, W), how many thresholds each pixel exceeds
        self.roc_counts += _roc_counts(passed, label, ~label)
        self.published_roc_counts += _roc_counts(passed, exact, target == 0)

    def _add_regions(self, prediction, label, exact):
        predicted = regions(prediction)
        wanted = regions(label)
        matched, unmatched = match(wanted, predicted)
        self.targets += len(wanted)
        self.detected += len(matched)
        self.false_area += sum(area for area, _ in unmatched)
        if not np.array_equal(label, exact):
            wanted = regions(exact)
            matched, unmatched = match(wanted, predicted)
        areas = {area for area, _ in matched}
        self.published_targets += len(wanted)
        self.published_detected += len(matched)
        self.published_false_area += sum(area for area, _ in predicted if area not in areas)

    def result(self):
        """dict of floats: iou, niou, pixel_accuracy, pd in [0, 1]; fa in false pixels per pixel; images, targets."""
        return dict(
            iou=self.intersection / max(self.predicted + self.labelled - self.intersection, 1),
            niou=float(np.mean(self.iou_per_image)) if self.iou_per_image else 0.0,
            pixel_accuracy=self.intersection / max(self.labelled, 1),
            pd=self.detected / max(self.targets, 1),
            fa=self.false_area / max(self.pixels, 1),
            images=self.images,
            targets=self.targets,
        )

    def published(self):
        """The same scores as the published code counts them: iou, pixel_accuracy, pd, fa, roc."""
        union = self.predicted + self.labelled - self.published_intersection
        return dict(
            iou=self.published_intersection / max(union, 1),
            pixel_accuracy=self.published_intersection / max(self.published_labelled, 1),
            pd=self.published_detected / max(self.published_targets, 1),
            fa=self.published_false_area / max(self.pixels, 1),
            roc=_rates(self.published_roc_counts),
        )

    def roc(self):
        """dict of lists over `THRESHOLDS`: tpr (= recall), fpr, precision."""
        return _rates(self.roc_counts)


def _roc_counts(passed, positive, negative):
    """(4, 11) counts. passed: (H, W) thresholds exceeded. positive, negative: (H, W) bool, what a prediction hits and a
    rejection spares."""

    def above(chosen):
        counts = np.bincount(passed[chosen], minlength=len(THRESHOLDS) + 1)
        return counts[:0:-1].cumsum()[::-1]

    true, false = above(positive), above(~positive)
    missed, spared = (~negative).sum() - above(~negative), negative.sum() - above(negative)
    return np.stack([true, false, true + missed, false + spared])


def _rates(counts):
    true, false, positives, negatives = counts
    rates = dict(tpr=true / (positives + 0.001), fpr=false / (negatives + 0.001), precision=true / (true + false + 0.001))
    return {name: [float(v) for v in values] for name, values in rates.items()}


def regions(mask):
    """(H, W) bool -> list of (area, centroid) of its 8-connected regions, in scan order."""
    labels, count = measure.label(mask, connectivity=2, return_num=True)
    rows, columns = np.nonzero(mask)
    region = labels[rows, columns] - 1
    areas = np.bincount(region, minlength=count)
    centres = [np.bincount(region, weights=at, minlength=count) / areas for at in (rows, columns)] if count else ([], [])
    return [(int(area), centre) for area, centre in zip(areas, zip(*centres))]


def match(targets, predictions):
    """Each target takes the first unused prediction whose centroid is closer than 3 pixels.

    Both are lists of (area, centroid). Returns (matched predictions, unmatched predictions).
    """
    free, matched = list(predictions), []
    for _, centre in targets:
        for prediction in free:
            if np.hypot(prediction[1][0] - centre[0], prediction[1][1] - centre[1]) < MATCH_DISTANCE:
                matched.append(prediction)
                free.remove(prediction)
                break
    return matched, free
