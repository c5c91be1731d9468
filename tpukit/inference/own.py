"""Predict a user's own files, save and show the results; pack a run as a zip."""

import io
import itertools
import json
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tpukit.data.datasets import DEMO, is_demo
from tpukit.devices.runtime import Runtime
from tpukit.host import environment, files
from tpukit.host.errors import TpukitError
from tpukit.host.spreadsheets import as_csv
from tpukit.host.text import format_bytes, one_line, printable
from tpukit.inference.own_files import OwnFiles, Sample, list_files, predict_files, stem_of
from tpukit.inference.trained import find_trained, task_of
from tpukit.leaves import part_of
from tpukit.reporting import figures, presenting
from tpukit.reporting.display import panels_of, predictions_figure
from tpukit.reporting.presenting import present_figure
from tpukit.reporting.widgets import offer_download, show_with_controls
from tpukit.runs.run import Run
from tpukit.training.task import Task

MAX_SHOWN = 64  # files, and samples in them, that one picture shows
RUN_FILES = ("best.*", "config.json", "records.jsonl", "log.txt")
ZIPPED = (*RUN_FILES, "peft/*", "pictures/*", "predictions/*", "own/*", "own/*/*")


def save_predictions(
    task: Task, samples: Iterable[Sample], folder: Path, *, pictures: bool = True
) -> list[dict]:
    """Save what was predicted for a user's own files, one after the other, and return it: a list of dicts.

    samples: of `predict_files`. Each dict: name, and what the task's `results` gives, or `error`.
    In the folder: predictions.json and predictions.csv, a folder for each kind of array (masks/NAME.png,
    images/NAME.npy), and, with pictures, pictures/NAME.png. Raises TpukitError for two samples of one NAME.
    """
    results, listed, taken = [], [], set()
    for sample in samples:
        results.append(result_of(task, sample))
        entry = dict(results[-1])
        stem = stem_of(sample.name)
        if stem.lower() in taken:
            raise TpukitError(f"two samples would have files of the name {stem}: predict them one by one")
        taken.add(stem.lower())
        for key, value in entry.items():
            if isinstance(value, np.ndarray):
                entry[key] = _save_array(folder, key, stem, value)
            elif isinstance(value, float):
                entry[key] = float(f"{value:.6g}")  # the digits that a float32 can have right
        has_panels = pictures and sample.batch is not None
        panels = panels_of(task)(sample.batch, sample.prediction) if has_panels else []
        if any(not isinstance(value, str) for row in panels for _, value in row):  # no pictures of texts
            entry["picture"] = f"pictures/{stem}.png"
            _save(folder / entry["picture"], presenting.as_png(figures.panels_figure(panels, sample.name)))
        listed.append(entry)
    _save(folder / "predictions.json", json.dumps(listed, indent=1).encode())
    _save(folder / "predictions.csv", _as_csv(listed).encode())
    return results


def result_of(task: Task, sample: Sample) -> dict:
    """Return dict(name, ...) of a sample: the task's results, or `error`."""
    if sample.batch is None:
        return dict(name=sample.name, error=sample.error)
    try:
        [result] = part_of(task, OwnFiles, "results")(sample.batch, sample.prediction)
    except TpukitError as error:
        result = dict(error=f"{one_line(sample.name)}: {error}")
    return dict(name=sample.name, **result)


def _save_array(folder, key, stem, value):
    """Save an array of a result. Returns its path within the folder."""
    file = io.BytesIO()
    if value.dtype == bool and value.ndim == 2:
        path = f"{key}s/{stem}.png"
        Image.fromarray(np.where(value, 255, 0).astype(np.uint8)).save(file, format="PNG")
    else:
        path = f"{key}s/{stem}.npy"
        np.save(file, value)
    _save(folder / path, file.getvalue())
    return path


