"""Show a task, a run or a plan, in a notebook or a shell."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from tpukit import leaves
from tpukit.data.datasets import is_synthetic
from tpukit.host import environment, files
from tpukit.host.errors import TpukitError
from tpukit.host.tables import Notice, Sentences, Table
from tpukit.host.text import say
from tpukit.leaves import part_of
from tpukit.reporting import figures, findings
from tpukit.reporting.figures import RIGHT, WRONG, Panel
from tpukit.reporting.presenting import present, present_figure
from tpukit.runs.run import Run
from tpukit.runs.settings import settings_dict
from tpukit.training.task import Task, check_dataset_dir

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@runtime_checkable
class Shown(Protocol):
    """A plan: it knows how it is shown."""

    def table(self) -> Table: ...

    def show(self) -> None: ...


class Displayed(Protocol):
    """The part of a task that only pictures of its samples ask for. What a task leaves out is as here."""

    saved_title: str = ""
    """Title of a picture of saved predictions, which then shows the first ones; without a title, some that
    are evenly spaced."""

    def panels(self, batch: Mapping[str, Any], prediction: Any = None) -> list[list[Panel]]:
        """Return what to show of a batch. By default: `image`, titled by what has one value a sample, `label`
        and the prediction.

        Args:
            batch: dict of arrays from the dataset.
            prediction: what `predict` returned, on the CPU; None to show the data alone.

        Returns:
            For each sample a list of (title, array), the array (H, W) or (H, W, 3), or (title, text). A title
            that begins with ✓ or ✗ gets a green or a red frame.

        Raises:
            TpukitError: if the batch has no `image` and the task no method of its own."""
        if "image" not in batch:
            name = type(self).__name__
            raise TpukitError(f"{name} must implement panels() to show its samples: they have no `image`")
        images = np.asarray(batch["image"])
        if images.ndim == 4 and images.shape[1] in (1, 3):
            images = np.moveaxis(images, 1, -1)  # (B, C, H, W) -> (B, H, W, C)
        images = images[..., 0] if images.shape[3:] == (1,) else images
        titles = [[] for _ in images]
        for word, values in {"": batch.get("label"), "predicted ": prediction}.items():
            for title, value in zip(titles, values if np.ndim(values) == 1 else ()):
                title.append(f"{word}{value}")
        titles = [", ".join(title) for title in titles]
        label, guess = np.asarray(batch.get("label", ())), np.asarray(prediction)
        if guess.ndim == 1 and guess.dtype.kind in "iu" and label.shape == guess.shape:
            titles = [f"{RIGHT if ok else WRONG} {title}" for title, ok in zip(titles, label == guess)]
        return [[panel] for panel in zip(titles, images)]

    def check_labels(self, data: Any) -> tuple[list[str], Sequence[int]]:
        """Describe the samples and labels of a dataset.

        Args:
            data: the training set.

        Returns:
            (sentences, the most important first; indices of samples to look at)."""
        return [f"{len(data)} samples"], []

    def verdict(self, scores: dict, last: dict) -> str:
        """Return a sentence about scores that need one, or "". A task of tpukit has this and `figures` as
        static methods: a saved run has only its name.

        Args:
            scores: what `evaluate` returned for the kept weights, read from a file that may hold anything.
            last: the same for the last epoch.

        Returns:
            The sentence."""
        return ""

    def figures(self, scores: dict) -> Mapping[str, "Figure | Table"]:
        """Return figures and tables of scores that are more than a number.

        Args:
            scores: as of `verdict`.

        Returns:
            Each under the name of its file in the run's pictures/."""
        return {}

    def load_predictions(self, folder: Path) -> tuple[Mapping[str, Any], Any] | None:
        """Read what `save_predictions` wrote.

        Args:
            folder: the run's folder predictions/.

        Returns:
            (batch, predictions) for `panels`, or None if there are none. `name` in the batch, if it is
            there, names each sample."""
        return None


def panels_of(task: Task) -> Callable[..., list[list[Panel]]]:
    """Return `Displayed.panels` of a task."""
    return part_of(task, Displayed, "panels")


def load_predictions(task: Task, folder: Path) -> tuple[Mapping[str, Any], Any] | None:
    """Return what `Displayed.load_predictions` of a task returns."""
    return part_of(task, Displayed, "load_predictions")(folder)


def show(shown: Run | Task | Shown | str | Path) -> None:
    """Show a run, a folder of runs, a task or a plan.

    Args:
        shown: a `Run` or its path: scores and curves, whose pictures are saved in its folder. A folder of run
            folders: their curves, a chart for each task. A task: its settings. What `plan` or `compare`
            returned: its table and what the columns mean.

    Raises:
        TpukitError: if the folder holds no runs, or for anything else."""
    if isinstance(shown, (str, Path)):
        folder = Path(shown)
        if files.exists(folder / "config.json") or not any(folder.glob("*/config.json")):
            _show_run(Run.find(folder))
        else:
            from tpukit.reporting.widgets import show_runs

            show_runs(folder)
    elif isinstance(shown, Run):
        _show_run(shown)
    elif isinstance(shown, Task):
        _show_task(shown.choose_settings(environment.detect()))
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
    scores = findings.last_and_kept_table(records, labels.names)
    curves = figures.curves_figure(records, labels)
    if scores is None and curves is None:
        present(Sentences(["No interval of training was recorded yet."]))
        return
    if scores is not None:
        present(scores)
    task = _described_by(run)
    if verdict := findings.verdict(records, part_of(task, Displayed, "verdict")):
        present(Sentences([verdict]))
    present_figure(curves, pictures / "curves.png")
    kept = findings.kept_evaluation(findings.of_kind(records, "evaluation"))
    shown = part_of(task, Displayed, "figures")(kept["scores"]) if kept else {}
    for name, thing in shown.items():
        if isinstance(thing, Table):
            present(thing)
        else:
            present_figure(thing, pictures / f"{name}.png")


