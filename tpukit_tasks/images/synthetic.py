"""A synthetic set: bright shapes in any colour on a dark, noisy ground, in class folders."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

SIZE = 64  # pixels
SHAPES = ("bar", "circle", "cross", "ring", "square", "triangle")


def shapes_set(folder: Path, size: int, rng: np.random.Generator) -> None:
    """train/CLASS/NUMBER.png and test/CLASS/NUMBER.png, a quarter of them to test, of `size` images in all
    classes."""
    for number in range(size):
        shape = SHAPES[number % len(SHAPES)]
        place = folder / ("test" if number // len(SHAPES) % 4 == 0 else "train") / shape
        place.mkdir(parents=True, exist_ok=True)
        _draw(shape, rng).save(place / f"{number:05d}.png")


def _draw(shape, rng):
    ground = rng.integers(0, 80, 3)
    colour = tuple(rng.integers(150, 256, 3).tolist())
    image = Image.fromarray((ground + rng.normal(0, 15, (SIZE, SIZE, 3))).clip(0, 255).astype(np.uint8))
    draw, radius = ImageDraw.Draw(image), int(rng.integers(18, 27))
    x, y = rng.integers(radius, SIZE - radius, 2).tolist()
    box, thin = (x - radius, y - radius, x + radius, y + radius), radius // 3
    if shape == "circle":
        draw.ellipse(box, fill=colour)
    elif shape == "ring":
        draw.ellipse(box, outline=colour, width=thin)
    elif shape == "square":
        draw.rectangle(box, fill=colour)
    elif shape == "triangle":
        draw.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=colour)
    else:
        draw.rectangle((x - radius, y - thin // 2, x + radius, y + thin // 2), fill=colour)
        if shape == "cross":
            draw.rectangle((x - thin // 2, y - radius, x + thin // 2, y + radius), fill=colour)
    return image
