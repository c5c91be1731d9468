"""Showing things: figures, tables and sentences, in a notebook or a shell. The only importer of matplotlib and IPython."""

import dataclasses
import itertools
import math

import numpy as np

from tpukit.host.errors import TpukitError
from tpukit.host.tables import GIB, Sentences, Table, printable
from tpukit.reporting import findings
from tpukit.runs import weights
from tpukit.runs.run import Run, settings_dict

LABEL = 60  # characters
INK, ACCENT, SECOND, GREY = "#1f2933", "#0b6e99", "#c2410c", "#8a94a0"


def show(run):
    """Show a run: its scores and its curves. `show_report` shows what the accelerator did.

    run: a `Run`, or the path of one. The curves are also kept as pictures/curves.png in its folder.
    """
    run = run if isinstance(run, Run) else Run.find(run)
    records = run.records()
    evaluations = [r for r in findings.whole(records) if r["kind"] == "evaluation"]
    if evaluations:
        last = evaluations[-1]
        _out(findings.scores_table(last["scores"], f"Scores after epoch {last['epoch'] + 1}"))
    figure = curves_figure(records)
    if figure is not None:
        _out(figure, run.path / "pictures" / "curves.png")
    if not records:
        _out(Sentences(["This run has not started yet."]))


def show_report(run):
    """Show what the accelerator did in the last session of a run: in words, then numbers, then a picture.

    Compilations with their causes, where a step's time went, memory of every device. run: a `Run`, or the path of one. The
    picture is also kept as pictures/report.png in its folder.
    """
    run = run if isinstance(run, Run) else Run.find(run)
    records = run.records()
    _out(Sentences(findings.findings(records)))
    for table in findings.accelerator_tables(records):
        _out(table)
    figure = report_figure(records)
    if figure is not None:
        _out(figure, run.path / "pictures" / "report.png")


def report_figure(records):
    """A matplotlib figure of where a step's time went over the last session, and of each device's memory; None where there is
    nothing to draw."""
    found = findings.intervals(records)
    if not found:
        return None
    memory = found[-1]["memory"]
    figure, axes = _figure(1, 1 + bool(memory), (6.4 + 3.2 * bool(memory), 3.2))
    axis, ends = axes[0, 0], [i["to"] for i in found]
    axis.plot(ends, [i["step_ms"] for i in found], color=INK, lw=1.6, marker="o", ms=3, label="a step, all in all")
    for name, part, colour in (
        ("waiting for data", "wait_ms", SECOND),
        ("sending to the device", "to_device_ms", ACCENT),
        ("reading from the device", "from_device_ms", "#6b7280"),
    ):
        axis.plot(ends, [i[part] for i in found], color=colour, lw=1.2, marker="o", ms=2, label=name)
    for number, step in enumerate(findings.compiled_at(records)):
        axis.axvline(step, color=SECOND, ls=":", lw=1.2, label=None if number else "step compiled")
    axis.set(xlabel="step", ylabel="ms a step", ylim=(0, None))
    axis.set_title("where a step's time went", loc="left", fontsize=10, color=INK)
    axis.legend(fontsize=8, frameon=False)
    axis.grid(alpha=0.25)
    if memory:
        axis, gib = axes[0, 1], [(peak / GIB, total / GIB) for peak, total in memory]
        axis.bar([str(n) for n in range(len(gib))], [peak for peak, _ in gib], color=ACCENT, width=0.6)
        axis.axhline(gib[0][1], color=INK, ls="--", lw=1)
        axis.set(xlabel="device", ylabel="peak memory, GiB", ylim=(0, 1.15 * max(total for _, total in gib)))
        axis.set_title(f"of {gib[0][1]:.1f} GiB each", loc="left", fontsize=10, color=INK)
    return figure


def show_task(task):
    """Show every setting of a workload as a table."""
    _out(findings.settings_table(dict(workload=task.name, settings=settings_dict(task))))


def show_samples(task, *, count=4):
    """Show samples of the training set as the model gets them, augmented, with their labels."""
    data, _ = task.datasets()
    chosen = _spread(len(data), count)
    numbers = np.random.default_rng(task.seed).random((len(chosen), data.num_draws)) if data.num_draws else None
    if said := getattr(data, "notes", ""):
        print(printable(said))
    _out(panels_figure(task.panels(data.batch(chosen, numbers)), "Training samples"))


def show_predictions(run, task, *, count=4):
    """Show what the run's best weights say about test images, beside the truth.

    The predictions are those that `test` kept, where the workload keeps them; otherwise they are made here, on the CPU. Also
    kept as pictures/predictions.png in the run's folder.
    """
    best, folder = run.path / "best.safetensors", run.path / "predictions"
    fresh = folder.is_dir() and best.exists() and folder.stat().st_mtime >= best.stat().st_mtime
    kept = task.load_predictions(folder) if fresh else None
    batch, prediction = _some(*kept, count) if kept else _predict(run, task, count)
    _out(panels_figure(task.panels(batch, prediction), "Test images"), run.path / "pictures" / "predictions.png")


