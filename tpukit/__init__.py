"""tpukit: PyTorch training that simply works on Colab, Kaggle and a laptop.

Names are loaded when they are used: `import tpukit` imports neither torch nor matplotlib.
"""

import importlib

__version__ = "0.1.0"

_HOMES = {
    "TpukitError": "host.errors",
    "detect": "host.environment",
    "find_dataset": "tasks.datasets",
    "mount_drive": "host.drive",
    "Run": "runs.run",
    "core": "launching.core",
    "launch": "launching.launcher",
    "live": "reporting.widgets",
    "train": "training.loop",
    "train_core": "training.spawned",
    "test": "training.evaluation",
    "export": "tools.export",
    "plan": "tools.plan",
    "predict": "tools.predict",
    "Task": "training.task",
    "explore": "reporting.widgets",
    "save_zip": "reporting.own",
    "show": "reporting.display",
    "show_labels": "reporting.display",
    "show_own": "reporting.own",
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
