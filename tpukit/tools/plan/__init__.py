"""`tpukit plan`: whether a step fits a TPU, what it computes, and what it moves, by the TPU's own compiler
without a TPU.

torch_xla traces the step on its CPU device, in a process of its own, into compiled graphs (as StableHLO);
libtpu compiles them in an environment of its own (`tpu_compiler.py`). torch_tpu, which needs another torch,
does both in an environment of its own. No figure is a measurement of a TPU."""

import contextlib
import dataclasses
import gzip
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
from tpukit.tools import hlo
from tpukit.tools.child import ROOT, last_line, run_python
from tpukit.training.task import to_request

# libtpu as in the images with torch_xla 2.9, and the jax that belongs to it.
COMPILER = ("jax==0.7.1", "jaxlib==0.7.1", "libtpu==0.0.21")
# What each backend's environment holds. pip prefers a torch without CUDA, if an index that it searches has
# one.
COMPILERS = {
    "torch_xla": COMPILER,
    "torch_tpu": ("torch==2.13.0", "torch_tpu==0.2.0", "jax==0.10.2", "jaxlib==0.10.2", "libtpu==0.0.52"),
}
SIZES = {"torch_xla": "1 GB", "torch_tpu": "2.5 GB"}
COMPILER_SCRIPT = Path(__file__).with_name("tpu_compiler.py")
PARTS = ("train", "evaluate", "session")
PARALLEL = ("processes", "spmd")
NO_FLAGS = dict(XLA_FLAGS=None, LIBTPU_INIT_ARGS=None)  # those of this process are for its own device


def plan(
    task,
    *,
    chip="v5e-1",
    batch_sizes=None,
    part="train",
    parallel="processes",
    backend="torch_xla",
    find_batch=False,
    log=print,
):
    """What a task's step needs on a TPU: a `Plan`.

    batch_sizes: global ones; by default the task's own. part: "train", the whole training step; "evaluate",
    the graphs that predict a batch of the test set; "session", every graph that a training compiles.
    parallel: how eight cores share the step, as for `launch`: "processes", with a gradient all-reduce, or
    "spmd". backend: what lowers the step, "torch_xla" or "torch_tpu", which lowers no collectives without a
    TPU, so that only one core can be planned. find_batch: also bisect the largest batch that fits. With a
    dataset_dir, its sets lie on the chip as in training, where they are small enough. Raises TpukitError
    where the compiler cannot be had, or refuses a graph for another reason than memory."""
    sizes = list(batch_sizes or [task.batch_size])
    check(chip, part, sizes, parallel, backend, task.micro_batches)
    parts = MACHINES[chip].chips * task.micro_batches
    rows = {}

    def fits(size):
        if size not in rows:
            log(f"batch {size}: tracing the step")
            rows[size] = _plan_batch(task, MACHINES[chip], size, part, parallel, log, backend)
        return rows[size]["fits"]

    for size in sizes:
        fits(size)
    if find_batch:
        _bisect(fits, max(parts, min(sizes)), parts)
    return Plan(task.name, part, chip, [rows[size] for size in sorted(rows)])


def check(chip, part, batch_sizes, parallel="processes", backend="torch_xla", micro_batches=1):
    """Raise TpukitError for arguments that cannot be planned, before minutes of compilation."""
    from tpukit.devices.runtime import check_batch

    if chip not in MACHINES:
        raise TpukitError(f"no chip {chip!r}; there are: {', '.join(MACHINES)}")
    if part not in PARTS:
        raise TpukitError(f"no part {part!r}; there are: {', '.join(PARTS)}")
    if parallel not in PARALLEL:
        raise TpukitError(f"parallel={parallel!r}: choose one of {', '.join(PARALLEL)}")
    if backend not in COMPILERS:
        raise TpukitError(f"backend={backend!r}: choose one of {', '.join(COMPILERS)}")
    if backend == "torch_tpu" and (MACHINES[chip].chips > 1 or part == "session"):
        raise TpukitError(
            f"torch_tpu cannot plan chip={chip!r}, part={part!r}: without a TPU it lowers no collectives, and"
            " only single steps. Choose one chip with one core's share of the batch, and part 'train' or"
            " 'evaluate'; or backend 'torch_xla'"
        )
    for size in batch_sizes:
        check_batch(size, MACHINES[chip].chips, f"cores of {chip}", micro_batches)


