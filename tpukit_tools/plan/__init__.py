"""`tpukit plan`: whether a step fits a TPU, and what it computes, by the TPU's own compiler without a TPU.

trace.py traces the step in a process of its own, on torch_xla's CPU device (xla_export.py); compiler.py has
libtpu compile its graph in an environment of its own. No figure is measured on a TPU."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tpukit.devices.chips import Chip
from tpukit.host.errors import TpukitError
from tpukit.host.tables import Sentences, Table
from tpukit.host.text import GIB
from tpukit_tools.plan.compiler import COMPILER, MACHINES, Log, Machine, compile_graph, install_compiler
from tpukit_tools.plan.trace import trace_step

if TYPE_CHECKING:
    from tpukit.training.task import Task

__all__ = ["COMPILER", "MACHINES", "Plan", "compile_step", "install_compiler", "plan", "row_of"]
# Columns of the table: heading, figure of a row, unit.
FIGURES = (
    ("TFLOP", "flops", 1e12),
    ("FLOP time, ms", "flop_s", 1e-3),
)


def plan(
    task: Task,
    *,
    chip: Literal["v5e-1", "v5e-8", "v6e-1"] = "v5e-1",
    batch_sizes: Sequence[int] = (),
    log: Callable[[str], object] = print,
) -> Plan:
    """Compile a task's step for a TPU, without a TPU: whether it fits, and what it computes. With a
    dataset_dir, its sets lie on the chip as in training, if they are small enough.

    Args:
        task: whose step is compiled.
        chip: one v5e chip (Colab), eight with a gradient all-reduce (Kaggle), or one v6e chip.
        batch_sizes: global batch sizes to try; by default the task's own.
        log: gets a sentence before everything that takes long.

    Returns:
        A `Plan`. Printing it shows a table with a row for each batch size.

    Raises:
        TpukitError: if the compiler cannot be had, or refuses a graph for another reason than memory."""
    from tpukit.devices.runtime import check_batch

    if chip not in MACHINES:
        raise TpukitError(f"unknown chip {chip!r}: choose one of {', '.join(MACHINES)}")
    machine = MACHINES[chip]
    task = task.choose_settings(machine.environment())
    sizes = sorted(set(batch_sizes or [task.batch_size]))
    for size in sizes:  # before minutes of compilation
        check_batch(size, machine.chips, task.micro_batches)
    rows = [row_of(size, compile_step(task, size, machine, log), machine.chip) for size in sizes]
    return Plan(task.name, chip, rows)


def compile_step(task: Task, size: int, machine: Machine, log: Log) -> dict[str, Any]:
    """Return what `trace_step` and `compile_graph` say of the graph of a step at a global batch size."""
    install_compiler(log)  # which has the jax that lowers kernels, too
    task = dataclasses.replace(task, batch_size=size).choose_settings(machine.environment())
    log(f"batch {size}: tracing the step")
    with tempfile.TemporaryDirectory() as folder:
        graph = trace_step(task, size, machine, Path(folder))
        return graph | compile_graph(graph, machine, log)


def row_of(size: int, graph: dict[str, Any], chip: Chip) -> dict[str, Any]:
    """Return the figures of a batch size, from what `compile_step` says of its graph."""
    row = dict(batch_size=size, compile_s=graph["compile_s"])
    why = graph.get("error", "")
    if not why:
        peak = row["peak_bytes"] = graph["resident_bytes"] + graph["peak_bytes"]
        if peak > chip.hbm_bytes:
            why = f"used {peak / GIB:.2f}G of {chip.hbm_bytes / GIB:g}G"
    if why:
        return row | dict(fits=False, why=why)
    row["flops"] = graph["flops"] + sum(kernel["flops"] for kernel in graph["kernels"])
    row["flop_s"] = row["flops"] / chip.flops
    return row | dict(fits=True, kernels=sorted({kernel["name"] for kernel in graph["kernels"]}))


@dataclasses.dataclass
class Plan:
    """The compiler's report. Printing it shows a table and what its columns mean."""

    task: str
    """Name of the task."""
    chip: str
    """As `plan` was given it."""
    rows: list[dict]
    """A dict for each batch size: batch_size, compile_s, fits, and the figures, or why it does not fit."""

    @property
    def largest_batch(self) -> int | None:
        """The largest batch in `rows` that fits, or None."""
        return max((row["batch_size"] for row in self.rows if row["fits"]), default=None)

    def table(self) -> Table:
        """Return the figures as a table."""
        rows = []
        for row in self.rows:
            if row["fits"]:
                figures = [f"{row[name] / unit:.3g}" for _, name, unit in FIGURES]
                answer = ["yes", f"{row['peak_bytes'] / GIB:.2f}", *figures]
            else:
                used = re.search(r"([\d.]+[KMG])\)? (?:of|exceeds)", row["why"])
                needs = f"needs {used[1]}" if used else "more than available"
                answer = ["no", needs, *[""] * len(FIGURES)]
            rows.append([row["batch_size"], *answer, round(row["compile_s"])])
        headings = [heading for heading, *_ in FIGURES]
        columns = ["batch", "fits", "peak HBM, GiB", *headings, "compiled in, s"]
        return Table(f"{self.task}: training step on {self.chip}, per core", columns, rows)

    @property
    def caption(self) -> str:
        """Explain the columns."""
        chip = MACHINES[self.chip].chip
        text = (
            f"{chip.hbm_bytes / GIB:g} GiB of HBM per core. FLOP time: at {chip.flops / 1e12:g} TFLOP/s; a"
            " lower bound, no forecast."
        )
        if kernels := {name for row in self.rows if row["fits"] for name in row["kernels"]}:
            text += f" The work inside kernels ({', '.join(sorted(kernels))}) is counted by hand and added."
        return text

    def show(self) -> None:
        """Display the table and what its columns mean."""
        from tpukit.reporting.presenting import present

        present(self.table())
        present(Sentences([self.caption]))

    def __str__(self) -> str:
        return f"{self.table()}\n\n{self.caption}"
