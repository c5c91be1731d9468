"""Draw figures from records and panels. Displays and saves nothing."""

import itertools
import math
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tpukit.host.errors import importing
from tpukit.host.text import printable
from tpukit.reporting import findings
from tpukit.reporting.presenting import translate_drawn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Nearly those of Okabe and Ito, told apart with every common colour blindness. A figure has no background:
# curves and text (in grey) have to be seen on white pages and on dark ones.
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#B98000", "#009E73", "#D55E00", "#787f89"
SERIES = ((BLUE, "o"), (ORANGE, "s"), (GREEN, "^"), ("#CC79A7", "D"))  # colour and marker of a curve
WIDTH = 9.6  # inches, of every figure: a page has one width
SMALL, MEDIUM, LARGE = 9, 10, 11.5  # points; on a page of 1,000 pixels the smallest has 11 pixels
MAX_LABEL = 60  # characters
MAX_NAME = 36  # characters of a file's name below a panel's title
RIGHT, WRONG = "\u2713", "\u2717"  # begin the title of a panel whose prediction is right, or wrong
MARKS = {RIGHT: GREEN, WRONG: RED}  # sign at the beginning of a panel's title -> colour of its frame
Panel = tuple[str, Any]  # a title, and an array (H, W) or (H, W, 3), or a text
TEXT_LINES, TEXT_WIDTH = 16, 32  # lines of a panel, and characters in one


def curves_figure(records: list, labels: findings.Labels = findings.NO_LABELS) -> "Figure | None":
    """Draw loss, gradient norm, learning rate and scores over the epochs of a run; None without any."""
    shown = findings.NO_SCORES + tuple(labels.names)
    series = findings.curves(records)
    series = {name: points for name, points in series.items() if name in shown or not labels.names}
    if not series:
        return None
    columns = 2 if len(series) in (1, 2, 4) else 3  # no line with one chart alone
    lines = math.ceil(len(series) / columns)
    figure, axes = subplots(lines, columns, 2.6 * lines)
    hide(axes.flat[len(series) :])
    end = max(epochs[-1] for epochs, _ in series.values())
    for axis, (name, (epochs, values)) in zip(axes.flat, series.items()):
        plot_curve(axis, name, epochs, values, labels, end)
        if name == "gradient norm" and max(values) > 10 * min(values) > 0:
            axis.set_yscale("log")
    return figure


def plot_curve(axis, name, epochs, values, labels, end):
    """Plot one series of a run over the epochs up to `end`, with its unit and best value."""
    is_score, title = name not in findings.NO_SCORES, labels.names.get(name, name.replace("_", " "))
    plot(axis, epochs, values, RED if is_score else BLUE)
    if name == labels.score and values:
        best, epoch = max(zip(values, epochs), key=lambda point: point[0])
        axis.plot(epoch, best, marker="*", ms=12, color=RED, mec="white", clip_on=False)
        title += f" (best {best:.3g})"
    if is_score:
        fit_scores(axis, values)
    axis.ticklabel_format(axis="y", useOffset=False)  # 0.9995 and not 2 with 1e-7+9.995e-1 above
    finish(axis, title, "epoch", end=end)


def live_figure(records: list, labels: findings.Labels) -> "Figure":
    """Draw a training run as it stands, over all planned epochs: loss, a score, and speed. The score is the
    one that decides, or where it has no name, the first that has. The progress bar, which is redrawn more
    often, says how far it is."""
    figure, ((loss, score, speed),) = subplots(1, 3, 2.9)
    steps_per_epoch, series = findings.steps_per_epoch(records), findings.curves(records)
    intervals = findings.of_kind(findings.last_session(records), "train")
    done = [record["step"] / steps_per_epoch for record in intervals]
    end = max([findings.planned_epochs(records), *done, *(epochs[-1] for epochs, _ in series.values())])
    scores = [name for name in series if name not in findings.NO_SCORES]
    named = list(labels.names) or [labels.score or next(iter(scores), "score")]
    shown = labels.score if labels.score in named else named[0]
    for axis, name in ((loss, "loss"), (score, shown)):
        plot_curve(axis, name, *series.get(name, ((), ())), labels, end)
    rates = [record["speed"]["images_per_s"] for record in intervals]
    plot(speed, done, rates, GREEN)
    speed.set_ylim(0, 1.1 * max(rates, default=0) or 1)
    finish(speed, "samples per second", "epoch", end=end)
    write_above(figure, findings.headline(records))
    return figure


def runs_figure(curves: dict[str, findings.Series], task: str, runs: Iterable[str], score: str) -> "Figure":
    """Draw a score of some runs of a task over the epochs. curves: dict run -> score -> (epochs, values)."""
    series = {run: curves[run][score] for run in runs if score in curves[run]}
    figure, ((axis,),) = subplots(1, 1, 3.4)
    looks = itertools.cycle(itertools.product(("-", "--", ":"), SERIES))
    for (run, (epochs, values)), (dashes, (colour, marker)) in zip(series.items(), looks):
        name_of_run = f" {label(run)}"  # matplotlib leaves a label that begins with _ out of the legend
        axis.plot(epochs, values, ls=dashes, color=colour, marker=marker, lw=1.6, ms=4, label=name_of_run)
    if not series:
        write_in_empty(axis, "no run has this score")
    end = max((epochs[-1] for epochs, _ in series.values()), default=1)
    finish(axis, score.replace("_", " "), "epoch", end=end)
    write_above(figure, task)
    return figure


