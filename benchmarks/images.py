"""`ImageClassifier` next to a plain loop over a network of timm: the same images, weights, epochs and
processor, in turn.

`python -m benchmarks.images FOLDER [ROUNDS [EPOCHS]]`. Both find the images decoded; both score the test set
after each epoch. The plain loop is what one would write by hand over two tensors: no threads, no checkpoints,
no records. Seconds are of steps and predictions; processor_s is of all threads in the whole call, checkpoints
and records included."""

import dataclasses
import json
import random
import statistics
import sys
import tempfile
import time
import warnings

import numpy as np
import timm
import torch
from torch.nn.functional import cross_entropy

from tpukit import ImageClassifier, Run, train
from tpukit.devices.runtime import Runtime

MODEL, SIZE, BATCH, LR = "test_resnet", 28, 128, 2e-3
OFF = dict(flip=0, crop=1, colour=0)


def plain(train_set, test_set, epochs, seed):
    """Accuracy after each epoch, and seconds."""
    torch.manual_seed(seed)
    network = timm.create_model(MODEL, num_classes=len(train_set.classes))
    decayed = [p for p in network.parameters() if p.ndim > 1]
    others = [p for p in network.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [dict(params=decayed, weight_decay=0.05), dict(params=others, weight_decay=0.0)], lr=LR
    )
    mean, std = (255 * torch.tensor(network.pretrained_cfg[name]).view(3, 1, 1) for name in ("mean", "std"))
    images, labels, test_images, test_labels = (
        torch.from_numpy(np.array(values))
        for data in (train_set, test_set)
        for values in (data.images, data.labels)
    )
    accuracies, started = [], time.perf_counter()
    for epoch in range(epochs):
        network.train()
        order = torch.randperm(len(images))
        for first in range(0, len(images) - BATCH + 1, BATCH):
            chosen = order[first : first + BATCH]
            optimizer.zero_grad(set_to_none=True)
            loss = cross_entropy(
                network((images[chosen].float() - mean) / std), labels[chosen], label_smoothing=0.1
            )
            loss.backward()
            optimizer.step()
        network.eval()
        with torch.no_grad():
            right = sum(
                int((network((part.float() - mean) / std).argmax(1) == label).sum())
                for part, label in zip(test_images.split(BATCH), test_labels.split(BATCH))
            )
        accuracies.append(right / len(test_images))
    return accuracies, time.perf_counter() - started


def ours(task, runtime):
    """The same of `tpukit.train`: the seconds of its steps and predictions, by its own records."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run.open(folder, task)
        run.echo = False
        train(task, run, runtime=runtime, progress=False)
        evaluations = run.records("evaluation")
        seconds = sum(record["speed"]["seconds"] for record in [*run.records("train"), *evaluations])
        return [record["scores"]["accuracy"] for record in evaluations], seconds


def main(folder, rounds=6, epochs=2):
    warnings.simplefilter("ignore")
    settings = dict(
        model_name=MODEL, image_size=SIZE, pretrained="no", batch_size=BATCH, lr=LR, epochs=int(epochs), **OFF
    )
    task, runtime = (
        ImageClassifier(dataset_dir=folder, num_workers=1, log_every=100, **settings),
        Runtime("cpu"),
    )
    train_set, test_set = task.datasets()
    found = dict(plain=[], tpukit=[])
    for seed in range(int(rounds) + 1):
        for loop in random.sample(list(found), 2):
            used = time.process_time()
            if loop == "plain":
                accuracies, seconds = plain(train_set, test_set, int(epochs), seed)
            else:
                accuracies, seconds = ours(dataclasses.replace(task, seed=seed), runtime)
            found[loop].append((accuracies[-1], seconds, time.process_time() - used))
    for loop, rows in found.items():
        accuracies, *times = (list(column[1:]) for column in zip(*rows))  # after a first round that warms up
        row = dict(model=MODEL, images=len(train_set), epochs=int(epochs), loop=loop)
        for name, number, own in zip(("seconds", "processor_s"), (1, 2), times):
            ratios = [value / other[number] for value, other in zip(own, found["plain"][1:])]
            row |= {
                name: round(statistics.median(own), 2),
                f"{name}_times_plain": round(statistics.median(ratios), 3),
            }
            row |= {f"{name}_range": f"{min(ratios):.3f} to {max(ratios):.3f}"}
        row |= dict(accuracy=round(statistics.mean(accuracies), 4))
        row |= dict(accuracy_range=f"{min(accuracies):.4f} to {max(accuracies):.4f}", rounds=len(accuracies))
        print("ROW " + json.dumps(row), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
