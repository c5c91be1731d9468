"""`LanguageModel` on Python's own documentation next to a plain loop over the same network of transformers.

`python -m benchmarks.text ROUNDS`. The texts are those of `--dataset-dir demo`: the topics of `help()`, which
are parts of the Python Language Reference. The plain loop is what one would write by hand: the rows as one
tensor, transformers' own attention and loss, no checkpoints, no records. It lets the documents of a row see
each other. Each round times an epoch of both, in turn, on one thread; a first round warms up."""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.text_gpu import decayed_groups
from tpukit import LanguageModel, Run, train
from tpukit.devices.runtime import Runtime, keep_freed_memory
from tpukit.tasks.datasets import make_synthetic
from tpukit.tasks.text.data import TextSet


def plain(task: LanguageModel, data: TextSet, steps: int) -> float:
    """Return the seconds of a loop written by hand."""
    import transformers

    keep_freed_memory()  # as tpukit does, or the system would clear each step's memory anew
    torch.manual_seed(task.seed)
    network = transformers.AutoModelForCausalLM.from_config(task.config, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(decayed_groups(network), lr=task.lr, betas=(0.9, 0.95))
    batch = data.batch(np.arange(len(data)))
    rows, labels = (torch.from_numpy(batch[name]).long() for name in ("tokens", "labels"))
    order, started = torch.randperm(len(rows)), time.perf_counter()
    for step in range(steps):
        chosen = order[step * task.batch_size : (step + 1) * task.batch_size]
        optimizer.zero_grad(set_to_none=True)
        logits = network(rows[chosen]).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[chosen].flatten(), ignore_index=-1
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
    return time.perf_counter() - started


def ours(task: LanguageModel) -> float:
    """Return the seconds of the same steps by tpukit, by its own records."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run.open(folder, task)
        run.echo = False
        train(task, run, runtime=Runtime("cpu"), progress=False)
        return sum(record["speed"]["seconds"] for record in run.records("train"))


def main(rounds: str) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        place = make_synthetic("my-text", Path(folder) / "topics", size=60)
        settings = dict(batch_size=8, lr=2e-3, schedule="constant", gradient_checkpointing=False)
        shortened = dict(epochs=1, eval_every=2, samples=0, warmup_epochs=0, log_every=10)
        task = LanguageModel(dataset_dir=place, **settings, **shortened)
        data, _ = task.datasets()
        steps = len(data) // task.batch_size
        pairs = [(plain(task, data, steps), ours(task)) for _ in range(int(rounds) + 1)][1:]
    ratios = [tpukit_s / plain_s for plain_s, tpukit_s in pairs]
    step_s = statistics.median(tpukit_s for _, tpukit_s in pairs) / steps
    row = dict(
        steps=steps,
        ms_per_step=round(1e3 * step_s, 1),
        tokens_per_s=round(task.batch_size * task.length / step_s),
        times_plain=round(statistics.median(ratios), 3),
        lowest=round(min(ratios), 3),
        highest=round(max(ratios), 3),
        rounds=len(pairs),
    )
    print("ROW " + json.dumps(row))


if __name__ == "__main__":
    main(*sys.argv[1:])
