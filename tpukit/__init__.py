"""tpukit: PyTorch training that simply works on Colab, Kaggle and a laptop.

Names are loaded when they are used: `import tpukit` imports neither torch nor matplotlib.
"""

import importlib

__version__ = "0.1.0"

_HOMES = {
    "TpukitError": "errors",
    "detect": "environment",
    "Environment": "environment",
    "find_dataset": "storage",
    "find_run": "storage",
    "mount_drive": "storage",
    "simulate": "simulator",
    "Run": "run",
    "launch": "launching",
    "CoreFailed": "watching",
    "train": "training",
    "test": "scoring",
    "plan": "tools.plan",
    "Workload": "task",
    "show": "display",
    "show_comparison": "display",
    "show_plan": "display",
    "show_predictions": "display",
    "show_report": "display",
    "show_samples": "display",
    "show_task": "display",
    "MNIST": "workloads.mnist",
    "MSHNet": "workloads.mshnet",
    "CDEIT": "workloads.cdeit",
}
__all__ = sorted(_HOMES)


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module 'tpukit' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"tpukit.{_HOMES[name]}"), name)


def __dir__():
    return [*__all__, "__version__"]
