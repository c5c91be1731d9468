"""`tpukit plan`: whether a step fits a TPU, and what bounds its time, computed by the TPU's own compiler without a TPU.

torch_xla traces the step on its CPU device, in a process of its own, into compiled graphs (as StableHLO); libtpu compiles them
in an environment of its own (`tpu_compiler.py`). No figure is a measurement of a TPU.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

from tpukit.devices.chips import MACHINES
from tpukit.host import files
from tpukit.host.errors import TpukitError
from tpukit.host.tables import GIB, Table
from tpukit.tools.child import last_line, run_python
from tpukit.training.task import from_request, to_request

# libtpu as in the images with torch_xla 2.9, and the jax that belongs to it.
COMPILER = ("jax==0.7.1", "jaxlib==0.7.1", "libtpu==0.0.21")
COMPILER_SCRIPT = Path(__file__).with_name("tpu_compiler.py")
PARTS = ("train", "evaluate")
NO_FLAGS = dict(XLA_FLAGS=None, LIBTPU_INIT_ARGS=None)  # those of this process are for its own device


def plan(task, *, chip="v5e-1", batch_sizes=None, part="train", find_batch=False, log=print):
    """What a workload's step needs on a TPU: a `Plan`.

    batch_sizes: global ones; by default the task's own. part: "train", the whole training step (on v5e-8 all 8 replicas and
    their gradient all-reduce), or "evaluate", the graphs that predict a batch of the test set. find_batch: also bisect the
    largest batch that fits. With a dataset_dir, its sets lie on the chip as in training, where they are small enough.
    Raises TpukitError where the compiler cannot be had, or refuses a graph for another reason than memory.
    """
    sizes = list(batch_sizes or [task.batch_size])
    check(chip, part, sizes)
    cores = MACHINES[chip].chips
    rows = {}

    def fits(size):
        if size not in rows:
            log(f"batch {size}: tracing the step")
            rows[size] = _plan_batch(task, MACHINES[chip], size, part, log)
        return rows[size]["fits"]

    for size in sizes:
        fits(size)
    if find_batch:
        _bisect(fits, max(cores, min(sizes)), cores)
    return Plan(task.name, part, chip, [rows[size] for size in sorted(rows)])


def check(chip, part, batch_sizes):
    """Raise TpukitError for arguments that cannot be planned, before minutes of compilation."""
    from tpukit.devices.runtime import check_batch

    if chip not in MACHINES:
        raise TpukitError(f"no chip {chip!r}; there are: {', '.join(MACHINES)}")
    if part not in PARTS:
        raise TpukitError(f"no part {part!r}; there are: {', '.join(PARTS)}")
    for size in batch_sizes:
        check_batch(size, MACHINES[chip].chips, f"cores of {chip}")


def _bisect(fits, size, cores):
    """Call `fits` until the largest batch that fits is known to within a sixteenth."""
    while not fits(size) and size > cores:
        size = max(cores, size // 2 // cores * cores)
    if not fits(size):
        return
    good, bad = size, 2 * size
    while fits(bad):
        good, bad = bad, 2 * bad
    while bad - good > max(cores, good // 16):
        middle = (good + bad) // 2 // cores * cores
        if fits(middle):
            good = middle
        else:
            bad = middle


@dataclasses.dataclass
class Plan:
    """What the compiler reports; printed, a table with its explanation. rows: a dict for each batch size."""

    workload: str
    part: str
    chip: str
    rows: list

    @property
    def largest_batch(self):
        """The largest batch in `rows` that fits, or None."""
        return max((row["batch_size"] for row in self.rows if row["fits"]), default=None)

    @property
    def hbm_gib(self):
        """What a compiled graph may use of one core's memory."""
        return MACHINES[self.chip].chip.hbm_bytes / GIB

    def table(self):
        columns = ["batch", "fits", "peak HBM, GiB", "TFLOP", "GB", "FLOP per byte", "at least, ms", "bound by", "Mcycles*"]
        rows = []
        for row in self.rows:
            if row["fits"]:
                intensity = row["flops"] / row["bytes"]
                figures = [f"{row['flops'] / 1e12:.3g}", f"{row['bytes'] / 1e9:.3g}", f"{intensity:.3g}"]
                figures += [f"{1e3 * row['bound_s']:.3g}", row["bound_by"], f"{row['cycles'] / 1e6:.4g}"]
                answer = ["yes", f"{row['peak_bytes'] / GIB:.2f}", *figures]
            else:
                used = re.search(r"[Uu]sed ([\d.]+[KMG]) of", row["why"])
                answer = ["no", f"needs {used[1]}" if used else "more than available", *[""] * 6]
            rows.append([row["batch_size"], *answer, round(row["compile_s"])])
        what = "training step" if self.part == "train" else "prediction of one batch"
        return Table(f"{self.workload}: {what} on {self.chip}, per core", [*columns, "compiled in, s"], rows)

    @property
    def caption(self):
        """What the columns mean."""
        chip = MACHINES[self.chip].chip
        return (
            f"{self.hbm_gib:g} GiB of HBM per core. At least: the longer of FLOP / {chip.flops / 1e12:g} TFLOP/s and "
            f"bytes / {chip.bandwidth / 1e9:g} GB/s; a bound, not a forecast. *Cycles: the compiler's own estimate, added up. "
            "Not calibrated: use it to compare one graph with another, never as a time."
        )

    def __str__(self):
        return f"{self.table()}\n\n{self.caption}"