def show_plan(plan):
    """Show what `plan` found: the table, and the peak of each batch size beside the chip's memory."""
    _out(plan.table())
    _out(plan_figure(plan))
    _out(Sentences([plan.caption]))


def show_comparison(comparison, picture=None):
    """Show what `compare` found: tables, plots, and the choice in words. picture: also keep the plots there, as a PNG file."""
    for table in comparison.tables():
        _out(table)
    _out(comparison_figure(comparison), picture)
    _out(comparison.sentences())


def comparison_figure(comparison):
    """A matplotlib figure: speed and memory over the batch size, and time and cost of the whole training by hardware."""
    from matplotlib.patches import Patch

    measured = dict(facecolor=ACCENT, edgecolor="white")
    published = dict(facecolor=GREY, hatch="//", edgecolor="white")
    bound = dict(facecolor=SECOND, hatch="..", edgecolor="white")
    styles = dict(zip(comparison.bases, (measured, published, bound)))
    estimates, epochs = comparison.estimates, comparison.epochs
    priced = [candidate for candidate in comparison.candidates if candidate.usd is not None]
    lines = max(len(estimates), len(priced), 3)
    figure, ((speed, memory), (time, cost)) = _figure(
        2, 2, (9.6, 3.1 + 0.9 + 0.27 * lines), height_ratios=(10, 3 + 0.9 * lines)
    )
    shades = itertools.cycle((ACCENT, "#5b8c2a", "#7a4fa3", "#b8860b"))
    for name, kind, points in comparison.series():
        style = dict(color=next(shades), marker="o") if kind == "measured" else dict(color=SECOND, marker="s", ls="--")
        for axis, column in ((speed, 1), (memory, 2)):
            axis.plot(
                [p[0] for p in points], [p[column] for p in points], label=_label(f"{name}, {kind}"), lw=1.6, ms=4, **style
            )
    for axis, label in ((speed, "images a second"), (memory, "peak memory, GiB")):
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_xlabel("global batch size", fontsize=9)
        axis.set_ylabel(label, fontsize=9)
        tops = [max(line.get_ydata()) for line in axis.get_lines()]
        axis.set_ylim(0, (1.15 + 0.1 * len(tops)) * max(tops, default=1))  # with room for the legend
        if tops:
            axis.legend(fontsize=7, frameon=False, loc="upper left")
        else:
            _empty(axis, "nothing measured yet")
    bars = [(one.label, one.hours(epochs), styles[one.basis]) for one in estimates]
    _bars(time, bars, f"hours of {epochs} epochs", "{:.3g}")
    bars = [(f"{c.estimate.label}, {c.place}", c.usd, styles[c.estimate.basis]) for c in priced]
    _bars(cost, bars, f"USD of {epochs} epochs", "{:.2f}")
    present = {one.basis: styles[one.basis] for one in estimates}
    figure.legend(
        handles=[Patch(label=_label(basis), **style) for basis, style in present.items()],
        loc="outside lower center",
        ncols=3,
        fontsize=8,
    )
    for axis in (speed, memory, time, cost):
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def _bars(axis, bars, label, number):
    """Horizontal bars, the smallest on top, each with its number. bars: (name, value, style)."""
    bars = sorted(bars, key=lambda bar: -bar[1])
    if not bars:
        _empty(axis, "no price known")
    for place, (_, value, style) in enumerate(bars):
        axis.barh(place, value, height=0.65, **style)
        # In the bar's colour, because the bar of a small number is hardly seen.
        said = f" {'≥ ' if style['facecolor'] == SECOND else ''}{number.format(value)}"
        axis.text(value, place, said, va="center", fontsize=7, fontweight="bold", color=style["facecolor"])
    axis.set_yticks(range(len(bars)), [_label(name) for name, *_ in bars])
    axis.set_xlabel(label, fontsize=9)
    axis.set(xlim=(0, 1.2 * max([value for _, value, _ in bars], default=1) or 1), ylim=(-0.6, max(len(bars), 3) - 0.4))


def _empty(axis, text):
    axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", fontsize=9, color=GREY)


def plan_figure(plan):
    """A matplotlib bar chart of peak HBM over the batch sizes of a plan, with a line at what the chip has."""
    figure, ((axis,),) = _figure(1, 1, (6.4, 3.2))
    fitting = [row for row in plan.rows if row["fits"]]
    labels = [f"{row['batch_size']:,}" for row in plan.rows]
    heights = [row["peak_bytes"] / GIB if row["fits"] else plan.hbm_gib * 1.15 for row in plan.rows]
    colours = [ACCENT if row["fits"] else SECOND for row in plan.rows]
    bars = axis.bar(labels, heights, color=colours, width=0.6)
    axis.bar_label(bars, [f"{h:.2f}" if row["fits"] else "does not fit" for h, row in zip(heights, plan.rows)], fontsize=8)
    axis.axhline(plan.hbm_gib, color=INK, linestyle="--", linewidth=1)
    axis.text(
        0.01, plan.hbm_gib, f"the chip's {plan.hbm_gib:g} GiB", transform=axis.get_yaxis_transform(), va="bottom", fontsize=8
    )
    axis.set(xlabel="global batch size", ylabel="peak HBM a core, GiB", ylim=(0, 1.3 * max([plan.hbm_gib, *heights])))
    title = f"{plan.workload} on {plan.chip}" + ("" if fitting else ": nothing fits")
    axis.set_title(_label(title), loc="left", fontsize=10)
    return figure


