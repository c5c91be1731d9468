"""Figures from records, panels, plans and comparisons. The only importer of matplotlib; nothing here displays
or saves."""

import io
import itertools
import math

from tpukit.host.tables import GIB, printable
from tpukit.reporting import findings

# Of Okabe and Ito: told apart with every common colour blindness. Black is left to matplotlib, for dark
# backgrounds.
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#8a94a0"
SERIES = (
    (BLUE, "o"),
    (ORANGE, "s"),
    (GREEN, "^"),
    ("#CC79A7", "D"),
)  # colour and marker of one of several curves
MAX_LABEL = 60  # characters


def as_png(figure):
    """The bytes of a figure as a PNG file."""
    png = io.BytesIO()
    figure.savefig(png, dpi=110, format="png")
    return png.getvalue()


def curves_figure(records, labels=findings.NO_LABELS):
    """Loss, gradient norm, learning rate and scores over the epochs of a run; None without any.

    labels: of `findings.labels_of`."""
    series = {
        name: points for name, points in findings.epoch_curves(records).items() if not labels.hides(name)
    }
    if not series:
        return None
    columns = min(3, len(series))
    lines = math.ceil(len(series) / columns)
    figure, axes = subplots(lines, columns, (4.2 * columns, 2.7 * lines))
    for axis in axes.flat[len(series) :]:
        axis.set_axis_off()
    for axis, (name, (epochs, values)) in zip(axes.flat, series.items()):
        plot_curve(axis, name, epochs, values, labels)
        if name == "gradient norm" and max(values) > 10 * min(values) > 0:
            axis.set_yscale("log")
    return figure


def plot_curve(axis, name, epochs, values, labels):
    """One series of a run over the epochs, with what its task says of it: unit, best value, the paper's,
    milestones."""
    is_score = name not in findings.NO_SCORES
    axis.plot(
        epochs, values, color=RED if is_score else BLUE, lw=1.6, marker="o", ms=3 if len(values) < 60 else 0
    )
    set_title(axis, labels.names.get(name, name))
    label_epochs(axis)
    style(axis)
    if not values:
        write_in_empty(axis, "nothing yet")
        return
    if is_score and min(values) >= 0:
        axis.set_ylim(0, 1.25 * max(values) or 1)
    if name == labels.score:
        best = max(range(len(values)), key=values.__getitem__)
        axis.plot(epochs[best], values[best], marker="*", ms=12, color=RED, mec="white")
        axis.annotate(f"best {values[best]:.3g}", (epochs[best], values[best]), (0, 9), textcoords="offset points",
                      ha="right" if epochs[best] > max(epochs) / 2 else "left", fontsize=8)  # fmt: skip
    if name in labels.published:
        axis.axhline(labels.published[name], color=GREY, ls="--", lw=1.2)
        axis.text(
            0.01,
            labels.published[name],
            "the paper",
            transform=axis.get_yaxis_transform(),
            va="bottom",
            fontsize=8,
        )
        axis.set_ylim(0, 1.25 * max(*values, labels.published[name]))
    for epoch, what in labels.milestones.items():
        if min(epochs) < epoch < max(epochs) and not is_score:
            axis.axvline(epoch, color=GREY, ls=":", lw=1.2)
            axis.text(epoch, 0.98, f" {what}", transform=axis.get_xaxis_transform(), va="top", fontsize=8)


def live_figure(records, progress, labels):
    """A training as it stands: loss, the score that decides, and speed with the compilations of the step,
    over the epochs."""
    figure, ((loss, score, speed),) = subplots(1, 3, (12.6, 3.0))
    steps_per_epoch, series = findings.steps_per_epoch(records), findings.epoch_curves(records)
    scores = [name for name in series if name not in findings.NO_SCORES]
    for axis, name in ((loss, "loss"), (score, labels.score or next(iter(scores), "score"))):
        plot_curve(axis, name, *series.get(name, ((), ())), labels)
    found = findings.intervals(records)
    speed.plot([interval["to"] / steps_per_epoch for interval in found], [one["images_per_s"] for one in found],
               color=GREEN, lw=1.6, marker="o", ms=3 if len(found) < 60 else 0)  # fmt: skip
    mark_compilations(speed, [step / steps_per_epoch for step in findings.compiled_steps(records)])
    set_title(speed, "samples per second")
    label_epochs(speed)
    speed.set_ylim(bottom=0)
    style(speed)
    if not found:
        write_in_empty(speed, "nothing yet")
    figure.suptitle(label(findings.headline(records, progress), limit=150), x=0.01, ha="left", fontsize=11)
    return figure


def mark_compilations(axis, places):
    """A dotted line at each place on the x axis where the training step was compiled, and a legend where
    there are any."""
    for number, place in enumerate(places):
        axis.axvline(place, color=RED, ls=":", lw=1.4, label=None if number else "step compiled")
    if places:
        axis.legend(fontsize=8, frameon=False)


