"""Whether the real torch_tpu has a name, and takes the arguments of a call.

In an environment with torch_tpu: `python -m tests.devices.torch_tpu_calls` reads a list of (place, name,
number of positional arguments, keywords) as JSON, without a number where nothing is called, and prints what
does not fit."""

import importlib
import inspect
import json
import os
import shutil
import sys

import pytest

from tests.conftest import ROOT

PACKAGES = ("torch==2.13.0", "torch_tpu==0.2.0", "jax==0.10.2", "jaxlib==0.10.2", "libtpu==0.0.52")


def fault(name, count, keywords):
    """What is wrong with a use of the real package, or ""."""
    try:
        found = _resolve(name)
        if getattr(found, "__tt_api_stage__", "") in ("Internal", "Deprecated"):
            return found.__tt_api_stage__
        if count is not None:
            _bind(found, count, keywords)
    except Exception as error:
        # It is there, and opens a chip.
        return "" if "No jellyfish device found" in str(error) else f"{type(error).__name__}: {error}"
    return ""


def _bind(function, count, keywords):
    """Raise TypeError if a function does not take these arguments."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # of C++, with its arguments in the docstring, if anywhere
        if missing := [keyword for keyword in keywords if f"{keyword}:" not in function.__doc__]:
            raise TypeError(f"no argument {', '.join(missing)}") from None
    else:
        signature.bind(*[None] * count, **dict.fromkeys(keywords))


def _resolve(name):
    module, _, inner = name.rpartition(".")
    try:
        return importlib.import_module(name)
    except ImportError:
        return getattr(_resolve(module), inner)


def in_the_real_package(tmp_path, *arguments, text=""):
    """A process that has ended, in the environment of the planner, which holds torch_tpu itself: `folder`."""
    if sys.platform != "linux" or shutil.disk_usage(tmp_path).free < 6e9:
        pytest.skip("torch_tpu has wheels for Linux, and takes 2.5 GB")
    from tpukit.tools import plan
    from tpukit.tools.child import run_python

    folder = plan.install_compiler(packages=PACKAGES)
    variables = dict(PYTHONPATH=f"{ROOT}{os.pathsep}{folder}", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    variables["TPU_SKIP_MDS_QUERY"] = "1"
    ran = run_python(*arguments, text=text, variables=variables)
    ran.folder = folder
    return ran


if __name__ == "__main__":
    from tpukit.devices import torch_tpu_private

    torch_tpu_private.load()
    faults = [(place, name, fault(name, *call)) for place, name, *call in json.load(sys.stdin)]
    print("FAULTS", json.dumps([found for found in faults if found[2]]))
