"""The tasks by name, and the parts that a task may leave out. None is imported until it is needed."""

import functools
import importlib
from typing import TYPE_CHECKING, Any

from tpukit import leaves
from tpukit.host.errors import TpukitError

if TYPE_CHECKING:
    from tpukit.training.task import Task

TASKS = leaves.tasks()


def find(name: str) -> "type[Task]":
    """The Task class of a name. Raises TpukitError listing the names there are."""
    if name not in TASKS:
        raise TpukitError(f"no task {name!r}; choose one of {', '.join(TASKS)}")
    return getattr(importlib.import_module(f"tpukit_tasks.{name}"), TASKS[name].cls)


def part_of(task: Any, protocol: type, name: str) -> Any:
    """Return an attribute or a method of a protocol that a task may leave out: the task's own, or the
    default."""
    own = getattr(task, name, None)
    if own is not None:
        return own
    default = getattr(protocol, name)
    return functools.partial(default, task) if callable(default) else default
