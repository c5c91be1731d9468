"""The workloads by name: name -> (module, class, one line). Nothing is imported until one is asked for."""

import importlib

from tpukit.errors import TpukitError

WORKLOADS = {
    "mnist": ("tpukit.workloads.mnist", "MNIST", "handwritten digits with a small convolutional network"),
    "mshnet": ("tpukit.workloads.mshnet", "MSHNet", "infrared small target detection (Liu et al., CVPR 2024)"),
    "cdeit": ("tpukit.workloads.cdeit", "CDEIT", "diffusion transformer for impedance tomography (Shi et al., IEEE TIM 2025)"),
}


def find(name):
    """The Workload class of a name. Raises TpukitError listing the names there are."""
    if name not in WORKLOADS:
        raise TpukitError(f"no workload {name!r}; there are: {', '.join(WORKLOADS)}")
    module, cls, _ = WORKLOADS[name]
    return getattr(importlib.import_module(module), cls)
