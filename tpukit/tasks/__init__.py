"""The tasks by name. None is imported until it is needed."""

import importlib
from typing import TYPE_CHECKING

from tpukit import leaves
from tpukit.host.errors import TpukitError

if TYPE_CHECKING:
    from tpukit.training.task import Task

TASKS = leaves.tasks()


def find(name: str) -> "type[Task]":
    """The Task class of a name. Raises TpukitError listing the names there are."""
    if name not in TASKS:
        raise TpukitError(f"no task {name!r}; choose one of {', '.join(TASKS)}")
    return getattr(importlib.import_module(f"tpukit.tasks.{name}"), TASKS[name].cls)
