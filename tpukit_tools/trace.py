"""`tpukit report RUN --trace`: take a step of a run's task, and name the lines that interrupt it. The run is
not touched: what the step learns, from fresh weights, is thrown away."""

import collections
import contextlib
import os
import tempfile
import traceback

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tpukit.host.known_errors import explain_known_errors
from tpukit.host.signals import StopSignal
from tpukit.launching.launcher import launch
from tpukit.runs.run import Run
from tpukit.training.setup import Trainer
from tpukit.training.task import Task

# What waits for the device, or has no fixed shape.
BLOCKING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2")
ROOT = os.path.dirname(os.path.dirname(__file__))
PACKAGES = tuple(os.path.join(ROOT, name) + os.sep for name in ("tpukit", "tpukit_tasks", "tpukit_tools"))
LIBRARIES = ("<", os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(torch.__file__)))


def trace(task: Task) -> list[str]:
    """Look at a step of a task, in its last phase. Return the findings as sentences."""
    with tempfile.TemporaryDirectory() as scratch:
        return launch(_trace_step, task, Run.open(scratch, task))


def _trace_step(task: Task, run: Run, *, runtime=None) -> list[str]:
    """On every core: return the findings as sentences."""
    run.echo = False
    with StopSignal() as stop, explain_known_errors():
        trainer = Trainer(task, run, runtime, stop)
        trainer.model.train()
        with contextlib.closing(trainer.batches()) as batches:
            first = next(batches)
        # Outside of its compiled graph, so that each operation is seen as Python calls it.
        with Interruptions(trainer.runtime) as interruptions:
            trainer.step.eager(*trainer.step.arguments(first, task.epochs, trainer.lr_factor()))
    if trainer.runtime.device.type == "cpu":
        return ["On a CPU nothing waits; PJRT_DEVICE=CPU shows what would wait on an XLA device."]
    if not interruptions.lines:
        return ["No operation of the step ran on the host, and none waited for the device."]
    found = interruptions.lines.most_common()
    return [f"{operation}, {count} times per step, at {line}." for (operation, line), count in found]


class Interruptions(TorchDispatchMode):
    """Counts the operations that run on the host instead of an XLA device, or that wait for the device. On a
    CPU there are none.

    lines: (operation, line) -> how often."""

    def __init__(self, runtime):
        super().__init__()
        self.runtime = runtime
        self.lines = collections.Counter()

    def __torch_dispatch__(self, operation, types, arguments=(), named=None):
        before = self.runtime.counters().get("fallbacks")
        result = operation(*arguments, **(named or {}))
        name = operation._schema.name
        is_on_device = any(one.device.type != "cpu" for one in arguments if torch.is_tensor(one))
        waits = name in BLOCKING or (torch.is_tensor(result) and result.device.type == "cpu")
        if is_on_device and waits or self.runtime.counters().get("fallbacks") != before:
            self.lines[name, _line()] += 1
        return result


def _line():
    """Return the innermost line that is not a library's, from which the running operation was called."""
    for frame in reversed(traceback.extract_stack()):
        is_library = frame.filename.startswith(LIBRARIES) and not frame.filename.startswith(PACKAGES)
        if frame.filename != __file__ and not is_library:
            return f"{frame.filename}:{frame.lineno}"
    return "the backward pass"  # it runs on a thread of its own
