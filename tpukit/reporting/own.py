"""What a run predicts for a user's own files, saved and shown, and the run as one file to take along."""

import csv
import dataclasses
import hashlib
import io
import json
import os
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

from tpukit.host import environment, files
from tpukit.host.errors import TpukitError, first_line
from tpukit.host.tables import printable
from tpukit.reporting import figures
from tpukit.reporting.display import as_image, predictions_figure, present_figure

MAX_NAME = 200  # bytes of the name of a file in the results, without what is added to it
MAX_SHOWN = 64  # files, and samples in them, that one picture shows
ZIPPED = (
    "best.*",
    "config.json",
    "records.jsonl",
    "log.txt",
    "pictures/*",
    "predictions/*",
    "own/*",
    "own/*/*",
)


def save_predictions(task, samples, folder, *, pictures=True):
    """Save what was predicted for a user's own files, one after the other, and return it: a list of dicts.

    samples: of `prediction.predict_files`. Each dict: name, and what `task.results` gives, or `error`. In the
    folder: predictions.json and predictions.csv, a folder for each kind of array (masks/NAME.png,
    images/NAME.npy), and, with pictures, pictures/NAME.png."""
    results, listed, taken = [], [], set()
    for sample in samples:
        result = result_of(task, sample)
        results.append(result)
        entry = dict(result)
        name = _free_name(_short(Path(printable(sample.name).replace("/", "_")).name), taken)
        for key, value in result.items():
            if isinstance(value, np.ndarray):
                entry[key] = _save_array(folder, key, name, value)
        if pictures and not sample.error:
            entry["picture"] = f"pictures/{_with_ending(name, '.png')}"
            figure = figures.panels_figure(task.panels(sample.batch, sample.prediction), sample.name)
            _save(folder / entry["picture"], lambda file: file.write(figures.as_png(figure)))  # noqa: B023
        listed.append(entry)
    _save(folder / "predictions.json", lambda file: file.write(json.dumps(listed, indent=1).encode()))
    _save(
        folder / "predictions.csv", lambda file: file.write(_as_csv(listed).encode(errors="backslashreplace"))
    )
    return results


def result_of(task, sample):
    """dict(name, ...) of a sample: what the task gives of it, or `error`."""
    if sample.error:
        return dict(name=sample.name, error=sample.error)
    return dict(name=sample.name, **task.results(sample.batch, sample.prediction)[0])


def _save_array(folder, key, name, value):
    """Save an array of a result. Returns its path within the folder."""
    if value.dtype == bool and value.ndim == 2:
        path = f"{key}s/{_with_ending(name, '.png')}"
        _save(folder / path, Image.fromarray(np.where(value, 255, 0).astype(np.uint8)).save, format="PNG")
    else:
        path = f"{key}s/{name}.npy"
        _save(folder / path, lambda file: np.save(file, value))
    return path


def _free_name(name, taken):
    """The name for a sample's files, with a number where those of an earlier sample have it: night.png is
    that of night, too.

    taken: the names so far, to which this one is added."""
    free, number = name, 1
    while _with_ending(free, ".png").lower() in taken:
        number += 1
        free = f"{name}-{number}"
    taken.add(_with_ending(free, ".png").lower())
    return free


def _short(name):
    """The name of a file, cut to what leaves room for endings in the 255 bytes that a disk takes; cut names
    stay apart."""
    content = name.encode()
    if len(content) <= MAX_NAME:
        return name
    digest = hashlib.sha256(content).hexdigest()[:8]
    return f"{content[: MAX_NAME - 9].decode(errors='ignore')}-{digest}"


def _with_ending(name, ending):
    """The name of a file with an ending; a.png and a.jpg stay apart."""
    return name if name.lower().endswith(ending) else f"{name}{ending}"