def roc_figure(roc):
    """Recall over the false pixels per pixel, and precision over recall. roc: dict of lists tpr, fpr,
    precision, threshold."""
    figure, ((axis, other),) = subplots(1, 2, (9.6, 3.2))
    least = min([rate for rate in roc["fpr"] if rate > 0], default=1e-6) / 2
    rates = [max(rate, least) for rate in roc["fpr"]]
    axis.plot(rates, roc["tpr"], color=BLUE, lw=1.6, marker="o", ms=4)
    axis.set(xscale="log", ylim=(0, 1.08))
    set_title(axis, "ROC, pixels of the test set")
    axis.set_xlabel("false pixels per background pixel", fontsize=9)
    axis.set_ylabel("recall", fontsize=9)
    # Where nothing is predicted there is no precision.
    predicted = [place for place, found in enumerate(zip(roc["tpr"], roc["fpr"])) if any(found)]
    recall, precision = ([roc[name][place] for place in predicted] for name in ("tpr", "precision"))
    other.plot(recall, precision, color=RED, lw=1.6, marker="s", ms=4)
    other.set(xlim=(0, 1.08), ylim=(0, 1.08))
    set_title(other, "precision and recall")
    other.set_xlabel("recall", fontsize=9)
    other.set_ylabel("precision", fontsize=9)
    for drawn in (axis, other):
        style(drawn)
    thresholds = [roc["threshold"][place] for place in predicted]
    label_points(axis, rates, roc["tpr"], roc["threshold"], ha="left")
    label_points(other, recall, precision, thresholds, ha="right")
    return figure


def label_points(axis, x, y, thresholds, ha):
    """Write the threshold beside the points of 0.1, 0.5 and 0.9, each text where it covers no other. ha: the
    side of the text that is next to its point, left or right."""
    axis.figure.draw_without_rendering()  # lays the axes out
    low, high = axis.get_ylim()
    covered = []
    for place, threshold in enumerate(thresholds):
        if threshold in (0.1, 0.5, 0.9):
            step = -9 if y[place] > (low + high) / 2 else 9  # points, towards the middle of the axis
            beside = 5 if ha == "left" else -5
            look = dict(textcoords="offset points", ha=ha, fontsize=8)
            note = axis.annotate(f"{threshold:g}", (x[place], y[place]), (beside, step), **look)
            while any(note.get_window_extent().overlaps(box) for box in covered):
                note.xyann = (beside, note.xyann[1] + step)
            covered.append(note.get_window_extent())


def confusion_figure(confusion):
    """Test images by their class (a row each) and the predicted one. confusion: dict of classes (K) and
    counts (K, K)."""
    names, counts = [label(name, 20) for name in confusion["classes"]], confusion["counts"]
    side = 2.2 + 0.32 * len(names)  # inches
    figure, ((axis,),) = subplots(1, 1, (side + 0.6, side))
    shares = [[count / (sum(row) or 1) for count in row] for row in counts]
    axis.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for line, row in enumerate(counts):
        for column, count in enumerate(row):
            if count:
                colour = "white" if shares[line][column] > 0.5 else "black"
                axis.text(column, line, f"{count:g}", ha="center", va="center", fontsize=7, color=colour)
    axis.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=8)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_xlabel("predicted", fontsize=9)
    axis.set_ylabel("class", fontsize=9)
    set_title(axis, "test images")
    return figure


def report_figure(records):
    """Where a step's time went over the last session; None without any interval."""
    found = findings.intervals(records)
    if not found:
        return None
    figure, ((axis,),) = subplots(1, 1, (8.4, 3.2))
    steps = [interval["to"] for interval in found]
    largest = max(interval["step_ms"] for interval in found)
    for part, name, (colour, marker) in zip(
        ("step_ms", "wait_ms", "to_device_ms", "from_device_ms"),
        ("step, in total", "waiting for data", "sending to the device", "reading from the device"),
        SERIES,
    ):
        values = [interval[part] for interval in found]
        if part == "step_ms" or max(values) > largest / 50:  # flat lines at zero say nothing
            axis.plot(steps, values, color=colour, marker=marker, lw=1.5, ms=3, label=name)
        else:
            axis.plot([], [], color=colour, marker=marker, ms=3, label=f"{name}: below 2%")
    axis.set_xlabel("step", fontsize=9)
    axis.set_ylabel("ms per step", fontsize=9)
    axis.set_ylim(0, None)
    set_title(axis, "where a step's time went")
    axis.legend(fontsize=8, frameon=False)
    mark_compilations(axis, findings.compiled_steps(records))
    style(axis)
    return figure


def threshold_figure(scores, score_names, threshold, panels):
    """Panels of an image, and below them the scores over the threshold with a line at the one that the panels
    show.

    scores: dict threshold -> dict of scores. score_names: of the task. panels: list of (title, array)."""
    names = list(score_names) or [
        name for name, value in scores[threshold].items() if isinstance(value, float)
    ]
    columns = max(len(panels), len(names))
    figure, axes = subplots(2, columns, (3.2 * columns, 5.6), height_ratios=(3.4, 2.2))
    for axis in [*axes[0, len(panels) :], *axes[1, len(names) :]]:
        axis.set_axis_off()
    for axis, (name, array) in zip(axes[0], panels):
        draw_panel(axis, name, array)
    for axis, name in zip(axes[1], names):
        axis.plot(list(scores), [row[name] for row in scores.values()], color=BLUE, lw=1.6, marker="o", ms=3)
        axis.axvline(threshold, color=RED, lw=1.2)
        set_title(axis, f"{score_names.get(name, name)}: {scores[threshold][name]:.3g}")
        axis.set_xlabel("threshold", fontsize=9)
        axis.set_ylim(bottom=0)
        style(axis)
    return figure