def _plan_batch(task, machine, size, part, log):
    """The row of one batch size: its graphs, traced and compiled."""
    chip = machine.chip
    with tempfile.TemporaryDirectory() as folder:
        graphs = _trace(task, part, size, machine, Path(folder))
        resident_bytes = int((Path(folder) / "resident_bytes").read_text())
        answers = [_compile(path, machine, log) | dict(times=count) for path, count in graphs]
    row = dict(batch_size=size, fits=True, compile_s=sum(answer["compile_s"] for answer in answers))
    for answer in answers:
        if "error" in answer:
            return row | dict(fits=False, why=answer["error"])
    row["peak_bytes"] = resident_bytes + max(answer["peak_bytes"] for answer in answers)
    if row["peak_bytes"] > chip.hbm_bytes:
        why = f"used {row['peak_bytes'] / GIB:.2f}G of {chip.hbm_bytes / GIB:g}G"
        return row | dict(fits=False, why=why)
    for name in ("flops", "bytes", "cycles"):
        row[name] = sum(answer["times"] * answer[name] for answer in answers)
    seconds = {"arithmetic": row["flops"] / chip.flops, "memory": row["bytes"] / chip.bandwidth}
    row["bound_by"] = max(seconds, key=seconds.get)
    row["bound_s"] = seconds[row["bound_by"]]
    return row | dict(programs=answers)


# Tracing the graphs


def _trace(task, part, size, machine, folder):
    """[(path of a compiled graph, how often a batch runs it)], traced in a fresh process, which opens torch_xla's CPU device.

    The file `resident_bytes` holds how much more a core keeps meanwhile: the average of the weights, and the set that is not
    used."""
    request = to_request(task) | dict(part=part, size=size, cores=machine.chips, memory_size=int(machine.chip.hbm_bytes))
    ran = run_python("-m", "tpukit.tools.plan", folder, text=json.dumps(request), variables=NO_FLAGS)
    if ran.returncode:
        last = last_line(ran)
        if "No module named 'torch_xla'" in last or "_XLAC" in last and "undefined symbol" in last:
            raise TpukitError(
                f"a plan needs a torch_xla that matches torch, to trace the step ({last}). In a separate environment: "
                "pip install torch==2.9.0 torch-xla==2.9.0"
            )
        raise TpukitError(f"the {part} step of {task.name} at batch {size} cannot be traced: {last}")
    paths = {}
    for path in sorted(folder.glob("*.mlirbc")):
        paths.setdefault(files.sha256(path), []).append(path)
    return [(same[0], len(same)) for same in paths.values()]


