"""Showing things: figures, tables and sentences, in a notebook or a shell. The only importer of matplotlib and IPython."""

import dataclasses
import math

import numpy as np

from tpukit import report, weights
from tpukit.errors import TpukitError
from tpukit.run import Run, settings
from tpukit.tables import Table

INK, ACCENT, SECOND = "#1f2933", "#0b6e99", "#c2410c"


def show(run):
    """Show a run: its scores, its curves, and what the accelerator did, in words before numbers.

    run: a `Run`, or the path of one. The curves are also kept as pictures/curves.png in its folder.
    """
    run = run if isinstance(run, Run) else Run.find(run)
    records = run.records()
    evaluations = [r for r in records if r["kind"] == "evaluation"]
    if evaluations:
        last = evaluations[-1]
        _out(report.scores_table(last["scores"], f"Scores after epoch {last['epoch'] + 1}"))
    figure = curves_figure(records)
    if figure is not None:
        _out(figure, run.path / "pictures" / "curves.png")
    _say(report.findings(records))
    _out(report.accelerator_table(records))


def show_task(task):
    """Show every setting of a workload as a table."""
    _out(report.settings_table(dict(workload=task.name, settings=settings(task))))


def show_samples(task, *, count=4):
    """Show samples of the training set as the model gets them, augmented, with their labels."""
    data, _ = task.datasets()
    chosen = _spread(len(data), count)
    numbers = np.random.default_rng(task.seed).random((len(chosen), data.draws)) if data.draws else None
    if said := getattr(data, "said", ""):
        print(said)
    _out(panels_figure(task.panels(data.batch(chosen, numbers)), "Training samples"))


def show_predictions(run, task, *, count=4):
    """Show what the run's best weights say about test images, beside the truth.

    The predictions are those that `test` kept, where the workload keeps them; otherwise they are made here, on the CPU. Also kept
    as pictures/predictions.png in the run's folder.
    """
    best, folder = run.path / "best.safetensors", run.path / "predictions"
    fresh = folder.is_dir() and best.exists() and folder.stat().st_mtime >= best.stat().st_mtime
    kept = task.kept(folder) if fresh else None
    batch, prediction = _some(*kept, count) if kept else _predict(run, task, count)
    _out(panels_figure(task.panels(batch, prediction), "Test images"), run.path / "pictures" / "predictions.png")


def show_plan(plan):
    """Show what `plan` found: the table, and the peak of each batch size beside the chip's memory."""
    _out(plan.table())
    _out(plan_figure(plan))
    _say([plan.caption])


def plan_figure(plan):
    """A matplotlib bar chart of peak HBM over the batch sizes of a plan, with a line at what the chip has."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    fitting = [row for row in plan.rows if row["fits"]]
    labels = [f"{row['batch_size']:,}" for row in plan.rows]
    heights = [row["peak_bytes"] / 2**30 if row["fits"] else plan.hbm_gib * 1.15 for row in plan.rows]
    colours = [ACCENT if row["fits"] else SECOND for row in plan.rows]
    bars = axis.bar(labels, heights, color=colours, width=0.6)
    axis.bar_label(bars, [f"{h:.2f}" if row["fits"] else "does not fit" for h, row in zip(heights, plan.rows)], fontsize=8)
    axis.axhline(plan.hbm_gib, color=INK, linestyle="--", linewidth=1)
    axis.text(
        0.01, plan.hbm_gib, f"the chip's {plan.hbm_gib:g} GiB", transform=axis.get_yaxis_transform(), va="bottom", fontsize=8
    )
    axis.set(xlabel="global batch size", ylabel="peak HBM a core, GiB", ylim=(0, 1.3 * max([plan.hbm_gib, *heights])))
    axis.set_title(f"{plan.workload} on {plan.chip}" + ("" if fitting else ": nothing fits"), loc="left", fontsize=10)
    plt.close(figure)
    return figure


def _some(batch, prediction, count):
    chosen = _spread(len(prediction), count)
    return {name: values[chosen] for name, values in batch.items()}, prediction[chosen]


def _predict(run, task, count):
    import torch

    from tpukit.runtime import Runtime

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
    series = report.curves(records)
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
        axis.set_title(name, loc="left", fontsize=10, color=INK)
        axis.set_xlabel("step", fontsize=8)
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
            axis.imshow(array, cmap="gray", interpolation="nearest")
            axis.set_title(name, fontsize=9, color=INK)
    figure.suptitle(title, x=0.02, ha="left", fontsize=11, color=INK)
    return figure


def _figure(lines, columns, size):
    from matplotlib.figure import Figure  # without pyplot: nothing global, no window, no leak

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(lines, columns, squeeze=False)


def _in_notebook():
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    shell = get_ipython()
    return shell is not None and hasattr(shell, "kernel")


def _out(thing, path=None):
    """Display a table or a figure in a notebook, print a table in a shell; keep a figure at `path`."""
    if path is not None:
        path.parent.mkdir(exist_ok=True)
        thing.savefig(path, dpi=110)
    if _in_notebook():
        from IPython.display import display

        if isinstance(thing, Table):
            display(thing)
        else:
            _display_figure(thing)
    elif isinstance(thing, Table):
        print(f"\n{thing}")
    elif path is not None:
        print(f"\npicture: {path}")


def _display_figure(figure):
    import io

    from IPython.display import Image, display

    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=110, format="png")
    display(Image(buffer.getvalue()))


def _say(sentences):
    if _in_notebook():
        from IPython.display import Markdown, display

        display(Markdown("\n".join(f"- {s}" for s in sentences)))
    else:
        print("\n" + "\n".join(f"- {s}" for s in sentences))
