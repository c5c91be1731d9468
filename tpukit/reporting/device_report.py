"""Report the device's work in any loop: `metrics_report`. Needs no run and no task, and opens no device."""

import bisect
import collections
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from tpukit.host.tables import Notice, Sentences, Table
from tpukit.host.text import GIB
from tpukit.reporting import device_words
from tpukit.reporting.presenting import present

READ_A_VALUE = "aten::_local_scalar_dense"  # what `.item()` calls
MANY_SENT = 10  # tensors in a step
Sample = tuple[float, float]  # time, value


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
        self._began = 0.0
        # (time, optimizer) of each step in the block; 0: of weights on the CPU without a gradient
        self._steps: list[Sample] = []
        self._read()

    def __enter__(self) -> "MetricsReport":
        self.where = "in this block"
        if xla := _open_xla():
            xla.wait()  # so that what runs is counted where it was asked for
            self._before = xla.counters()
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._hook = register_optimizer_step_post_hook(self._note_step)
        self._began, self._steps = time.time(), []
        self._read()
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        try:
            if kind is None and (xla := _open_xla()):  # the work of a block that failed may never end
                xla.wait()
        finally:
            self._hook.remove()
            self._read()
            present(self)

    def _note_step(self, optimizer: Any, *_: object) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        is_on_device = any(p.device.type == "xla" for p in parameters)
        if is_on_device or all(p.grad is None for p in parameters):
            self._steps.append((time.time(), is_on_device and id(optimizer)))

    def _read(self) -> None:
        xla = _open_xla()
        self.counters = xla.counters() if xla else {}
        for name, before in self._before.items():
            self.counters[name] -= before
        self.compilations = self.counters.get("compilations", 0)
        self.fallbacks = dict(self.counters.get("fallbacks", {}))
        self.device, self.memory = (xla.device_name(), xla.memory()) if xla else _gpus()
        compiled, self._runs, self._sent = xla.history(self._began) if xla else ([], [], [])
        self._compiled = compiled[max(len(compiled) - self.compilations, 0) :]
        self.causes = collections.Counter(cause for cause, _, _ in self._compiled)

    def problems(self) -> list[str]:
        """Return the problems that were found, each a sentence with its fix."""
        if not self.counters:
            return []
        syncs, executions, problems = self.counters["syncs"], self.counters["executions"], []
        steps = collections.Counter(optimizer for _, optimizer in self._steps)
        operations = self._operations_on_the_cpu()
        found = [name for name in operations if "nonzero" in name or "masked_select" in name]
        left_behind, most = steps.pop(0, 0), max(steps.values(), default=0)
        never_ran = not executions and self.counters["traced"] > 100
        is_unended = 10 * syncs < most if most > 1 else not syncs and (executions > 3 or never_ran)
        if is_unended:
            problems.append(f"Steps ended: {syncs}. Call `torch_xla.sync()` after each, or the graph grows.")
        ends = syncs // max(len(self._steps), 1)
        parts = {operations for _, operations in self._runs[-ends:]}
        # Gradients that are added up over batches, with a sync each, are graphs that each get a batch.
        batches = sum(max(sizes, default=0) > 8 for sizes in _split(self._sent, self._runs))
        if len(parts) == ends > 2 and 2 * batches <= len(self._runs) and len(self._steps) > 3:
            problems.append(
                f"Each step ended {ends} times: call `torch_xla.sync()` once, after the optimizer."
            )
        if left_behind:
            problems.append(
                f"Optimizer steps without a gradient: {left_behind}. Make it after `.to(device)`."
            )
        # Not the first graphs of a part: such a graph had run twice, or half of all graphs.
        again = [cause for cause, before, after in self._compiled if before > 1 or 2 * after < executions]
        if len(again) > 2 and 10 * len(again) > executions and not is_unended:
            from tpukit.devices.recompiles import KEEP_ONE_GRAPH  # here: with torch, which has compiled

            [(cause, count)] = collections.Counter(again).most_common(1)
            cause = f"what {found[0]} finds has another size each time" if found else cause
            problems.append(
                f"Compiled {self.compilations} graphs in {executions} executions, which took"
                f" {self.counters['compile_s']:.1f} s. Likely cause of {count} of them: {cause}."
                f" {KEEP_ONE_GRAPH}. PT_XLA_DEBUG_LEVEL=2, set before Python starts, names the lines."
            )
        if operations:
            problems.append(
                f"{device_words.describe_fallbacks(operations)} Choose by `torch.where` or a product instead"
                " of `x[mask]` and `nonzero`, others before the loop; `tpukit migrate FILE` names such lines."
            )
        values = self.fallbacks.get(READ_A_VALUE, 0)
        reads = max(self.counters["read"] - self.counters["saved"] - sum(operations.values()), values)
        if reads > 3 and 10 * reads > executions:
            ways = [device_words.BY_ITEM] * (values > 0) + [device_words.BY_COPY] * (reads > values)
            problems.append(
                f"The host read from the device {reads} times in {executions} executions, by"
                f" {' or '.join(ways)}, and waited each time: add up on the device, and read every 20 steps."
            )
        tensors, sent = self._sent_in_a_step()
        return [*problems, f"{sent} Send one for many."] if tensors > MANY_SENT else problems

    def _sent_in_a_step(self) -> tuple[float, str]:
        """Return how many tensors a step sends, and a sentence of it, if both are known."""
        sends = [sizes for sizes in _split(self._sent, self._steps or self._runs)[:-1] if sizes]
        if len(sends) < 4:  # the first has the model
            return 0, ""
        tensors, size = statistics.median(map(len, sends)), statistics.median(map(sum, sends))
        return tensors, f"Sent in each step: {size / 1e3:,.1f} kB (tensors: {tensors:.0f})."

    def facts(self) -> list[str]:
        """Return sentences about the device and its work that are no problems."""
        if self.counters:
            compiled, executed = self.compilations, self.counters["executions"]
            sentences = [f"{self.device}, {self.where}: graphs compiled: {compiled}, executed: {executed}."]
            if executed and not self._operations_on_the_cpu():
                sentences.append(device_words.describe_fallbacks({}))
            tensors, sent = self._sent_in_a_step()
            return sentences + [sent] * (0 < tensors <= MANY_SENT)
        if self.device:
            counted = "Graphs of `torch.compile` are not counted."
            return [f"{self.device}.", f"{device_words.NOTHING_COMPILES} {counted}"]
        if "torch_tpu" in sys.modules:
            return ["torch_tpu does not report what it compiles."]
        return [
            "This process has not opened an XLA device or a GPU. Each core of `tpukit.launch`,"
            " `torch_xla.launch` or `xmp.spawn` makes its own report: write it into the function."
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


def _split(samples: Sequence[Sample], ends: Sequence[Sample]) -> list[list[float]]:
    """Return the values of samples, (time, value), before the first of some ends, ..., and after the last."""
    parts: list[list[float]] = [[] for _ in range(len(ends) + 1)]
    for at, value in samples:
        parts[bisect.bisect_left(ends, (at, 0))].append(value)
    return parts


def metrics_report() -> MetricsReport:
    """Report the device's work since this process began, or in a block:

        print(tpukit.metrics_report())

        with tpukit.metrics_report() as report:
            for batch in loader:
                step(batch)
        report.compilations, report.fallbacks

    The block's report is shown when it ends, even if by an error. Problems come first, with what to do:
    steps that are not ended, or several times; an optimizer made before the model moved; graphs that are
    compiled again and again; operations that the CPU runs instead; values that are read and many tensors
    that are sent in a step. Then numbers: compilations, executions, transfers, memory. The host waits for the
    device where the block begins and where it ends. Each process has a report of its own.

    Returns:
        A `MetricsReport`, which is also a context manager."""
    return MetricsReport()
