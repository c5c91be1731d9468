"""Facts of TPU chips: the one table of memory sizes, rates and names. Imports no torch.

The PCI ids by which a TPU is detected are in `host/environment.py`, which is a lower layer.
"""

import dataclasses

from tpukit.host.text import GIB

LANES = 128  # numbers that a TPU core works on side by side


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One generation of TPU.

    Sources: Google Cloud's documentation ("TPU versions" with the page of each version, "TPU architecture",
    and "TPU software versions", read in November 2026); of hbm_bytes libtpu's compiler, whose refusal of a
    larger graph names the limit."""

    name: str
    cloud_type: str
    """How the accelerator types of Google Cloud begin: v5litepod-8."""
    hbm_bytes: float
    """What a compiled graph may use of the memory of one chip."""
    flops: float
    """bf16 FLOP/s of one chip."""

    @property
    def short_name(self) -> str:
        return self.name.removeprefix("TPU ")


V5E = Chip(name="TPU v5e", cloud_type="v5litepod", hbm_bytes=15.75 * GIB, flops=197e12)
V6E = Chip(name="TPU v6e", cloud_type="v6e", hbm_bytes=31.25 * GIB, flops=918e12)
CHIPS = (V5E, V6E)


def find_chip(accelerator_type: str) -> Chip | None:
    """Return the Chip of an accelerator type, which some hosts call v5litepod-8 and others v5e-8; None for
    one that is not in the table."""
    generation = accelerator_type.partition("-")[0]
    return next((chip for chip in CHIPS if generation in (chip.cloud_type, chip.short_name)), None)
