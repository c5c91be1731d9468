"""A user's own files predicted by a run, and the run as one file to take along: `show_own` and `save_zip`."""

import dataclasses
import os
import zipfile
from pathlib import Path

import numpy as np

from tpukit.host import environment, files
from tpukit.host.errors import TpukitError, first_line
from tpukit.host.tables import printable
from tpukit.reporting import figures
from tpukit.reporting.display import as_image, open_predictor, predict_in_parts, predictions_figure, present_figure

MOST = 64  # files, and samples in them, that are predicted at once, on the CPU
ZIPPED = ("best.safetensors", "config.json", "records.jsonl", "log.txt", "pictures/*", "predictions/*", "own/*", "own/masks/*")


def predict_files(run, task, paths):
    """Predict a user's own files with the run's best weights, on the CPU.

    paths: files, or one folder of files, of a kind that the task reads. Returns (batch, predictions, names): dict of arrays
    (N, ...), what `task.predictor` makes of it, and a name for each sample. Raises TpukitError naming a file that is no input.
    """
    import torch

    paths, predictor = list_files(paths), open_predictor(run, task)
    batch, names = task.read_files(paths, run.path / "best.safetensors")
    if len(names) > MOST:
        raise TpukitError(f"the files hold {len(names)} samples; it takes {MOST} at once")
    tensors = {name: torch.as_tensor(values) for name, values in batch.items()}
    return batch, predict_in_parts(predictor, tensors).numpy(), names


def list_files(paths):
    """The files that were named, those of a folder sorted by name, without hidden ones.

    Raises TpukitError where there is none, or too many, or two of one name, which could not be told apart in the results.
    """
    paths = [Path(path).expanduser() for path in ([paths] if isinstance(paths, (str, Path)) else paths)]
    found = []
    for path in paths:
        if not path.exists():
            raise TpukitError(f"{path} does not exist: name a file of yours, or a folder that holds some")
        if path.is_dir():  # in which macOS leaves hidden files
            found += sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
        else:
            found.append(path)
    if not 0 < len(found) <= MOST:
        raise TpukitError(f"{len(found)} files were named; it takes 1 to {MOST} at once")
    names = [path.name for path in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise TpukitError(
            f"{names.count(twice)} files are called {twice}: rename them, so that their predictions can be told apart"
        )
    return found


def show_own(run, task, paths=""):
    """Show what the run's best weights predict for a user's own files, and save it in the run's folder own/.

    paths: a file, a folder, or a list of files. Empty: test images stand in for them, and an open page gets a button to upload.
    """
    if paths:
        present_figure(_predict_and_save(run, task, paths))
        return
    print("no file named: test images stand in for your own")
    present_figure(predictions_figure(run, task, 2))
    try:
        import ipywidgets
    except ImportError:
        return
    if not environment.has_open_page():
        return
    from IPython.display import display

    button = ipywidgets.FileUpload(multiple=True, description="your own files")
    note = ipywidgets.Label("what is uploaded here stays on this machine")
    display(ipywidgets.HBox([button, note]))
    # A place in this cell for the picture: what is displayed later, when a button calls, belongs to no cell in JupyterLab.
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
    """The figure of the predictions, after saving them."""
    task = dataclasses.replace(task, weights=run.path / "best.safetensors")  # whose metadata name the classes
    batch, predictions, names = predict_files(run, task, paths)
    folder = run.path / "own"
    with files.explain_unwritable(folder):
        folder.mkdir(exist_ok=True)
        with files.atomic_file(folder / "predictions.npz") as file:
            np.savez_compressed(file, names=np.array(names), predictions=predictions)
        task.save_own(folder, list_files(paths), predictions)
        figure = figures.panels_figure(task.panels(batch, predictions), "Your own files")
        figure.savefig(folder / "predictions.png", dpi=110)
    return figure


def save_uploads(value, folder):
    """Write what an ipywidgets FileUpload holds to a folder. Returns the paths. value: of ipywidgets 8, or of 7 (a dict)."""
    uploads = value.items() if isinstance(value, dict) else ((upload["name"], upload) for upload in value)
    with files.explain_unwritable(folder):
        folder.mkdir(exist_ok=True)
        paths = []
        for name, upload in uploads:
            path = folder / f"upload-{Path(printable(name)).name}"  # the name alone: a path in it leads nowhere
            files.write_atomic(path, bytes(upload["content"]))
            paths.append(path)
    return paths


def save_zip(run):
    """Pack weights, settings, records, pictures and predictions of a run into one zip beside its folder. Returns its path.

    On Colab an open page then downloads it; on Kaggle it is under Output; JupyterLab shows a link.
    """
    folder = run.path.resolve()
    path = folder.with_name(f"{folder.name}.zip")
    members = [member for pattern in ZIPPED for member in sorted(folder.glob(pattern)) if member.is_file()]
    if not members:
        raise TpukitError(f"{run.path} has nothing to pack yet: train first")
    with files.explain_unwritable(path), files.atomic_file(path) as file, zipfile.ZipFile(file, "w") as archive:
        for member in members:
            archive.write(member, member.relative_to(folder.parent))
    print(printable(f"{path}: {path.stat().st_size / 1e6:.1f} MB, {len(members)} files"))
    if environment.has_open_page():
        _offer(path)
    return path


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
        print(printable(f"the download did not start ({first_line(error)}): find it in the folder view at the left"))
