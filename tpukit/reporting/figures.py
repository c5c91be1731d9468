"""Draw figures from records and panels. The only importer of matplotlib; displays and saves nothing."""

import io
import itertools
import math
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tpukit.host.tables import printable
from tpukit.reporting import findings
from tpukit.training.panels import RIGHT, WRONG

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Nearly those of Okabe and Ito, told apart with every common colour blindness. A figure has no background:
# curves and text (in grey) have to be seen on white pages and on dark ones.
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#B98000", "#009E73", "#D55E00", "#787f89"
SERIES = ((BLUE, "o"), (ORANGE, "s"), (GREEN, "^"), ("#CC79A7", "D"))  # colour and marker of a curve
MAX_LABEL = 60  # characters
MAX_NAME = 36  # characters of a file's name below a panel's title
MARKS = {RIGHT: GREEN, WRONG: RED}  # sign at the beginning of a panel's title -> colour of its frame
Panel = tuple[str, Any]  # a title, and an array (H, W) or (H, W, 3), or a text
TEXT_LINES = 18  # of a panel


def as_png(figure: "Figure") -> bytes:
    """Return a figure as the bytes of a PNG file, without a background."""
    png = io.BytesIO()
    figure.savefig(png, dpi=110, format="png", transparent=True)
    return png.getvalue()


def curves_figure(records: list, labels: findings.Labels = findings.NO_LABELS) -> "Figure | None":
    """Draw loss, gradient norm, learning rate and scores over the epochs of a run; None without any."""
    shown = findings.NO_SCORES + tuple(labels.names)
    series = findings.curves(records)
    series = {name: points for name, points in series.items() if name in shown or not labels.names}
    if not series:
        return None
    columns = min(3, len(series))
    lines = math.ceil(len(series) / columns)
    figure, axes = subplots(lines, columns, (4.2 * columns, 2.7 * lines))
    hide(axes.flat[len(series) :])
    for axis, (name, (epochs, values)) in zip(axes.flat, series.items()):
        plot_curve(axis, name, epochs, values, labels)
        if name == "gradient norm" and max(values) > 10 * min(values) > 0:
            axis.set_yscale("log")
    return figure


def plot_curve(axis, name, epochs, values, labels):
    """Plot one series of a run over the epochs, with its unit, best value and the paper's."""
    is_score, title = name not in findings.NO_SCORES, labels.names.get(name, name)
    plot(axis, epochs, values, RED if is_score else BLUE)
    if name == labels.score and values:
        best, epoch = max(zip(values, epochs), key=lambda point: point[0])
        axis.plot(epoch, best, marker="*", ms=12, color=RED, mec="white", clip_on=False)
        title += f" (best {best:.3g})"
    paper = labels.published.get(name) if values else None
    if paper:
        axis.axhline(paper, color=GREY, ls="--", lw=1.2, label=f"the paper: {paper:.3g}")
    if is_score:
        start_at_zero(axis, [*values, paper or 0])
    finish(axis, title, "epoch")


def live_figure(records: list, labels: findings.Labels) -> "Figure":
    """Draw a training as it stands: loss, the score that decides, and speed with the compilations of the
    step, over the epochs. The progress bar, which is redrawn more often, says how far it is."""
    figure, ((loss, score, speed),) = subplots(1, 3, (12.6, 3.0))
    steps_per_epoch, series = findings.steps_per_epoch(records), findings.curves(records)
    scores = [name for name in series if name not in findings.NO_SCORES]
    for axis, name in ((loss, "loss"), (score, labels.score or next(iter(scores), "score"))):
        plot_curve(axis, name, *series.get(name, ((), ())), labels)
    spans = findings.intervals(records)
    rates = [span["images_per_s"] for span in spans]
    plot(speed, [span["to"] / steps_per_epoch for span in spans], rates, GREEN)
    mark_compilations(speed, [step / steps_per_epoch for step in findings.compiled_steps(records)])
    speed.set_ylim(bottom=0)
    finish(speed, "samples per second", "epoch")
    write_above(figure, findings.headline(records))
    return figure


