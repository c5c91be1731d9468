"""Draw the rates and the confused classes of an evaluation."""

import itertools
import math
from typing import TYPE_CHECKING

from tpukit.host.tables import Table
from tpukit.reporting.figures import BLUE, GREEN, RED, SMALL, finish, label, plot, subplots
from tpukit.reporting.findings import format_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHARES = (-0.03, 1.03)  # limits of an axis, so that points at 0 and 1 are off the frame


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


def confusion_figure(confusion: dict) -> "Figure":
    """Draw test images by their class (a row each) and the predicted one.

    confusion: classes (K names) and counts (K, K)."""
    names, counts = [label(name, 20) for name in confusion["classes"]], confusion["counts"]
    figure, ((axis,),) = subplots(1, 1, 2.2 + 0.32 * len(names))
    # No tile where there is no image; the palest one is still seen on white.
    shares = [[count / (sum(row) or 1) if count else math.nan for count in row] for row in counts]
    axis.imshow(shares, cmap="Blues", vmin=-0.25, vmax=1)
    for line, column in itertools.product(range(len(names)), repeat=2):
        if count := counts[line][column]:
            colour = "white" if shares[line][column] > 0.5 else "black"
            axis.text(column, line, f"{count:g}", ha="center", va="center", fontsize=SMALL, color=colour)
    axis.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axis.set_yticks(range(len(names)), names)
    finish(axis, "test images", "predicted", "class")
    axis.grid(False)
    return figure


def per_class_table(confusion: dict) -> Table:
    """Return a table of the classes of `confusion`: number of test images, precision, recall."""
    rows = []
    for name, row, column in zip(confusion["classes"], confusion["counts"], zip(*confusion["counts"])):
        correct = row[len(rows)]
        precision, recall = (format_number(correct / of) if of else "" for of in (sum(column), sum(row)))
        rows.append((name, f"{sum(row):.0f}", precision, recall))
    return Table("Classes", ("class", "test images", "precision", "recall"), rows, are_names=True)
