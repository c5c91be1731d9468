"""The training step of a recipe, timed on this machine: each batch size in a process of its own."""

import contextlib
import dataclasses
import itertools
import json
import math
import re
import signal
import statistics
import tempfile
import time
from pathlib import Path

from tpukit.host import environment, known_errors
from tpukit.host.errors import TpukitError
from tpukit.host.tables import GIB
from tpukit.tools.child import last_line, run_python
from tpukit.tools.compare.measurement import build_measurement, check_out, default_cores, rate
from tpukit.training.task import to_request

ROUNDS = 5  # of timed steps; each ends with a metric sync, as an interval of a training does
# steps between the first and the timed ones: torch_xla checks them for recompilations, and they are slower
WARM_UP = 4
MAX_BATCH = 1024  # where doubling ends; a CPU, which gains little from a large batch, doubles once
SYNTHETIC_IMAGES = {"mshnet": 640}  # where there is no dataset: enough for large batches
TOO_LARGE = re.compile(
    r"does not fit into the device's memory|RESOURCE_EXHAUSTED|out of memory|can.t allocate"
    r" memory|bad_alloc|MemoryError"
    r"|the host's memory was full",
    re.IGNORECASE,
)


# On every core


def measure(task, run, *, runtime=None, steps=20, started=None):
    """Time the training step of `task` on this core, among others: a function for `launch`, like `train`.

    What runs is a training without its evaluations and checkpoints. A phased loss is timed in its last phase.
    steps: timed ones, in `ROUNDS` rounds. started: `time.time()` at which the session began; by default now.
    Returns a dict on every rank."""
    from tpukit.runs.signals import StopSignal
    from tpukit.training.loop import Trainer

    started = started or time.time()
    with StopSignal() as stop, known_errors.explain_known_errors():
        trainer = Trainer(task, run, runtime, stop)
        trainer.model.train()
        runtime = trainer.runtime
        runtime.heartbeat(0)
        with contextlib.closing(trainer.endless_batches()) as batches:

            def timed(count):
                """(seconds per step with the sync after them, seconds per step of waiting for the batch)."""
                began, waited_s = time.perf_counter(), 0.0
                for _ in range(count):
                    asked = time.perf_counter()
                    batch = next(batches)
                    waited_s += time.perf_counter() - asked
                    trainer.take_step(batch, task.epochs)
                trainer.sync()
                stop.check()
                return (time.perf_counter() - began) / count, waited_s / count

            first_step_s, _ = timed(1)
            start_s = time.time() - started
            timed(WARM_UP)
            compiled, _ = runtime.compilations()
            per_round = math.ceil(steps / ROUNDS)
            rounds = [timed(per_round) for _ in range(math.ceil(steps / per_round))]
            step_ms = [1e3 * step_s for step_s, _ in rounds]
            row = dict(
                batch_size=task.batch_size,
                fits=True,
                first_step_s=round(first_step_s, 3),
                start_s=round(start_s, 3),
                step_ms=round(statistics.median(step_ms), 3),
                step_ms_low=round(min(step_ms), 3),
                step_ms_high=round(max(step_ms), 3),
                wait_ms=round(1e3 * statistics.mean(wait_s for _, wait_s in rounds), 3),
                timed_steps=len(rounds) * per_round,
                compiled_late=runtime.compilations()[0] - compiled,
                **_peak_memory(runtime),
            )
    about = dict(
        device=str(runtime), cores=runtime.cores, processes=runtime.world.size, precision=runtime.precision
    )
    return dict(row=row, **about, samples=len(trainer.data))


def _peak_memory(runtime):
    """dict(memory_bytes, memory_of), on every rank the same: of the fullest device, or of all processes
    together."""
    devices = [peak for peak, _ in runtime.memory()]
    peaks = [row[0] for row in runtime.world.all_gather([max(devices) if devices else peak_host_bytes()])]
    if devices:
        return dict(memory_bytes=int(max(peaks)), memory_of="a core's device")
    return dict(memory_bytes=int(sum(peaks)), memory_of="resident set of the processes")


