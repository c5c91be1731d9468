"""Figures from records, panels, plans and comparisons. The only importer of matplotlib; nothing here displays
or saves."""

import io
import itertools
import math
from typing import TYPE_CHECKING, Any

from tpukit.host.tables import GIB, printable
from tpukit.reporting import findings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Of Okabe and Ito: told apart with every common colour blindness. Black is left to matplotlib, for dark
# backgrounds.
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#8a94a0"
SERIES = ((BLUE, "o"), (ORANGE, "s"), (GREEN, "^"), ("#CC79A7", "D"))  # colour and marker of a curve
MAX_LABEL = 60  # characters
# Times of an interval, and their names in `report_figure`.
STEP_TIMES = dict(
    step_ms="step, in total",
    wait_ms="waiting for data",
    to_device_ms="sending to the device",
    from_device_ms="reading from the device",
)
Panel = tuple[str, Any]  # a title, and an array (H, W) or (H, W, 3)


def as_png(figure: "Figure") -> bytes:
    """The bytes of a figure as a PNG file."""
    png = io.BytesIO()
    figure.savefig(png, dpi=110, format="png")
    return png.getvalue()


def curves_figure(records: list, labels: findings.Labels = findings.NO_LABELS) -> "Figure | None":
    """Loss, gradient norm, learning rate and scores over the epochs of a run; None without any."""
    series = findings.epoch_curves(records)
    series = {name: points for name, points in series.items() if not labels.is_hidden(name)}
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
    """One series of a run over the epochs, with what its task says of it: unit, best value, the paper's,
    milestones."""
    is_score = name not in findings.NO_SCORES
    axis.plot(epochs, values, color=RED if is_score else BLUE, **dots(values))
    finish(axis, labels.names.get(name, name))
    label_epochs(axis)
    if not values:
        write_in_empty(axis, "nothing yet")
        return
    if is_score and min(values) >= 0:
        axis.set_ylim(0, 1.25 * max(values) or 1)
    if name == labels.score:
        best, epoch = max(zip(values, epochs), key=lambda point: point[0])
        axis.plot(epoch, best, marker="*", ms=12, color=RED, mec="white")
        side = "right" if epoch > max(epochs) / 2 else "left"
        look = dict(textcoords="offset points", ha=side, fontsize=8)
        axis.annotate(f"best {best:.3g}", (epoch, best), (0, 9), **look)
    if paper := labels.published.get(name):
        mark_height(axis, paper, "the paper")
        axis.set_ylim(0, 1.25 * max(*values, paper))
    for epoch, change in labels.milestones.items():
        if min(epochs) < epoch < max(epochs) and not is_score:
            axis.axvline(epoch, color=GREY, ls=":", lw=1.2)
            axis.text(epoch, 0.98, f" {change}", transform=axis.get_xaxis_transform(), va="top", fontsize=8)


def live_figure(records: list, progress: dict, labels: findings.Labels) -> "Figure":
    """A training as it stands: loss, the score that decides, and speed with the compilations of the step,
    over the epochs."""
    figure, ((loss, score, speed),) = subplots(1, 3, (12.6, 3.0))
    steps_per_epoch, series = findings.steps_per_epoch(records), findings.epoch_curves(records)
    scores = [name for name in series if name not in findings.NO_SCORES]
    for axis, name in ((loss, "loss"), (score, labels.score or next(iter(scores), "score"))):
        plot_curve(axis, name, *series.get(name, ((), ())), labels)
    spans = findings.intervals(records)
    rates = [span["images_per_s"] for span in spans]
    speed.plot([span["to"] / steps_per_epoch for span in spans], rates, color=GREEN, **dots(rates))
    mark_compilations(speed, [step / steps_per_epoch for step in findings.compiled_steps(records)])
    finish(speed, "samples per second")
    label_epochs(speed)
    speed.set_ylim(bottom=0)
    if not rates:
        write_in_empty(speed, "nothing yet")
    figure.suptitle(label(findings.headline(records, progress), limit=150), x=0.01, ha="left", fontsize=11)
    return figure


def mark_compilations(axis, positions):
    """A dotted line where the training step was compiled, and a legend where there are any. positions: on the
    x axis."""
    for number, x in enumerate(positions):
        axis.axvline(x, color=RED, ls=":", lw=1.4, label=None if number else "step compiled")
    if positions:
        axis.legend(fontsize=8, frameon=False)


