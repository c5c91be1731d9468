"""Read what torch_xla has counted in this process, and conclude why it compiled. Neither opens a device."""

import collections
import sys
from typing import Any

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met

from tpukit.devices import xla_private

FIRST = "the first graph"
OTHER_OPERATIONS = "a different number of operations: a new part of the program, a branch or a loop"
NEW_SIZE = "data of a new size was sent to the device: a batch of a different shape"
SAME_SIZES = "the same number of operations and data of known sizes: a Python number, or a shape made there"
UNKNOWN = "too long ago to tell"
COPIES = ("xla::_copy_from", "xla::_to_copy", "xla::empty_symint")
Samples = list[tuple[float, float]]
PREFETCHED = 16  # graphs: a loader may have sent a batch that long before its step

is_open = xla_private.is_open
wait = xm.wait_device_ops  # until the device has run what it was given


def counters() -> dict[str, Any]:
    """Return what was counted since this process started.

    dict: compilations, executions, syncs (ends of steps), traced (operations other than copies), sent, read
    (transfers), saved (reads of `Checkpoints.save`): counts; compile_s, execute_s, to_device_s,
    from_device_s: seconds; fallbacks: Counter of the operations that XLA could not
    lower and the CPU ran instead."""
    compilations, compile_s = timed("CompileTime")
    executions = timed("ExecuteTime"), timed("ExecuteReplicatedTime")  # the second: a user's own SPMD
    sent, to_device_s = timed("TransferToDeviceTime")
    read, from_device_s = timed("TransferFromDeviceTime")
    counts = {name: met.counter_value(name) for name in met.counter_names()}
    return dict(
        compilations=compilations,
        compile_s=compile_s,
        executions=sum(count for count, _ in executions),
        execute_s=sum(seconds for _, seconds in executions),
        syncs=counts.get("MarkStep", 0),
        traced=sum(counts[name] for name in counts if name.startswith("xla::") and name not in COPIES),
        sent=sent,
        to_device_s=to_device_s,
        read=read,
        saved=getattr(sys.modules.get("tpukit.runs.tensors"), "device_reads", 0),
        from_device_s=from_device_s,
        fallbacks=collections.Counter({name: counts[name] for name in counts if name.startswith("aten::")}),
    )


def is_compiling() -> bool:
    """Return whether a graph is being compiled: looked for in vain, and not timed yet."""
    return (met.counter_value("UncachedCompile") or 0) > timed("CompileTime")[0]


def timed(name: str) -> tuple[int, float]:
    """Return (count, seconds) of one of torch_xla's timers."""
    data = met.metric_data(name)
    return (data[0], data[1] / 1e9) if data else (0, 0.0)


def history(start: float) -> tuple[list[tuple[str, int, int]], Samples, Samples]:
    """Return what happened in this process: the last compilations, each as (likely cause, runs of graphs with
    as many operations between `start` and it, runs of any graph since); and since `start`, or since both are
    known, [(time, operations)] of graphs that ran and [(time, bytes)] of what was sent.

    torch_xla keeps no causes, only the times of the last 1,024 compilations, graphs with their numbers of
    operations, and transfers with their sizes. The cause is concluded from the order of these."""
    compiled_at, _ = _samples("CompileTime")
    graphs, graphs_since = _samples("TensorsGraphSize")
    sent, sent_since = _samples("OutboundData")
    complete_since = max(graphs_since, sent_since)
    in_order: list[tuple[str, int, int]] = []
    previous = 0.0  # when the compilation before ended
    for time, _ in compiled_at:
        # A graph's operations are noted each time it runs. What is noted first after the compilation is the
        # compiled graph, whatever was noted before has run without it.
        ran = [(at, operations) for at, operations in graphs if at < time]
        known_operations = {operations for _, operations in ran}
        compiled = next((operations for at, operations in graphs if at >= time), None)
        # Data that was sent long before belongs to the graphs that ran; what came recently may be of a batch
        # for the compiled one. A size that only came recently is new.
        recently = previous
        if len(ran) > PREFETCHED:
            before_prefetched, _ = ran[-PREFETCHED - 1]
            recently = max(previous, before_prefetched)
        sizes_before = {size for at, size in sent if at < recently}
        sizes_since = {size for at, size in sent if recently <= at < time}
        if recently < complete_since:
            cause = UNKNOWN
        elif not ran:
            cause = FIRST
        elif compiled not in known_operations:
            cause = OTHER_OPERATIONS
        elif sizes_since - sizes_before:
            cause = NEW_SIZE
        else:
            cause = SAME_SIZES
        before = sum(1 for at, operations in ran if at >= start and operations == compiled)
        in_order.append((cause, before, len(graphs) - len(ran)))
        previous = time
    start = max(start, complete_since)
    return in_order, [run for run in graphs if run[0] >= start], [one for one in sent if one[0] >= start]


def _samples(name: str) -> tuple[Samples, float]:
    """Return [(time, value)] of the last samples of a metric, and since when they are complete."""
    count, _, samples = met.metric_data(name) or (0, 0.0, [])
    return samples, samples[0][0] if count > len(samples) else 0.0


def device_name() -> str:
    return xm.xla_device_hw(torch_xla.device()) + " through torch_xla"


def memory() -> list[tuple[int, int]]:
    """Return [(peak bytes, total bytes)] of this process's device, or [] if torch_xla does not tell."""
    try:
        info = xm.get_memory_info(torch_xla.device())
    except RuntimeError:  # neither the CPU XLA device nor the one device of SPMD implements it
        return []
    return [(info.get("peak_bytes_used", info["bytes_used"]), info["bytes_limit"])]
