"""`python -m benchmarks [PART...]`: measure, and print a table for each part.

All figures are of one machine in one run. Without a part: steps and loops.

steps     MSHNet's training step, plain, with each way that PyTorch has to make it faster, and by tpukit
loops     the cost of tpukit's loop next to a bare loop, Lightning and accelerate: same model, same device
text      GPT-2 and LoRA on a GPU, or small models on a CPU, next to a loop by hand and TRL"""

import os
import subprocess
import sys

import torch

from benchmarks.rows import read_rows
from tpukit.host import environment
from tpukit.host.tables import Table

# Part -> the arguments of its processes, each of which has a device of its own.
CASES = dict(steps=["cpu 256 4", "xla 128 4"], loops=["cpu mnist", "xla mnist", "xla mshnet"], text=[""])
if torch.cuda.is_available():
    CASES["steps"] += ["cuda 256 4", "cuda 256 16", "cuda 256 64"]
PEERS = ("lightning", "accelerate", "trl")
ROUNDS = "5"


def main():
    parts = sys.argv[1:] or ["steps", "loops"]
    if not CASES.keys() >= set(parts):
        sys.exit(__doc__)
    print(environment.detect(), *(f"{name} {environment.version_of(name)}" for name in PEERS), sep="\n")
    for part in parts:
        rows = [row for case in CASES[part] for row in measure(part, case)]
        print(Table(part, rows[0], map(dict.values, rows)), flush=True)


def measure(part, case):
    """Return the rows that a part prints in a process of its own, so that no device is shared."""
    command = [sys.executable, "-m", f"benchmarks.{part}", *case.split(), ROUNDS]
    environ = dict(os.environ, PJRT_DEVICE="CPU")
    ran = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    return read_rows(ran.stdout)


if __name__ == "__main__":
    main()