def _bisect(fits, size, parts):
    """Call `fits` until the largest batch that fits, a multiple of `parts`, is known to within a
    sixteenth."""
    while not fits(size) and size > parts:
        size = max(parts, size // 2 // parts * parts)
    if not fits(size):
        return
    good, bad = size, 2 * size
    while fits(bad):
        good, bad = bad, 2 * bad
    while bad - good > max(parts, good // 16):
        middle = (good + bad) // 2 // parts * parts
        if fits(middle):
            good = middle
        else:
            bad = middle


@dataclasses.dataclass
class Plan:
    """What the compiler reports; printed, a table with its explanation. rows: a dict for each batch size."""

    task: str
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
        columns = [
            "batch",
            "fits",
            "peak HBM, GiB",
            "TFLOP",
            "FLOP time, ms",
            "HBM GB",
            "HBM time, ms",
            "VMEM GB",
            "Mcycles*",
        ]
        rows = []
        for row in self.rows:
            if row["fits"]:
                figures = [f"{row['flops'] / 1e12:.3g}", f"{1e3 * row['flop_s']:.3g}"]
                figures += [f"{row['hbm_bytes'] / 1e9:.3g}", f"{1e3 * row['hbm_s']:.3g}"]
                figures += [f"{row['vmem_bytes'] / 1e9:.3g}", f"{row['cycles'] / 1e6:.4g}"]
                answer = ["yes", f"{row['peak_bytes'] / GIB:.2f}", *figures]
            else:
                used = re.search(r"([\d.]+[KMG])\)? (?:of|exceeds)", row["why"])
                answer = ["no", f"needs {used[1]}" if used else "more than available", *[""] * 6]
            rows.append([row["batch_size"], *answer, round(row["compile_s"])])
        what = dict(
            train="training step",
            evaluate="prediction of one batch",
            session="all graphs of a training, once each",
        )
        return Table(
            f"{self.task}: {what[self.part]} on {self.chip}, per core", [*columns, "compiled in, s"], rows
        )

    def graphs_table(self):
        """A Table of the compiled graphs at the largest batch that fits."""
        rows = []
        for graph in self._largest_row.get("graphs", []):
            figures = [
                f"{graph['peak_bytes'] / GIB:.2f}",
                f"{graph['hbm_bytes'] / 1e9:.3g}",
                f"{graph['cycles'] / 1e6:.4g}",
            ]
            rows.append([graph["name"], graph["times"], *figures, f"{graph['compile_s']:.0f}"])
        columns = ("graph", "times", "peak HBM, GiB", "HBM GB", "Mcycles*", "compiled in, s")
        return Table(f"{self.task}: its {len(rows)} graphs at batch {self.largest_batch}", columns, rows)

    @property
    def caption(self):
        """What the columns mean."""
        chip = MACHINES[self.chip].chip
        text = (
            f"{self.hbm_gib:g} GiB of HBM per core. FLOP time: at {chip.flops / 1e12:g} TFLOP/s. HBM time: of"
            f" this graph, at {chip.bandwidth / 1e9:g} GB/s, for what its operations read and write in HBM,"
            " padded, each operand once. Neither is a forecast. *Cycles: the compiler's own estimates, added"
            " up. Not calibrated: use them to compare one graph with another, never as a time."
        )
        graphs = self._largest_row.get("graphs", [])
        if calls := sum(
            graph["times"] * call["calls"] for graph in graphs for call in graph["custom_calls"].values()
        ):
            text += f" Of {calls} custom calls only operands and results are counted, once each."
        if kernels := [kernel for graph in graphs for kernel in graph["times"] * graph["kernels"]]:
            names = ", ".join(sorted({kernel["name"] for kernel in kernels}))
            text += (
                f" What the kernels among them ({names}) read again and compute is counted by hand: "
                f"{sum(kernel['hbm_bytes'] for kernel in kernels) / 1e9:.3g} GB and "
                f"{sum(kernel['flops'] for kernel in kernels) / 1e12:.3g} TFLOP are added."
            )
        return text

    def heaviest(self, count):
        """A Table of the operations with the largest share of HBM bytes or cycles, at the largest batch that
        fits."""
        row = self._largest_row
        found = [(one, graph["times"]) for graph in row.get("graphs", []) for one in graph["operations"]]
        hbm_bytes, cycles = (max(row.get(name, 0), 1) for name in ("hbm_bytes", "cycles"))
        found.sort(key=lambda item: -item[1] * max(item[0].hbm_bytes / hbm_bytes, item[0].cycles / cycles))
        rows = []
        for one, times in found[:count]:
            figures = [f"{times * value / 1e6:.3g}" for value in (one.hbm_bytes, one.vmem_bytes, one.cycles)]
            rows.append([f"{one.opcode} {one.name}", one.result, one.source, *figures])
        columns = ("operation", "result", "traced from", "HBM MB", "VMEM MB", "Mcycles*")
        return Table(
            f"{self.task}: the heaviest operations of {len(found)}, at batch {self.largest_batch}",
            columns,
            rows,
        )

    @property
    def _largest_row(self):
        return next((row for row in self.rows if row["batch_size"] == self.largest_batch), {})

    def __str__(self):
        tables = [self.table(), self.graphs_table()] if self.part == "session" else [self.table()]
        return "\n\n".join(map(str, [*tables, self.caption]))


def _plan_batch(task, machine, size, part, parallel, log, backend="torch_xla"):
    """The row of one batch size: its graphs, traced and compiled."""
    chip = machine.chip
    install_compiler(log, backend)  # which has the jax that lowers kernels, too
    with tempfile.TemporaryDirectory() as folder:
        graphs, resident_bytes = _trace(task, part, size, machine, Path(folder), parallel, backend)
        flags = task.libtpu_args(size // machine.chips) if backend == "torch_xla" else ""
        graphs = [graph | dict(libtpu_args=flags) for graph in graphs]
        answers = [_compile(graph, machine, parallel, log, backend) | graph for graph in graphs]
    row = dict(batch_size=size, fits=True, compile_s=sum(answer["compile_s"] for answer in answers))
    for answer in answers:
        if "error" in answer:
            return row | dict(fits=False, why=answer["error"])
    row["peak_bytes"] = resident_bytes + max(answer["peak_bytes"] for answer in answers)
    if row["peak_bytes"] > chip.hbm_bytes:
        why = f"used {row['peak_bytes'] / GIB:.2f}G of {chip.hbm_bytes / GIB:g}G"
        return row | dict(fits=False, why=why)
    row["graphs"] = [_count(answer) for answer in answers]
    for name in ("flops", "hbm_bytes", "vmem_bytes", "cycles"):
        row[name] = sum(graph["times"] * graph[name] for graph in row["graphs"])
    row["flop_s"], row["hbm_s"] = row["flops"] / chip.flops, row["hbm_bytes"] / chip.bandwidth
    return row


def _count(answer):
    """What a compiled graph computes and moves in one run, with the hand-written kernels in it. answer: see
    `_compile`."""
    found = {name: answer[name] for name in ("name", "times", "compile_s", "peak_bytes", "flops", "kernels")}
    operations = found["operations"] = hlo.operations(answer["hlo"])
    for name in ("hbm_bytes", "vmem_bytes", "cycles"):
        found[name] = sum(getattr(one, name) for one in operations)
    found["all_reduces"] = sum(
        one.times for one in operations if one.opcode in ("all-reduce", "all-reduce-start")
    )
    found["custom_calls"] = {}  # target -> how many, and the bytes of their operands and results, each once
    for one in operations:
        if one.custom_call:
            calls = found["custom_calls"].setdefault(one.custom_call, dict(calls=0, hbm_bytes=0.0))
            calls["calls"] += one.times
            calls["hbm_bytes"] += one.hbm_bytes
    for kernel in found["kernels"]:
        found["hbm_bytes"] += kernel["hbm_bytes"]
        found["flops"] += kernel["flops"]
    return found


# Tracing the graphs


def _trace(task, part, size, machine, folder, parallel="processes", backend="torch_xla"):
    """(list of graphs, resident bytes), traced in a fresh process, which opens torch_xla's CPU device, or
    loads torch_tpu.

    A graph is a dict as of `ExportRuntime.graphs`, with path and times (how often a batch runs it; 1 in a
    session). Resident bytes: how much more a core keeps meanwhile, which is the average of the weights, and
    the set that is not used."""
    request = to_request(task) | dict(part=part, size=size, cores=machine.chips, spmd=parallel == "spmd")
    request |= dict(memory_size=int(machine.chip.hbm_bytes), compiler=str(compiler_folder()), backend=backend)
    variables = NO_FLAGS
    if backend == "torch_tpu":  # its torch goes before the one that is installed here
        variables = NO_FLAGS | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(compiler_folder(backend))])}
    ran = run_python("-m", "tpukit.tools.plan_trace", folder, text=json.dumps(request), variables=variables)
    if ran.returncode:
        last = last_line(ran)
        if "No module named 'torch_xla'" in last or "_XLAC" in last and "undefined symbol" in last:
            raise TpukitError(
                f"a plan needs a torch_xla that matches torch, to trace the step ({last}). In a separate"
                " environment: pip install torch==2.9.0 torch-xla==2.9.0"
            )
        raise TpukitError(f"the {part} step of {task.name} at batch {size} cannot be traced: {last}")
    traced = json.loads((folder / "traced.json").read_text())
    different = {}
    for number, graph in enumerate(traced["graphs"]):
        graph["path"] = folder / f"{number}.mlirbc"
        same = different.setdefault(graph["digest"], graph | dict(times=0))
        same["times"] = 1 if part == "session" else same["times"] + 1
    return list(different.values()), traced["resident_bytes"]