def mark_compilations(axis, positions):
    """Draw a dotted line where the training step was compiled. positions: on the x axis."""
    for number, x in enumerate(positions):
        axis.axvline(x, color=RED, ls=":", lw=1.4, label=None if number else "step compiled")


def roc_figure(roc: dict) -> "Figure":
    """Draw recall over the false pixels per pixel, and precision over recall, with the points of three
    thresholds. roc: of `findings.roc`."""
    figure, ((left, right),) = subplots(1, 2, (9.6, 3.2))
    least = min([rate for rate in roc["fpr"] if rate > 0], default=1e-6) / 2  # 0 has no logarithm
    points = list(zip(roc["threshold"], roc["tpr"], [max(rate, least) for rate in roc["fpr"]]))
    # Where nothing is found the precision says nothing: 0 of 0, or 0 of some.
    precise = [point for point in zip(roc["threshold"], roc["precision"], roc["tpr"]) if point[2] > 0]
    for axis, curve, colour in ((left, points, BLUE), (right, precise, RED)):
        plot(axis, [x for _, _, x in curve], [y for _, y, _ in curve], colour)
        marked = [point for point in curve if point[0] in (0.1, 0.5, 0.9)]
        for (threshold, y, x), marker in zip(marked, "^sv"):
            name = f"threshold {threshold:g}"
            axis.plot(x, y, ls="", color=GREEN, marker=marker, ms=8, label=name, clip_on=False)
    left.set(xscale="log", ylim=(0, 1))
    finish(left, "ROC, pixels of the test set", "false pixels per background pixel", "recall")
    right.set(xlim=(0, 1), ylim=(0, 1))
    finish(right, "precision and recall", "recall", "precision")
    return figure


def confusion_figure(confusion: dict) -> "Figure":
    """Draw test images by their class (a row each) and the predicted one. confusion: see `findings`."""
    names, counts = [label(name, 20) for name in confusion["classes"]], confusion["counts"]
    side = 2.2 + 0.32 * len(names)  # inches
    figure, ((axis,),) = subplots(1, 1, (side + 0.6, side))
    # No tile where there is no image; the palest one is still seen on white.
    shares = [[count / (sum(row) or 1) if count else math.nan for count in row] for row in counts]
    axis.imshow(shares, cmap="Blues", vmin=-0.25, vmax=1)
    for line, column in itertools.product(range(len(names)), repeat=2):
        if count := counts[line][column]:
            colour = "white" if shares[line][column] > 0.5 else "black"
            axis.text(column, line, f"{count:g}", ha="center", va="center", fontsize=7, color=colour)
    axis.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axis.set_yticks(range(len(names)), names)
    finish(axis, "test images", "predicted", "class")
    axis.grid(False)
    return figure


def runs_figure(series: findings.Series, name: str) -> "Figure":
    """Draw one series of several runs over the epochs. series: dict run -> (epochs, values)."""
    figure, ((axis,),) = subplots(1, 1, (7.2, 3.4))
    looks = itertools.cycle(itertools.product(("-", "--", ":"), SERIES))
    for (run, (epochs, values)), (dashes, (colour, marker)) in zip(series.items(), looks):
        name_of_run = f" {label(run)}"  # matplotlib leaves a label that begins with _ out of the legend
        axis.plot(epochs, values, ls=dashes, color=colour, marker=marker, lw=1.6, ms=4, label=name_of_run)
    if not series:
        write_in_empty(axis, "no run has this score")
    if name not in findings.NO_SCORES:
        start_at_zero(axis, [value for _, values in series.values() for value in values])
    finish(axis, name, "epoch")
    return figure


def panels_figure(rows: list[list[Panel]], title: str, names: Iterable[str] = ()) -> "Figure":
    """Draw rows of panels, several samples in a line where there is space. names: of the samples, written
    below the titles of their first panels; of a long one the end, where files differ."""
    named = [name if len(name) <= MAX_NAME else f"…{name[1 - MAX_NAME :]}" for name in map(printable, names)]
    if named:
        rows = [[(f"{row[0][0]}\n{name}", row[0][1]), *row[1:]] for row, name in zip(rows, named)]
    samples = {1: 4, 2: 2, 3: 2}.get(len(rows[0]), 1)  # in a line
    rows = [sum(rows[first : first + samples], []) for first in range(0, len(rows), samples)]
    side = 2.3 if len(rows[0]) < 6 else 2.0  # inches
    height = side + (0.3 if named else 0.15)
    figure, axes = subplots(len(rows), len(rows[0]), (side * len(rows[0]), height * len(rows) + 0.3))
    for line, row in zip(axes, rows):
        draw_panels(line, row)
    write_above(figure, title)
    return figure


