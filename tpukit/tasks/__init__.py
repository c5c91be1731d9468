"""The tasks by name. None is imported until it is needed."""

import importlib
from typing import NamedTuple

from tpukit.host.errors import TpukitError


class Entry(NamedTuple):
    module: str
    cls: str
    dataset: str
    summary: str


TASKS = {
    "mnist": Entry("mnist", "MNIST", "mnist", "handwritten digits with a small convolutional network"),
    "mshnet": Entry(
        "mshnet", "MSHNet", "IRSTD-1k", "infrared small target detection (Liu et al., CVPR 2024)"
    ),
    "cdeit": Entry(
        "cdeit", "CDEIT", "eit", "diffusion transformer for impedance tomography (Shi et al., IEEE TIM 2025)"
    ),
    "images": Entry(
        "images",
        "ImageClassifier",
        "my-images",
        "your own images in classes, with a network of timm or torchvision",
    ),
}


def find(name):
    """The Task class of a name. Raises TpukitError listing the names there are."""
    if name not in TASKS:
        raise TpukitError(f"no task {name!r}; choose one of {', '.join(TASKS)}")
    entry = TASKS[name]
    return getattr(importlib.import_module(f"tpukit.tasks.{entry.module}"), entry.cls)