# Compiling them


def _compile(graph, machine, parallel, log, backend="torch_xla"):
    """What the compiler answers to a graph of `_trace`, cached; with an `error` where it needs too much
    memory."""
    flags = graph.get("libtpu_args", "")
    key = (
        f"{graph['digest']} {machine.topology} {parallel} {COMPILERS[backend]}"
        f" {files.sha256(COMPILER_SCRIPT)}{flags}"
    )
    cached = files.cache_folder() / "plans" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json.gz"
    with contextlib.suppress(OSError, EOFError, ValueError):
        files.make_private(cached.parent)  # what another user put there is not trusted
        return json.loads(gzip.decompress(cached.read_bytes()))
    libraries = install_compiler(log, backend)
    path = graph["path"]
    log(
        f"compiling {path.stat().st_size / 1000:.0f} kB of StableHLO for {machine.topology}: minutes for a"
        " large network"
    )
    started = time.monotonic()
    variables = NO_FLAGS | {"PYTHONPATH": str(libraries), "LIBTPU_INIT_ARGS": flags or None}
    arguments = (path, machine.topology, machine.chips, parallel)
    answer = _read_answer(run_python("-s", COMPILER_SCRIPT, *arguments, variables=variables), libraries)
    answer["compile_s"] = time.monotonic() - started
    with contextlib.suppress(OSError, TpukitError):  # then it is compiled again next time
        files.make_private(cached.parent)
        with files.file_lock(cached):
            files.write_atomic(cached, gzip.compress(json.dumps(answer).encode()))
    return answer


