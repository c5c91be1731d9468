"""The recipe's step, timed on what is here: each batch size in a process of its own."""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tpukit.host import environment, files
from tpukit.host.errors import TpukitError
from tpukit.host.tables import GIB
from tpukit.tools.compare.measurement import check_writable, measurement_of, rate
from tpukit.training.task import from_request, to_request

ROUNDS = 5  # of timed steps; each ends with a reading, as an interval of a training does
WARM_UP = 4  # steps between the first and the timed ones: torch_xla watches them, and they are slower
CEILING = 1024  # where doubling ends
CPU_DOUBLINGS = 1  # a CPU gains little from a large batch, and each one takes long
SYNTHETIC_IMAGES = {"mshnet": 640}  # where there is no dataset: enough for large batches
SPARE = 0.8  # of the free memory a batch may be expected to take on a CPU
TOO_LARGE = re.compile(
    r"does not fit into the device's memory|RESOURCE_EXHAUSTED|out of memory|can.t allocate memory|bad_alloc|MemoryError"
    r"|the host's memory was full",
    re.IGNORECASE,
)
SAID = "tpukit says: "


# On every core


def measure(task, run, *, runtime=None, steps=20, started=None):
    """Time the training step of `task` on this core, among others: a function for `launch`, like `train`.

    What runs is a training without its evaluations and checkpoints: its feed, its program, its readings. A phased loss is
    timed in its last phase. steps: timed ones, in `ROUNDS` rounds. started: `time.time()` at which the session began, now
    unless given. Returns a dict on every rank.
    """
    from tpukit.runs.signals import StopSignal
    from tpukit.training.loop import Training

    started = started or time.time()
    with StopSignal() as stop, environment.explain_known_errors():
        trainer = Training(task, run, runtime, stop, progress=False)
        runtime = trainer.runtime
        trainer.model.train()
        runtime.heartbeat(0)
        with contextlib.closing(trainer.feed.batches(_endless_plan(task, trainer.data))) as batches:
            first_step_s, _ = _timed(trainer, batches, 1)
            start_s = time.time() - started
            _timed(trainer, batches, WARM_UP)
            compiled, _ = runtime.compilations()
            per_round = math.ceil(steps / ROUNDS)
            rounds = [_timed(trainer, batches, per_round) for _ in range(math.ceil(steps / per_round))]
        step_ms, wait_ms = ([1e3 * seconds / per_round for seconds in column] for column in zip(*rounds))
        row = dict(
            batch_size=task.batch_size,
            fits=True,
            first_step_s=round(first_step_s, 3),
            start_s=round(start_s, 3),
            step_ms=round(statistics.median(step_ms), 3),
            step_ms_low=round(min(step_ms), 3),
            step_ms_high=round(max(step_ms), 3),
            wait_ms=round(statistics.mean(wait_ms), 3),
            timed_steps=len(rounds) * per_round,
            compiled_late=runtime.compilations()[0] - compiled,
            **_peak_of_memory(runtime),
        )
        about = dict(device=str(runtime), cores=runtime.cores, processes=runtime.world.size, precision=runtime.precision)
        return dict(row=row, **about, samples=len(trainer.data))


def _endless_plan(task, data):
    """The batches of a training that has no last epoch."""
    from tpukit.training.data import training_plan

    for epoch in itertools.count():
        yield from training_plan(len(data), task.batch_size, seed=task.seed, epoch=epoch, num_draws=data.num_draws)


def _timed(trainer, batches, steps):
    """(seconds of so many steps and the reading after them, those of it in which they waited for their batches).

    The reading waits for the device, and is where a core leaves that was asked to."""
    began, waited = time.perf_counter(), 0.0
    for _ in range(steps):
        asked = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - asked
        trainer.take_step(batch, trainer.task.epochs)
    stop = trainer.stop
    rows = trainer.runtime.totals(trainer.sums, stop.signal or trainer.run.stop_requested() or 0)
    stop.signal = int(max(row[-1] for row in rows)) or None
    stop.check()
    return time.perf_counter() - began, waited


def _peak_of_memory(runtime):
    """dict(memory_bytes, memory_of), on every rank the same: of the fullest device, or of all processes if no device tells."""
    memory = runtime.memory()
    peaks = [row[0] for row in runtime.world.all_gather([max(peak for peak, _ in memory) if memory else resident_bytes()])]
    if memory:
        return dict(memory_bytes=int(max(peaks)), memory_of="a core's device")
    return dict(memory_bytes=int(sum(peaks)), memory_of="resident set of the processes")


def resident_bytes():
    """The most host memory that this process ever had, in bytes."""
    with contextlib.suppress(OSError, StopIteration):
        # Not ru_maxrss: on Linux a process starts with that of the one which started it.
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# From the notebook or the shell


