"""The leaves: the tasks, and the tools that have a command of their own. Any of them can be cut off by
deleting its file or folder: the command line offers what is there, no lower layer knows a leaf by name. A
leaf is imported when it is found, and only one of these names is looked for."""

import functools
import importlib
import importlib.util
from typing import TYPE_CHECKING, Any, NamedTuple

from tpukit.host.errors import TpukitError

if TYPE_CHECKING:
    from tpukit.training.task import Task


class TaskEntry(NamedTuple):
    cls: str
    dataset: str
    summary: str


_TASKS = dict(
    mnist=TaskEntry("MNIST", "mnist", "handwritten digits with a small convolutional network"),
    mshnet=TaskEntry("MSHNet", "IRSTD-1k", "infrared small target detection (Liu et al., CVPR 2024)"),
    cdeit=TaskEntry(
        "CDEIT", "eit", "diffusion transformer for impedance tomography (Shi et al., IEEE TIM 2025)"
    ),
    images=TaskEntry("ImageClassifier", "my-images", "your own images in classes, with timm or torchvision"),
    text=TaskEntry(
        "LanguageModel", "my-text", "language models, fine-tuned or pretrained, with transformers"
    ),
)
# Commands that need a leaf, and its module below tpukit; all others are always there.
COMMANDS = dict(
    doctor="tpukit_tools.doctor",
    predict="tpukit.inference.predict",
    export="tpukit.inference.export",
    plan="tpukit_tools.plan",
    compare="tpukit_tools.measure",
    migrate="tpukit_tools.migrate",
    simulate="tpukit_tasks.cdeit",
)


def tasks() -> dict[str, TaskEntry]:
    """Return the tasks that are there, by name, which is their module's too. Import none of them."""
    return {name: entry for name, entry in _TASKS.items() if _is_there(f"tpukit_tasks.{name}")}


def has_command(name: str) -> bool:
    """Return True if the command line offers a command."""
    return name not in COMMANDS or _is_there(COMMANDS[name])


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # nor is the folder around it
        return False


TASKS = tasks()


def find(name: str) -> "type[Task]":
    """Return the Task class of a name. Raises TpukitError listing the names there are."""
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