def _save(path, write, **options):
    with files.explain_unwritable(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    with files.atomic_file(path, durable=False) as file:
        write(file, **options)


def _as_csv(entries):
    """A line for each result, or for each dict in its lists (of boxes, for instance)."""
    lines = []
    for entry in entries:
        parts = [part for value in entry.values() if isinstance(value, list) for part in value]
        flat = {key: value for key, value in entry.items() if not isinstance(value, list)}
        lines += [flat | part for part in parts] or [flat]
    out = io.StringIO()
    writer = csv.DictWriter(
        out, list(dict.fromkeys(key for line in lines for key in line)), lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def show_own(run, task, paths=""):
    """Show what the run's best weights predict for a user's own files, and save it in the run's folder own/.

    paths: a file, a folder, or a list of files. Empty: test images stand in for them, and an open page gets a
    button to upload."""
    if paths:
        present_figure(_predict_and_save(run, task, paths))
        return
    print("no file named: test images stand in for your own")
    present_figure(predictions_figure(run, task, 2))
    try:
        import ipywidgets
    except ImportError:
        return
    if not environment.is_interactive_notebook():
        return
    from IPython.display import display

    button = ipywidgets.FileUpload(multiple=True, description="your own files")
    note = ipywidgets.Label("what is uploaded here stays on this machine")
    display(ipywidgets.HBox([button, note]))
    # A place in this cell for the picture: what is displayed later, when a button calls, belongs to no cell
    # in JupyterLab.
    handle = display({"text/plain": ""}, raw=True, display_id=True)

    def predict(_):
        try:
            shown = as_image(_predict_and_save(run, task, save_uploads(button.value, run.path / "own")))
        except TpukitError as error:
            note.value = printable(error)
            return
        note.value = "predicted; saved in the run's folder own/"
        handle.update(shown)

    button.observe(predict, names="value")


def _predict_and_save(run, task, paths):
    """The figure of the predictions, after saving them. Raises TpukitError for a file that cannot be read:
    nothing is saved."""
    from tpukit.training import prediction

    samples = prediction.predict_own(run, task, paths, limit=MAX_SHOWN)
    task = dataclasses.replace(task, weights=run.best())
    save_predictions(task, samples, run.path / "own", pictures=False)
    rows = [row for sample in samples for row in task.panels(sample.batch, sample.prediction)]
    figure = figures.panels_figure(rows, "Your own files")
    _save(run.path / "own/predictions.png", lambda file: file.write(figures.as_png(figure)))
    return figure


def save_uploads(value, folder):
    """Write what an ipywidgets FileUpload holds to a folder. Returns the paths. value: of ipywidgets 8, or of
    7 (a dict)."""
    uploads = value.items() if isinstance(value, dict) else ((upload["name"], upload) for upload in value)
    with files.explain_unwritable(folder):
        folder.mkdir(exist_ok=True)
        paths = []
        for name, upload in uploads:
            path = (
                folder / f"upload-{Path(printable(name)).name}"
            )  # the name alone: a path in it leads nowhere
            files.write_atomic(path, bytes(upload["content"]))
            paths.append(path)
    return paths


def save_zip(run):
    """Pack weights, settings, records, pictures and predictions of a run into one zip beside its folder.
    Returns its path.

    On Colab an open page then downloads it; on Kaggle it is under Output; JupyterLab shows a link.
    """
    folder = run.path.resolve()
    path = folder.with_name(f"{folder.name}.zip")
    members = [member for pattern in ZIPPED for member in sorted(folder.glob(pattern)) if member.is_file()]
    if not members:
        raise TpukitError(f"{run.path} has nothing to pack yet: train first")
    if path.exists() and not _is_zip_of(run, path):
        raise TpukitError(f"{path} would be replaced, and does not hold this run: move it to another folder")
    with files.atomic_file(path) as file, zipfile.ZipFile(file, "w") as archive:
        for member in members:
            archive.write(member, member.relative_to(folder.parent))
    print(printable(f"{path}: {path.stat().st_size / 1e6:.1f} MB, {len(members)} files"))
    if environment.is_interactive_notebook():
        _offer(path)
    return path


def _is_zip_of(run, path):
    """Whether a file is a zip that `save_zip` made of this run, not of an earlier one in a folder of the same
    name."""
    try:
        with zipfile.ZipFile(path) as archive:
            config = files.parse_with_crc32(archive.read(f"{run.path.resolve().name}/config.json"))
        return config["id"] == run.config["id"]
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile, TpukitError):
        return False


def _offer(path):
    """Let the page download a file."""
    try:
        from google.colab import files as colab
    except ImportError:
        from IPython.display import FileLink, display

        display(FileLink(os.path.relpath(path)))  # which the page resolves from the notebook's folder
        return
    try:
        colab.download(str(path))
    except Exception as error:  # the browser refused, or the page was closed
        print(
            printable(
                f"the download did not start ({first_line(error)}): find it in the folder view at the left"
            )
        )
