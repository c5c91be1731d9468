"""`make plan`: what the TPU compiler says of the steps of MNIST, MSHNet and CDEIT at a small and a full size,
and of language models, kept in plan.json next to this.

The committed plan.json is a gate: a test compiles some of its small graphs and compares. Renew it when a step
has changed on purpose. The seconds of compilation are of the machine that renewed it."""

import functools
import json
import sys
from pathlib import Path

from benchmarks import hlo
from benchmarks.literal import LiteralMSHNet
from benchmarks.small import SmallCDEIT
from tpukit import CDEIT, MNIST, LanguageModel, MSHNet
from tpukit_tools.plan import COMPILER, MACHINES, compile_step, row_of

PATH = Path(__file__).with_name("plan.json")

# name -> task, chip
CASES = {
    "mnist small": (MNIST(batch_size=32, channels=8), "v5e-1"),
    "mnist full": (MNIST(), "v5e-1"),
    "mnist on 8 cores": (MNIST(batch_size=1024), "v5e-8"),
    "mshnet small": (MSHNet(batch_size=4, base_size=64, crop_size=64), "v5e-1"),
    "mshnet full": (MSHNet(batch_size=32), "v5e-1"),
    "mshnet literal": (LiteralMSHNet(batch_size=32), "v5e-1"),
    "mshnet on 8 cores, 4 images each": (MSHNet(batch_size=32), "v5e-8"),
    "mshnet on 8 cores, 32 images each": (MSHNet(batch_size=256), "v5e-8"),
    "cdeit small": (SmallCDEIT(batch_size=8), "v5e-1"),
    "cdeit full": (CDEIT(), "v5e-1"),
    "cdeit on 8 cores": (CDEIT(), "v5e-8"),
}
# The batches that one chooses between: docs/TRAINING_COMPARISON.md has them as tables. Global ones.
BATCHES = {
    "mshnet": (MSHNet, "v5e-1", (4, 8, 16, 64, 128)),
    "mshnet on 8 cores": (MSHNet, "v5e-8", (64, 128)),
    "cdeit": (CDEIT, "v5e-1", (4, 8, 32, 64, 128)),  # 128 does not fit
    "cdeit on 8 cores": (CDEIT, "v5e-8", (32, 64, 128, 256, 512)),
}
# The language models of docs/TEXT.md: the weights that train, and the batch of one core.
LANGUAGE_MODELS = {
    "gpt2": ("none", 8),
    "HuggingFaceTB/SmolLM2-135M": ("lora", 8),
    "google/gemma-3-270m": ("lora", 8),
    "Qwen/Qwen3-0.6B": ("lora", 4),
    "google/gemma-3-1b-pt": ("lora", 2),
}
CASES |= {
    f"{name}, batch {size}": (task(batch_size=size), chip)
    for name, (task, chip, sizes) in BATCHES.items()
    for size in sizes
}
CASES |= {
    f"{name} on v5e-{cores}": (
        LanguageModel(model_name=name, adapter=adapter, batch_size=cores * size),
        f"v5e-{cores}",
    )
    for name, (adapter, size) in LANGUAGE_MODELS.items()
    for cores in (1, 8)
}
log = functools.partial(print, file=sys.stderr)
KEPT = ("batch_size", "fits", "peak_bytes", "flops", "hbm_bytes", "compile_s")


def measure(name):
    """Return the figures of one case, as plan.json keeps them."""
    task, chip = CASES[name]
    machine = MACHINES[chip]
    graph = compile_step(task, task.batch_size, machine, log)
    row = row_of(task.batch_size, graph, machine.chip)
    if row["fits"]:
        row["hbm_bytes"] = hlo.nbytes(graph["hlo"])
    return dict(chip=chip) | {key: row.get(key) for key in KEPT}


def main(names):
    committed = json.loads(PATH.read_text())
    found = committed if committed["compiler"] == list(COMPILER) else dict(compiler=list(COMPILER), plans={})
    for name in names or CASES:
        found["plans"][name] = measure(name)
        PATH.write_text(json.dumps(found, indent=1) + "\n")
        print("ROW " + json.dumps(dict(case=name, **found["plans"][name])), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
