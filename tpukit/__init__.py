"""tpukit: PyTorch training that simply works on Colab, Kaggle and a laptop.

Names are loaded when they are used: `import tpukit` imports neither torch nor matplotlib.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for editors; the same names as in _HOMES
    from tpukit.data.datasets import find_dataset as find_dataset
    from tpukit.host.drive import mount_drive as mount_drive
    from tpukit.host.environment import detect as detect
    from tpukit.host.errors import TpukitError as TpukitError
    from tpukit.inference.own import save_zip as save_zip
    from tpukit.inference.own import show_own as show_own
    from tpukit.inference.predict import predict as predict
    from tpukit.launching.core import core as core
    from tpukit.launching.launcher import launch as launch
    from tpukit.reporting.device_report import metrics_report as metrics_report
    from tpukit.reporting.display import show as show
    from tpukit.reporting.display import show_labels as show_labels
    from tpukit.reporting.display import show_predictions as show_predictions
    from tpukit.reporting.display import show_report as show_report
    from tpukit.reporting.display import show_samples as show_samples
    from tpukit.reporting.live import live as live
    from tpukit.runs.checkpoints import Checkpoints as Checkpoints
    from tpukit.runs.run import Run as Run
    from tpukit.training.evaluation import test as test
    from tpukit.training.loop import train as train
    from tpukit.training.spawned import train_core as train_core
    from tpukit.training.task import Task as Task
    from tpukit_tasks.cdeit import CDEIT as CDEIT
    from tpukit_tasks.images import ImageClassifier as ImageClassifier
    from tpukit_tasks.mnist import MNIST as MNIST
    from tpukit_tasks.mshnet import MSHNet as MSHNet
    from tpukit_tasks.mshnet.explore import explore as explore
    from tpukit_tasks.text import LanguageModel as LanguageModel
    from tpukit_tools.export import export as export
    from tpukit_tools.plan import plan as plan

__version__ = "0.1.0"

_HOMES = {
    "TpukitError": "tpukit.host.errors",
    "detect": "tpukit.host.environment",
    "find_dataset": "tpukit.data.datasets",
    "mount_drive": "tpukit.host.drive",
    "Checkpoints": "tpukit.runs.checkpoints",
    "Run": "tpukit.runs.run",
    "core": "tpukit.launching.core",
    "launch": "tpukit.launching.launcher",
    "live": "tpukit.reporting.live",
    "metrics_report": "tpukit.reporting.device_report",
    "train": "tpukit.training.loop",
    "train_core": "tpukit.training.spawned",
    "test": "tpukit.training.evaluation",
    "export": "tpukit_tools.export",
    "plan": "tpukit_tools.plan",
    "predict": "tpukit.inference.predict",
    "Task": "tpukit.training.task",
    "explore": "tpukit_tasks.mshnet.explore",
    "save_zip": "tpukit.inference.own",
    "show": "tpukit.reporting.display",
    "show_labels": "tpukit.reporting.display",
    "show_own": "tpukit.inference.own",
    "show_predictions": "tpukit.reporting.display",
    "show_report": "tpukit.reporting.display",
    "show_samples": "tpukit.reporting.display",
    "ImageClassifier": "tpukit_tasks.images",
    "LanguageModel": "tpukit_tasks.text",
    "MNIST": "tpukit_tasks.mnist",
    "MSHNet": "tpukit_tasks.mshnet",
    "CDEIT": "tpukit_tasks.cdeit",
}
__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll] (loaded when used)


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module 'tpukit' has no attribute {name!r}; it has {', '.join(__all__)}")
    from tpukit.host.errors import importing

    with importing():
        return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__():
    return [*__all__, "__version__"]