def runs_figure(series, name):
    """One series of several runs over the epochs. series: dict run -> (epochs, values)."""
    figure, ((axis,),) = subplots(1, 1, (7.2, 3.4))
    looks = itertools.cycle(itertools.product(("-", "--", ":"), SERIES))
    for (run, (epochs, values)), (dashes, (colour, marker)) in zip(series.items(), looks):
        name_of_run = f" {label(run)}"  # matplotlib leaves a label that begins with _ out of the legend
        axis.plot(epochs, values, ls=dashes, color=colour, marker=marker, lw=1.6, ms=4, label=name_of_run)
    set_title(axis, name)
    label_epochs(axis)
    style(axis)
    if series:
        axis.legend(fontsize=8, frameon=False)
    else:
        write_in_empty(axis, "no run has this score")
    return figure


def panels_figure(rows, title):
    """Rows of panels. rows: list of lists of (title, array (H, W) or (H, W, 3))."""
    beside = {1: 4, 2: 2, 3: 2}.get(len(rows[0]), 1)  # samples side by side
    rows = [sum(rows[first : first + beside], []) for first in range(0, len(rows), beside)]
    side = 2.3 if len(rows[0]) < 6 else 2.0  # inches
    figure, axes = subplots(len(rows), len(rows[0]), (side * len(rows[0]), (side + 0.15) * len(rows) + 0.3))
    for line, row in zip(axes, rows):
        for axis in line[len(row) :]:
            axis.set_axis_off()
        for axis, (name, array) in zip(line, row):
            draw_panel(axis, name, array)
    figure.suptitle(label(title), x=0.02, ha="left", fontsize=11)
    return figure


def draw_panel(axis, name, array):
    """An array (H, W) or (H, W, 3) as a picture with its title."""
    axis.set(xticks=(), yticks=())
    axis.spines[:].set_color(GREY)  # so that a white image has an edge
    # The range of its type: scaled to its own values, a mask that is true everywhere would be black.
    low, high = {"bool": (0, 1), "uint8": (0, 255)}.get(str(array.dtype), (None, None))
    axis.imshow(array, cmap="gray", interpolation="nearest", vmin=low, vmax=high)
    axis.set_title(label(name), fontsize=8)


def plan_figure(plan):
    """A bar chart of peak HBM over the batch sizes of a plan, with a line at the chip's."""
    figure, ((axis,),) = subplots(1, 1, (6.4, 3.2))
    sizes = [f"{row['batch_size']:,}" for row in plan.rows]
    heights = [row["peak_bytes"] / GIB if row["fits"] else 1.15 * plan.hbm_gib for row in plan.rows]
    bars = axis.bar(sizes, heights, color=[BLUE if row["fits"] else RED for row in plan.rows], width=0.6)
    labels = [f"{height:.2f}" if row["fits"] else "does not fit" for height, row in zip(heights, plan.rows)]
    axis.bar_label(bars, labels, fontsize=8)
    axis.axhline(plan.hbm_gib, color=GREY, linestyle="--", linewidth=1)
    text = f"the chip's {plan.hbm_gib:g} GiB"
    axis.text(0.01, plan.hbm_gib, text, transform=axis.get_yaxis_transform(), va="bottom", fontsize=8)
    axis.set(
        xlabel="global batch size",
        ylabel="peak HBM per core, GiB",
        ylim=(0, 1.3 * max([plan.hbm_gib, *heights])),
    )
    fits = any(row["fits"] for row in plan.rows)
    set_title(axis, f"{plan.task} on {plan.chip}{'' if fits else ': nothing fits'}")
    return figure


def subplots(lines, columns, size, **grid):
    from matplotlib.figure import Figure  # without pyplot: nothing global, no window, no leak

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(lines, columns, squeeze=False, gridspec_kw=grid)


def style(axis):
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def set_title(axis, text):
    axis.set_title(label(text), loc="left", fontsize=10)


def label_epochs(axis):
    """Name the x axis, with ticks at whole epochs where the axis holds one."""
    axis.set_xlabel("epoch", fontsize=9)
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)


def write_in_empty(axis, text):
    axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", fontsize=9, color=GREY)
    axis.set(xticks=(), yticks=())


def label(text, limit=MAX_LABEL):
    """Text for a figure: on one line, too short to push the axes out of it, and without formulas for
    matplotlib."""
    words = " ".join(printable(text).split())
    if len(words) > limit:
        words = f"{words[: limit - 1]}…"
    return words.replace("$", r"\$")
