"""The task and the weights of a finished training run, from a run's folder or from a weights file alone."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpukit import leaves
from tpukit.data.datasets import is_demo
from tpukit.host import files
from tpukit.host.errors import TpukitError, explained
from tpukit.runs import weights
from tpukit.runs.run import Run
from tpukit.runs.settings import from_settings
from tpukit.training.task import Task

DEMO_FOLDER = leaves.folder_of("mshnet") / "demo"  # a small MSHNet and infrared images


def task_of(config: dict, source: Path) -> Task:
    """Return the task of a run's config, dict(task, settings), with fresh weights: those that it started from
    may be gone. source: the run's folder or weights file, for errors. Raises TpukitError for a task of the
    user's own, and for damaged settings."""
    if config["task"] not in leaves.tasks():
        raise TpukitError(
            f"{config['task']} is a task of your own, not found by its name: from Python, give it as"
            " task=TASK"
        )
    try:
        return from_settings(leaves.find(config["task"]), config["settings"] | dict(weights=None))
    except TpukitError as error:
        raise TpukitError(f"the settings in {source} are damaged: {error}") from error


def config_of(path: Path) -> dict | None:
    """Return the config of a weights file, like a run's; None if it does not name a task."""
    metadata = weights.metadata(path)
    if metadata.get("task") not in leaves.tasks():
        return None
    with explained(f"{path}: the settings in its metadata are damaged"):
        return dict(task=metadata["task"], settings=dict(json.loads(metadata.get("settings", "{}"))))


def find_trained(source: Run | Path | str, task: Task | str | None = None) -> tuple[Task, Path]:
    """Return (task, weights file) of a `Run`, a run's folder, a weights file, or "demo", the small MSHNet
    that comes with tpukit.

    The task has the file as its `weights`, because what it says of classes may count. task: one of the user's
    own, or the name of a task, for a file that does not name its own. Raises TpukitError if there are no
    weights, or they are of an unknown task or of another one."""
    if is_demo(source):
        source = DEMO_FOLDER / "weights.safetensors"
    if isinstance(source, Run) or files.is_folder(Path(source)):
        run = source if isinstance(source, Run) else Run.find(source)
        path = run.best()
    else:
        run, path = None, weights.local(source)
    if not files.exists(path):
        raise TpukitError(f"{path} does not exist: name the folder of a run, or a weights file")
    if task is None or isinstance(task, str):
        config = run.config if run else config_of(path)
        if not (config or task):
            names = ", ".join(leaves.tasks())
            raise TpukitError(f"{path} does not say which task it belongs to: name one of {names} (--task)")
        if config and task not in (None, config["task"]):
            raise TpukitError(f"{source} is of the task {config['task']}, not of {task}")
        task = task_of(config or dict(task=task, settings={}), path)
    return dataclasses.replace(task, weights=path), path


def replaced(task: Task, given: Mapping[str, Any]) -> Task:
    """Return a task with other settings. Raises TpukitError for one that the task does not have."""
    for name in given.keys() - {field.name for field in dataclasses.fields(task)}:
        raise TpukitError(f"the task {task.name} has no setting {name} (--{name.replace('_', '-')})")
    return dataclasses.replace(task, **given)
