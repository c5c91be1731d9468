"""Words for the work of an accelerator, in the report of a run and of any loop. Needs no torch."""

from collections.abc import Mapping, Sequence

from tpukit.host.tables import Table
from tpukit.host.text import GIB

NOTHING_COMPILES = "Nothing is compiled on this device: PyTorch runs each operation as it comes."
SENDING, READING = "sending to the device", "reading from the device"

BY_ITEM, BY_COPY = "`.item()`, `float(x)` or `if x > 0`", "`print(x)`, `x.cpu()` or the like"


def describe_fallbacks(fallbacks: Mapping[str, int]) -> str:
    """Return a sentence about the operations that the CPU ran instead of an XLA device: name -> count."""
    if not fallbacks:
        return "No operation fell back to the CPU."
    names = ", ".join(f"{name} ({count} times)" for name, count in fallbacks.items())
    return f"Ran on the CPU, a round trip each: {names}."


def memory_table(memory: Sequence[tuple[float, float]]) -> Table:
    """Return the table of (peak bytes, total bytes) of each device."""
    rows = [
        (device, f"{peak / GIB:.2f}", f"{size / GIB:.2f}", f"{peak / max(size, 1):.0%}")
        for device, (peak, size) in enumerate(memory)
    ]
    return Table("Memory", ("device", "peak, GiB", "of GiB", ""), rows)