def measure_here(task, *, batch_sizes=None, steps=20, cores=None, parallel="processes", max_batch=None, out=None, say=print):
    """Measure a task on what is here, at several batch sizes, each in a process of its own. Returns a `Measurement`.

    batch_sizes: global ones; otherwise they double from the task's own until a step does not fit, the training set or
    `max_batch` ends it. out: the JSON file, which is written after every size, so that an interrupt keeps what is there.
    Raises TpukitError where nothing could be measured, saying why.
    """
    if steps < 1:
        raise TpukitError(f"steps={steps}: time at least 1")
    if any(size < 1 for size in batch_sizes or ()):
        raise TpukitError(f"batch sizes {', '.join(map(str, batch_sizes))}: each is at least 1")
    if environment.under_torchrun():
        raise TpukitError("start `tpukit compare` without torchrun: it takes all GPUs of this host by itself")
    if out:
        check_writable(out)  # now, not after minutes
    task.check_dataset_dir()
    env = environment.detect()
    here = cores or (env.cores if env.accelerator in ("tpu", "cuda") else 1)
    on_cpu = env.accelerator in ("cpu", "xla")
    first = math.ceil(task.batch_size / here) * here
    if max_batch is None:
        max_batch = first * 2**CPU_DOUBLINGS if on_cpu else CEILING
    sizes = dict.fromkeys(batch_sizes) if batch_sizes else _doubling(first)
    rows, about = [], None
    for size in sizes:
        if about and not batch_sizes and (size > max_batch or size > about["samples"]):
            what = f"{max_batch}, the set limit" if size > max_batch else f"the {about['samples']} samples of the training set"
            say(f"batch {size}: not tried, because it is more than {what}")
            break
        if on_cpu and (why := _would_crowd(rows, size, _free_bytes())):
            say(f"batch {size}: not tried, because it {why}")
            break
        how = ", the first step with minutes of compilation" if env.accelerator in ("tpu", "xla") else ""
        say(f"batch {size}: measuring in a process of its own{how}")
        found = _in_a_process(dataclasses.replace(task, batch_size=size), steps, cores, parallel)
        if "why" in found:
            rows.append(dict(batch_size=size, fits=False, why=found["why"]))
            say(f"batch {size}: does not fit: {found['why']}")
        else:
            about = found
            rows.append(found["row"])
            say(f"batch {size}: {_spoken(found['row'])}")
        if about:
            measurement = measurement_of(task, env, about, sorted(rows, key=lambda row: row["batch_size"]))
            if out:
                measurement.write(out)
        if not rows[-1]["fits"] and not batch_sizes:
            break
    if about is None:
        raise TpukitError(f"no batch size fits: {rows[-1]['why'] if rows else 'none was tried'}")
    if out:
        say(f"saved: {out}")
    return measurement


def _doubling(size):
    while True:
        yield size
        size *= 2


def _spoken(row):
    return (
        f"{row['step_ms']:.4g} ms a step ({row['step_ms_low']:.4g} to {row['step_ms_high']:.4g}), {rate(row):.4g} images a "
        f"second, first step {row['first_step_s']:.1f} s, {row['memory_bytes'] / GIB:.2f} GiB"
    )


def _would_crowd(rows, size, free):
    """Why a batch is not to be tried on a CPU, whose memory is everybody's, or None. free: bytes, or None where not known."""
    fitting = [(row["batch_size"], row["memory_bytes"]) for row in rows if row["fits"]]
    if free is None or not fitting:
        return None
    (least, low), (most, high) = min(fitting), max(fitting)
    slope = (high - low) / (most - least) if most > least else high / most
    expected = high + max(0.0, slope) * (size - most)
    if expected <= SPARE * free:
        return None
    return f"would take about {expected / GIB:.1f} GiB of host memory, of which {free / GIB:.1f} GiB are free"


def _free_bytes(root="/"):
    """Free memory of this machine or of its container, in bytes; None where it is not said."""
    found = []
    with contextlib.suppress(OSError, StopIteration):
        lines = (Path(root) / "proc/meminfo").read_text().splitlines()
        found.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]))
    with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
        group = Path(root) / "sys/fs/cgroup"
        found.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return min(found, default=None)


def _in_a_process(task, steps, cores, parallel):
    """What `measure` found in a fresh process, or dict(why) where the step is too large for the memory.

    Fresh, because a memory error, the one opening of an XLA device and a peak of memory are the whole process's.
    """
    request, variables = to_request(task)
    request |= dict(steps=steps, cores=cores, parallel=parallel, started=time.time())
    with tempfile.TemporaryDirectory(prefix="tpukit-compare-") as folder:
        command = [sys.executable, "-P", "-m", "tpukit.tools.compare", folder]
        environ = {**os.environ, **variables}
        ran = subprocess.run(command, input=json.dumps(request), env=environ, capture_output=True, text=True)
        result = Path(folder) / "result.json"
        if ran.returncode == 0 and result.exists():
            return json.loads(result.read_text())
    if ran.returncode in (-signal.SIGINT, 128 + signal.SIGINT):
        raise KeyboardInterrupt
    if ran.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return dict(why="the process was killed, most likely because this machine's memory was full")
    said = ran.stderr.strip().splitlines() or [f"it ended with code {ran.returncode} and without a word"]
    if TOO_LARGE.search(ran.stderr):
        return dict(why=next(line for line in said if TOO_LARGE.search(line)).strip()[:300])
    said = ran.stderr.partition(SAID)[2].strip() or said[-1]
    raise TpukitError(f"batch {task.batch_size} of {task.name} could not be measured: {said}")


def answer(folder):
    """In the fresh process: answer a request of `_in_a_process`, in a file of the folder."""
    from tpukit.launching.launcher import launch
    from tpukit.launching.supervisor import end_with_parent
    from tpukit.runs.run import Run

    end_with_parent(os.getppid())
    request = json.loads(sys.stdin.read())
    task = from_request(request)
    run = Run.open(folder / "run", task)
    run.echo = False
    function = functools.partial(measure, steps=request["steps"], started=request["started"])
    found = launch(function, task, run, cores=request["cores"], parallel=request["parallel"])
    files.write_atomic(folder / "result.json", json.dumps(found))
