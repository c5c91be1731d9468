"""`LanguageModel` on Python's own documentation: beside a bigram model of its bytes, and next to a plain loop
over the same network of transformers.

`python -m benchmarks.text [ROUNDS [TOPICS]]`. The texts are those of `--dataset-dir demo`: the topics of
`help()`, which are parts of the Python Language Reference. The plain loop is what one would write by hand:
the rows as one tensor, transformers' own attention and loss, no checkpoints, no records. It lets the
documents of a row see each other. Each round times an epoch of both, in turn, on one thread; a first round
warms up."""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from tpukit import LanguageModel, Run, train
from tpukit.devices.runtime import Runtime, keep_freed_memory
from tpukit.tasks.datasets import make_synthetic
from tpukit.tasks.text.data import TextSet

# What falls below the bigram model within minutes on a CPU.
BELOW_BIGRAM = dict(epochs=4, batch_size=8, lr=2e-3, samples=1, gradient_checkpointing=False)


def bigram_loss(train_set: TextSet, test_set: TextSet) -> float:
    """Cross entropy of a test token, in nats, by how often it follows the one before in the training set;
    each pair counted 0.01 times more."""
    (first, second), tests = _pairs(train_set), _pairs(test_set)
    size = 1 + max(int(tokens.max()) for tokens in (first, second, *tests))
    counts = np.full((size, size), 0.01)
    np.add.at(counts, (first, second), 1)
    shares = counts / counts.sum(1, keepdims=True)
    return float(-np.log(shares[tests]).mean())


def _pairs(data):
    """(tokens, the tokens that follow them and are predicted)"""
    batch = data.batch(np.arange(len(data)))
    is_learned = batch["labels"] >= 0
    return batch["tokens"][is_learned], batch["labels"][is_learned]


def decayed_groups(network: torch.nn.Module) -> list[dict]:
    """The parameters for AdamW, of which matrices alone decay."""
    matrices = [p for p in network.parameters() if p.ndim > 1]
    others = [p for p in network.parameters() if p.ndim <= 1]
    return [dict(params=matrices, weight_decay=0.1), dict(params=others, weight_decay=0.0)]


def plain(task: LanguageModel, data: TextSet, steps: int) -> float:
    """Seconds of a loop written by hand."""
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
    """The same by tpukit: the seconds of its steps, by its own records."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run.open(folder, task)
        run.echo = False
        train(task, run, runtime=Runtime("cpu"), progress=False)
        return sum(record["speed"]["seconds"] for record in run.records("train"))


def main(rounds: int = 3, topics: int = 60) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        place = make_synthetic("my-text", Path(folder) / "topics", size=topics)
        settings = BELOW_BIGRAM | dict(
            epochs=1, eval_every=2, samples=0, schedule="constant", warmup_epochs=0
        )
        task = LanguageModel(dataset_dir=place, log_every=10, **settings)
        data, test_set = task.datasets()
        steps = len(data) // task.batch_size
        found: dict[str, list[float]] = dict(plain=[], tpukit=[])
        for _ in range(rounds + 1):
            found["plain"].append(plain(task, data, steps))
            found["tpukit"].append(ours(task))
    pairs = list(zip(found["plain"], found["tpukit"]))[1:]  # after a first round that warms up
    ratios = sorted(ours / by_hand for by_hand, ours in pairs)
    rate = steps * task.batch_size * task.length / statistics.median(found["tpukit"][1:])
    row = dict(found, steps=steps, ratio=statistics.median(ratios), ratios=ratios, tokens_per_s=rate)
    print(json.dumps(row | dict(bigram=bigram_loss(data, test_set), torch=torch.__version__), indent=1))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
