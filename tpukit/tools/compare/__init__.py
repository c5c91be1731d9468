"""`tpukit compare`: a recipe measured here, merged with measurements of other machines, and the choice that
follows.

`measuring` times the training step; `measurement` is the small file of the result; `comparison` puts many of
them beside the published figures and what `tpukit plan` counts; `choosing` says which hardware finishes, in
how many sessions, at what cost."""

from tpukit.tools.compare.choosing import Candidate, Estimate, choose, sessions_needed
from tpukit.tools.compare.comparison import Comparison, compare, plan_recipe
from tpukit.tools.compare.measurement import Measurement, check_out, check_writable, file_for, hardware_of
from tpukit.tools.compare.measuring import SYNTHETIC_IMAGES, measure, measure_here

__all__ = [
    "Candidate",
    "Comparison",
    "Estimate",
    "Measurement",
    "SYNTHETIC_IMAGES",
    "check_out",
    "check_writable",
    "choose",
]
__all__ += ["compare", "file_for", "hardware_of", "measure", "measure_here", "plan_recipe", "sessions_needed"]
