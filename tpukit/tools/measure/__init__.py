"""`tpukit compare`: timing.py measures how long a step takes here; choice.py chooses among hardware by what
several machines measured, what was published, and what an hour costs."""

# ruff: noqa: F401
from tpukit.tools.measure.choice import PRICES, compare, prices_table, read_prices, show_comparison
from tpukit.tools.measure.timing import SYNTHETIC_IMAGES, measure_here, read, table
