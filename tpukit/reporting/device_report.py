"""Report the device's work in any loop: `metrics_report`. Needs no run and no task, and opens no device."""

import collections
import sys
from typing import Any

from tpukit.host.tables import Notice, Sentences, Table
from tpukit.host.text import GIB
from tpukit.reporting import device_words
from tpukit.reporting.presenting import present

READ_A_VALUE = "aten::_local_scalar_dense"  # what `.item()` calls


class MetricsReport:
    """The device's work since the process began; after a `with` block, in the block. Printing it shows all of
    it."""

    counters: dict[str, Any]
    """See `xla_counters.counters`; empty without an open XLA device."""
    compilations: int
    """Graphs that were compiled."""
    causes: collections.Counter[str]
    """Likely cause -> how many of the compilations it explains."""
    fallbacks: dict[str, int]
    """Operation that the CPU ran instead of the device -> count."""
    device: str
    """Name of the device; empty if this process has opened none."""
    memory: list[tuple[int, int]]
    """(Peak bytes since the process began, total bytes) of each device that tells."""
    where: str
    """What the numbers are of, in words: "in this block" or "since this process began"."""

    def __init__(self) -> None:
        self.where = "since this process began"
        self._before: dict[str, Any] = {}
        self._read()

    def __enter__(self) -> "MetricsReport":
        self.where = "in this block"
        if xla := _open_xla():
            xla.wait()  # so that what runs is counted where it was asked for
            self._before = xla.counters()
        self._read()
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        try:
            if kind is None and (xla := _open_xla()):  # the work of a block that failed may never end
                xla.wait()
        finally:
            self._read()
            present(self)

    def _read(self) -> None:
        xla = _open_xla()
        now = xla.counters() if xla else {}
        self.counters = now
        if self._before:
            self.counters = {name: now[name] - before for name, before in self._before.items()}
        self.compilations = self.counters.get("compilations", 0)
        self.fallbacks = dict(self.counters.get("fallbacks", {}))
        self.causes = collections.Counter()
        self.device, self.memory = _gpus()
        if xla:
            causes = xla.causes()
            self.causes.update(causes[max(len(causes) - self.compilations, 0) :])
            self.device, self.memory = xla.device_name(), xla.memory()

    def problems(self) -> list[str]:
        """Return the problems that were found, each a sentence with its fix."""
        executions, problems = self.counters.get("executions", 0), []
        if _is_often(self.compilations, executions):
            from tpukit.devices.recompiles import KEEP_ONE_GRAPH  # here: with torch, which has compiled

            [(cause, count)] = self.causes.most_common(1)
            problems.append(
                f"Compiled {self.compilations} graphs in {executions} executions, which took"
                f" {self.counters['compile_s']:.1f} s. Likely cause of {count} of them: {cause}."
                f" {KEEP_ONE_GRAPH}. PT_XLA_DEBUG_LEVEL=2, set before Python starts, names the lines."
            )
        if operations := self._operations_on_the_cpu():
            problems.append(
                f"{device_words.describe_fallbacks(operations)} Choose by `torch.where` or a product instead"
                " of `x[mask]` and `nonzero`; `tpukit migrate FILE` names such lines."
            )
        if _is_often(self.counters.get("read", 0), executions):
            problems.append(
                f"The host read from the device {self.counters['read']} times in {executions} executions,"
                f" {self.fallbacks.get(READ_A_VALUE, 0)} of them by `.item()`, `float(x)` or `if x > 0`,"
                " and waited each time: add up on the device, and read every 20 steps or so."
            )
        if executions > 3 and not self.counters["syncs"]:
            problems.append("No step was ended: call `torch_xla.sync()` after each, or the graph grows.")
        return problems

    def facts(self) -> list[str]:
        """Return sentences about the device and its work that are no problems."""
        if self.counters:
            compiled, executed = self.compilations, self.counters["executions"]
            sentences = [f"{self.device}, {self.where}: graphs compiled: {compiled}, executed: {executed}."]
            return sentences + (
                [] if self._operations_on_the_cpu() else [device_words.describe_fallbacks({})]
            )
        if self.device:
            return [
                f"{self.device}.",
                f"{device_words.NOTHING_COMPILES} Graphs of `torch.compile` are not counted.",
            ]
        if "torch_tpu" in sys.modules:
            return ["torch_tpu does not report what it compiles."]
        return [
            "This process has not opened an XLA device or a GPU. A function that `torch_xla.launch` or"
            " `xmp.spawn` runs in other processes has to make its own report."
        ]

    def tables(self) -> list[Table]:
        """Return the numbers as tables, without those that are empty."""
        counted = collections.defaultdict(int, self.counters)
        rows = [
            ("compilations", counted["compilations"], counted["compile_s"]),
            ("executions of a graph", counted["executions"], counted["execute_s"]),
            (device_words.SENDING, counted["sent"], counted["to_device_s"]),
            (device_words.READING, counted["read"], counted["from_device_s"]),
        ]
        rows = [(what, count, f"{seconds:.2f}") for what, count, seconds in rows if count]
        names = {name: f"{name} on the CPU" for name in self.fallbacks}
        names[READ_A_VALUE] = "single values read, as by .item()"
        rows += [(names[name], count, None) for name, count in self.fallbacks.items()]
        tables = (
            Table(f"What the XLA device did {self.where}", ("what", "how often", "seconds"), rows),
            Table("Likely causes of compilations", ("cause", "graphs"), self.causes.most_common()),
            device_words.memory_table(self.memory),
        )
        return [table for table in tables if table.rows]

    def _operations_on_the_cpu(self):
        """Return the fallbacks without the reads of a value, which torch_xla counts with them."""
        return {name: count for name, count in self.fallbacks.items() if name != READ_A_VALUE}

    def _parts(self) -> list[Any]:
        parts = [Sentences(self.facts()), *self.tables()]
        problems = self.problems()
        return [Notice(problems), *parts] if problems else parts

    def __repr__(self) -> str:
        return "\n\n".join(map(str, self._parts()))

    def _repr_html_(self) -> str:
        return "".join(part._repr_html_() for part in self._parts())


