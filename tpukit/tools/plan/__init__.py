"""`tpukit plan`: whether a step fits a TPU, what it computes, and what it moves, by the TPU's own compiler
without a TPU.

trace.py traces the step in a process of its own: on torch_xla's CPU device (xla_export.py), or by torch_tpu,
which needs another torch (torch_tpu_export.py). compiler.py has libtpu compile the graphs in an environment
of its own; hlo.py reads what they move. No figure is a measurement of a TPU."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpukit.devices.chips import MACHINES, Chip, Machine
from tpukit.host.errors import TpukitError
from tpukit.host.tables import GIB, Sentences, Table
from tpukit.tools.plan import compiler, hlo
from tpukit.tools.plan.compiler import COMPILER, COMPILER_SCRIPT, COMPILERS, install_compiler

if TYPE_CHECKING:
    from tpukit.training.task import Task

__all__ = ["COMPILER", "COMPILERS", "COMPILER_SCRIPT", "Plan", "install_compiler", "plan"]
PARTS = {
    "train": "training step",
    "evaluate": "prediction of one batch",
    "session": "all graphs of a training, once each",
}
PARALLEL = ("processes", "spmd")
# Columns of the tables: heading, figure, unit, significant digits.
FIGURES = (
    ("TFLOP", "flops", 1e12, 3),
    ("FLOP time, ms", "flop_s", 1e-3, 3),
    ("HBM GB", "hbm_bytes", 1e9, 3),
    ("HBM time, ms", "hbm_s", 1e-3, 3),
    ("VMEM GB", "vmem_bytes", 1e9, 3),
    ("Mcycles*", "cycles", 1e6, 4),
)


def plan(
    task: Task,
    *,
    chip: str = "v5e-1",
    batch_sizes: Sequence[int] | None = None,
    part: str = "train",
    parallel: str = "processes",
    backend: str = "torch_xla",
    log: Callable[[str], object] = print,
) -> Plan:
    """What a task's step needs on a TPU: a `Plan`.

    batch_sizes: global ones; by default the task's own. part: "train", the whole training step; "evaluate",
    the graphs that predict a batch of the test set; "session", every graph that a training compiles.
    parallel: how eight cores share the step, as for `launch`: "processes", with a gradient all-reduce, or
    "spmd". backend: what lowers the step, "torch_xla" or "torch_tpu", which lowers no collectives without a
    TPU, so that only one core can be planned. With a dataset_dir, its sets lie on the chip as in training,
    where they are small enough. Raises TpukitError where the compiler cannot be had, or refuses a graph for
    another reason than memory."""
    sizes = sorted(set(batch_sizes or [task.batch_size]))
    machine = _check(chip, part, sizes, parallel, backend, task.micro_batches)
    install_compiler(log, backend)  # which has the jax that lowers kernels, too
    rows = []
    for size in sizes:
        log(f"batch {size}: tracing the step")
        flags = task.libtpu_args(size // machine.chips) if backend == "torch_xla" else ""
        with tempfile.TemporaryDirectory() as folder:
            graphs, resident_bytes = compiler.trace(
                task, part, size, machine, Path(folder), parallel, backend
            )
            for graph in graphs:
                graph |= compiler.compile_graph(graph, machine, parallel, backend, flags, log)
        rows.append(_row(size, graphs, resident_bytes, machine.chip))
    return Plan(task.name, part, chip, rows)


def _check(chip, part, batch_sizes, parallel, backend, micro_batches) -> Machine:
    """The machine. Raises TpukitError for arguments that cannot be planned, before minutes of compilation."""
    from tpukit.devices.runtime import check_batch

    choices = dict(chip=(chip, MACHINES), part=(part, PARTS), parallel=(parallel, PARALLEL))
    for name, (value, known) in (choices | dict(backend=(backend, COMPILERS))).items():
        if value not in known:
            raise TpukitError(f"unknown {name} {value!r}: choose one of {', '.join(known)}")
    chips = MACHINES[chip].chips
    if backend == "torch_tpu" and (chips > 1 or part == "session"):
        raise TpukitError(
            f"torch_tpu cannot plan chip={chip!r}, part={part!r}: without a TPU it lowers no collectives, and"
            " only single steps. Choose one chip with one core's share of the batch, and part 'train' or"
            " 'evaluate'; or backend 'torch_xla'"
        )
    for size in batch_sizes:
        check_batch(size, chips, micro_batches)
    return MACHINES[chip]


def _row(size: int, graphs: list[dict], resident_bytes: int, chip: Chip) -> dict[str, Any]:
    """What `Plan` keeps of a batch size. graphs: of `compiler.trace`, with what `compiler.compile_graph` says
    of each."""
    row: dict[str, Any] = dict(batch_size=size, compile_s=sum(graph["compile_s"] for graph in graphs))
    why = next((graph["error"] for graph in graphs if "error" in graph), "")
    if not why:
        peak = row["peak_bytes"] = resident_bytes + max(graph["peak_bytes"] for graph in graphs)
        if peak > chip.hbm_bytes:
            why = f"used {peak / GIB:.2f}G of {chip.hbm_bytes / GIB:g}G"
    if why:
        return row | dict(fits=False, why=why)
    row["graphs"] = [_figures_of(graph) for graph in graphs]
    for name in ("flops", "hbm_bytes", "vmem_bytes", "cycles"):
        row[name] = sum(graph["times"] * graph[name] for graph in row["graphs"])
    return row | dict(fits=True, flop_s=row["flops"] / chip.flops, hbm_s=row["hbm_bytes"] / chip.bandwidth)


def _figures_of(graph: dict) -> dict[str, Any]:
    """What a compiled graph computes and moves in one run, with the hand-written kernels in it."""
    operations, kernels = hlo.operations(graph["hlo"]), graph["kernels"]
    reductions = [one for one in operations if one.opcode in ("all-reduce", "all-reduce-start")]
    custom_calls = {}  # target -> how many, and the bytes of their operands and results, each once
    for one in operations:
        if one.custom_call:
            calls = custom_calls.setdefault(one.custom_call, dict(calls=0, hbm_bytes=0.0))
            calls["calls"] += one.times
            calls["hbm_bytes"] += one.hbm_bytes
    return {name: graph[name] for name in ("name", "times", "compile_s", "peak_bytes", "kernels")} | dict(
        flops=graph["flops"] + sum(kernel["flops"] for kernel in kernels),
        hbm_bytes=sum(one.hbm_bytes for one in operations) + sum(kernel["hbm_bytes"] for kernel in kernels),
        vmem_bytes=sum(one.vmem_bytes for one in operations),
        cycles=sum(one.cycles for one in operations),
        all_reduces=sum(one.times for one in reductions),
        custom_calls=custom_calls,
        operations=operations,
    )


@dataclasses.dataclass
class Plan:
    """What the compiler reports; printed, a table with its explanation. rows: a dict for each batch size."""

    task: str
    part: str
    chip: str
    rows: list[dict]

    @property
    def largest_batch(self) -> int | None:
        """The largest batch in `rows` that fits, or None."""
        return max((row["batch_size"] for row in self.rows if row["fits"]), default=None)

    def table(self) -> Table:
        rows = []
        for row in self.rows:
            if row["fits"]:
                figures = [f"{row[name] / unit:.{digits}g}" for _, name, unit, digits in FIGURES]
                answer = ["yes", f"{row['peak_bytes'] / GIB:.2f}", *figures]
            else:
                used = re.search(r"([\d.]+[KMG])\)? (?:of|exceeds)", row["why"])
                needs = f"needs {used[1]}" if used else "more than available"
                answer = ["no", needs, *[""] * len(FIGURES)]
            rows.append([row["batch_size"], *answer, round(row["compile_s"])])
        headings = [heading for heading, *_ in FIGURES]
        columns = ["batch", "fits", "peak HBM, GiB", *headings, "compiled in, s"]
        return Table(f"{self.task}: {PARTS[self.part]} on {self.chip}, per core", columns, rows)

    @property
    def caption(self) -> str:
        """What the columns mean."""
        chip = MACHINES[self.chip].chip
        text = (
            f"{chip.hbm_bytes / GIB:g} GiB of HBM per core. FLOP time: at {chip.flops / 1e12:g} TFLOP/s. HBM"
            f" time: of this graph, at {chip.bandwidth / 1e9:g} GB/s, for what its operations read and write"
            " in HBM, padded, each operand once. Neither is a forecast. *Cycles: the compiler's own"
            " estimates, added up. Not calibrated: use them to compare one graph with another, never as a"
            " time."
        )
        fitting = [row["graphs"] for row in self.rows if row["fits"]]
        graphs = fitting[-1] if fitting else []  # of the largest batch
        if any(graph["custom_calls"] for graph in graphs):
            text += " Of custom calls only operands and results are counted, once each."
        if kernels := [kernel for graph in graphs for kernel in graph["times"] * graph["kernels"]]:
            names = ", ".join(sorted({kernel["name"] for kernel in kernels}))
            text += (
                f" What the kernels among them ({names}) read again and compute is counted by hand: "
                f"{sum(kernel['hbm_bytes'] for kernel in kernels) / 1e9:.3g} GB and "
                f"{sum(kernel['flops'] for kernel in kernels) / 1e12:.3g} TFLOP are added."
            )
        return text

    def show(self) -> None:
        """Display the table and what its columns mean."""
        from tpukit.reporting.display import present

        present(self.table())
        present(Sentences([self.caption]))

    def __str__(self) -> str:
        return f"{self.table()}\n\n{self.caption}"
