"""Showing things: figures, tables and sentences, in a notebook or a shell. The only importer of matplotlib and IPython."""

import dataclasses
import io
import itertools
import math

import numpy as np

from tpukit.host.errors import TpukitError
from tpukit.host.tables import Sentences, printable
from tpukit.reporting import findings
from tpukit.runs import weights
from tpukit.runs.run import Run, settings_dict

MAX_LABEL = 60  # characters
INK, ACCENT, SECOND, GREY = "#1f2933", "#0b6e99", "#c2410c", "#8a94a0"


def show(run):
    """Show the scores and the curves of a run: a `Run`, or the path of one. The curves are also saved as pictures/curves.png
    in its folder."""
    run = run if isinstance(run, Run) else Run.find(run)
    records = run.records()
    evaluations = [record for record in findings.valid_records(records) if record["kind"] == "evaluation"]
    if evaluations:
        last = evaluations[-1]
        _display(findings.scores_table(last["scores"], f"Scores after epoch {last['epoch'] + 1}"))
    _display_figure(curves_figure(records), run.path / "pictures" / "curves.png")
    if not records:
        _display(Sentences(["This run has not started yet."]))


def show_report(run):
    """Show what the accelerator did in the last session of a run (a `Run`, or the path of one): in sentences, then numbers,
    then a picture, which is also saved as pictures/report.png in its folder."""
    run = run if isinstance(run, Run) else Run.find(run)
    records = run.records()
    _display(Sentences(findings.findings(records)))
    for table in findings.accelerator_tables(records):
        _display(table)
    _display_figure(report_figure(records), run.path / "pictures" / "report.png")


def show_task(task):
    """Show every setting of a workload as a table."""
    _display(findings.settings_table(dict(workload=task.name, settings=settings_dict(task))))


def show_samples(task, *, count=4):
    """Show samples of the training set as the model gets them, augmented, with their labels."""
    data, _ = task.datasets()
    indices = _evenly_spaced(len(data), count)
    numbers = np.random.default_rng(task.seed).random((len(indices), data.num_draws)) if data.num_draws else None
    if notes := getattr(data, "notes", ""):
        print(printable(notes))
    _display_figure(panels_figure(task.panels(data.batch(indices, numbers)), "Training samples"))


def show_predictions(run, task, *, count=4):
    """Show what the run's best weights predict for test images, next to the truth. Also saved as pictures/predictions.png.

    The predictions are those that `test` saved, if the workload saves them; otherwise they are made here, on the CPU."""
    best, folder = run.path / "best.safetensors", run.path / "predictions"
    saved = None
    if folder.is_dir() and best.exists() and folder.stat().st_mtime >= best.stat().st_mtime:
        saved = task.load_predictions(folder)
    if saved:
        batch, prediction = saved
        indices = _evenly_spaced(len(prediction), count)
        batch, prediction = {name: values[indices] for name, values in batch.items()}, prediction[indices]
    else:
        batch, prediction = _predict(run, task, count)
    figure = panels_figure(task.panels(batch, prediction), "Test images")
    _display_figure(figure, run.path / "pictures" / "predictions.png")


def show_plan(plan):
    """Show what `plan` found: the table, and what its columns mean."""
    _display(plan.table())
    _display(Sentences([plan.caption]))


def show_comparison(comparison, picture=None):
    """Show what `compare` found: tables, plots, and the choice in words. picture: also save the plots there, as a PNG file."""
    for table in comparison.tables():
        _display(table)
    _display_figure(comparison_figure(comparison), picture)
    _display(comparison.sentences())


def _predict(run, task, count):
    """(batch, predictions) of test images by the run's best weights, on the CPU."""
    import torch

    from tpukit.devices.runtime import Runtime

    best = run.path / "best.safetensors"
    if not best.exists():
        raise TpukitError(f"{run.path} has no best weights yet: the first evaluation saves them")
    model = task.model().eval()
    weights.load(model, best)
    data = dataclasses.replace(task, weights=best).test_set()
    batch = data.batch(_evenly_spaced(len(data), count))
    tensors = {name: torch.as_tensor(value) for name, value in batch.items()}
    return batch, task.predictor(model, Runtime("cpu"), weights.epoch_of(best))(tensors)