def draw_panels(axes, panels):
    """Draw each panel as a picture, or a text, with its title of one or two lines; hide axes without one."""
    hide(axes[len(panels) :])
    for axis, (title, array) in zip(axes, panels):
        colour = MARKS.get(title[:1], GREY)  # an edge for a white image, too
        axis.set(xticks=(), yticks=())
        axis.spines[:].set(color=colour, linewidth=0.8 if colour == GREY else 2.5)
        axis.set_title("\n".join(map(label, title.split("\n", 1))), fontsize=8, color=colour)
        if isinstance(array, str):
            lines = [
                part for line in array.splitlines() for part in textwrap.wrap(printable(line), 38) or [""]
            ]
            text = "\n".join(lines[:TEXT_LINES])
            axis.text(
                0.02, 0.98, text, fontsize=6, va="top", color=GREY, transform=axis.transAxes, parse_math=False
            )
            continue
        # The range of its type: scaled to its own values, a mask that is true everywhere would be black.
        low, high = {"bool": (0, 1), "uint8": (0, 255)}.get(str(array.dtype), (None, None))
        axis.imshow(array, cmap="gray", interpolation="nearest", vmin=low, vmax=high)


# The common look


def subplots(lines: int, columns: int, size: tuple[float, float], **grid) -> tuple["Figure", Any]:
    """Return (figure, array (lines, columns) of axes). size: in inches."""
    from matplotlib.figure import Figure  # without pyplot: nothing global, no window, no leak

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(lines, columns, squeeze=False, gridspec_kw=grid)


def plot(axis, x, y, colour):
    """Plot a curve, with a dot at each point where there are few."""
    axis.plot(x, y, color=colour, lw=1.6, marker="o", ms=3 if len(y) < 60 else 0)
    if not y:
        write_in_empty(axis, "nothing yet")


def start_at_zero(axis, scores):
    """Set the range of an axis of scores, if none is below 0: a share ends at 1."""
    largest = max(scores, default=0)
    top = 1 if 0.8 < largest <= 1 else 1.25 * largest or 1
    if min(scores, default=0) >= 0 and math.isfinite(top):
        axis.set_ylim(0, top)


def finish(axis, title, x, y=""):
    """Set title, names, look, and a legend if a curve has a label. Ticks of epochs are whole."""
    axis.set_title(label(title), loc="left", fontsize=10, color=GREY)
    axis.set_xlabel(x, fontsize=9, color=GREY)
    axis.set_ylabel(y, fontsize=9, color=GREY)
    if x == "epoch":
        axis.set_xlim(0, 1.02 * max(1, axis.dataLim.x1))
        axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    if axis.get_legend_handles_labels()[1]:
        axis.legend(fontsize=8, frameon=False, labelcolor=GREY)
    style(axis)


def style(axis):
    axis.tick_params(labelsize=8, color=GREY, labelcolor=GREY, which="both")
    axis.grid(color=GREY, alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["bottom", "left"]].set_color(GREY)


def write_above(figure, text):
    letters = int(12 * figure.get_figwidth())  # in a line
    title = textwrap.fill(label(text, limit=150), letters)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=GREY)


def hide(axes):
    for axis in axes:
        axis.set_axis_off()


def write_in_empty(axis, text):
    axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", fontsize=9, color=GREY)
    axis.tick_params(left=False, bottom=False, labelleft=False, labelbottom=False)


def label(text: str, limit: int = MAX_LABEL) -> str:
    """Fit a text for a figure: on one line, within the limit, and without formulas for matplotlib."""
    words = " ".join(printable(text).split())
    if len(words) > limit:
        words = f"{words[: limit - 1]}…"
    return words.replace("$", r"\$")
