"""What a run of the image classifier shows of its scores besides numbers and curves: a sentence, and which
classes were taken for which."""

import itertools
import math
from typing import TYPE_CHECKING, Any

from tpukit.host.tables import Table
from tpukit.reporting.figures import SMALL, finish, label, subplots
from tpukit.reporting.findings import are_numbers, format_number, number_in
from tpukit_tasks import finite

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARGIN = 0.1  # of the accuracy above that of guessing, below which nothing was learned


def verdict(scores: dict, last: dict) -> str:
    """Return a sentence about the accuracy of the kept weights, or "". Any value may be missing or of another
    type."""
    if sentence := finite.verdict(scores):
        return sentence
    accuracy, confusion = number_in(scores, "accuracy"), scores.get("confusion", {})
    if accuracy is None or not is_confusion(confusion):  # without it, nobody says of how many classes
        return ""
    classes = len(confusion["classes"])
    if classes and accuracy < 1 / classes + MARGIN:
        return f"This is hardly better than guessing one of {classes} classes: train longer."
    return ""


def figures(scores: dict) -> "dict[str, Figure | Table]":
    """Return the confusion matrix and a table of its classes, if there is one that can be drawn."""
    confusion = scores.get("confusion", {})
    if not is_confusion(confusion):
        return {}
    return dict(confusion=confusion_figure(confusion), classes=per_class_table(confusion))


def is_confusion(confusion: Any) -> bool:
    """Return True for what `confusion_figure` can draw."""
    try:
        classes, counts = confusion["classes"], confusion["counts"]
        is_square = {len(classes)} == {len(counts), *map(len, counts)} and isinstance(classes, list)
        return is_square and all(are_numbers(*row) for row in counts)
    except (LookupError, TypeError):
        return False


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
