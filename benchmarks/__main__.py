"""`python -m benchmarks [PART...]`: measure, and print each row once it is there, then a table for each part.

All figures are of one machine in one run. Without a part: all of them.

loops     the cost of tpukit's loop next to a bare loop, Fabric, Lightning and accelerate: same model, device
steps     MSHNet's training step, plain, with each way that PyTorch has to make it faster, and by tpukit
text      GPT-2 and LoRA on a GPU, or small models on a CPU, next to a loop by hand and TRL"""

import os
import subprocess
import sys

import torch

from benchmarks.rows import read_row
from tpukit.host import environment
from tpukit.host.tables import Table

# Part -> the arguments of its processes, each of which has a device of its own.
CASES = dict(
    loops=["cpu tiny", "cpu mnist", "cpu resnet50", "cpu mshnet", "xla tiny", "xla mnist", "xla mshnet"],
    steps=["cpu 256 4", "xla 128 4"],
    text=[""],
)
if torch.cuda.is_available():
    CASES["loops"] = ["cuda tiny", "cuda mnist", "cuda resnet50", "cuda mshnet", *CASES["loops"]]
    CASES["steps"] = ["cuda 256 4", "cuda 256 16", "cuda 256 64", *CASES["steps"]]
# Package -> the ways that it has a row for
PEERS = dict(lightning="Fabric, Lightning", accelerate="accelerate", transformers="text", trl="TRL")
ROUNDS = "5"


def main():
    parts = sys.argv[1:] or list(CASES)
    if not CASES.keys() >= set(parts):
        sys.exit(__doc__)
    print(environment.detect())
    for package, ways in PEERS.items():
        version = environment.version_of(package)
        print(f"{package} {version}" if version else f"{package} is not installed: no rows of {ways}")
    for part in parts:
        rows = {}  # the columns that are no measurements -> the row, of the most rounds so far
        try:
            for case in CASES[part]:
                for row in measure(part, case):
                    rows[tuple(value for value in row.values() if isinstance(value, str))] = row
                    print(part, *row.values(), flush=True)
        finally:
            if rows:
                print(Table(part, next(iter(rows.values())), map(dict.values, rows.values())), flush=True)


def measure(part, case):
    """Generate the rows that a part prints in a process of its own, so that no device is shared."""
    command = [sys.executable, "-m", f"benchmarks.{part}", *case.split(), ROUNDS]
    environ = dict(os.environ, PJRT_DEVICE="CPU")
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if row := read_row(line):
                yield row
    if process.returncode:
        print(f"{part} {case} ended with {process.returncode}", file=sys.stderr)


if __name__ == "__main__":
    main()