def _read_answer(ran, libraries):
    """The compiler's answer. Too little memory is one; anything else that went wrong is a TpukitError.

    libraries: the folder of the compiler's packages."""
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    answer = json.loads(lines[-1]) if lines else {}
    error = answer.get("error") if answer else ran.stderr
    if answer and (not error or "RESOURCE_EXHAUSTED" in error and "hbm" in error.lower()):
        return answer
    if "libtpu_lockfile" in error or "already in use" in error:
        raise TpukitError(
            "libtpu is held by another process on this machine (/tmp/libtpu_lockfile). End that process, or,"
            " if there is none any more, delete the file, then plan again"
        )
    if answer:
        raise TpukitError(f"the TPU compiler refuses this graph: {' '.join(error.split())[:600]}")
    if ran.returncode == -signal.SIGKILL:
        raise TpukitError(
            "the TPU compiler was killed, most likely for lack of memory: a large network needs 8 GiB or more"
        )
    raise TpukitError(
        f"the TPU compiler does not run here: {last_line(ran)}. It needs Linux on x86-64; delete {libraries}"
        " to install it again"
    )


def compiler_folder(backend="torch_xla"):
    """The folder of the packages that a backend's graphs are compiled with."""
    tag = hashlib.sha256(" ".join(COMPILERS[backend]).encode()).hexdigest()[:10]
    return files.cache_folder() / f"tpu-compiler-{sys.version_info[0]}.{sys.version_info[1]}-{tag}"


def install_compiler(log=print, backend="torch_xla"):
    """Install the packages of a backend's compiler into `compiler_folder`, unless they are there. Returns
    it."""
    folder, packages = compiler_folder(backend), COMPILERS[backend]
    try:
        files.make_private(folder.parent)
    except OSError as error:
        raise TpukitError(
            f"the TPU compiler cannot be stored in {folder.parent} ({error}): set TPUKIT_CACHE to another"
        ) from error
    with files.file_lock(folder):
        if folder.is_dir():
            return folder
        log(
            f"installing the TPU compiler ({', '.join(packages)}; about {SIZES[backend]}, once) into {folder}"
        )
        with files.atomic_folder(folder) as work:
            # A folder and not a virtual environment, because Colab's and Debian's Python cannot make one.
            ran = run_python(
                "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", work, *packages
            )
            if ran.returncode:
                errors = [line for line in ran.stderr.splitlines() if "ERROR" in line or "No module" in line]
                raise TpukitError(
                    "the TPU compiler could not be installed:"
                    f" {errors[-1].strip() if errors else last_line(ran)}. It is on PyPI for Linux on x86-64;"
                    " `pip install tpukit[plan]` installs pip where it is missing"
                )
    return folder