def _save(path, content):
    with files.explain_unwritable(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    files.write_atomic(path, content, durable=False)


def _as_csv(entries):
    """Return a line for each result, or for each dict in its lists (of boxes, for instance)."""
    lines = []
    for entry in entries:
        parts = [part for value in entry.values() if isinstance(value, list) for part in value]
        flat = {key: value for key, value in entry.items() if not isinstance(value, list)}
        lines += [flat | part for part in parts] or [flat]
    columns = dict.fromkeys(key for line in lines for key in line)
    return as_csv(columns, ([line.get(column, "") for column in columns] for line in lines))


def show_own(run: Run | str | Path, task: Task | None = None, paths: str | Path | list = "") -> None:
    """Show what the run's best weights predict for a user's own files, and save it in the run's folder own/.
    What is uploaded also joins the zip of `save_zip`, if there is one.

    Args:
        run: a `Run`, its folder, or "demo", the small MSHNet that comes with tpukit, which saves nothing;
            without `paths` it shows four infrared images that come with it.
        task: the task of the run; by default as in its config.json.
        paths: a file, a folder, or a list of files. Empty: test images stand in for them, and an open page
            gets a button to upload.

    Raises:
        TpukitError: if a file cannot be read, or there are more samples than one picture shows."""
    if is_demo(run):
        title = "Detections of the small MSHNet that comes with tpukit"
        present_figure(_predict(run, None, paths or DEMO, title)[2])
        return
    run = run if isinstance(run, Run) else Run.find(run)
    task = task or task_of(run.config, run.path)
    if paths:
        present_figure(_predict_and_save(run, task, paths))
        return
    print("No file given, so these are test images. Files you upload stay on this machine.")

    def draw(upload):
        if not upload:
            return predictions_figure(run, task, 2)
        figure = _predict_and_save(run, task, save_uploads(upload, run.path / "own"))
        if _zip_path(run).exists():  # made before the upload: now it holds that, too
            _pack(run)
        return figure

    show_with_controls(draw, upload=("FileUpload", dict(multiple=True)))


def _predict(run, task, paths, title):
    """Return (task with the best weights, samples of a user's files, their figure). Raises TpukitError for a
    file that cannot be read, or for too many samples."""
    task, best = find_trained(run, task)
    # On the CPU: see `prediction.predict_test_images`.
    predicted = predict_files(task, best, list_files(paths), Runtime("cpu"))
    samples = list(itertools.islice(predicted, MAX_SHOWN + 1))
    if len(samples) > MAX_SHOWN:
        raise TpukitError(
            f"there are more than {MAX_SHOWN} samples, the most that one picture shows: use `tpukit predict`"
        )
    rows = []
    for sample in samples:
        if sample.batch is None:
            raise TpukitError(sample.error)
        rows += panels_of(task)(sample.batch, sample.prediction)
    return task, samples, figures.panels_figure(rows, title, [sample.name for sample in samples])


def _predict_and_save(run, task, paths):
    """Save the predictions, and return their figure. If a file cannot be read, nothing is saved."""
    task, samples, figure = _predict(run, task, paths, "Your own files")
    save_predictions(task, samples, run.path / "own", pictures=False)
    _save(run.path / "own/predictions.png", presenting.as_png(figure))
    return figure


def save_uploads(value: Any, folder: Path) -> list[Path]:
    """Write what an ipywidgets FileUpload holds to a folder. value: of ipywidgets 8, or of 7 (a dict)."""
    uploads = value.items() if isinstance(value, dict) else ((upload["name"], upload) for upload in value)
    paths = []
    for name, upload in uploads:
        # The name alone: a path in it leads nowhere.
        paths.append(folder / f"upload-{Path(printable(name)).name}")
        _save(paths[-1], bytes(upload["content"]))
    return paths


def save_zip(run: Run) -> Path:
    """Pack weights, settings, records, pictures and predictions of a run into one zip in its folder. An open
    page of Colab then downloads it; on Kaggle it is under Output; JupyterLab shows a link.

    Args:
        run: the run.

    Returns:
        Path of the zip.

    Raises:
        TpukitError: if the run has no results yet."""
    path, count = _pack(run)
    print(printable(f"{path}: {format_bytes(path.stat().st_size)}, {count} files"))
    if environment.is_interactive_notebook():
        offer_download(path)
    return path


def _zip_path(run):
    folder = run.path.resolve()
    return folder / f"{folder.name}.zip"


def _pack(run):
    """Write the zip of a run. Returns (its path, how many files are in it)."""
    path = _zip_path(run)
    folder = path.parent
    found = [member for pattern in ZIPPED for member in sorted(folder.glob(pattern)) if member.is_file()]
    members = [member for member in found if member != path]  # best.zip, of a run whose folder is called best
    if not members:
        raise TpukitError(f"{run.path} has nothing to pack yet: train first")
    with files.atomic_file(path) as file, zipfile.ZipFile(file, "w", strict_timestamps=False) as archive:
        for member in members:
            archive.write(member, member.relative_to(folder.parent))
    return path, len(members)
