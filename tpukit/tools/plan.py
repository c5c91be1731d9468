"""`tpukit plan`: whether a step fits a TPU, and what bounds its time, said by the TPU's own compiler on a machine without one.

The programs are written down by torch_xla on its CPU device (in a process of their own), and compiled by libtpu in an
environment of its own (`tpu_compiler.py`). No figure is a measurement of a TPU.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tpukit.host import files
from tpukit.host.errors import TpukitError
from tpukit.host.tables import GIB, Table
from tpukit.training.task import from_request, to_request

# libtpu as in the images with torch_xla 2.9, and the jax that belongs to it.
COMPILER = ("jax==0.7.1", "jaxlib==0.7.1", "libtpu==0.0.21")
PARTS = ("train", "evaluate")


@dataclasses.dataclass(frozen=True)
class Chip:
    """A kind of TPU machine. Rates are of one chip, as Google Cloud's documentation of v5e and v6e gives them."""

    topology: str
    cores: int
    hbm_bytes: float  # what a program may use of the 16 and 32 GiB
    flops: float  # a second, in bf16
    bandwidth: float  # bytes a second


CHIPS = {
    "v5e-1": Chip("v5e:1x1", 1, 15.75 * GIB, 197e12, 819e9),
    "v5e-8": Chip("v5e:2x4", 8, 15.75 * GIB, 197e12, 819e9),
    "v6e-1": Chip("v6e:1x1", 1, 31.25 * GIB, 918e12, 1640e9),
}


def plan(task, *, chip="v5e-1", batch_sizes=None, part="train", find_batch=False, say=print):
    """What a workload's step needs on a TPU: a `Plan`.

    batch_sizes: global ones; the task's own unless given. part: "train", the whole training step (all 8 replicas of it and
    their gradient sum on v5e-8), or "evaluate", the programs that predict a batch of the test set. find_batch: bisect the
    largest batch that fits, too. With a dataset_dir, its sets lie on the chip as in training, where they do not crowd it.
    Raises TpukitError where the compiler cannot be had, or refuses a program for another reason than memory.
    """
    from tpukit.devices.runtime import check_batch

    if chip not in CHIPS:
        raise TpukitError(f"no chip {chip!r}; there are: {', '.join(CHIPS)}")
    if part not in PARTS:
        raise TpukitError(f"no part {part!r}; there are: {', '.join(PARTS)}")
    cores = CHIPS[chip].cores
    sizes = list(batch_sizes or [task.batch_size])
    for size in sizes:
        check_batch(size, cores, f"cores of {chip}")
    rows = {}

    def fits(size):
        if size not in rows:
            say(f"batch {size}: writing down the programs")
            rows[size] = _one(task, chip, size, part, say)
        return rows[size]["fits"]

    for size in sizes:
        fits(size)
    if find_batch:
        _bisect(fits, max(cores, min(sizes)), cores)
    return Plan(task.name, part, chip, [rows[size] for size in sorted(rows)])


