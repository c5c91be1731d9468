"""The scores of MSHNet as the published code counts them, to compare ours and a paper's figures with."""

import numpy as np
from scipy import special

from tpukit_tasks.mshnet.scores import THRESHOLDS, match, regions


def published_scores(logits, target):
    """dict: iou, pixel_recall, pd, fa, and tpr, fpr, precision over `THRESHOLDS`, of one epoch of the
    published code.

    logits: (N, 1, H, W). target: (N, 1, H, W) in [0, 1]. Two things differ from `Scores`:
    - False alarms: a predicted region counts only if its area differs from that of every matched region of
    the image.
    - Grey labels (between 0 and 1): a pixel is labelled from 0.5 on in the union, above 0 in the pixel recall
    (which the published code calls pixel accuracy), and only at exactly 1 in the intersection and in the
    regions."""
    intersection = predicted = labelled = above_zero = targets = detected = false_area = 0
    roc = np.zeros((4, len(THRESHOLDS)), np.int64)  # true positives, false positives, positives, negatives
    for image, label in zip(np.asarray(logits, np.float32)[:, 0], np.asarray(target, np.float32)[:, 0]):
        prediction, exact = image > 0, label >= 1
        intersection += np.count_nonzero(prediction & exact)
        predicted += np.count_nonzero(prediction)
        labelled += np.count_nonzero(label >= 0.5)
        above_zero += np.count_nonzero(label > 0)
        found, wanted = regions(prediction), regions(exact)
        matched, _ = match(wanted, found)
        targets += len(wanted)
        detected += len(matched)
        matched_areas = {area for area, _ in matched}
        false_area += sum(area for area, _ in found if area not in matched_areas)
        for place, threshold in enumerate(THRESHOLDS):
            above = special.expit(image) > threshold
            true, false = np.count_nonzero(above & exact), np.count_nonzero(above & ~exact)
            missed, rejected = np.count_nonzero(~above & (label > 0)), np.count_nonzero(~above & (label == 0))
            roc[:, place] += true, false, true + missed, false + rejected
    true, false, positives, negatives = roc
    return dict(
        iou=intersection / (predicted + labelled - intersection),
        pixel_recall=intersection / above_zero,
        pd=detected / targets,
        fa=false_area / np.size(target),
        tpr=true / (positives + 0.001),
        fpr=false / (negatives + 0.001),
        precision=true / (true + false + 0.001),
    )
