"""Synthetic infrared scenes in the layout of IRSTD-1k."""

from pathlib import Path

import numpy as np
from PIL import Image


def infrared_set(folder: Path, size: int, rng: np.random.Generator) -> None:
    """IRSTD-1k's layout: grey images with soft clouds and 1 to 3 small warm spots, masks, trainval.txt and
    test.txt."""
    (folder / "images").mkdir()
    (folder / "masks").mkdir()
    names = [f"synthetic{index:04d}" for index in range(size)]
    for name in names:
        image, mask = infrared_scene(rng)
        Image.fromarray(image).save(folder / "images" / f"{name}.png")
        Image.fromarray(mask).save(folder / "masks" / f"{name}.png")
    cut = max(1, size * 4 // 5)
    (folder / "trainval.txt").write_text("\n".join(names[:cut]) + "\n")
    (folder / "test.txt").write_text("\n".join(names[cut:] or names[-1:]) + "\n")


def infrared_scene(rng: np.random.Generator, size: int = 256) -> tuple[np.ndarray, np.ndarray]:
    """One synthetic infrared image. Returns (image, mask), both (size, size) uint8; the mask is 0 or 255."""
    clouds = np.zeros((size, size), np.float32)
    for cells, weight in ((4, 40), (12, 18), (40, 8)):
        noise = (rng.random((cells, cells)) * 255).astype(np.uint8)
        soft = Image.fromarray(noise).resize((size, size), Image.Resampling.BICUBIC)
        clouds += weight * np.asarray(soft, np.float32) / 255
    image = 30 + clouds + rng.normal(0, 2, (size, size))
    mask = np.zeros((size, size), np.uint8)
    y, x = np.mgrid[:size, :size]
    for _ in range(rng.integers(1, 4)):
        centre_y, centre_x = rng.uniform(12, size - 12, 2)
        radius_y, radius_x = rng.uniform(2.0, 4.5, 2)
        distance = ((y - centre_y) / radius_y) ** 2 + ((x - centre_x) / radius_x) ** 2
        image += rng.uniform(70, 130) * np.exp(-distance)
        mask[distance <= 1] = 255
    return image.clip(0, 255).astype(np.uint8), mask
