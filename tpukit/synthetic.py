"""Small made-up datasets in the layout of the real ones, so that everything runs where no data is."""

from pathlib import Path

import numpy as np

from tpukit import files, simulator
from tpukit.errors import TpukitError

LICENCE_NOTE = "Made by tpukit.synthetic; not real data.\n"


def make(name, folder, *, size=None, seed=0):
    """Make the synthetic stand-in of dataset `name` in `folder`, whole or not at all; kept if already there.

    size: number of images, train and test together. Returns the folder. Raises TpukitError for a name that no workload has,
    and where the folder cannot be written.
    """
    folder = Path(folder)
    makers = {"mnist": (_digits, 6000), "IRSTD-1k": (_infrared, 40), "eit": (_tank, 400)}
    known = {other.lower(): made for other, made in makers.items()}
    if name.lower() not in known:
        raise TpukitError(
            f"no dataset {name!r} was found, and a synthetic one is made for {', '.join(makers)} only. Check the name; "
            "for a set of your own give its path, or put it into ./datasets"
        )
    maker, default = known[name.lower()]
    size = size or default
    folder = folder.with_name(f"{folder.name}-{size}")
    if not folder.exists():
        with files.whole_folder(folder) as work:
            maker(work, size, np.random.default_rng(seed))
            (work / "README.txt").write_text(LICENCE_NOTE)
    return folder


def _infrared(folder, size, rng):
    """IRSTD-1k's layout: grey images with soft clouds and 1 to 3 small warm spots, masks, trainval.txt and test.txt."""
    from PIL import Image

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


def infrared_scene(rng, size=256):
    """One made-up infrared image. Returns (image, mask), both (size, size) uint8; the mask is 0 or 255."""
    from PIL import Image

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


def _tank(folder, size, rng):
    """A simulated set for electrical impedance tomography: train/ and test/."""
    cut = size * 4 // 5
    simulator.simulate(folder, samples=cut, test_samples=size - cut, seed=int(rng.integers(2**31)))


def _digits(folder, size, rng):
    """mnist.npz with made-up digits: seven-segment figures, shifted, of random thickness, in noise."""
    images = np.zeros((size, 28, 28), np.float32)
    labels = rng.integers(0, 10, size)
    for image, label in zip(images, labels):
        top, left, thick = rng.integers(2, 8), rng.integers(4, 12), rng.integers(1, 4)
        for segment in _SEGMENTS[label]:
            (y0, x0), (y1, x1) = _ENDS[segment]
            image[top + y0 : top + y1 + thick, left + x0 : left + x1 + thick] = rng.uniform(150, 255)
    images = (images + rng.normal(0, 20, images.shape)).clip(0, 255).astype(np.uint8)
    cut = size * 5 // 6
    labels = labels.astype(np.uint8)
    np.savez_compressed(
        folder / "mnist.npz", x_train=images[:cut], y_train=labels[:cut], x_test=images[cut:], y_test=labels[cut:]
    )


_ENDS = dict(a=((0, 0), (0, 8)), b=((0, 8), (8, 8)), c=((8, 8), (16, 8)), d=((16, 0), (16, 8)))
_ENDS |= dict(e=((8, 0), (16, 0)), f=((0, 0), (8, 0)), g=((8, 0), (8, 8)))
_SEGMENTS = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgcde", "abc", "abcdefg", "abcdfg")