def _bisect(fits, size, cores):
    """Ask `fits` until the largest batch that fits is known to within a sixteenth."""
    while not fits(size) and size > cores:
        size = max(cores, size // 2 // cores * cores)
    if not fits(size):
        return
    good, bad = size, 2 * size
    while fits(bad):
        good, bad = bad, 2 * bad
    while bad - good > max(cores, good // 16):
        middle = (good + bad) // 2 // cores * cores
        good, bad = (middle, bad) if fits(middle) else (good, middle)


@dataclasses.dataclass
class Plan:
    """What the compiler said. `rows`: a dict for each batch size; printed, a table with what it means."""

    workload: str
    part: str
    chip: str
    rows: list

    @property
    def largest_batch(self):
        """The largest batch asked about that fits, or None."""
        return max((row["batch_size"] for row in self.rows if row["fits"]), default=None)

    def table(self):
        columns = (
            "batch",
            "fits",
            "peak HBM, GiB",
            "TFLOP",
            "GB",
            "FLOP a byte",
            "at least, ms",
            "bound by",
            "Mcycles*",
            "compiled in, s",
        )
        cells = []
        for row in self.rows:
            if not row["fits"]:
                cells.append((row["batch_size"], "no", _needs(row), *[""] * 6, round(row["compile_s"])))
                continue
            cells.append(
                (
                    row["batch_size"],
                    "yes",
                    f"{row['peak_bytes'] / GIB:.2f}",
                    f"{row['flops'] / 1e12:.3g}",
                    f"{row['bytes'] / 1e9:.3g}",
                    f"{row['flops'] / row['bytes']:.3g}",
                    f"{1e3 * row['bound_s']:.3g}",
                    row["bound_by"],
                    f"{row['cycles'] / 1e6:.4g}",
                    round(row["compile_s"]),
                )
            )
        what = "training step" if self.part == "train" else "prediction of one batch"
        return Table(f"{self.workload}: {what} on {self.chip}, per core", columns, cells)

    @property
    def hbm_gib(self):
        """What a program may use of one core's memory."""
        return CHIPS[self.chip].hbm_bytes / GIB

    @property
    def caption(self):
        """What the columns mean."""
        chip = CHIPS[self.chip]
        return (
            f"{self.hbm_gib:g} GiB of HBM a core. At least: the longer of FLOP / {chip.flops / 1e12:g} TFLOP/s and "
            f"bytes / {chip.bandwidth / 1e9:g} GB/s; a bound, not a forecast. *Cycles: the compiler's own estimate, added up. "
            "Not calibrated: use it to compare one program with another, never as a time."
        )

    def __str__(self):
        return f"{self.table()}\n\n{self.caption}"


def _needs(row):
    found = re.search(r"[Uu]sed ([\d.]+[KMG]) of", row["why"])
    return f"needs {found[1]}" if found else "more than there is"


def _one(task, chip, size, part, say):
    """The row of one batch size: its programs, written down and compiled."""
    machine = CHIPS[chip]
    with tempfile.TemporaryDirectory() as folder:
        programs = _write_down(task, part, size, machine, Path(folder))
        beside = int((Path(folder) / "beside").read_text())
        found = [(count, _compile(path, machine, say)) for path, count in programs]
    row = dict(batch_size=size, fits=all("error" not in one for _, one in found))
    row["compile_s"] = sum(one["compile_s"] for _, one in found)
    if not row["fits"]:
        return dict(row, why=next(one["error"] for _, one in found if "error" in one))
    row["peak_bytes"] = beside + max(one["peak_bytes"] for _, one in found)
    if row["peak_bytes"] > machine.hbm_bytes:
        return dict(row, fits=False, why=f"used {row['peak_bytes'] / GIB:.2f}G of {machine.hbm_bytes / GIB:g}G")
    for name in ("flops", "bytes", "cycles"):
        row[name] = sum(count * one[name] for count, one in found)
    times = {"arithmetic": row["flops"] / machine.flops, "memory": row["bytes"] / machine.bandwidth}
    row["bound_by"] = max(times, key=times.get)
    row["bound_s"] = times[row["bound_by"]]
    return dict(row, programs=[dict(one, times=count) for count, one in found])


# Writing programs down


def _write_down(task, part, size, machine, folder):
    """[(path, how often a batch runs it)] of the part's programs, made in a fresh process, which opens torch_xla's CPU device.

    The file `beside` says how many bytes more a core holds meanwhile: the average of the weights, and the set that is not
    used."""
    request, variables = to_request(task)
    request |= dict(part=part, size=size, cores=machine.cores, memory_size=int(machine.hbm_bytes))
    ran = _run([sys.executable, "-P", "-m", "tpukit.tools.plan", str(folder)], json.dumps(request), variables)
    if ran.returncode:
        last = ran.stderr.strip().splitlines()[-1:] or ["it ended without a word"]
        if "No module named 'torch_xla'" in last[0] or "_XLAC" in last[0] and "undefined symbol" in last[0]:
            raise TpukitError(
                f"a plan needs a torch_xla that matches torch, to write the programs down ({last[0]}). In an environment of "
                "its own: pip install torch==2.9.0 torch-xla==2.9.0"
            )
        raise TpukitError(f"the {part} programs of {task.name} at batch {size} cannot be written down: {last[0]}")
    counts = {}
    for path in sorted(folder.glob("*.mlirbc")):
        counts.setdefault(files.sha256(path), []).append(path)
    return [(paths[0], len(paths)) for paths in counts.values()]


def write_programs(request, folder):
    """In the fresh process: the programs of a request of `_write_down`, as numbered files."""
    import numpy as np

    from tpukit.devices.xla import RecordingRuntime
    from tpukit.training.data import BatchLoader
    from tpukit.training.step import freeze_batch_norm, fresh_sums, training_step

    task, per_core = from_request(request), request["size"] // request["cores"]
    runtime = RecordingRuntime(task.precision, request["cores"], request["memory_size"])
    training, beside = request["part"] == "train", 0
    model = task.model().train(training)
    if task.batch_norm == "frozen":
        freeze_batch_norm(model)
    if training and task.ema_decay:
        beside += sum(value.nbytes for value in model.state_dict().values())
    model = runtime.place(model)
    optimizer = task.optimizer(model) if training else None
    if training:
        runtime.init_optimizer_state(optimizer)
    compose = lambda batch: batch  # noqa: E731
    if task.dataset_dir:
        sets = task.datasets() if training else (task.test_set(),)
        data, others = sets[0], sets[1:]
        beside += sum(BatchLoader(other, runtime, on=task.data_on, workers=0).bytes_per_core for other in others)
        feed = BatchLoader(data, runtime, on=task.data_on, workers=0)
        numbers = np.random.default_rng(0).random((request["size"], data.num_draws)) if training else None
        batch = next(feed.batches([(np.arange(request["size"]) % len(data), numbers, None)]))
        compose = feed.compose
    else:
        batch = runtime.put(task.example(per_core))
    sums = fresh_sums(runtime)
    runtime.sync()
    if training:
        step = lambda batch: training_step(task, model, optimizer, runtime, compose(batch), task.epochs, sums)  # noqa: E731
        runtime.compile(step, model=model, optimizer=optimizer)(batch)
    else:
        if task.dataset_dir:
            batch = runtime.inference(compose)(batch)
        task.predictor(model, runtime)(batch)
    (folder / "beside").write_text(str(beside))
    for number, program in enumerate(runtime.programs):
        (folder / f"{number:04d}.mlirbc").write_bytes(program)


# Compiling them


def _compile(path, machine, say):
    """What the compiler says of a program, from the cache where it was asked before. One that needs too much memory has an
    `error`."""
    key = f"{files.sha256(path)} {machine.topology} {COMPILER} {files.sha256(_script())}"
    cached = files.cache_folder() / "plans" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    with contextlib.suppress(OSError, ValueError):
        files.make_private(cached.parent)  # what another user put there is not believed
        return json.loads(cached.read_text())
    libraries = compiler_folder(say)
    say(f"compiling {path.stat().st_size / 1000:.0f} kB of StableHLO for {machine.topology}: minutes for a large network")
    started = time.monotonic()
    command = [sys.executable, "-P", "-s", str(_script()), str(path), machine.topology, str(machine.cores)]
    ran = _run(command, "", {"PYTHONPATH": str(libraries)})
    found = _understood(ran)
    found["compile_s"] = time.monotonic() - started
    with contextlib.suppress(OSError, TpukitError):  # then it is asked again next time
        files.make_private(cached.parent)
        with files.file_lock(cached):
            files.write_atomic(cached, json.dumps(found))
    return found


def _script():
    return Path(__file__).with_name("tpu_compiler.py")


def _understood(ran):
    """The compiler's answer, or what went wrong as a TpukitError. Too little memory is an answer."""
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    found = json.loads(lines[-1]) if lines else {}
    trouble = found.get("error") or ("" if found else ran.stderr)
    if found and not trouble or "RESOURCE_EXHAUSTED" in trouble and "hbm" in trouble.lower():
        return found or dict(error=trouble)
    if "libtpu_lockfile" in trouble or "already in use" in trouble:
        raise TpukitError(
            "libtpu is held by another process on this machine (/tmp/libtpu_lockfile). End that process, or, if there is none "
            "any more, delete the file, then plan again"
        )
    if not found and ran.returncode == -signal.SIGKILL:
        raise TpukitError(
            "the TPU compiler was killed, most likely for want of memory here: a large network needs 8 GiB or more"
        )
    if not found:
        last = trouble.strip().splitlines()[-1:] or [f"exit code {ran.returncode}"]
        raise TpukitError(
            f"the TPU compiler does not run here: {last[0]}. It needs Linux on x86-64; {compiler_home()} can be deleted to "
            "install it anew"
        )
    operation = re.search(r'op_name="([^"]+)"|(%[\w.\-]+ = [^\n]{0,160})', trouble)
    named = f" It names {(operation[1] or operation[2]).strip()}." if operation else ""
    raise TpukitError(f"the TPU compiler refuses this program: {_first_sentence(trouble)}{named}")


def _first_sentence(text):
    return next((line.strip() for line in text.splitlines() if line.strip()), "without a reason")[:500].rstrip(".") + "."


def compiler_home():
    """Where the compiler's environment lies."""
    tag = hashlib.sha256(" ".join(COMPILER).encode()).hexdigest()[:10]
    return files.cache_folder() / f"tpu-compiler-{sys.version_info[0]}.{sys.version_info[1]}-{tag}"


def compiler_folder(say=print):
    """The compiler's packages in a folder of their own, installed on first use (about 1 GB)."""
    home = compiler_home()
    try:
        files.make_private(home.parent)
    except OSError as error:
        raise TpukitError(
            f"the TPU compiler cannot be kept in {home.parent} ({error}): name another folder in TPUKIT_CACHE"
        ) from error
    with files.file_lock(home):
        if home.is_dir():
            return home
        say(f"installing the TPU compiler ({', '.join(COMPILER)}; about 1 GB, once) into {home}")
        with files.atomic_folder(home) as work:
            # A folder and not a virtual environment, because Colab's and Debian's Python cannot make one.
            pip = [sys.executable, "-P", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            ran = _run([*pip, "--target", str(work), *COMPILER], "", {})
            if ran.returncode:
                last = [line for line in ran.stderr.splitlines() if "ERROR" in line or "No module" in line] or ["pip failed"]
                raise TpukitError(
                    f"the TPU compiler is not installed, and could not be: {last[-1].strip()}. It is on PyPI for Linux on "
                    "x86-64; `pip install tpukit[plan]` brings pip where it is missing"
                )
    return home


def _run(command, text, more):
    """A process with its output caught, without this one's settings of devices and flags."""
    environ = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}
    return subprocess.run(command, input=text, env={**environ, **more}, capture_output=True, text=True)


if __name__ == "__main__":
    try:
        write_programs(json.loads(sys.stdin.read()), Path(sys.argv[1]))
    except TpukitError as error:
        sys.exit(str(error))
    sys.stdout.flush()
    os._exit(0)  # the programs hold the whole step unfinished; an orderly end would run it
