"""Small sets of images on disk, for the tests."""

import itertools

import numpy as np
from PIL import Image

from tpukit import ImageClassifier

COLOURS = dict(blue=(0, 0, 200), green=(0, 200, 0), red=(200, 0, 0))


def paint(folder, count=5, splits=("train", "test")):
    """Class folders of small images, each of its class's colour but for the number of the image in one
    channel."""
    for split in splits:
        for name, colour in COLOURS.items():
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                image = Image.new("RGB", (9, 7), tuple(max(c, number) for c in colour))
                image.save(folder / split / name / f"{number}.png")
    return folder


def task(folder, **settings):
    settings |= dict(image_size=8, model_name="test_resnet", pretrained="no")
    return ImageClassifier(dataset_dir=folder, **settings)


def check_colours(*datasets):
    """Each image has the colour of its label's class."""
    for dataset in datasets:
        batch = dataset.batch(np.arange(len(dataset)))
        for image, label in zip(batch["image"], batch["label"]):
            assert COLOURS[dataset.classes[label]] == tuple(np.where(image[:, 3, 3] > 100, 200, 0))


def grey(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (8, 8), value).save(path)


def make(folder, *places, count=4, start=0):
    """`count` images in each place, all different."""
    for number, place in enumerate(places, start):
        for index in range(count):
            grey(folder / place / f"{index}.png", 10 * number + index)
    return folder


def write_list(path, images, ending=".png"):
    """A CSV file of images that lie in a folder, not in folders of their classes."""
    images.mkdir(parents=True)
    lines = ["Image_ID,species,split"]
    for split, name, number in itertools.product(("train", "test"), COLOURS, range(4)):
        Image.new("RGB", (9, 7), COLOURS[name]).save(images / f"{split}-{name}-{number}.png")
        lines.append(f"{images.name}/{split}-{name}-{number}{ending},{name},{split}")
    path.write_text("\n".join(lines), "utf-8-sig")
