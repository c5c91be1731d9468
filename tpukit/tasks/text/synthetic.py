"""Texts to try with, where the user has none: Python's own documentation of its language."""

import pydoc_data.topics
from pathlib import Path

import numpy as np


def write_demo(folder: Path, size: int, rng: np.random.Generator) -> None:
    """train/TOPIC.txt and test/TOPIC.txt, a tenth of them to test, of up to `size` topics of `help()`: parts
    of the Python Language Reference, which come with every Python."""
    topics = sorted(pydoc_data.topics.topics.items())[:size]
    for number, (topic, text) in enumerate(topics):
        place = folder / ("test" if number % 10 == 9 else "train") / f"{topic}.txt"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
