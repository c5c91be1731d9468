"""The dataset of a task, found on this host, downloaded or made: `find_dataset`."""

from pathlib import Path

import numpy as np

from tpukit.host import datasets, files
from tpukit.host.environment import NAMES
from tpukit.host.errors import TpukitError
from tpukit.host.tables import printable
from tpukit.tasks import TASKS, find

SYNTHETIC_NOTE = "Synthetic, made by tpukit; not real data.\n"


def find_dataset(env, name, path=None, *, fallback=False, size=None):
    """Find a dataset's folder and print which one was taken and why; download it or make a synthetic set
    where there is none.

    In this order: `path`; Drive (MyDrive/datasets/NAME); Kaggle inputs; ./datasets/NAME; on Colab a Drive
    that is not mounted yet, for which the user is asked once; a download, where the task has one and its
    server answers; a synthetic set of `size` samples, by default more of them where there is a TPU or a GPU.
    Archives (.zip, .tar.gz) at these places are unpacked below `env.outputs`. A given `path` that does not
    exist raises TpukitError, unless `fallback=True` allows the other places, or `fallback` is a folder, which
    is then taken instead (and, where no path is given, before Drive is asked for). So does a name that no
    task has, where no place holds it."""
    task = _task_of(name)
    found = datasets.find(env, name, path, fallback=fallback, parts=task.dataset_parts if task else ())
    if found is not None:
        return found
    task = _require_task(name)
    try:
        folder = _download(task, env.outputs / "datasets" / f"{name}-downloaded")
    except TpukitError as error:
        not_downloaded = error
    else:
        print(printable(f"dataset {name}: {folder} (downloaded, checksums verified)"))
        return folder
    count = f"{size} synthetic samples"
    if not size:
        large = task.synthetic_size_accelerator if env.accelerator in ("tpu", "cuda") else 0
        size = large or task.synthetic_size
        count = f"{size} synthetic samples, the default on a {NAMES[env.accelerator]}"
    folder = make_synthetic(name, env.outputs / "datasets" / f"{name}-synthetic", size=size)
    unseen = "; Drive is not mounted" if env.drive and not env.drive.is_dir() else ""
    why = (
        f"no real ones were found on Drive, in Kaggle inputs or in ./datasets{unseen}; no download:"
        f" {not_downloaded}"
    )
    print(printable(f"dataset {name}: {folder} ({count}; {why})"))
    return folder


def make_synthetic(name, folder, *, size=None, seed=0):
    """Make the synthetic set of a task's dataset, whole or not at all; kept if already there.

    size: number of samples, train and test together. Returns the folder, whose name gets the size. Raises
    TpukitError for a name that no task has, and where the folder cannot be written."""
    task = _require_task(name)
    size, folder = size or task.synthetic_size, Path(folder)
    folder = folder.with_name(f"{folder.name}-{size}")
    with files.file_lock(folder):
        if not folder.exists():
            with files.atomic_folder(folder) as work:
                task.synthesize(work, size, np.random.default_rng(seed))
                (work / "README.txt").write_text(SYNTHETIC_NOTE)
    return folder


def _download(task, folder):
    """Download the dataset of a task, whole or not at all; kept if already there. Returns the folder."""
    with files.file_lock(folder):
        if not folder.exists():
            with files.atomic_folder(folder) as work:
                task.download(work)
    return folder


def _task_of(name):
    """The class of the task with a dataset of this name, or None."""
    return next((find(key) for key, entry in TASKS.items() if entry.dataset.lower() == name.lower()), None)


def _require_task(name):
    """The same, or a TpukitError that lists the names."""
    task = _task_of(name)
    if task is None:
        names = ", ".join(entry.dataset for entry in TASKS.values())
        raise TpukitError(
            f"no dataset {name!r} was found; tpukit can synthesize {names}. Give a path, or put yours into"
            " ./datasets"
        )
    return task
