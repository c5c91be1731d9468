"""`tpukit compare`: a recipe's step timed here (`timing`), and what the whole training then takes by hardware
and place (`choice`)."""

from tpukit.tools.measure.choice import (
    PRICES,
    Comparison,
    Offer,
    Price,
    compare,
    prices_table,
    read_prices,
    sessions_needed,
    show_comparison,
)
from tpukit.tools.measure.timing import (
    SYNTHETIC_IMAGES,
    Measurement,
    check_out,
    file_for,
    hardware_of,
    measure_here,
    time_steps,
)

__all__ = [
    "PRICES",
    "SYNTHETIC_IMAGES",
    "Comparison",
    "Measurement",
    "Offer",
    "Price",
    "check_out",
    "compare",
]
__all__ += ["file_for", "hardware_of", "measure_here", "prices_table", "read_prices", "sessions_needed"]
__all__ += ["show_comparison", "time_steps"]
