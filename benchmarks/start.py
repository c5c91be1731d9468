"""How long a user waits: from the launch line to the end of the first step, in a process that has imported
torch."""

import json
import statistics
import sys
import tempfile
import time

import torch  # noqa: F401  a notebook has it imported

from tpukit import MNIST, Run, launch, train

LAUNCHES = 5


def main(kind, count, digits):
    how = dict(parallel="spmd") if kind == "spmd" else {}
    seconds = []
    # On one core the process keeps its device and its compiled graphs: only the first launch counts.
    for _ in range(1 if count == "1" else LAUNCHES):
        with tempfile.TemporaryDirectory() as folder:
            task = MNIST(dataset_dir=digits, epochs=1, log_every=1, eval_every=9)
            run = Run.open(folder, task)
            started = time.time()
            launch(train, task, run, cores=int(count), **how)
            seconds.append(run.records("train")[0]["time"] - started)
    row = dict(device=kind, cores=int(count), seconds=round(statistics.median(seconds), 2))
    row |= dict(lowest=round(min(seconds), 2), highest=round(max(seconds), 2), launches=len(seconds))
    print("ROW " + json.dumps(row))


if __name__ == "__main__":
    main(*sys.argv[1:])
