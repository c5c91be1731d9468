"""Show a task, a run or a plan, in a notebook or a shell."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from tpukit.host.errors import TpukitError
from tpukit.host.tables import Notice, Sentences, Table, say
from tpukit.reporting import figures, findings
from tpukit.reporting.output import present_figure
from tpukit.reporting.presenting import present
from tpukit.runs.run import Run
from tpukit.runs.settings import settings_dict
from tpukit.tasks.datasets import is_synthetic
from tpukit.training.panels import RIGHT, WRONG
from tpukit.training.task import Task

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@runtime_checkable
class Shown(Protocol):
    """A plan: it knows how it is shown."""

    def table(self) -> Table: ...

    def show(self) -> None: ...


def show(shown: Run | Task | Shown | str | Path) -> None:
    """Show a run, a folder of runs, a task or a plan.

    Args:
        shown: a `Run` or its path: scores and curves, whose pictures are saved in its folder. A folder of run
            folders: their curves in one chart. A task: its settings. What `plan` or `compare` returned: its
            table and what the columns mean.

    Raises TpukitError for a folder without runs, and for anything else."""
    from tpukit.reporting.widgets import show_runs

    if isinstance(shown, (str, Path)):
        folder = Path(shown)
        if (folder / "config.json").is_file() or not any(folder.glob("*/config.json")):
            _show_run(Run.find(folder))
        else:
            show_runs(folder)
    elif isinstance(shown, Run):
        _show_run(shown)
    elif isinstance(shown, Task):
        _show_task(shown)
    elif isinstance(shown, Shown):
        shown.show()
    else:
        needed = "a run or its path, a folder of runs, a task or a plan"
        raise TpukitError(f"show() got {type(shown).__name__}: give it {needed}")


def _show_run(run: Run) -> None:
    """Show the scores and curves of a run, and save the pictures in its folder."""
    records = run.records()
    pictures = run.path / "pictures"
    labels = findings.labels_of(run.config)
    for table in findings.last_and_kept_tables(records):
        present(table)
    if sentences := findings.verdict(records):
        present(Sentences(sentences))
    present_figure(figures.curves_figure(records, labels), pictures / "curves.png")
    if roc := findings.roc(records):
        present_figure(figures.roc_figure(roc), pictures / "roc.png")
    if confusion := findings.confusion(records):
        present_figure(figures.confusion_figure(confusion), pictures / "confusion.png")
        present(findings.per_class_table(confusion))
    if not records:
        present(Sentences(["This run has not started yet."]))


def show_report(run: Run | str | Path) -> None:
    """Show the accelerator's work in the last session of a run: in sentences, then numbers.

    Compilations with their causes, where a step's time went, memory of every device. run: a `Run`, or its
    path."""
    run = run if isinstance(run, Run) else Run.find(run)
    records = run.records()
    present(Sentences(findings.describe(records)))
    for table in findings.accelerator_tables(records):
        present(table)


def _show_task(task: Task) -> None:
    """Show every setting of a task as a table; in a notebook those at their defaults are folded away."""
    defaults = {field.name: field.default for field in dataclasses.fields(task)}
    rows, folded = [], []
    for name, value in settings_dict(task).items():
        (folded if getattr(task, name) == defaults[name] else rows).append((name, value))
    summary = f"{len(folded)} settings at their defaults"
    present(Table(f"Settings of {task.name}", ("setting", "value"), rows, folded=folded, summary=summary))


def show_samples(task: Task, *, count: int = 4) -> None:
    """Show samples of the training set as the model gets them, augmented, with their labels."""
    data, _ = task.datasets()
    indices = _evenly_spaced(len(data), count)
    uniforms = None
    if data.num_uniforms:
        uniforms = np.random.default_rng(task.seed).random((len(indices), data.num_uniforms))
    if notes := getattr(data, "notes", ""):
        say(notes)
    present_figure(figures.panels_figure(task.panels(data.batch(indices, uniforms)), "Training samples"))


def show_labels(task: Task, *, count: int = 4) -> None:
    """Show the facts and problems of the training set's labels before training on them, with the samples
    concerned."""
    data, _ = task.datasets()
    notices: list[str] = [*getattr(data, "notices", ())]
    if task.dataset_dir and is_synthetic(task.dataset_dir):
        yours = "Name your folder as DATASET_DIR, or in a shell as --dataset-dir."
        notices.insert(0, f"This is not your data, but a synthetic set that tpukit made. {yours}")
    if notices:
        present(Notice(notices))
    sentences, indices = task.check_labels(data)
    present(Sentences([*sentences, _steps_sentence(task, len(data))]))
    if indices:
        panels = task.panels(data.batch(indices[:count]))
        present_figure(figures.panels_figure(panels, "Samples to look at, not augmented"))


def _steps_sentence(task, count):
    steps, dropped = divmod(count, task.batch_size)
    if not steps:
        return (
            f"batch_size={task.batch_size} is more than the {count} training samples: choose at most {count}"
        )
    sentence = f"{task.epochs} epochs of {steps} steps, each of batch_size={task.batch_size} samples"
    left_over = f"; {dropped} samples are left over each epoch (different ones each time)"
    return sentence + (left_over if dropped else "")


def show_predictions(run: Run, task: Task, *, count: int = 4) -> None:
    """Show the predictions of the run's best weights for test images, next to the truth.

    The predictions are those that `test` saved, if the task saves them; otherwise they are made here, on the
    CPU. Also saved as pictures/predictions.png in the run's folder."""
    present_figure(predictions_figure(run, task, count), run.path / "pictures" / "predictions.png")


def predictions_figure(run: Run, task: Task, count: int) -> "Figure":
    """Draw the figure of `show_predictions`."""
    from tpukit.training.prediction import predict_test_images

    best, folder = run.path / "best.safetensors", run.path / "predictions"
    saved = None
    # Where foreign weights are tested there are no best ones, and what the last test saved is what there is.
    if folder.is_dir() and (not best.exists() or folder.stat().st_mtime >= best.stat().st_mtime):
        saved = task.load_predictions(folder)
    title = getattr(task, "saved_title", "") if saved else ""
    if saved:
        batch, prediction = saved
        indices = np.arange(len(prediction))[:count] if title else _evenly_spaced(len(prediction), count)
        batch = {name: values[indices] for name, values in batch.items()}
        prediction = prediction[indices]
    else:
        batch, prediction = predict_test_images(run, task, count)
    rows, title = task.panels(batch, prediction), title or "Test images"
    if known := [row[0][0] for row in rows if row[0][0].startswith((RIGHT, WRONG))]:
        title += f": {sum(word.startswith(WRONG) for word in known)} of {len(known)} shown are wrong"
    return figures.panels_figure(rows, title, map(str, batch.get("name", ())))


def _evenly_spaced(size, count):
    """Return up to `count` indices of `size`."""
    return np.linspace(0, size - 1, min(count, size)).astype(int)
