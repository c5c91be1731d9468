"""`tpukit report RUN --trace N`: a few more steps of a run's task, beside the run, under a profiler.

Profiling costs time, so a training does not do it. The run itself is not touched: the steps start from its
best weights, and what they learn is thrown away."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import os
import re
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tpukit.devices import cuda_graph
from tpukit.devices.recompiles import UnexpectedRecompilation
from tpukit.host import files
from tpukit.host.errors import TpukitError
from tpukit.host.known_errors import explain_known_errors, fix_for
from tpukit.launching.launcher import launch
from tpukit.runs.run import Run
from tpukit.runs.signals import StopSignal
from tpukit.training.setup import Trainer

if TYPE_CHECKING:
    from tpukit.training.task import Task

WARM_UP = cuda_graph.WARM_UP + 1  # steps before the trace: the first compiles, on a GPU the last is captured
# What waits for the device, or has no fixed shape.
BLOCKING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2")
PACKAGE = Path(__file__).resolve().parents[1]
TRAINING, TASKS = (os.path.join(PACKAGE, name, "") for name in ("training", "tasks"))
TORCH_OPTIM = os.path.join(os.path.dirname(torch.__file__), "optim", "")
STANDARD_LIBRARY = os.path.dirname(os.__file__)


def trace(task: Task, run: Run, *, steps: int = 5) -> list[str]:
    """Trace some steps of a run's task on the device. Returns what was found, as sentences.

    The profiler's trace is kept as trace/ in the run's folder, the compiled graph of an XLA device as
    step.hlo."""
    if steps < 1:
        raise TpukitError(f"--trace {steps}: trace one step or more")
    best = run.path / "best.safetensors"
    task = dataclasses.replace(task, weights=best if best.exists() else task.weights)
    trained = run.records("train")
    epoch = trained[-1]["epoch"] if trained else max(task.epochs, 1) - 1  # whose phase is traced
    function = functools.partial(_trace_steps, steps=steps, folder=run.path, epoch=epoch)
    with tempfile.TemporaryDirectory() as scratch:
        return launch(function, task, Run.open(scratch, task))


def _trace_steps(task, run, *, steps, folder, epoch, runtime=None):
    """On every core: what was found, as sentences."""
    run.echo = False
    with StopSignal() as stop, explain_known_errors():
        trainer = Trainer(task, run, runtime, stop)
        runtime, step = trainer.runtime, trainer.step
        trainer.model.train()
        with contextlib.closing(trainer.batches(endless=True)) as batches:
            first = next(batches)
            sentences = [_profile(trainer, batches, epoch, steps, folder / "trace")]
        # Outside of its compiled graph, so that each operation is seen as Python calls it. The results are
        # thrown away.
        eager = functools.partial(step.eager, *step.arguments(first, epoch, trainer.lr_factor()))
        hlo_of = getattr(runtime, "hlo_of", None)  # XLA's alone
        hlo = hlo_of(eager, trainer.model, trainer.optimizer) if hlo_of else None
        with _Interruptions(runtime) as found, torch.autograd.set_detect_anomaly(True, check_nan=False):
            eager()
    for (operation, line), count in found.lines.most_common():
        sentences.append(f"{operation}, {count} times per step, at {line}.")
    if not found.lines:
        sentences.append("No operation of the step ran on the host instead, and none waited for the device.")
    if hlo is not None:
        if runtime.world.rank == 0:
            files.write_atomic(folder / "step.hlo", hlo)
        sentences.append(f"The step's compiled graph as HLO: {folder / 'step.hlo'}")
    return sentences


def _profile(trainer, batches, epoch, steps, folder):
    """Take steps under the profiler. Returns a sentence: where the trace is, or why they fail."""
    runtime = trainer.runtime

    def run_steps(count):
        for batch in itertools.islice(batches, count):
            trainer.take_step(batch, epoch)
        runtime.sync()

    try:
        run_steps(WARM_UP)
        with runtime.traced(folder) if runtime.world.rank == 0 else contextlib.nullcontext():
            run_steps(steps)
    except (RuntimeError, ValueError) as failure:  # the second is XLA's of a graph that it refuses
        reason = failure if isinstance(failure, UnexpectedRecompilation) else fix_for(str(failure))
        if reason is None:
            raise
        return f"No trace, because the step fails on {runtime}: {reason}"
    viewers = "with the plugin of `pip install xprof` for XLA, of `torch-tb-profiler` for GPUs and CPUs"
    where = f"is in {folder}: `tensorboard --logdir {folder}` shows it ({viewers})"
    return f"A trace of {steps} steps on {runtime} {where}."


class _Interruptions(TorchDispatchMode):
    """Counts what runs on the host instead of an XLA device, and what waits for the device. lines:
    (operation, line) -> how often."""

    def __init__(self, runtime):
        super().__init__()
        self.runtime = runtime
        self.lines = collections.Counter()

    def __torch_dispatch__(self, operation, types, arguments=(), named=None):
        before = self._fallbacks()
        result = operation(*arguments, **(named or {}))
        name, device = operation._schema.name, self.runtime.device.type
        blocks = name in BLOCKING and arguments[0].device.type == device
        if blocks or _copies_to_host(name, arguments, result) or self._fallbacks() != before:
            frames = _frames()
            # On a CPU, where nothing waits, the optimizers read their own step counts too.
            if device != "cpu" or not any(TORCH_OPTIM in path for path, _ in frames):
                self.lines[name, _line(frames)] += 1
        return result

    def _fallbacks(self):
        return sum(self.runtime.counters().get("fallbacks", {}).values())


def _copies_to_host(name, arguments, result):
    if name not in ("aten::_to_copy", "aten::copy_"):
        return False
    source = arguments[1] if name == "aten::copy_" else arguments[0]
    return torch.is_tensor(source) and source.device.type != "cpu" and result.device.type == "cpu"


def _frames():
    """[(path, line number)] of the code that the running operation belongs to, from the step inwards; of a
    backward pass, that of its forward."""
    node = torch._C._current_autograd_node()
    recorded = []
    if node is not None:
        metadata: dict = node.metadata  # pyright: ignore[reportAssignmentType] a method in torch's stub
        recorded = metadata.get("traceback_", [])
    matches = [re.match(r'\s*File "(.+?)", line (\d+)', text) for text in recorded]
    frames = [(match[1], int(match[2])) for match in matches if match]
    frames = frames or [(frame.filename, frame.lineno) for frame in traceback.extract_stack()]
    frames = [frame for frame in frames if frame[0] != __file__]
    in_training = [number for number, (path, _) in enumerate(frames) if path.startswith(TRAINING)]
    return frames[in_training[-1] :] if in_training else frames


def _line(frames):
    """The innermost line of a task or of the user's own code; where there is none, the innermost line."""
    own = [frame for frame in frames if not _is_library(frame[0])] or frames or [("?", 0)]
    path, number = own[-1]
    is_backward = torch._C._current_autograd_node() is not None
    return f"{path}:{number}" + (" (its backward pass)" if is_backward else "")


def _is_library(path):
    if path.startswith(f"{PACKAGE}{os.sep}"):
        return not path.startswith(TASKS)
    return path.startswith(("<", STANDARD_LIBRARY)) or f"{os.sep}site-packages{os.sep}" in path
