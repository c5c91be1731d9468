"""Images per second of every way from a set on disk to a training batch, on one core: MSHNet's recipe at
256x256 from 512x512.

plain: what published training code does for every image, every epoch: open, decode, augment with PIL, to a
normalised tensor. host: tpukit's threads, from pixels decoded once. device: the pixels lie on the device,
which augments by matrix products."""

import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.steps import open_runtime
from tpukit import MSHNet
from tpukit.tasks.mshnet import augment
from tpukit.tasks.mshnet.model import IMAGE_MEAN, IMAGE_STD, normalise
from tpukit.training.data import BatchLoader, training_index_batches

ROUNDS, BATCH = 7, 16


def plain(folder, names, numbers, size):
    """One batch as a plain PyTorch dataset makes it."""
    images, masks = [], []
    for name, drawn in zip(names, numbers):
        image = Image.open(folder / "images" / f"{name}.png").convert("RGB")
        mask = Image.open(folder / "masks" / f"{name}.png").convert("L")
        crop = augment.random_crop(drawn, image.size, size, size)
        image, mask = augment.on_host(np.stack(image.split()), np.asarray(mask), crop)
        image = torch.from_numpy(image.copy()).float() / 255
        images.append(
            (image - torch.tensor(IMAGE_MEAN).view(3, 1, 1)) / torch.tensor(IMAGE_STD).view(3, 1, 1)
        )
        masks.append(torch.from_numpy(mask.copy()).float() / 255)
    return torch.stack(images), torch.stack(masks)


def main(device, folder):
    torch.set_num_threads(1)
    folder = Path(folder)
    data, _ = MSHNet(dataset_dir=folder).datasets()
    runtime = open_runtime(device, "auto")
    plan = list(training_index_batches(len(data), BATCH, seed=0, epoch=0, num_uniforms=data.num_uniforms))[:6]
    ways = {
        "plain": lambda steps: (
            plain(folder, [data.names[i] for i in indices], numbers, 256) for indices, numbers, _ in steps
        )
    }
    for on in ("host", "device"):
        loader = BatchLoader(data, runtime, on=on, workers=0)
        ways[on] = lambda steps, loader=loader: (
            normalise(loader.compose(batch)["image"]) for batch in loader.batches(steps)
        )
    seconds = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            for steps in (plan[:1], plan):  # the first batch finds the memory as another way left it
                started = time.perf_counter()
                for _ in way(steps):  # each is let go of before the next, as in a training
                    pass
                runtime.sync()
            seconds[name].append(time.perf_counter() - started)
    rates = {name: len(plan) * BATCH / statistics.median(times) for name, times in seconds.items()}
    for name, rate in rates.items():
        ratio = round(rate / rates["plain"], 1)
        print(
            "ROW "
            + json.dumps(
                dict(device=device, way=name, images_per_s=round(rate), times_plain=ratio, rounds=ROUNDS)
            )
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
