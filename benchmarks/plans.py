"""`make plan`: what the TPU compiler says of every task's step at a small and a full size, kept in plan.json
next to this.

The committed plan.json is a gate: a test compiles some of its small graphs and compares. Renew it when a step
has changed on purpose. The seconds of compilation are of the machine that renewed it."""

import json
import sys
from pathlib import Path

from benchmarks.literal import LiteralMSHNet
from tpukit import CDEIT, MNIST, MSHNet
from tpukit.tools.plan import COMPILER, plan

PATH = Path(__file__).with_name("plan.json")
SMALL_CDEIT = CDEIT(batch_size=8, patch=16, width=64, heads=2, window=4, levels=1)


# name -> task, part, chip, and how its cores share the step; a name that ends in ", torch_tpu" is lowered by
# it
CASES = {
    "mnist small": (MNIST(batch_size=32, channels=8), "train", "v5e-1"),
    "mnist small, torch_tpu": (MNIST(batch_size=32, channels=8), "train", "v5e-1"),
    "mshnet small, torch_tpu": (MSHNet(batch_size=4, base_size=64, crop_size=64), "train", "v5e-1"),
    "cdeit small, torch_tpu": (SMALL_CDEIT, "train", "v5e-1"),
    "cdeit full at batch 2, torch_tpu": (CDEIT(batch_size=2), "train", "v5e-1"),
    "cdeit full, torch_tpu": (CDEIT(), "train", "v5e-1"),
    "mnist full, torch_tpu": (MNIST(), "train", "v5e-1"),
    "mshnet full, torch_tpu": (MSHNet(batch_size=32), "train", "v5e-1"),
    "mnist full": (MNIST(), "train", "v5e-1"),
    "mnist on 8 cores": (MNIST(batch_size=1024), "train", "v5e-8"),
    "mshnet small": (MSHNet(batch_size=4, base_size=64, crop_size=64), "train", "v5e-1"),
    "mshnet full": (MSHNet(batch_size=32), "train", "v5e-1"),
    "mshnet literal": (LiteralMSHNet(batch_size=32), "train", "v5e-1"),
    "mshnet evaluation": (MSHNet(batch_size=32), "evaluate", "v5e-1"),
    "mshnet session": (MSHNet(batch_size=32), "session", "v5e-1"),
    "mshnet on 8 cores, 4 images each": (MSHNet(batch_size=32), "train", "v5e-8"),
    "mshnet on 8 cores, 32 images each": (MSHNet(batch_size=256), "train", "v5e-8"),
    "mshnet on 8 cores by SPMD, 4 images each": (MSHNet(batch_size=32), "train", "v5e-8", "spmd"),
    "mshnet on 8 cores by SPMD, 32 images each": (MSHNet(batch_size=256), "train", "v5e-8", "spmd"),
    "cdeit small": (SMALL_CDEIT, "train", "v5e-1"),
    "cdeit full": (CDEIT(), "train", "v5e-1"),
    "cdeit sampling": (CDEIT(), "evaluate", "v5e-1"),
    "cdeit session": (CDEIT(), "session", "v5e-1"),
    "cdeit on 8 cores": (CDEIT(), "train", "v5e-8"),
    "cdeit on 8 cores by SPMD": (CDEIT(), "train", "v5e-8", "spmd"),
}
# The batches that one chooses between: docs/TRAINING_COMPARISON.md has them as tables. Global ones.
BATCHES = {
    "mshnet": (MSHNet, "v5e-1", (4, 8, 16, 64, 128)),
    "mshnet on 8 cores": (MSHNet, "v5e-8", (64, 128)),
    "cdeit": (CDEIT, "v5e-1", (4, 8, 32, 64, 128)),  # 128 does not fit
    "cdeit on 8 cores": (CDEIT, "v5e-8", (32, 64, 128, 256, 512)),
}
CASES |= {
    f"{name}, batch {size}": (task(batch_size=size), "train", chip)
    for name, (task, chip, sizes) in BATCHES.items()
    for size in sizes
}
KEPT = ("batch_size", "fits", "peak_bytes", "flops", "hbm_bytes", "vmem_bytes", "cycles", "compile_s")
KEPT_OF_GRAPHS = ("name", "times", "peak_bytes", "hbm_bytes", "custom_calls", "kernels", "compile_s")


def measure(name, log=print):
    """The figures of one case, as plan.json keeps them."""
    task, part, chip, *parallel = CASES[name]
    parallel = parallel[0] if parallel else "processes"
    backend = "torch_tpu" if name.endswith(", torch_tpu") else "torch_xla"
    (row,) = plan(task, part=part, chip=chip, parallel=parallel, backend=backend, log=log).rows
    found = dict(chip=chip, part=part, parallel=parallel, **{key: row[key] for key in KEPT if key in row})
    return found | dict(
        graphs=[{key: graph[key] for key in KEPT_OF_GRAPHS} for graph in row.get("graphs", [])]
    )


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