def trace_step(request, folder):
    """In the fresh process: the graphs of a request of `_trace`, as numbered files. All calls into training are here."""
    import numpy as np

    from tpukit.devices.xla_export import ExportRuntime
    from tpukit.training import batch_norm
    from tpukit.training.data import BatchLoader, Draw, already_composed
    from tpukit.training.metrics import new_sums
    from tpukit.training.step import train_step

    task, size, training = from_request(request), request["size"], request["part"] == "train"
    runtime = ExportRuntime(task.precision, request["cores"], request["memory_size"])
    resident_bytes = 0
    model = task.model().train(training)
    if task.batch_norm == "frozen":
        batch_norm.freeze(model)
    if training and task.ema_decay:
        resident_bytes += sum(value.nbytes for value in model.state_dict().values())
    model = runtime.place(model)
    if training:
        optimizer = task.optimizer(model)
        runtime.init_optimizer_state(optimizer)
    compose = already_composed
    if task.dataset_dir:
        data, *others = task.datasets() if training else [task.test_set()]
        resident_bytes += sum(BatchLoader(other, runtime, on=task.data_on, workers=0).bytes_per_core for other in others)
        loader = BatchLoader(data, runtime, on=task.data_on, workers=0)
        numbers = np.random.default_rng(0).random((size, data.num_draws)) if training else None
        batch = next(loader.batches([Draw(np.arange(size) % len(data), numbers)]))
        compose = loader.compose
    else:
        batch = runtime.put(task.example(size // request["cores"]))
    sums = new_sums(runtime)
    runtime.sync()
    if training:
        step = functools.partial(train_step, task, model, optimizer, runtime, compose)
        runtime.compile(step, name="step", changes=(model, optimizer))(batch, runtime.scalar(task.epochs), sums)
    else:
        if task.dataset_dir:
            batch = runtime.inference(compose)(batch)
        task.predictor(model, runtime)(batch)
    (folder / "resident_bytes").write_text(str(resident_bytes))
    for number, graph in enumerate(runtime.graphs):
        (folder / f"{number:04d}.mlirbc").write_bytes(graph)


# Compiling them


def _compile(path, machine, log):
    """What the compiler answers to a graph, cached; with an `error` where it needs too much memory."""
    key = f"{files.sha256(path)} {machine.topology} {COMPILER} {files.sha256(COMPILER_SCRIPT)}"
    cached = files.cache_folder() / "plans" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    with contextlib.suppress(OSError, ValueError):
        files.make_private(cached.parent)  # what another user put there is not trusted
        return json.loads(cached.read_text())
    libraries = install_compiler(log)
    log(f"compiling {path.stat().st_size / 1000:.0f} kB of StableHLO for {machine.topology}: minutes for a large network")
    started = time.monotonic()
    variables = NO_FLAGS | {"PYTHONPATH": str(libraries)}
    answer = _read_answer(run_python("-s", COMPILER_SCRIPT, path, machine.topology, machine.chips, variables=variables))
    answer["compile_s"] = time.monotonic() - started
    with contextlib.suppress(OSError, TpukitError):  # then it is compiled again next time
        files.make_private(cached.parent)
        with files.file_lock(cached):
            files.write_atomic(cached, json.dumps(answer))
    return answer


def _read_answer(ran):
    """The compiler's answer. Too little memory is one; anything else that went wrong is a TpukitError."""
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    answer = json.loads(lines[-1]) if lines else {}
    error = answer.get("error") if answer else ran.stderr
    if answer and (not error or "RESOURCE_EXHAUSTED" in error and "hbm" in error.lower()):
        return answer
    if "libtpu_lockfile" in error or "already in use" in error:
        raise TpukitError(
            "libtpu is held by another process on this machine (/tmp/libtpu_lockfile). End that process, or, if there is none "
            "any more, delete the file, then plan again"
        )
    if answer:
        raise TpukitError(f"the TPU compiler refuses this graph: {' '.join(error.split())[:600]}")
    if ran.returncode == -signal.SIGKILL:
        raise TpukitError("the TPU compiler was killed, most likely for lack of memory: a large network needs 8 GiB or more")
    raise TpukitError(
        f"the TPU compiler does not run here: {last_line(ran)}. It needs Linux on x86-64; delete {compiler_folder()} to "
        "install it again"
    )


def compiler_folder():
    """The folder of the compiler's packages."""
    tag = hashlib.sha256(" ".join(COMPILER).encode()).hexdigest()[:10]
    return files.cache_folder() / f"tpu-compiler-{sys.version_info[0]}.{sys.version_info[1]}-{tag}"


def install_compiler(log=print):
    """Install the compiler's packages (about 1 GB) into `compiler_folder()` unless they are already installed. Returns it."""
    folder = compiler_folder()
    try:
        files.make_private(folder.parent)
    except OSError as error:
        raise TpukitError(
            f"the TPU compiler cannot be stored in {folder.parent} ({error}): set TPUKIT_CACHE to another"
        ) from error
    with files.file_lock(folder):
        if folder.is_dir():
            return folder
        log(f"installing the TPU compiler ({', '.join(COMPILER)}; about 1 GB, once) into {folder}")
        with files.atomic_folder(folder) as work:
            # A folder and not a virtual environment, because Colab's and Debian's Python cannot make one.
            ran = run_python("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", work, *COMPILER)
            if ran.returncode:
                errors = [line for line in ran.stderr.splitlines() if "ERROR" in line or "No module" in line]
                raise TpukitError(
                    f"the TPU compiler could not be installed: {errors[-1].strip() if errors else last_line(ran)}. It is on "
                    "PyPI for Linux on x86-64; `pip install tpukit[plan]` installs pip where it is missing"
                )
    return folder


if __name__ == "__main__":
    try:
        trace_step(json.loads(sys.stdin.read()), Path(sys.argv[1]))
    except TpukitError as error:
        sys.exit(str(error))
    sys.stdout.flush()
    os._exit(0)  # the graphs hold the whole step unfinished; an orderly exit would run it