def _open_xla():
    """Return the module `xla_counters`; None if this process has opened no XLA device."""
    if "torch_xla" not in sys.modules:
        return None
    from tpukit.devices import xla_counters

    return xla_counters if xla_counters.is_open() else None


def _gpus() -> tuple[str, list[tuple[int, int]]]:
    """Return the GPUs that this process has used, in words, and (peak bytes, total bytes) of each."""
    torch, names, memory = sys.modules.get("torch"), [], []
    if torch is not None and torch.cuda.is_initialized():
        for number in range(torch.cuda.device_count()):
            if peak := torch.cuda.max_memory_allocated(number):
                card, held = torch.cuda.get_device_properties(number), torch.cuda.memory_allocated(number)
                names.append(f"{card.name}, {held / GIB:.2f} GiB allocated")
                memory.append((peak, card.total_memory))
    return "; ".join(names), memory


def _is_often(count: int, executions: int) -> bool:
    return count > 3 and 10 * count > executions


def metrics_report() -> MetricsReport:
    """Report the device's work since this process began, or in a block:

        print(tpukit.metrics_report())

        with tpukit.metrics_report() as report:
            for batch in loader:
                step(batch)
        report.compilations, report.fallbacks

    The block's report is shown when it ends, even if by an error. Problems come first, with what to do:
    graphs that are compiled again and again, operations that the CPU runs instead, values that are read in a
    step. Then numbers: compilations, executions, transfers, memory. The host waits for the device where the
    block begins and where it ends. Each process has a report of its own.

    Returns:
        A `MetricsReport`, which is also a context manager."""
    return MetricsReport()
