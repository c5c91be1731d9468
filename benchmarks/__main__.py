"""`python -m benchmarks [PART...]`: measure, print tables, and write one JSON. All figures are of one machine
in one run.

data    images per second of each way from a set on disk to a batch, next to a plain PIL pipeline; one core
steps   MSHNet's training step written by hand and with each way of making it faster
epochs  an epoch around it: waiting for data, compilations after warm-up, evaluation, time to the first step,
peak memory overheads  what saving, scoring and recording take away from a fast device with epochs of a second
loops   the cost of tpukit's loop next to a bare loop, Lightning and accelerate: same model, same device
images  a network of timm trained by tpukit and by a plain loop: time and accuracy cores   2 and 4 processes
against one, and what share of a step the gradient all-reduce takes host    what the host does for a step of
MSHNet on eight TPU cores, traced and replayed start   from the launch line to the end of the first step"""

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

PARTS = ("data", "steps", "epochs", "overheads", "loops", "images", "cores", "host", "start")


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
    if part == "data":
        rows = [row for device in ["cpu", *gpu] for row in ask("data", device, infrared)]
        columns = ("device", "way", "images_per_s", "times_plain", "rounds")
        title = (
            "From the set to batches of 256x256, one thread: times_plain is against decoding and augmenting"
            " by PIL"
        )
    elif part == "steps":
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
    elif part == "overheads":
        rows = ask("overheads")
        columns = (
            "way",
            "lost_percent",
            "lowest",
            "highest",
            "lost_ms",
            "saves_ms",
            "scores_ms",
            "evaluation_ms",
        )
        columns += ("records_ms", "end_ms", "runs", "epochs")
        title = (
            "What an epoch of a second takes longer than its mocked device: MSHNet's sizes, evaluated every"
            " epoch"
        )
    elif part == "loops":
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
    elif part == "images":
        with tempfile.TemporaryDirectory() as work:
            rows = ask("images", make_synthetic("my-images", Path(work) / "shapes", size=4800))
        columns = (
            "model",
            "images",
            "epochs",
            "loop",
            "seconds",
            "seconds_times_plain",
            "seconds_range",
            "processor_s",
        )
        columns += ("processor_s_times_plain", "processor_s_range", "accuracy", "accuracy_range", "rounds")
        title = (
            "A network of timm from scratch, in turn: seconds of steps and predictions, processor_s of"
            " everything"
        )
    elif part == "cores":
        rows = [
            row for kind in ("cpu", "xla") for count in (1, 2, 4) for row in ask("cores", kind, count, digits)
        ]
        alone = {row["device"]: row["images_per_s"] for row in rows if row["processes"] == 1}
        rows = [dict(row, times_one=round(row["images_per_s"] / alone[row["device"]], 2)) for row in rows]
        columns = ("device", "processes", "images_per_s", "times_one", "gradient_all_reduce_share", "rounds")
        title = (
            "Several processes on this machine's cores, global batch 128: gradient_all_reduce_share is the"
            " part of a step"
        )
    elif part == "host":
        rows = [row for parallel in ("processes", "spmd") for row in ask("cores", "host", parallel)]
        columns = ("parallel", "way", "host_ms", "lowest", "highest", "times_traced", "wall_ms", "steps")
        title = (
            "MSHNet on eight TPU cores: processor time of a host's thread for a step of a process, or of all"
            " by SPMD"
        )
    else:
        cases = (("cpu", 1), ("cpu", 2), ("cpu", 4), ("xla", 1), ("xla", 2), ("spmd", 8))
        rows = [row for kind, count in cases for row in ask("start", kind, count, digits)]
        columns = ("device", "cores", "seconds", "lowest", "highest", "launches")
        title = "From the launch line to the end of the first step, MNIST network"
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