def peak_host_bytes():
    """The most host memory that this process ever had."""
    status = Path("/proc/self/status")
    if status.exists():  # on Linux ru_maxrss of a process starts with that of its parent
        return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1])
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


# From the notebook or the shell


def measure_here(task, *, batch_sizes=None, steps=20, cores=None, parallel="processes", out=None, log=print):
    """Measure a task on this machine, at several batch sizes, each in a process of its own. Returns a
    `Measurement`.

    batch_sizes: global ones; otherwise they double from the task's own until a step does not fit, or
    MAX_BATCH or the training set ends it. out: the JSON file, which is written after every size, so that an
    interrupt keeps what is there. Raises TpukitError where nothing could be measured, saying why."""
    if steps < 1:
        raise TpukitError(f"steps={steps}: give 1 or more")
    if any(size < 1 for size in batch_sizes or ()):
        raise TpukitError(f"batch sizes {', '.join(map(str, batch_sizes))}: each must be 1 or more")
    if environment.under_torchrun():
        raise TpukitError("start `tpukit compare` without torchrun: it takes all GPUs of this host by itself")
    if out:
        check_out(out)  # now, not after minutes
    task.check_dataset_dir()
    env = environment.detect()
    count = cores or default_cores(env)
    first = math.ceil(task.batch_size / count) * count
    max_batch = 2 * first if env.accelerator in ("cpu", "xla") else MAX_BATCH
    sizes = dict.fromkeys(batch_sizes) if batch_sizes else (first * 2**n for n in itertools.count())
    rows, measured = [], None
    for size in sizes:
        limit = min(max_batch, measured["samples"]) if measured else size
        if size > limit and not batch_sizes:
            log(f"batch {size}: not tried, because doubling ends at {limit}: --batch-sizes tries others")
            break
        log(f"batch {size}: measuring in a process of its own")
        found = _run_process(dataclasses.replace(task, batch_size=size), steps, cores, parallel)
        row = found.get("row", found)
        rows.append(row)
        if row["fits"]:
            measured = found
            log(
                f"batch {size}: {row['step_ms']:.4g} ms per step ({row['step_ms_low']:.4g} to"
                f" {row['step_ms_high']:.4g}), {rate(row):.4g} images/s, first step {row['first_step_s']:.1f}"
                f" s, {row['memory_bytes'] / GIB:.2f} GiB"
            )
        else:
            log(f"batch {size}: does not fit: {row['why']}")
        if measured:
            measurement = build_measurement(
                task, env, measured, sorted(rows, key=lambda row: row["batch_size"])
            )
            if out:
                measurement.write(out)
        if not row["fits"] and not batch_sizes:
            break
    if measured is None:
        raise TpukitError(f"no batch size fits: {rows[-1]['why']}")
    if out:
        log(f"saved: {out}")
    return measurement


def _run_process(task, steps, cores, parallel):
    """What `measure` returned in a fresh process, or dict(batch_size, fits=False, why) where the step needs
    too much memory.

    Fresh, because a memory error, the one opening of an XLA device and a peak of memory are the whole
    process's."""
    request = to_request(task) | dict(steps=steps, cores=cores, parallel=parallel, started=time.time())
    with tempfile.TemporaryDirectory(prefix="tpukit-compare-") as folder:
        ran = run_python("-m", "tpukit.tools.compare", folder, text=json.dumps(request))
        result = Path(folder) / "result.json"
        answer = json.loads(result.read_text()) if result.exists() else {}
    if "row" in answer:
        return answer
    if ran.returncode in (-signal.SIGINT, 128 + signal.SIGINT):
        raise KeyboardInterrupt
    error = answer.get("error") or last_line(ran)
    why = next(
        (line.strip()[:300] for line in (ran.stderr + error).splitlines() if TOO_LARGE.search(line)), None
    )
    if ran.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL):
        why = "the process was killed, most likely because this machine's memory was full"
    if why is None:
        raise TpukitError(f"batch {task.batch_size} of {task.name} could not be measured: {error}")
    return dict(batch_size=task.batch_size, fits=False, why=why)
