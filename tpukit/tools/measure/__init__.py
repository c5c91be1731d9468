"""`tpukit compare`: a recipe's step timed here (`timing`), and what the whole training then takes by hardware
and place (`choice`)."""

from tpukit.tools.measure.choice import PRICES, compare, prices_table, read_prices, show_comparison
from tpukit.tools.measure.timing import SYNTHETIC_IMAGES, Measurement, check_out, file_for, measure_here

__all__ = ["PRICES", "SYNTHETIC_IMAGES", "Measurement", "check_out", "compare", "file_for", "measure_here"]
__all__ += ["prices_table", "read_prices", "show_comparison"]
