"""The task and the weights of a finished training, from a run's folder or from a weights file alone."""

import dataclasses
import json
from pathlib import Path

from tpukit import workloads
from tpukit.host.errors import TpukitError
from tpukit.runs import weights
from tpukit.runs.run import Run
from tpukit.training.task import from_settings


def task_of(config):
    """The task of a run's config, dict(workload, settings), with fresh weights: those that it started from may be gone."""
    return from_settings(workloads.find(config["workload"]), config["settings"] | dict(weights=None))


def find_trained(source, task=None):
    """(task, weights file) of a `Run`, a run's folder, a weights file, or the address of one.

    The task has the file as its `weights`, because what it says of classes may count. task: for a workload of the user's own,
    or a file that does not name its workload. Raises TpukitError where there are no weights, or nothing says what they are of.
    """
    if isinstance(source, Run) or Path(source).is_dir():
        run = source if isinstance(source, Run) else Run.find(source)
        return dataclasses.replace(task or task_of(run.config), weights=run.best()), run.best()
    path = weights.local(source)
    if not path.is_file():
        raise TpukitError(f"{path} does not exist: name the folder of a run, or a weights file")
    if task is None:
        about = weights.metadata(path)
        if about.get("workload") not in workloads.WORKLOADS:
            raise TpukitError(
                f"{path} does not say of which workload it is: name one of {', '.join(workloads.WORKLOADS)} (--workload)"
            )
        try:
            settings = dict(json.loads(about.get("settings", "{}")))
        except (ValueError, TypeError, RecursionError) as error:
            raise TpukitError(f"{path}: the settings in its metadata are damaged ({error})") from error
        task = task_of(dict(workload=about["workload"], settings=settings))
    return dataclasses.replace(task, weights=path), path
