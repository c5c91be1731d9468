"""`make plan`: what the TPU compiler says of every workload's step at a small and a full size, kept in plan.json next to this.

The committed plan.json is a gate: a test compiles some of its small graphs and compares. Renew it when a step has changed on
purpose.
"""

import json
import sys
from pathlib import Path

from tpukit import CDEIT, MNIST, MSHNet
from tpukit.tools.plan import COMPILER, plan

PATH = Path(__file__).with_name("plan.json")
SMALL_CDEIT = CDEIT(batch_size=8, patch=16, width=64, heads=2, window=4, levels=1)

# name -> task, part, chip
CASES = {
    "mnist small": (MNIST(batch_size=32, channels=8), "train", "v5e-1"),
    "mnist full": (MNIST(), "train", "v5e-1"),
    "mnist on 8 cores": (MNIST(batch_size=1024), "train", "v5e-8"),
    "mshnet small": (MSHNet(batch_size=4, base_size=64, crop_size=64), "train", "v5e-1"),
    "mshnet full": (MSHNet(batch_size=32), "train", "v5e-1"),
    "mshnet evaluation": (MSHNet(batch_size=32), "evaluate", "v5e-1"),
    "cdeit small": (SMALL_CDEIT, "train", "v5e-1"),
    "cdeit full": (CDEIT(), "train", "v5e-1"),
    "cdeit sampling": (CDEIT(), "evaluate", "v5e-1"),
}
KEPT = ("batch_size", "fits", "peak_bytes", "flops", "hbm_bytes", "vmem_bytes", "cycles")


def measure(name, log=print):
    """The figures of one case, as plan.json keeps them."""
    task, part, chip = CASES[name]
    (row,) = plan(task, part=part, chip=chip, log=log).rows
    return dict(chip=chip, part=part, **{key: row[key] for key in KEPT if key in row})


def main(names):
    found = json.loads(PATH.read_text()) if PATH.exists() else {}
    if found.get("compiler") != list(COMPILER):
        found = dict(compiler=list(COMPILER), plans={})
    for name in names or CASES:
        print(f"== {name}", flush=True)
        found["plans"][name] = measure(name)
        PATH.write_text(json.dumps(found, indent=1) + "\n")
        print(json.dumps(found["plans"][name]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
