"""What a check of the hardware finds."""

import dataclasses
import math

from tpukit.host.environment import Environment

PASS, FAIL, INFO, SKIP = "PASS", "FAIL", "INFO", "SKIP"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """outcome: whether the check's sentence holds (PASS, FAIL), a number without a right answer (INFO), or
    not tried (SKIP). text: what was found. numbers: name with unit -> value, all finite."""

    outcome: str
    text: str
    numbers: dict[str, float] = dataclasses.field(default_factory=dict)


def judged(holds: bool, text: str, **numbers: float) -> Outcome:
    """PASS or FAIL, with those of the numbers that are finite, which is all that JSON can hold."""
    return Outcome(PASS if holds else FAIL, text, _finite(numbers))


def measured(text: str, **numbers: float) -> Outcome:
    """INFO."""
    return Outcome(INFO, text, _finite(numbers))


def is_hardware(env: Environment) -> bool:
    """Whether this is not a rehearsal on a processor, in which sizes are small."""
    return env.accelerator in ("tpu", "cuda")


def _finite(numbers):
    return {name: float(f"{value:.4g}") for name, value in numbers.items() if math.isfinite(value)}