def _evenly_spaced(size, count):
    return np.linspace(0, size - 1, min(count, size)).astype(int)


# Figures


def curves_figure(records):
    """Loss, gradient norm and scores over the steps; None without any."""
    series = findings.curves(records)
    if not series:
        return None
    columns = min(3, len(series))
    lines = math.ceil(len(series) / columns)
    figure, axes = _subplots(lines, columns, (4.2 * columns, 2.7 * lines))
    for axis in axes.flat[len(series) :]:
        axis.set_axis_off()
    for axis, (name, (steps, values)) in zip(axes.flat, series.items()):
        axis.plot(steps, values, color=ACCENT if name in ("loss", "gradient norm") else SECOND, lw=1.6, marker="o", ms=2.5)
        _set_title(axis, name)
        axis.set_xlabel("step", fontsize=8)
        axis.xaxis.get_major_locator().set_params(integer=True)
        _style(axis)
        if name == "gradient norm" and min(values) > 0:
            axis.set_yscale("log")
    return figure


def report_figure(records):
    """Where a step's time went over the last session; None without any interval."""
    found = findings.intervals(records)
    if not found:
        return None
    figure, ((axis,),) = _subplots(1, 1, (6.4, 3.2))
    steps = [interval["to"] for interval in found]
    for part, label, colour in (
        ("step_ms", "step, in total", INK),
        ("wait_ms", "waiting for data", SECOND),
        ("to_device_ms", "sending to the device", ACCENT),
        ("from_device_ms", "reading from the device", GREY),
    ):
        axis.plot(steps, [interval[part] for interval in found], color=colour, lw=1.4, marker="o", ms=2.5, label=label)
    for number, step in enumerate(findings.compiled_steps(records)):
        axis.axvline(step, color=SECOND, ls=":", lw=1.2, label=None if number else "step compiled")
    axis.set(xlabel="step", ylabel="ms per step", ylim=(0, None))
    _set_title(axis, "where a step's time went")
    axis.legend(fontsize=8, frameon=False)
    axis.grid(alpha=0.25)
    return figure


def panels_figure(rows, title):
    """Rows of panels. rows: list of lists of (title, array (H, W) or (H, W, 3))."""
    if len(rows[0]) == 1:  # one panel per sample: four of them side by side
        rows = [[row[0] for row in rows[first : first + 4]] for first in range(0, len(rows), 4)]
    figure, axes = _subplots(len(rows), len(rows[0]), (2.3 * len(rows[0]), 2.45 * len(rows) + 0.3))
    for line, row in zip(axes, rows):
        for axis in line[len(row) :]:
            axis.set_axis_off()
        for axis, (name, array) in zip(line, row):
            axis.set(xticks=(), yticks=())
            axis.spines[:].set_color(GREY)  # so that a white image has an edge
            # The range of its type: scaled to its own values, a mask that is true everywhere would be black.
            low, high = {"bool": (0, 1), "uint8": (0, 255)}.get(str(array.dtype), (None, None))
            axis.imshow(array, cmap="gray", interpolation="nearest", vmin=low, vmax=high)
            axis.set_title(_label(name), fontsize=9, color=INK)
    figure.suptitle(_label(title), x=0.02, ha="left", fontsize=11, color=INK)
    return figure


