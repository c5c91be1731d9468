"""The tasks of `tpukit_tasks` by name, and the parts that a task may leave out.

None is imported before it is asked for, and any can be cut off by deleting its file or folder: the library
works on with those that are there. Nothing else in this package knows a task by name."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tpukit.host.errors import TpukitError, importing

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


def is_there(module: str) -> bool:
    """Return True if a module of another package is there. Import none but its parents."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package itself is not there
        return False


def tasks() -> dict[str, TaskEntry]:
    """Return the tasks that are there, by name, which is their module's too. Import none of them."""
    return {name: entry for name, entry in _TASKS.items() if is_there(f"tpukit_tasks.{name}")}


def find(name: str) -> type[Task]:
    """Return the class of a task by name. Raises TpukitError listing the names there are."""
    if name not in tasks():
        raise TpukitError(f"no task {name!r}; choose one of {', '.join(tasks())}")
    with importing():
        return getattr(importlib.import_module(f"tpukit_tasks.{name}"), _TASKS[name].cls)


def folder_of(name: str) -> Path:
    """Return the folder of a task, which need not be there."""
    spec = importlib.util.find_spec("tpukit_tasks") if is_there("tpukit_tasks") else None
    parents = spec.submodule_search_locations if spec else None
    return Path(next(iter(parents or [""])), name)


def part_of(task: Any, protocol: type, name: str) -> Any:
    """Return an attribute or a method of a protocol that a task may leave out: the task's own, or the
    protocol's default."""
    own = getattr(task, name, None)
    if own is not None:
        return own
    default = getattr(protocol, name)
    return functools.partial(default, task) if callable(default) else default
