"""`tpukit cloud`: TPU machines of Google Cloud, through the user's own gcloud: cost, creation, work, deletion.

Everything that it makes carries a label, and nothing without it is ever deleted. `skypilot` writes a task for SkyPilot instead.
On a TPU slice the same `tpukit train` is started on every host; the cores find one another.
"""

from tpukit.tools.cloud.rented import Rented, find
from tpukit.tools.cloud.renting import create, delete, listing
from tpukit.tools.cloud.running import fetch, run, shell, watch
from tpukit.tools.cloud.skypilot import Task, skypilot_task
from tpukit.tools.cloud.tpu_types import cost_table

# Word on the command line -> what does it.
VERBS = {"create": create, "list": listing, "open": shell, "run": run, "watch": watch, "fetch": fetch, "delete": delete}
WRITERS = {"skypilot": skypilot_task}

__all__ = [
    "VERBS",
    "WRITERS",
    "Rented",
    "Task",
    "cost_table",
    "create",
    "delete",
    "fetch",
    "find",
    "listing",
    "run",
    "shell",
    "skypilot_task",
    "watch",
]
