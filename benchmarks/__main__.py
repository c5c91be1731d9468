"""`python -m benchmarks [PART...]`: measure, print tables, and write one JSON. All figures are of one machine
in one run.

steps   MSHNet's training step written by hand and with each way of making it faster
epochs  an epoch around it: waiting for data, compilations after warm-up, evaluation, time to the first step,
peak memory
loops   the cost of tpukit's loop next to a bare loop, Lightning and accelerate: same model, same device"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from tpukit.host import environment
from tpukit.host.tables import Table
from tpukit.tasks.datasets import make_synthetic

PARTS = ("steps", "epochs", "loops")


def main():
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; by default all")
    parser.add_argument(
        "--data",
        type=Path,
        help="a real infrared set, for the parts that read one; by default synthetic images",
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/bench.json"))
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(unknown)}; there are: {', '.join(PARTS)}")
    versions = {
        name: environment.version_of(name) for name in ("torch", "torch_xla", "lightning", "accelerate")
    }
    machine = dict(
        processor=platform.machine(), cores=os.cpu_count(), python=platform.python_version(), **versions
    )
    found = dict(machine=machine)
    print(Table("Machine", ("what", "value"), machine.items()))
    with tempfile.TemporaryDirectory() as work:
        os.environ["TPUKIT_CACHE"] = f"{work}/cache"  # nothing that an earlier run left
        digits = make_synthetic("mnist", Path(work) / "digits", size=8000)
        synthetic = make_synthetic("IRSTD-1k", Path(work) / "infrared", size=120)
        for part in options.parts or PARTS:
            found[part] = measure(part, digits, synthetic, options.data or synthetic)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(found, indent=1))
    print(f"\n{options.out}")


def measure(part, digits, synthetic, infrared):
    """One part's rows, each a dict; printed as a table. infrared: the real set, or `synthetic`, which is 120
    images."""
    gpu = ["cuda"] if has_gpu() else []
    if part == "steps":
        cases = [("cpu", 256, 4), ("xla", 128, 4)] + [("cuda", 256, size) for size in (4, 16, 64) if gpu]
        rows = [
            dict(row, size=case[1], batch=case[2]) for case in cases for row in ask("steps", "steps", *case)
        ]
        columns = ("device", "size", "batch", "way", "ms_per_step", "times_first", "lowest", "highest")
        columns += ("host_ms", "first_step_s", "rounds")
        title = (
            "MSHNet's training step, each way in turn with its device's first; host_ms: until the host has"
            " handed it over"
        )
    elif part == "epochs":
        cases = [("cpu", 64, 8), ("xla", 64, 8)] + [("cuda", 256, size) for size in (4, 16) if gpu]
        rows = [
            dict(row, size=case[1], batch=case[2])
            for case in cases
            for row in ask("steps", "epochs", *case, infrared)
        ]
        columns = ("device", "size", "batch", "data_on", "images_per_s", "wait_share", "compiled_late")
        columns += ("eval_s", "scoring_s", "first_step_s", "peak_gib")
        title = "The second epoch of a training of MSHNet"
    else:
        rows = [
            row
            for case in ("cpu mnist", "xla mnist", "xla mshnet")
            for row in ask("loops", *case.split(), digits, synthetic)
        ]
        columns = ("device", "model", "loop", "ms_per_step", "times_bare", "lowest", "highest", "rounds")
        title = (
            "One loop against another, in turn: times_bare compares medians, lowest and highest are of single"
            " rounds"
        )
    print(f"\n{Table(title, columns, [[row[name] for name in columns] for row in rows])}", flush=True)
    return rows


def has_gpu():
    import torch

    return torch.cuda.is_available()


def ask(module, *arguments):
    """Run one measurement in a process of its own, so that no device is shared, and read its rows."""
    environ = dict(os.environ) if "cuda" in arguments else {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    environ.pop("PJRT_DEVICE", None)
    if {"xla", "spmd"} & set(arguments):
        environ["PJRT_DEVICE"] = "CPU"
    command = [sys.executable, "-m", f"benchmarks.{module}", *map(str, arguments)]
    ran = subprocess.run(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if ran.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{ran.stderr[-3000:]}")
    return [json.loads(line[4:]) for line in ran.stdout.splitlines() if line.startswith("ROW ")]


if __name__ == "__main__":
    main()
