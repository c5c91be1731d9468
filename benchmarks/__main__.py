"""`python -m benchmarks [PART...]`: measure, print a table for each part, and write one JSON. All figures are
of one machine in one run.

steps     MSHNet's training step, plain, with each way that PyTorch has to make it faster, and by tpukit
loops     the cost of tpukit's loop next to a bare loop, Lightning and accelerate: same model, same device
text      GPT-2 and LoRA on a GPU, or small models on a CPU, next to a loop by hand and TRL"""

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.rows import read_rows
from tpukit.host import environment
from tpukit.host.tables import Table

# Part -> the arguments of its processes, each of which has a device of its own.
CASES = dict(
    loops=("cpu mnist {rounds}", "xla mnist {rounds}", "xla mshnet {rounds}"),
    steps=(
        "cpu 256 4 {rounds}",
        "xla 128 4 {rounds}",
        *(f"cuda 256 {size} {{rounds}}" for size in (4, 16, 64) if torch.cuda.is_available()),
    ),
    text=("{rounds}",),
)
PACKAGES = ("torch", "torch_xla", "lightning", "accelerate", "trl")
DEFAULT = ("steps", "loops", *(["text"] if torch.cuda.is_available() else []))


def main():
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"by default {', '.join(DEFAULT)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("outputs/bench.json"))
    options = parser.parse_args()
    if unknown := set(options.parts) - CASES.keys():
        parser.error(f"no part {', '.join(unknown)}; there are: {', '.join(CASES)}")
    found = dict(processor=platform.machine(), cores=os.cpu_count(), python=platform.python_version())
    found |= {name: environment.version_of(name) for name in PACKAGES}
    print(Table("Machine", found, [found.values()]))
    for part in options.parts or DEFAULT:
        cases = [case.format(rounds=options.rounds).split() for case in CASES[part]]
        rows = found[part] = [row for case in cases for row in measure(part, case)]
        print(f"\n{Table(part, rows[0], [row.values() for row in rows])}", flush=True)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1))
    print(f"\n{options.out}")


def measure(part, case):
    """Return the rows that a part prints in a process of its own, so that no device is shared."""
    variables = dict(os.environ, PJRT_DEVICE="CPU")
    command = [sys.executable, "-m", f"benchmarks.{part}", *case]
    ran = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True)
    if ran.returncode:
        sys.exit(f"{' '.join(command)} failed, see above")
    return read_rows(ran.stdout)


if __name__ == "__main__":
    main()