def _some(batch, prediction, count):
    chosen = _spread(len(prediction), count)
    return {name: values[chosen] for name, values in batch.items()}, prediction[chosen]


def _predict(run, task, count):
    import torch

    from tpukit.devices.runtime import Runtime

    best = run.path / "best.safetensors"
    if not best.exists():
        raise TpukitError(f"{run.path} has no best weights yet: they come with the first evaluation")
    model = task.model().eval()
    weights.load(model, best)
    data = dataclasses.replace(task, weights=best).test_set()
    batch = data.batch(_spread(len(data), count))
    tensors = {name: torch.as_tensor(value) for name, value in batch.items()}
    return batch, task.predictor(model, Runtime("cpu"), weights.epoch_of(best))(tensors)


def _spread(size, count):
    """Up to `count` indices, evenly over `size`."""
    return np.linspace(0, size - 1, min(count, size)).astype(int)


def curves_figure(records):
    """A matplotlib figure of loss, gradient norm and scores over the steps, or None where there is nothing to draw."""
    series = findings.curves(records)
    if not series:
        return None
    columns = min(3, len(series))
    lines = math.ceil(len(series) / columns)
    figure, axes = _figure(lines, columns, (4.2 * columns, 2.7 * lines))
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, (name, (steps, values)) in zip(axes.flat, series.items()):
        axis.set_axis_on()
        axis.plot(steps, values, color=ACCENT if name in ("loss", "gradient norm") else SECOND, lw=1.6, marker="o", ms=2.5)
        axis.set_title(_label(name), loc="left", fontsize=10, color=INK)
        axis.set_xlabel("step", fontsize=8)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if name == "gradient norm" and min(values) > 0:
            axis.set_yscale("log")
    return figure


def panels_figure(rows, title):
    """A matplotlib figure of rows of panels. rows: list of lists of (title, array (H, W) or (H, W, 3))."""
    if len(rows[0]) == 1:  # one panel a sample: four of them side by side
        rows = [[row[0] for row in rows[first : first + 4]] for first in range(0, len(rows), 4)]
    figure, axes = _figure(len(rows), len(rows[0]), (2.3 * len(rows[0]), 2.45 * len(rows) + 0.3))
    for line, row in zip(axes, rows):
        for axis in line:
            axis.set_axis_off()
        for axis, (name, array) in zip(line, row):
            axis.set_axis_on()
            axis.set(xticks=(), yticks=())
            axis.spines[:].set_color(GREY)  # a white picture ends somewhere, too
            # By what the array could hold: scaled to what it does hold, a mask that is true everywhere would be black.
            low, high = {"bool": (0, 1), "uint8": (0, 255)}.get(str(array.dtype), (None, None))
            axis.imshow(array, cmap="gray", interpolation="nearest", vmin=low, vmax=high)
            axis.set_title(_label(name), fontsize=9, color=INK)
    figure.suptitle(_label(title), x=0.02, ha="left", fontsize=11, color=INK)
    return figure


def _label(text):
    """Words for a figure: on one line, not so many that they push the axes out of it, and no formula to matplotlib."""
    words = " ".join(printable(text).split())
    return (words if len(words) <= LABEL else f"{words[: LABEL - 1]}…").replace("$", r"\$")


def _figure(lines, columns, size, **grid):
    from matplotlib.figure import Figure  # without pyplot: nothing global, no window, no leak

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(lines, columns, squeeze=False, gridspec_kw=grid)


def _in_notebook():
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    shell = get_ipython()
    return shell is not None and hasattr(shell, "kernel")


def _out(thing, path=None):
    """Display a table, sentences or a figure in a notebook, print what has words in a shell; keep a figure at `path`."""
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            thing.savefig(path, dpi=110)
        except OSError as error:  # Kaggle's inputs, for instance: what is shown is not lost with it
            print(printable(f"picture not kept at {path}: {error.strerror}"))
            path = None
    if _in_notebook():
        from IPython.display import display

        if isinstance(thing, (Table, Sentences)):
            display(thing)
        else:
            _display_figure(thing)
    elif isinstance(thing, (Table, Sentences)):
        print(f"\n{thing}")
    elif path is not None:
        print(printable(f"\npicture: {path}"))


def _display_figure(figure):
    import io

    from IPython.display import Image, display

    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=110, format="png")
    display(Image(buffer.getvalue()))
