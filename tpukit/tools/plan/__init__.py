"""`tpukit plan`: whether a step fits a TPU, what it computes, and what it moves, by the TPU's own compiler
without a TPU.

trace.py traces the step in a process of its own, on torch_xla's CPU device (xla_export.py); compiler.py has
libtpu compile the graphs in an environment of its own; hlo.py reads what they move. No figure is measured on
a TPU."""

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
from tpukit.tools.plan.compiler import COMPILER, compile_graph, install_compiler
from tpukit.tools.plan.trace import trace_graphs

if TYPE_CHECKING:
    from tpukit.training.task import Task

__all__ = ["COMPILER", "Plan", "install_compiler", "plan"]
PARTS = {"train": "training step", "evaluate": "prediction of one batch"}
# Columns of the table: heading, figure of a row, unit.
FIGURES = (
    ("TFLOP", "flops", 1e12),
    ("FLOP time, ms", "flop_s", 1e-3),
    ("HBM GB", "hbm_bytes", 1e9),
    ("HBM time, ms", "hbm_s", 1e-3),
)


def plan(
    task: Task,
    *,
    chip: str = "v5e-1",
    batch_sizes: Sequence[int] = (),
    part: str = "train",
    log: Callable[[str], object] = print,
) -> Plan:
    """Return what a task's step needs on a TPU, as the TPU's compiler counts it. With a dataset_dir, its sets
    lie on the chip as in training, where they are small enough.

    Args:
        task: whose step it is.
        chip: a name of `MACHINES`; eight chips are eight replicas of the step with a gradient all-reduce.
        batch_sizes: global batch sizes; by default the task's own.
        part: "train", the whole training step; "evaluate", the graphs that predict a batch of the test set.
        log: gets a sentence before everything that takes long.

    Raises TpukitError where the compiler cannot be had, or refuses a graph for another reason than memory."""
    sizes = sorted(set(batch_sizes or [task.batch_size]))
    machine = _check(chip, part, sizes, task.micro_batches)
    install_compiler(log)  # which has the jax that lowers kernels, too
    rows = []
    for size in sizes:
        log(f"batch {size}: tracing the step")
        with tempfile.TemporaryDirectory() as folder:
            graphs, resident_bytes = trace_graphs(task, part, size, machine, Path(folder))
            for graph in graphs:
                graph |= compile_graph(graph, machine, task.libtpu_args(size // machine.chips), log)
        rows.append(_row(size, graphs, resident_bytes, machine.chip))
    return Plan(task.name, part, chip, rows)


def _check(chip: str, part: str, batch_sizes: Sequence[int], micro_batches: int) -> Machine:
    """Return the machine. Raises TpukitError for what cannot be planned, before minutes of compilation."""
    from tpukit.devices.runtime import check_batch

    for name, value, known in (("chip", chip, MACHINES), ("part", part, PARTS)):
        if value not in known:
            raise TpukitError(f"unknown {name} {value!r}: choose one of {', '.join(known)}")
    for size in batch_sizes:
        check_batch(size, MACHINES[chip].chips, micro_batches)
    return MACHINES[chip]


def _row(size: int, graphs: list[dict], resident_bytes: int, chip: Chip) -> dict[str, Any]:
    """Return the figures of a batch size, from what `trace_graphs` and `compile_graph` say of its graphs."""
    row: dict[str, Any] = dict(batch_size=size, compile_s=sum(graph["compile_s"] for graph in graphs))
    why = next((graph["error"] for graph in graphs if "error" in graph), "")
    if not why:
        peak = row["peak_bytes"] = resident_bytes + max(graph["peak_bytes"] for graph in graphs)
        if peak > chip.hbm_bytes:
            why = f"used {peak / GIB:.2f}G of {chip.hbm_bytes / GIB:g}G"
    if why:
        return row | dict(fits=False, why=why)
    kernels = [kernel for graph in graphs for kernel in graph["times"] * graph["kernels"]]
    for name in ("flops", "hbm_bytes"):
        compiled = sum(graph["times"] * graph[name] for graph in graphs)
        row[name] = compiled + sum(kernel[name] for kernel in kernels)
    row |= dict(flop_s=row["flops"] / chip.flops, hbm_s=row["hbm_bytes"] / chip.bandwidth)
    return row | dict(fits=True, kernels=sorted({kernel["name"] for kernel in kernels}))


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
        return Table(f"{self.task}: {PARTS[self.part]} on {self.chip}, per core", columns, rows)

    @property
    def caption(self) -> str:
        """What the columns mean."""
        chip = MACHINES[self.chip].chip
        text = (
            f"{chip.hbm_bytes / GIB:g} GiB of HBM per core. FLOP time: at {chip.flops / 1e12:g} TFLOP/s. HBM"
            f" time: of this graph, at {chip.bandwidth / 1e9:g} GB/s, for the operands and results of its"
            " operations that lie in HBM, padded, each once. Neither is a forecast."
        )
        if kernels := {name for row in self.rows if row["fits"] for name in row["kernels"]}:
            text += (
                f" What hand-written kernels ({', '.join(sorted(kernels))}) compute and read again is counted"
                " by hand and added, because the compiler does not know it."
            )
        return text

    def show(self) -> None:
        """Display the table and what its columns mean."""
        from tpukit.reporting.output import present

        present(self.table())
        present(Sentences([self.caption]))

    def __str__(self) -> str:
        return f"{self.table()}\n\n{self.caption}"
