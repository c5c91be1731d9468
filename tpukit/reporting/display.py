"""Showing a task, a run or a plan, in a notebook or a shell: `show` and the other display functions."""

import dataclasses

import numpy as np

from tpukit.host import files
from tpukit.host.errors import TpukitError, first_line
from tpukit.host.tables import Sentences, printable
from tpukit.reporting import figures, findings
from tpukit.runs.run import Run, settings_dict


def show(run):
    """Show a run: its scores and its curves. `show_report` shows what the accelerator did.

    run: a `Run`, or the path of one. The curves are also saved as pictures/curves.png in its folder.
    """
    run = run if isinstance(run, Run) else Run.find(run)
    records = run.records()
    try:
        labels = findings.labels_of(run.config)
    except TpukitError:  # a damaged config.json: the curves are worth showing without their names
        labels = findings.NO_LABELS
    for table in findings.last_and_kept_tables(records):
        present(table)
    present_figure(figures.curves_figure(records, labels), run.path / "pictures" / "curves.png")
    if roc := findings.roc(records):
        present_figure(figures.roc_figure(roc), run.path / "pictures" / "roc.png")
    if confusion := findings.confusion(records):
        present_figure(figures.confusion_figure(confusion), run.path / "pictures" / "confusion.png")
        present(findings.per_class_table(confusion))
    if not records:
        present(Sentences(["This run has not started yet."]))


def show_report(run):
    """Show what the accelerator did in the last session of a run: in sentences, then numbers, then a picture.

    Compilations with their causes, where a step's time went, memory of every device. run: a `Run`, or the
    path of one. The picture is also saved as pictures/report.png in its folder."""
    run = run if isinstance(run, Run) else Run.find(run)
    records = run.records()
    present(Sentences(findings.findings(records)))
    for table in findings.accelerator_tables(records):
        present(table)
    present_figure(figures.report_figure(records), run.path / "pictures" / "report.png")


def show_task(task):
    """Show every setting of a task as a table; in a notebook those at their defaults are folded away."""
    defaults = [
        field.name for field in dataclasses.fields(task) if getattr(task, field.name) == field.default
    ]
    present(findings.settings_table(dict(task=task.name, settings=settings_dict(task)), defaults))


def show_samples(task, *, count=4):
    """Show samples of the training set as the model gets them, augmented, with their labels."""
    data, _ = task.datasets()
    indices = _evenly_spaced(len(data), count)
    numbers = (
        np.random.default_rng(task.seed).random((len(indices), data.num_uniforms))
        if data.num_uniforms
        else None
    )
    if notes := getattr(data, "notes", ""):
        print(printable(notes))
    present_figure(figures.panels_figure(task.panels(data.batch(indices, numbers)), "Training samples"))


def show_labels(task, *, count=4):
    """Show what is worth knowing about the labels of the training set before training on them, with the
    samples concerned."""
    data, _ = task.datasets()
    sentences, indices = task.check_labels(data)
    present(Sentences(sentences))
    if indices:
        present_figure(
            figures.panels_figure(
                task.panels(data.batch(indices[:count])), "Samples to look at, not augmented"
            )
        )


def show_predictions(run, task, *, count=4):
    """Show what the run's best weights predict for test images, next to the truth.

    The predictions are those that `test` saved, if the task saves them; otherwise they are made here, on the
    CPU. Also saved as pictures/predictions.png in the run's folder."""
    present_figure(predictions_figure(run, task, count), run.path / "pictures" / "predictions.png")


def predictions_figure(run, task, count):
    """The figure of `show_predictions`."""
    best, folder = run.path / "best.safetensors", run.path / "predictions"
    saved = None
    # Where foreign weights are tested there are no best ones, and what the last test saved is what there is.
    if folder.is_dir() and (not best.exists() or folder.stat().st_mtime >= best.stat().st_mtime):
        saved = task.load_predictions(folder)
    if saved:
        batch, prediction = saved
        indices = _evenly_spaced(len(prediction), count)
        batch, prediction = {name: values[indices] for name, values in batch.items()}, prediction[indices]
    else:
        batch, prediction = predict_test_images(run, task, count)
    return figures.panels_figure(task.panels(batch, prediction), task.saved_title if saved else "Test images")


def show_plan(plan):
    """Show what `plan` found: the table, and the peak of each batch size beside the chip's memory."""
    present(plan.table())
    present_figure(figures.plan_figure(plan))
    present(Sentences([plan.caption]))


def predict_test_images(run, task, count):
    """(batch, predictions) of up to `count` test images, evenly spaced, by the run's best weights, on the
    CPU, as tensors.

    Raises TpukitError where the run has no best weights yet.
    """
    import torch

    from tpukit.devices.runtime import Runtime
    from tpukit.training import prediction

    # On a TPU the notebook's own process must not open the device: no cores could be launched from it
    # afterwards.
    best, runtime = run.best(), Runtime("cpu")
    task = dataclasses.replace(task, weights=best)
    predictor = prediction.open_predictor(task, best, runtime)
    data = task.test_set()
    indices = _evenly_spaced(len(data), count)
    batch = data.batch(indices)
    rows = [{name: values[row] for name, values in batch.items()} for row in range(len(indices))]
    predicted = prediction.stack(list(prediction.predict_in_batches(predictor, runtime, rows, 16)))
    batch = {name: torch.as_tensor(values) for name, values in batch.items()}
    return dict(batch, valid=torch.ones(len(indices), dtype=bool)), torch.as_tensor(predicted)


def _evenly_spaced(size, count):
    """Up to `count` indices of `size`."""
    return np.linspace(0, size - 1, min(count, size)).astype(int)


# Where it is shown


def present(thing):
    """Display a table or sentences in a notebook, print them in a shell."""
    if in_notebook():
        from IPython.display import display

        display(thing)
    else:
        print(f"\n{thing}")


def present_figure(figure, path=None):
    """Display a figure, if there is one, in a notebook; save it at `path`, and name that in a shell."""
    if figure is None:
        return
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write_atomic(path, figures.as_png(figure))
        except (
            OSError,
            TpukitError,
        ) as error:  # Kaggle's inputs are read-only; the figure is shown all the same
            print(printable(f"picture not saved at {path}: {first_line(error)}"))
            path = None
    if in_notebook():
        from IPython.display import display

        display(as_image(figure))
    elif path is not None:
        print(printable(f"\npicture: {path}"))


def as_image(figure):
    """A figure as a PNG image that a notebook shows."""
    from IPython.display import Image

    return Image(figures.as_png(figure))


def in_notebook():
    """Whether this is a kernel: what is displayed becomes part of a notebook."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    shell = get_ipython()
    return shell is not None and hasattr(shell, "kernel")