def roc_figure(roc: dict) -> "Figure":
    """Recall over the false pixels per pixel, and precision over recall, with the points of three thresholds.
    roc: of `findings.roc`."""
    figure, ((axis, other),) = subplots(1, 2, (9.6, 3.2))
    least = min([rate for rate in roc["fpr"] if rate > 0], default=1e-6) / 2  # 0 has no logarithm
    points = list(zip([max(rate, least) for rate in roc["fpr"]], roc["tpr"], roc["precision"]))
    # Where nothing is predicted there is no precision.
    predicted = [any(rates) for rates in zip(roc["tpr"], roc["fpr"])]
    axis.plot([x for x, _, _ in points], roc["tpr"], color=BLUE, lw=1.6, marker="o", ms=4)
    recall, precision = (list(itertools.compress(roc[name], predicted)) for name in ("tpr", "precision"))
    other.plot(recall, precision, color=RED, lw=1.6, marker="o", ms=4)
    for threshold, marker in ((0.1, "^"), (0.5, "s"), (0.9, "v")):
        if threshold in roc["threshold"]:
            index = roc["threshold"].index(threshold)
            look = dict(ls="", color=GREEN, marker=marker, ms=8, label=f"threshold {threshold:g}")
            axis.plot(*points[index][:2], **look)
            if predicted[index]:
                other.plot(*points[index][1:], **look)
            axis.legend(fontsize=8, frameon=False)
    axis.set(xscale="log", ylim=(0, 1.08))
    finish(axis, "ROC, pixels of the test set", "false pixels per background pixel", "recall")
    other.set(xlim=(0, 1.08), ylim=(0, 1.08))
    finish(other, "precision and recall", "recall", "precision")
    return figure


def confusion_figure(confusion: dict) -> "Figure":
    """Test images by their class (a row each) and the predicted one. confusion: of `findings.confusion`."""
    names, counts = [label(name, 20) for name in confusion["classes"]], confusion["counts"]
    side = 2.2 + 0.32 * len(names)  # inches
    figure, ((axis,),) = subplots(1, 1, (side + 0.6, side))
    shares = [[count / (sum(row) or 1) for count in row] for row in counts]
    axis.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for line, column in itertools.product(range(len(names)), repeat=2):
        if count := counts[line][column]:
            colour = "white" if shares[line][column] > 0.5 else "black"
            axis.text(column, line, f"{count:g}", ha="center", va="center", fontsize=7, color=colour)
    axis.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=8)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_xlabel("predicted", fontsize=9)
    axis.set_ylabel("class", fontsize=9)
    set_title(axis, "test images")
    return figure


def report_figure(records: list) -> "Figure | None":
    """Where a step's time went over the last session; None without any interval."""
    spans = findings.intervals(records)
    if not spans:
        return None
    figure, ((axis,),) = subplots(1, 1, (8.4, 3.2))
    largest = max(span["step_ms"] for span in spans)
    for (part, name), (colour, marker) in zip(STEP_TIMES.items(), SERIES):
        points = [(span["to"], span[part]) for span in spans]
        if part != "step_ms" and max(time for _, time in points) <= largest / 50:
            points, name = [], f"{name}: below 2%"  # flat lines at zero say nothing
        x, y = zip(*points) if points else ((), ())
        axis.plot(x, y, color=colour, marker=marker, lw=1.5, ms=3, label=name)
    finish(axis, "where a step's time went", "step", "ms per step")
    axis.set_ylim(0, None)
    mark_compilations(axis, findings.compiled_steps(records))
    axis.legend(fontsize=8, frameon=False)
    return figure


def threshold_figure(scores: dict, score_names: dict, threshold: float, panels: list[Panel]) -> "Figure":
    """Panels of an image, and below them the scores over the threshold with a line at the one that the panels
    show. scores: dict threshold -> dict of scores. score_names: of the task."""
    values = scores[threshold]
    names = list(score_names) or [name for name, value in values.items() if isinstance(value, float)]
    columns = max(len(panels), len(names))
    figure, axes = subplots(2, columns, (3.2 * columns, 5.6), height_ratios=(3.4, 2.2))
    draw_panels(axes[0], panels)
    hide(axes[1, len(names) :])
    for axis, name in zip(axes[1], names):
        axis.plot(list(scores), [row[name] for row in scores.values()], color=BLUE, **dots(scores))
        axis.axvline(threshold, color=RED, lw=1.2)
        finish(axis, f"{score_names.get(name, name)}: {values[name]:.3g}", "threshold")
        axis.set_ylim(bottom=0)
    return figure


def runs_figure(series: findings.Series, name: str) -> "Figure":
    """One series of several runs over the epochs. series: dict run -> (epochs, values)."""
    figure, ((axis,),) = subplots(1, 1, (7.2, 3.4))
    looks = itertools.cycle(itertools.product(("-", "--", ":"), SERIES))
    for (run, (epochs, values)), (dashes, (colour, marker)) in zip(series.items(), looks):
        name_of_run = f" {label(run)}"  # matplotlib leaves a label that begins with _ out of the legend
        axis.plot(epochs, values, ls=dashes, color=colour, marker=marker, lw=1.6, ms=4, label=name_of_run)
    finish(axis, name)
    label_epochs(axis)
    if series:
        axis.legend(fontsize=8, frameon=False)
    else:
        write_in_empty(axis, "no run has this score")
    return figure


