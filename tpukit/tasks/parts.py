"""What a task may leave out: a protocol names it, and has the default."""

import functools
from typing import Any


def part_of(task: Any, protocol: type, name: str) -> Any:
    """Return an attribute or a method of a protocol that a task may leave out: the task's own, or the
    default."""
    own = getattr(task, name, None)
    if own is not None:
        return own
    default = getattr(protocol, name)
    return functools.partial(default, task) if callable(default) else default
