"""Panels of samples, as figures show them: titles with a sign, and those of a task that has none of its
own."""

from collections.abc import Mapping
from typing import Any

import numpy as np

# The beginning of a panel's title where a prediction was right or wrong.
RIGHT, WRONG = "\u2713", "\u2717"


def marked(title: str, is_right: bool) -> str:
    """Return the title of a panel with the sign of a right or a wrong prediction."""
    return f"{RIGHT if is_right else WRONG} {title}"


def default_panels(batch: Mapping[str, Any], prediction: Any) -> list[list[tuple[str, Any]]]:
    """Return a panel for each sample of a batch, see `Task.panels`: its image, titled by what has one value
    a sample, the label and the prediction."""
    images, titles = np.asarray(batch["image"]), [[] for _ in batch["image"]]
    if images.ndim == 4 and images.shape[1] in (1, 3):
        images = np.moveaxis(images, 1, -1)  # (B, C, H, W) -> (B, H, W, C)
    images = images[..., 0] if images.shape[3:] == (1,) else images
    for word, values in {"": batch.get("label"), "predicted ": prediction}.items():
        for title, value in zip(titles, values if np.ndim(values) == 1 else ()):
            title.append(f"{word}{value}")
    titles = [", ".join(title) for title in titles]
    label, guess = np.asarray(batch.get("label", ())), np.asarray(prediction)
    if guess.ndim == 1 and guess.dtype.kind in "iu" and label.shape == guess.shape:
        titles = [marked(*pair) for pair in zip(titles, label == guess)]
    return [[panel] for panel in zip(titles, images)]