def panels_figure(rows: list[list[Panel]], title: str) -> "Figure":
    """Rows of panels, several samples in a line where there is space."""
    samples = {1: 4, 2: 2, 3: 2}.get(len(rows[0]), 1)  # in a line
    rows = [sum(rows[first : first + samples], []) for first in range(0, len(rows), samples)]
    side = 2.3 if len(rows[0]) < 6 else 2.0  # inches
    figure, axes = subplots(len(rows), len(rows[0]), (side * len(rows[0]), (side + 0.15) * len(rows) + 0.3))
    for line, row in zip(axes, rows):
        draw_panels(line, row)
    figure.suptitle(label(title), x=0.02, ha="left", fontsize=11)
    return figure


def draw_panels(axes, panels):
    """Each panel as a picture with its title; axes without one are hidden."""
    hide(axes[len(panels) :])
    for axis, (name, array) in zip(axes, panels):
        axis.set(xticks=(), yticks=())
        axis.spines[:].set_color(GREY)  # so that a white image has an edge
        # The range of its type: scaled to its own values, a mask that is true everywhere would be black.
        low, high = {"bool": (0, 1), "uint8": (0, 255)}.get(str(array.dtype), (None, None))
        axis.imshow(array, cmap="gray", interpolation="nearest", vmin=low, vmax=high)
        axis.set_title(label(name), fontsize=8)


def plan_figure(plan: Any) -> "Figure":
    """A bar chart of peak HBM over the batch sizes of a `Plan`, with a line at the chip's."""
    figure, ((axis,),) = subplots(1, 1, (6.4, 3.2))
    sizes = [f"{row['batch_size']:,}" for row in plan.rows]
    heights = [row["peak_bytes"] / GIB if row["fits"] else 1.15 * plan.hbm_gib for row in plan.rows]
    bars = axis.bar(sizes, heights, color=[BLUE if row["fits"] else RED for row in plan.rows], width=0.6)
    labels = [f"{height:.2f}" if row["fits"] else "does not fit" for height, row in zip(heights, plan.rows)]
    axis.bar_label(bars, labels, fontsize=8)
    mark_height(axis, plan.hbm_gib, f"the chip's {plan.hbm_gib:g} GiB")
    axis.set_ylim(0, 1.3 * max([plan.hbm_gib, *heights]))
    axis.set(xlabel="global batch size", ylabel="peak HBM per core, GiB")
    fits = any(row["fits"] for row in plan.rows)
    set_title(axis, f"{plan.task} on {plan.chip}{'' if fits else ': nothing fits'}")
    return figure


def subplots(lines: int, columns: int, size: tuple[float, float], **grid) -> tuple["Figure", Any]:
    """(figure, array (lines, columns) of axes). size: in inches."""
    from matplotlib.figure import Figure  # without pyplot: nothing global, no window, no leak

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(lines, columns, squeeze=False, gridspec_kw=grid)


def finish(axis, title, x="", y=""):
    """Title, names of the axes, and the common look of a plot."""
    set_title(axis, title)
    axis.set_xlabel(x, fontsize=9)
    axis.set_ylabel(y, fontsize=9)
    style(axis)


def style(axis):
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def dots(values):
    """The look of a curve, with a dot at each point where there are few."""
    return dict(lw=1.6, marker="o", ms=3 if len(values) < 60 else 0)


def mark_height(axis, y, text):
    """A dashed line across the plot, with a text on it."""
    axis.axhline(y, color=GREY, ls="--", lw=1.2)
    axis.text(0.01, y, text, transform=axis.get_yaxis_transform(), va="bottom", fontsize=8)


def hide(axes):
    for axis in axes:
        axis.set_axis_off()


def set_title(axis, text):
    axis.set_title(label(text), loc="left", fontsize=10)


def label_epochs(axis):
    """Name the x axis, with ticks at whole epochs where the axis holds one."""
    axis.set_xlabel("epoch", fontsize=9)
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)


def write_in_empty(axis, text):
    axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", fontsize=9, color=GREY)
    axis.set(xticks=(), yticks=())


def label(text: str, limit: int = MAX_LABEL) -> str:
    """Text for a figure: on one line, not longer than the limit, and without formulas for matplotlib."""
    words = " ".join(printable(text).split())
    if len(words) > limit:
        words = f"{words[: limit - 1]}…"
    return words.replace("$", r"\$")
