"""What a run of MSHNet shows of its scores besides numbers and curves: a sentence, and the ROC."""

from typing import TYPE_CHECKING, Any

from tpukit.reporting.figures import BLUE, GREEN, RED, finish, label, plot, subplots
from tpukit.reporting.findings import are_numbers, number_in
from tpukit_tasks import finite

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOO_MANY = 0.1  # false pixels per pixel
SHARES = (-0.03, 1.03)  # of an axis: what lies on 0 or 1 is not on the frame


def verdict(scores: dict, last: dict) -> str:
    """Return a sentence about pd and fa of the kept weights, or "". last: those of the last epoch. Any value
    may be missing or of another type."""
    if sentence := finite.verdict(scores):
        return sentence
    false_alarms, found = number_in(scores, "fa"), number_in(scores, "pd")
    if false_alarms is not None and false_alarms > TOO_MANY:
        return "The network marks far too many pixels: train longer."
    if found == 0:
        return "The network finds no target yet: train longer."
    if found and number_in(last, "pd") == 0:
        return "The last epoch finds no target any more: train longer, or with a lower learning rate."
    return ""


def figures(scores: dict) -> "dict[str, Figure]":
    """Return the ROC, if there is one that can be drawn."""
    roc = scores.get("roc", {})
    return dict(roc=roc_figure(roc)) if is_roc(roc) else {}


def is_roc(roc: Any) -> bool:
    """Return True for what `roc_figure` can draw."""
    try:
        curves = [roc[name] for name in ("tpr", "fpr", "precision")]
        return len({*map(len, curves)}) == 1 and all(are_numbers(*curve) for curve in curves)
    except (LookupError, TypeError):
        return False


def roc_figure(roc: dict) -> "Figure":
    """Draw recall over the false pixels per pixel, and precision over recall, with the points of three
    thresholds. roc: lists tpr, fpr, precision over thresholds that are evenly spaced from 0 to 1."""
    figure, ((left, right),) = subplots(1, 2, 3.2)
    least = min([rate for rate in roc["fpr"] if rate > 0], default=1e-6) / 2  # 0 has no logarithm
    last = max(len(roc["tpr"]) - 1, 1)
    thresholds = [index / last for index in range(len(roc["tpr"]))]
    points = list(zip(thresholds, roc["tpr"], [max(rate, least) for rate in roc["fpr"]]))
    # Where nothing is found the precision says nothing: 0 of 0, or 0 of some.
    precise = [point for point in zip(thresholds, roc["precision"], roc["tpr"]) if point[2] > 0]
    for axis, curve, colour in ((left, points, BLUE), (right, precise, RED)):
        plot(axis, [x for _, _, x in curve], [y for _, y, _ in curve], colour)
        marked = [point for point in curve if point[0] in (0.1, 0.5, 0.9)]
        for (threshold, y, x), marker in zip(marked, "^sv"):
            name = label(f"threshold {threshold:g}")
            axis.plot(x, y, ls="", color=GREEN, marker=marker, ms=8, label=name)
    left.set(xscale="log", ylim=SHARES)
    finish(left, "ROC, pixels of the test set", "false pixels per background pixel", "recall")
    right.set(xlim=SHARES, ylim=SHARES)
    finish(right, "precision and recall", "recall", "precision")
    return figure