def panels_figure(rows: list[list[Panel]], title: str, names: Iterable[str] = ()) -> "Figure":
    """Draw rows of panels, several samples in a line if there is space. names: of the samples, written
    below the titles of their first panels; of a long one the end, where files differ."""
    named = [name if len(name) <= MAX_NAME else f"…{name[1 - MAX_NAME :]}" for name in map(printable, names)]
    if named:
        rows = [[(f"{row[0][0]}\n{name}", row[0][1]), *row[1:]] for row, name in zip(rows, named)]
    samples = 4 if len(rows[0]) == 1 else 1  # in a line
    lines = [sum(rows[first : first + samples], []) for first in range(0, len(rows), samples)]
    columns = max(3, len(lines[0]))  # one picture alone is no larger than three are
    figure, axes = subplots(len(lines), columns, (WIDTH / columns + 0.3) * len(lines) + 0.3)
    for line, panels in zip(axes, lines):
        draw_panels(line, panels)
    write_above(figure, title)
    return figure


def draw_panels(axes, panels):
    """Draw each panel as a picture, or a text, with its title of one or two lines; hide axes without one."""
    hide(axes[len(panels) :])
    for axis, (title, array) in zip(axes, panels):
        colour = MARKS.get(title[:1], GREY)  # an edge for a white image, too
        axis.set(xticks=(), yticks=())
        axis.spines[:].set(color=colour, linewidth=0.8 if colour == GREY else 2.5)
        shown = "\n".join(map(label, title.split("\n", 1)))
        axis.set_title(shown, fontsize=SMALL, color=colour)
        if isinstance(array, str):
            paragraphs = [textwrap.wrap(printable(line), TEXT_WIDTH) or [""] for line in array.splitlines()]
            text = "\n".join(sum(paragraphs, [])[:TEXT_LINES])
            look = dict(fontsize=8, va="top", color=GREY, parse_math=False)
            axis.text(0.02, 0.98, text, transform=axis.transAxes, **look)
            continue
        # The range of its type: scaled to its own values, a mask that is true everywhere would be black.
        low, high = {"bool": (0, 1), "uint8": (0, 255)}.get(str(array.dtype), (None, None))
        axis.imshow(array, cmap="gray", interpolation="nearest", vmin=low, vmax=high)


# The common look


def subplots(lines: int, columns: int, height: float, **grid) -> tuple["Figure", Any]:
    """Return (figure, array (lines, columns) of axes). height: in inches."""
    with importing():
        from matplotlib.figure import Figure  # without pyplot: nothing global, no window, no leak

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots(lines, columns, squeeze=False, gridspec_kw=grid)


def plot(axis, x, y, colour):
    """Plot a curve, with a dot at each point if there are few."""
    axis.plot(x, y, color=colour, lw=1.6, marker="o", ms=3 if len(y) < 60 else 0)
    if not y:
        write_in_empty(axis, "nothing yet")


def fit_scores(axis, scores):
    """Set the range of an axis of scores so that the later half of them fills a quarter or more of it: a rise
    from 0.97 to 0.99 is seen, and a bad start may leave the axis below."""
    late = scores[len(scores) // 2 :] if len(scores) > 5 else scores
    if not late or not all(map(math.isfinite, scores)):
        return
    high = max(scores)
    low = max(min(scores), high - 4 * (high - min(late)))
    low = min(low, high - 0.1 * abs(high))
    if high == low:  # all of them are 0
        high = 1.0
    room = (high - low) / 10
    axis.set_ylim(low - (room if low < 0 or low > room else room / 3), high + room)


def finish(axis, title, x, y="", end=0.0):
    """Set title, names, look, and a legend if a curve has a label. Ticks of epochs are whole, up to `end`."""
    axis.set_title(textwrap.fill(label(title), 34), loc="left", fontsize=MEDIUM, color=GREY)
    axis.set_xlabel(label(x), fontsize=SMALL, color=GREY)
    axis.set_ylabel(label(y), fontsize=SMALL, color=GREY)
    if end:
        axis.set_xlim(0, 1.02 * max(1, end))
        axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    if axis.get_legend_handles_labels()[1]:
        axis.legend(fontsize=SMALL, frameon=False, labelcolor=GREY)
    axis.tick_params(labelsize=SMALL, color=GREY, labelcolor=GREY, which="both")
    axis.grid(color=GREY, alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["bottom", "left"]].set_color(GREY)


def write_above(figure, text):
    title = textwrap.fill(label(text, limit=150), 100)
    figure.suptitle(title, x=0.01, ha="left", fontsize=LARGE, color=GREY)


def hide(axes):
    for axis in axes:
        axis.set_axis_off()


def write_in_empty(axis, text):
    axis.text(0.5, 0.5, label(text), transform=axis.transAxes, ha="center", fontsize=SMALL, color=GREY)
    axis.tick_params(left=False, bottom=False, labelleft=False, labelbottom=False)


def label(text: str, limit: int = MAX_LABEL) -> str:
    """Fit a text for a figure: on one line, within the limit, and without formulas for matplotlib."""
    words = translate_drawn(" ".join(printable(text).split()))
    if len(words) > limit:
        words = f"{words[: limit - 1]}…"
    return words.replace("$", r"\$")