def _described_by(run: Run) -> Any:
    """Return the task that a run was opened with, or the class of that name if it is one of tpukit's; None
    for a run that was only found, of a task of the user's own: nothing is known of its scores."""
    if run.task is not None:
        return run.task
    name = run.config["task"]
    return leaves.find(name) if name in leaves.tasks() else None


def show_report(run: Run | str | Path) -> None:
    """Show the accelerator's work in the last session of a run, in sentences, then in numbers: compilations
    with their causes, where a step's time went, the memory of every device.

    Args:
        run: a `Run`, or its path."""
    from tpukit.reporting import run_report

    run = run if isinstance(run, Run) else Run.find(run)
    records = run.records()
    present(Sentences(run_report.describe(records)))
    for table in run_report.accelerator_tables(records):
        present(table)


def _show_task(task: Task) -> None:
    """Show the settings of a task that differ from their defaults, and how many others there are."""
    defaults = {field.name: field.default for field in dataclasses.fields(task)}
    changed = [
        (name, value) for name, value in settings_dict(task).items() if getattr(task, name) != defaults[name]
    ]
    title = f"Settings of {type(task).__name__} · {len(defaults) - len(changed)} at their defaults"
    present(Table(title, ("setting", "value"), changed, are_names=True))


def show_samples(task: Task, *, count: int = 4) -> None:
    """Show samples of the training set as the model gets them, augmented, with their labels.

    Args:
        task: the task, with its `dataset_dir`.
        count: number of samples, evenly spaced over the set."""
    check_dataset_dir(task)
    data, _ = task.datasets()
    indices = _evenly_spaced(len(data), count)
    uniforms = None
    if data.num_uniforms:
        uniforms = np.random.default_rng(task.seed).random((len(indices), data.num_uniforms))
    if notes := getattr(data, "notes", ""):
        say(notes)
    present_figure(figures.panels_figure(panels_of(task)(data.batch(indices, uniforms)), "Training samples"))


def show_labels(task: Task, *, count: int = 4) -> None:
    """Show the facts and problems of the training set's labels before training on them, with the samples
    concerned.

    Args:
        task: the task, with its `dataset_dir`.
        count: largest number of samples to show."""
    check_dataset_dir(task)
    data, _ = task.datasets()
    notices: list[str] = [*getattr(data, "notices", ())]
    if task.dataset_dir and is_synthetic(task.dataset_dir):
        yours = "Name your folder as DATASET_DIR, or in a shell as --dataset-dir."
        notices.insert(0, f"This is not your data, but a synthetic set that tpukit made. {yours}")
    if notices:
        present(Notice(notices))
    sentences, indices = part_of(task, Displayed, "check_labels")(data)
    present(Sentences(sentences))
    if indices:
        panels = panels_of(task)(data.batch(indices[:count]))
        present_figure(figures.panels_figure(panels, "Samples to look at, not augmented"))


def show_predictions(run: Run, task: Task, *, count: int = 4) -> None:
    """Show the predictions of the run's best weights for test images, next to the truth.

    They are the predictions that `test` saved, if the task saves them; otherwise they are made here, on the
    CPU. The picture is also saved as pictures/predictions.png in the run's folder.

    Args:
        run: a run with best weights, or with saved predictions.
        task: the task of the run.
        count: number of test images."""
    present_figure(predictions_figure(run, task, count), run.path / "pictures" / "predictions.png")


def predictions_figure(run: Run, task: Task, count: int) -> "Figure":
    """Draw the figure of `show_predictions`."""
    from tpukit.training.prediction import predict_test_images

    best, folder = run.path / "best.safetensors", run.path / "predictions"
    saved = None
    # A test of foreign weights leaves no best ones: then the predictions that it saved are all there is.
    if files.is_folder(folder) and (not files.exists(best) or folder.stat().st_mtime >= best.stat().st_mtime):
        saved = load_predictions(task, folder)
    title = part_of(task, Displayed, "saved_title") if saved else ""
    if saved:
        batch, prediction = saved
        indices = np.arange(len(prediction))[:count] if title else _evenly_spaced(len(prediction), count)
        batch = {name: values[indices] for name, values in batch.items()}
        prediction = prediction[indices]
    else:
        batch, prediction = predict_test_images(run, task, count)
    rows, title = panels_of(task)(batch, prediction), title or "Test images"
    if known := [row[0][0] for row in rows if row[0][0].startswith((RIGHT, WRONG))]:
        title += f": {sum(word.startswith(WRONG) for word in known)} of {len(known)} shown are wrong"
    return figures.panels_figure(rows, title, map(str, batch.get("name", ())))


def _evenly_spaced(size, count):
    """Return up to `count` indices of `size`."""
    return np.linspace(0, size - 1, min(count, size)).astype(int)
