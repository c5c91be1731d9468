"""`tpukit compare`: one recipe measured on what is here, merged with what was measured elsewhere, and the choice that follows.

`measuring` times the step, by the very pieces that a training consists of; `measurement` is the small file that comes of it;
`comparison` puts many of them beside the published figures and the bounds of `tpukit plan`; `choosing` says which hardware
finishes, in how many sessions, for how much. What was not measured is marked as such.
"""

from tpukit.tools.compare.choosing import Choice, Way, choose, sessions_needed
from tpukit.tools.compare.comparison import Comparison, compare, plan_recipe
from tpukit.tools.compare.measurement import Measurement, check_writable, file_for, hardware_of
from tpukit.tools.compare.measuring import SYNTHETIC_IMAGES, measure, measure_here

__all__ = ["Choice", "Comparison", "Measurement", "SYNTHETIC_IMAGES", "Way", "check_writable", "choose", "compare", "file_for"]
__all__ += ["hardware_of", "measure", "measure_here", "plan_recipe", "sessions_needed"]