def comparison_figure(comparison):
    """Speed and memory over the batch size, and time and cost of the whole training by hardware."""
    from matplotlib.patches import Patch

    estimates, epochs = comparison.estimates, comparison.epochs
    priced = [candidate for candidate in comparison.candidates if candidate.usd is not None]
    lines = max(len(estimates), len(priced), 3)
    heights = (10, 3 + 0.9 * lines)
    figure, ((speed, memory), (time, cost)) = _subplots(2, 2, (9.6, 4 + 0.27 * lines), height_ratios=heights)
    colours = itertools.cycle((ACCENT, "#5b8c2a", "#7a4fa3", "#b8860b"))
    for name, kind, points in comparison.series():
        style = dict(color=next(colours), marker="o") if kind == "measured" else dict(color=SECOND, marker="s", ls="--")
        sizes, rates, peaks = zip(*points)
        for axis, values in ((speed, rates), (memory, peaks)):
            axis.plot(sizes, values, label=_label(f"{name}, {kind}"), lw=1.6, ms=4, **style)
    for axis, label in ((speed, "images per second"), (memory, "peak memory, GiB")):
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_xlabel("global batch size", fontsize=9)
        axis.set_ylabel(label, fontsize=9)
        tops = [max(line.get_ydata()) for line in axis.get_lines()]
        axis.set_ylim(0, (1.15 + 0.1 * len(tops)) * max(tops, default=1))  # with space for the legend
        if tops:
            axis.legend(fontsize=7, frameon=False, loc="upper left")
        else:
            _write_in_empty(axis, "nothing measured yet")
    bars = [(estimate.label, estimate.hours(epochs), estimate.basis) for estimate in estimates]
    _plot_bars(time, bars, f"hours of {epochs} epochs", "{:.3g}")
    bars = [(f"{one.estimate.label}, {one.place}", one.usd, one.estimate.basis) for one in priced]
    _plot_bars(cost, bars, f"USD of {epochs} epochs", "{:.2f}")
    patches = [Patch(label=_label(kind), **_bar_style(kind)) for kind in dict.fromkeys(one.basis for one in estimates)]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, fontsize=8)
    for axis in (speed, memory, time, cost):
        _style(axis)
    return figure


def _bar_style(kind):
    styles = dict(measured=(ACCENT, None), published=(GREY, "//"), bound=(SECOND, ".."))
    colour, hatch = styles[kind.partition(",")[0]]
    return dict(facecolor=colour, hatch=hatch, edgecolor="white")


def _plot_bars(axis, bars, label, number):
    """Horizontal bars, the smallest on top, each with its number. bars: (name, value, kind)."""
    bars = sorted(bars, key=lambda bar: bar[1], reverse=True)
    if not bars:
        _write_in_empty(axis, "no price known")
    for place, (_, value, kind) in enumerate(bars):
        style = _bar_style(kind)
        axis.barh(place, value, height=0.65, **style)
        # In the bar's colour, because the bar of a small number is hardly visible.
        text = f" {'≥ ' if kind.startswith('bound') else ''}{number.format(value)}"
        axis.text(value, place, text, va="center", fontsize=7, fontweight="bold", color=style["facecolor"])
    axis.set_yticks(range(len(bars)), [_label(name) for name, *_ in bars])
    axis.set_xlabel(label, fontsize=9)
    largest = max([value for _, value, _ in bars], default=0) or 1
    axis.set(xlim=(0, 1.2 * largest), ylim=(-0.6, max(len(bars), 3) - 0.4))


def _subplots(lines, columns, size, **grid):
    from matplotlib.figure import Figure  # without pyplot: nothing global, no window, no leak

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(lines, columns, squeeze=False, gridspec_kw=grid)


def _style(axis):
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def _set_title(axis, text):
    axis.set_title(_label(text), loc="left", fontsize=10, color=INK)


def _write_in_empty(axis, text):
    axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", fontsize=9, color=GREY)


def _label(text):
    """Text for a figure: on one line, too short to push the axes out of it, and without formulas for matplotlib."""
    words = " ".join(printable(text).split())
    if len(words) > MAX_LABEL:
        words = f"{words[: MAX_LABEL - 1]}…"
    return words.replace("$", r"\$")


# Where it is shown


def _display(thing):
    if _in_notebook():
        from IPython.display import display

        display(thing)
    else:
        print(f"\n{thing}")


def _display_figure(figure, path=None):
    """Display a figure, if there is one, in a notebook; save it at `path`, and name that in a shell."""
    if figure is None:
        return
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=110)
        except OSError as error:  # Kaggle's inputs are read-only; the figure is shown all the same
            print(printable(f"picture not saved at {path}: {error.strerror}"))
            path = None
    if _in_notebook():
        from IPython.display import Image, display

        png = io.BytesIO()
        figure.savefig(png, dpi=110, format="png")
        display(Image(png.getvalue()))
    elif path is not None:
        print(printable(f"\npicture: {path}"))


def _in_notebook():
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    shell = get_ipython()
    return shell is not None and hasattr(shell, "kernel")
