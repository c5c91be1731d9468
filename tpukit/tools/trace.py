"""`tpukit report RUN --trace N`: take steps of a run's task under XLA's profiler, and name the lines that
interrupt a step. The run is not touched: what the steps learn, from fresh weights, is thrown away."""

import collections
import contextlib
import functools
import itertools
import os
import tempfile
import traceback
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tpukit.host.errors import TpukitError
from tpukit.host.known_errors import explain_known_errors, fix_for
from tpukit.host.signals import StopSignal
from tpukit.launching.launcher import launch
from tpukit.runs.run import Run
from tpukit.training.setup import Trainer
from tpukit.training.task import Task

WARM_UP = 2  # steps before the trace: the first compiles
# What waits for the device, or has no fixed shape.
BLOCKING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2")
PACKAGE = os.path.dirname(os.path.dirname(__file__))
LIBRARIES = ("<", os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(torch.__file__)))


def trace(task: Task, run: Run, *, steps: int = 5) -> list[str]:
    """Look at steps of a run's task, in its last phase. Return the findings as sentences; on an XLA device a
    trace of some steps is kept as trace/ in the run's folder."""
    if steps < 1:
        raise TpukitError(f"--trace {steps}: trace one step or more")
    function = functools.partial(_trace_steps, steps=steps, folder=run.path / "trace")
    with tempfile.TemporaryDirectory() as scratch:
        return launch(function, task, Run.open(scratch, task))


def _trace_steps(task: Task, run: Run, *, steps: int, folder: Path, runtime=None) -> list[str]:
    """On every core: return the findings as sentences."""
    run.echo = False
    with StopSignal() as stop, explain_known_errors():
        trainer = Trainer(task, run, runtime, stop)
        trainer.model.train()
        with contextlib.closing(trainer.batches(endless=True)) as batches:
            first = next(batches)
            sentences = [_profile(trainer, batches, steps, folder)]
        # Outside of its compiled graph, so that each operation is seen as Python calls it.
        with Interruptions(trainer.runtime) as interruptions:
            trainer.step.eager(*trainer.step.arguments(first, task.epochs, trainer.lr_factor()))
    for (operation, line), count in interruptions.lines.most_common():
        sentences.append(f"{operation}, {count} times per step, at {line}.")
    if trainer.runtime.device.type == "cpu":
        sentences.append("On a CPU nothing waits; PJRT_DEVICE=CPU shows what would wait on an XLA device.")
    elif not interruptions.lines:
        sentences.append("No operation of the step ran on the host, and none waited for the device.")
    return sentences


def _profile(trainer, batches, steps, folder):
    """Take steps under XLA's profiler. Return a sentence: where the trace is, or why there is none."""
    runtime = trainer.runtime
    if runtime.device.type != "xla":
        return f"No trace on {runtime}: take steps of your own in `with torch.profiler.profile() as profile`."
    from tpukit.devices import xla_counters

    try:
        _take_steps(trainer, batches, WARM_UP)
        with contextlib.ExitStack() as profiled:
            if runtime.world.rank == 0:
                xla_counters.start_trace(str(folder))
                profiled.callback(xla_counters.stop_trace)
            _take_steps(trainer, batches, steps)
    except (RuntimeError, ValueError) as failure:  # it is not one graph, or the compiler refuses it
        return f"No trace, because the step fails on {runtime}: {fix_for(str(failure)) or failure}"
    return f"The profiler's trace of {steps} steps on {runtime}, for TensorBoard: {folder}"


def _take_steps(trainer, batches, count):
    for batch in itertools.islice(batches, count):
        trainer.take_step(batch, trainer.task.epochs)
    trainer.runtime.sync()


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
        is_library = frame.filename.startswith(LIBRARIES) and not frame.filename.startswith(PACKAGE)
        if frame.filename != __file__ and not is_library:
            return f"{frame.filename}:{frame.lineno}"
    return "the backward pass"  # which runs on a thread of its own
