"""`tpukit report RUN --trace N` and `--hlo`: a few steps of a run's task once more, beside the run, with everything watched.

What is watched costs time, so a training does not do it. The run itself is not touched: the steps start from its best weights,
and what they learn is thrown away.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import re
import tempfile
import traceback

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tpukit.host import environment, files
from tpukit.host.errors import TpukitError
from tpukit.host.known_errors import fix_for
from tpukit.host.tables import Table
from tpukit.launching.launcher import launch
from tpukit.runs.run import Run
from tpukit.runs.signals import StopSignal
from tpukit.training.data import training_plan
from tpukit.training.loop import Training

WARM_UP = 2  # steps before the trace: the first compiles
# What waits for the device, or has no fixed shape.
READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2")
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclasses.dataclass
class Look:
    """What was seen. rows: (operation, times in a step, line) of what ran on the CPU instead or was read back. folder: with the
    trace, or trouble: why there is none."""

    device: str
    steps: int
    folder: str
    rows: list
    trouble: str | None = None
    hlo: str | None = None

    def findings(self):
        """In words."""
        said = [
            f"A trace of {self.steps} steps on {self.device} is in {self.folder}: `tensorboard --logdir {self.folder}` shows "
            "it (with the plugin of `pip install xprof` for XLA, of `torch-tb-profiler` or ui.perfetto.dev for GPUs and CPUs)."
        ]
        if self.trouble:
            said = [f"No trace, because the step fails on {self.device}: {self.trouble}"]
        said += [f"{operation}, {count} times in a step, at {line}." for operation, count, line in self.rows[:5]]
        if not self.rows:
            said.append("No operation of the step ran on the CPU instead, and none waited for the device.")
        return [*said, f"The step's program as HLO: {self.hlo}"] if self.hlo else said

    def table(self):
        return Table("What interrupts a step", ("operation", "times a step", "line"), self.rows)


def look(task, run, *, steps=5, hlo=False, cores=None, parallel="processes"):
    """Trace some steps of a run's task on the device. Returns a `Look`.

    The trace is kept as trace/ in the run's folder, the HLO as step.hlo. Raises TpukitError where hlo is asked for on a device
    that has none.
    """
    if steps < 1:
        raise TpukitError(f"--trace {steps}: trace one step or more")
    best, folder = run.path / "best.safetensors", run.path / "trace"
    task = dataclasses.replace(task, weights=best if best.exists() else task.weights)
    trained = run.records("train")
    epoch = trained[-1]["epoch"] if trained else max(task.epochs, 1) - 1  # whose phase is looked at
    if hlo and environment.detect().accelerator not in ("tpu", "xla"):
        raise TpukitError("--hlo: only XLA devices (a TPU, or PJRT_DEVICE=CPU) compile a step to HLO; leave it out here")
    with tempfile.TemporaryDirectory() as place:
        function = functools.partial(_look, steps=steps, hlo=hlo, folder=folder, epoch=epoch)
        found = launch(function, task, Run.open(place, task), cores=cores, parallel=parallel)
    if text := found.pop("text"):
        found["hlo"] = str(run.path / "step.hlo")
        files.write_atomic(run.path / "step.hlo", text)
    return Look(**{**found, "rows": [tuple(row) for row in found["rows"]]})


def _look(task, run, *, steps, hlo, folder, epoch, runtime=None):
    run.echo = False
    with StopSignal() as stop, environment.explain_known_errors():
        training = Training(task, run, runtime, stop, False)
        runtime = training.runtime
        training.model.train()
        size = dict(seed=task.seed, num_draws=training.data.num_draws)
        plans = (training_plan(len(training.data), task.batch_size, epoch=n, **size) for n in itertools.count(epoch))
        plan = itertools.islice(itertools.chain.from_iterable(plans), 1 + WARM_UP + steps)
        trouble = None
        with contextlib.closing(training.feed.batches(plan)) as batches:
            first = next(batches)
            try:
                for batch in itertools.islice(batches, WARM_UP):
                    training.sums = training.step_program(batch, epoch, training.sums)
                runtime.sync()
                with runtime.traced(folder) if runtime.world.rank == 0 else contextlib.nullcontext():
                    for batch in itertools.islice(batches, steps):
                        training.sums = training.step_program(batch, epoch, training.sums)
                    runtime.sync()
            except RuntimeError as error:
                if (fix := fix_for(str(error))) is None:
                    raise
                trouble = fix
        # From here on without its program, so that each operation is seen as Python asks for it. The results are of no use to
        # anybody.
        step = functools.partial(training.step, first, epoch, training.sums)
        text = runtime.hlo_of(step, training.model, training.optimizer) if hlo else None
        lines = _Lines(runtime)
        with lines, torch.autograd.set_detect_anomaly(True, check_nan=False):
            step()
    rows = [(operation, count, line) for (operation, line), count in lines.found.most_common()]
    found = dict(device=str(runtime), steps=steps, folder=str(folder), rows=rows, trouble=trouble, text=text)
    return json.loads(json.dumps(found))


class _Lines(TorchDispatchMode):
    """Within it, counts by operation and line what runs on the CPU in an XLA device's place, and what reads from the device."""

    def __init__(self, runtime):
        super().__init__()
        self.runtime, self.found = runtime, collections.Counter()

    def __torch_dispatch__(self, operation, types, arguments=(), named=None):
        before = self._fallbacks()
        result = operation(*arguments, **(named or {}))
        name = operation._schema.name
        device = self.runtime.device.type
        reads = name in READS and arguments[0].device.type == device or _copies_to_host(name, arguments, result)
        if self._fallbacks() != before or reads:
            frames = _frames()
            # On a CPU the optimizers' own counts of steps are read too, where nothing waits.
            if device != "cpu" or not any(f"{os.sep}torch{os.sep}optim{os.sep}" in path for path, _ in frames):
                self.found[name, _line(frames)] += 1
        return result

    def _fallbacks(self):
        return sum(self.runtime.counters().get("fallbacks", {}).values())


def _copies_to_host(name, arguments, result):
    if name not in ("aten::_to_copy", "aten::copy_"):
        return False
    source = arguments[1 if name == "aten::copy_" else 0]
    return torch.is_tensor(source) and source.device.type != "cpu" and result.device.type == "cpu"


def _frames():
    """[(path, line)] of the code that the running operation belongs to, from the step inwards; of a backward pass, that of its
    forward."""
    node = torch._C._current_autograd_node()
    said = node.metadata.get("traceback_", []) if node is not None else []
    frames = [(m[1], int(m[2])) for text in said if (m := re.match(r'\s*File "(.+?)", line (\d+)', text))]
    frames = frames or [(frame.filename, frame.lineno) for frame in traceback.extract_stack()]
    step = max((n for n, (path, _) in enumerate(frames) if path == os.path.join(PACKAGE, "training.py")), default=-1)
    return [frame for frame in frames[step + 1 :] if frame[0] != __file__]


def _line(frames):
    """The line of a workload or of the user's own code; where there is none, the innermost one."""
    own = [frame for frame in frames if not _is_machinery(frame[0])] or frames or [("?", 0)]
    return f"{own[-1][0]}:{own[-1][1]}{' (its backward pass)' if torch._C._current_autograd_node() is not None else ''}"


def _is_machinery(path):
    library = f"{os.sep}site-packages{os.sep}" in path or path.startswith(("<", os.path.dirname(os.__file__)))
    ours = path.startswith(PACKAGE + os.sep) and not path.startswith(os.path.join(PACKAGE, "workloads"))
    return library or ours
