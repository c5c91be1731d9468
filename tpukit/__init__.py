"""tpukit: PyTorch training that simply works on Colab, Kaggle and a laptop.

Names are loaded when they are used: `import tpukit` imports neither torch nor matplotlib.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for editors; the same names as in _HOMES
    from tpukit.host.drive import mount_drive as mount_drive
    from tpukit.host.environment import detect as detect
    from tpukit.host.errors import TpukitError as TpukitError
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
    from tpukit.tasks.cdeit import CDEIT as CDEIT
    from tpukit.tasks.datasets import find_dataset as find_dataset
    from tpukit.tasks.images import ImageClassifier as ImageClassifier
    from tpukit.tasks.mnist import MNIST as MNIST
    from tpukit.tasks.mshnet import MSHNet as MSHNet
    from tpukit.tasks.text import LanguageModel as LanguageModel
    from tpukit.tools.explore import explore as explore
    from tpukit.tools.export import export as export
    from tpukit.tools.own import save_zip as save_zip
    from tpukit.tools.own import show_own as show_own
    from tpukit.tools.plan import plan as plan
    from tpukit.tools.predict import predict as predict
    from tpukit.training.evaluation import test as test
    from tpukit.training.loop import train as train
    from tpukit.training.spawned import train_core as train_core
    from tpukit.training.task import Task as Task

__version__ = "0.1.0"

_HOMES = {
    "TpukitError": "host.errors",
    "detect": "host.environment",
    "find_dataset": "tasks.datasets",
    "mount_drive": "host.drive",
    "Checkpoints": "runs.checkpoints",
    "Run": "runs.run",
    "core": "launching.core",
    "launch": "launching.launcher",
    "live": "reporting.live",
    "metrics_report": "reporting.device_report",
    "train": "training.loop",
    "train_core": "training.spawned",
    "test": "training.evaluation",
    "export": "tools.export",
    "plan": "tools.plan",
    "predict": "tools.predict",
    "Task": "training.task",
    "explore": "tools.explore",
    "save_zip": "tools.own",
    "show": "reporting.display",
    "show_labels": "reporting.display",
    "show_own": "tools.own",
    "show_predictions": "reporting.display",
    "show_report": "reporting.display",
    "show_samples": "reporting.display",
    "ImageClassifier": "tasks.images",
    "LanguageModel": "tasks.text",
    "MNIST": "tasks.mnist",
    "MSHNet": "tasks.mshnet",
    "CDEIT": "tasks.cdeit",
}
__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll] (loaded when used)


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module 'tpukit' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"tpukit.{_HOMES[name]}"), name)


def __dir__():
    return [*__all__, "__version__"]
