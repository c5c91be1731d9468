"""Scores of infrared small target detection: IoU, nIoU, pixel accuracy, Pd and Fa.

All of them are counts until `result()`, so batches of any size give the same scores. Letters: B batch, H and W image size.
"""

import numpy as np
from scipy import ndimage

MATCH_DISTANCE = 3  # pixels between centroids


class Scores:
    """Counts over a set of images. A pixel is a target from a label of 0.5 on, and is predicted from a logit above 0."""

    def __init__(self):
        self.images = self.pixels = 0
        self.intersection = self.union = self.labelled = 0  # pixels
        self.iou_per_image = []
        self.targets = self.detected = 0  # regions
        self.false_area = 0  # pixels of predicted regions that match no target

    def add(self, logits, target, valid=None):
        """logits: (B, 1, H, W), unbounded. target: (B, 1, H, W) in [0, 1]. valid: (B,) bool, False for padding."""
        for index in range(len(logits)):
            if valid is None or valid[index]:
                self._add_image(logits[index, 0] > 0, target[index, 0] >= 0.5)

    def _add_image(self, prediction, label):  # (H, W) bool each
        intersection, union = int((prediction & label).sum()), int((prediction | label).sum())
        self.images += 1
        self.pixels += prediction.size
        self.intersection += intersection
        self.union += union
        self.labelled += int(label.sum())
        self.iou_per_image.append(intersection / union if union else 1.0)
        targets = regions(label)
        matched, unmatched = match(targets, regions(prediction))
        self.targets += len(targets)
        self.detected += len(matched)
        self.false_area += sum(area for area, _ in unmatched)

    def result(self):
        """dict of floats: iou, niou, pixel_accuracy, pd in [0, 1]; fa in false pixels per pixel; images, targets."""
        return dict(
            iou=self.intersection / max(self.union, 1),
            niou=float(np.mean(self.iou_per_image)) if self.iou_per_image else 0.0,
            pixel_accuracy=self.intersection / max(self.labelled, 1),
            pd=self.detected / max(self.targets, 1),
            fa=self.false_area / max(self.pixels, 1),
            images=self.images,
            targets=self.targets,
        )


def regions(mask):
    """(H, W) bool -> list of (area, centroid) of its 8-connected regions, in scan order."""
    labels, count = ndimage.label(mask, structure=np.ones((3, 3)))
    rows, columns = np.nonzero(mask)
    region = labels[rows, columns] - 1  # of each pixel
    areas = np.bincount(region, minlength=count)
    centre_rows = np.bincount(region, weights=rows, minlength=count) / areas
    centre_columns = np.bincount(region, weights=columns, minlength=count) / areas
    return [(int(area), (row, column)) for area, row, column in zip(areas, centre_rows, centre_columns)]


def match(targets, predictions):
    """Each target takes the first unused prediction whose centroid is closer than 3 pixels.

    Both are lists of (area, centroid). Returns (matched predictions, unmatched predictions).
    """
    unmatched, matched = list(predictions), []
    for _, (row, column) in targets:
        for prediction in unmatched:
            _, (other_row, other_column) = prediction
            if np.hypot(other_row - row, other_column - column) < MATCH_DISTANCE:
                matched.append(prediction)
                unmatched.remove(prediction)
                break
    return matched, unmatched
