"""The pixels of images with a class each, decoded once.

Shapes: N samples, B batch, S side of the images."""

import collections
import concurrent.futures
import functools
import hashlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from tpukit.data import arrays
from tpukit.host.errors import TpukitError, as_unreadable, first_line
from tpukit.host.text import GIB
from tpukit_tasks import pictures, splits
from tpukit_tasks.images.augment import NUM_UNIFORMS
from tpukit_tasks.images.lists import Sample

VERSION = 10  # raise it if `_decode` returns something else for the same files, because that is cached


def read_image(path: Path | str, size: int, levels: pictures.Levels | None = None) -> np.ndarray:
    """An image -> (size, size, 3) uint8: its short side is scaled to the size, and the middle kept. Raises
    what `pictures.read` does."""
    return read_telling(path, size, levels)[0]


def read_telling(
    path: Path | str, size: int, levels: pictures.Levels | None = None
) -> tuple[np.ndarray, pictures.Odd]:
    """Return (what `read_image` does, what is to be told of it)."""
    image, odd = pictures.read(path, levels, draft=2 * size)
    fitted = ImageOps.fit(image.convert("RGB"), (size, size), Image.Resampling.BICUBIC)
    return np.asarray(fitted), odd


def _decode(samples, size, skip_bad, split, levels):
    """Decode on all cores. Return a dict: images (N, 3, S, S) uint8, kept (N,) places in `samples`, digests
    (N,) of their pixels, notes. Raises TpukitError for images that cannot be read, without skip_bad."""
    from tpukit.host.bars import tqdm

    count, needed = len(samples), len(samples) * 3 * size * size
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if 2 * needed > free:  # once here, and once where they are kept
        raise TpukitError(
            f"{count} images of {size}x{size} take twice {needed / GIB:.1f} GiB of disk while they are"
            f" decoded, and {free / GIB:.1f} GiB are free: choose a smaller image_size"
        )
    with tempfile.TemporaryFile() as file, concurrent.futures.ThreadPoolExecutor() as pool:
        images = np.memmap(file, np.uint8, "w+", shape=(count, 3, size, size))
        digests = np.zeros(count, "U64")
        is_flat, odd = np.zeros(count, bool), [pictures.Odd()] * count

        def decode(index):
            """Return what is wrong with an image, or None."""
            path = samples[index].path
            try:
                image, odd[index] = read_telling(path, size, levels)
                images[index] = image.transpose(2, 0, 1)
                digests[index] = hashlib.sha256(images[index].tobytes()).hexdigest()
                is_flat[index] = not np.ptp(images[index], (1, 2)).any()
            except Exception as error:  # Pillow raises many types for a damaged file
                if of_disk := as_unreadable(error, Path(path)):  # not to be left out of the set
                    raise of_disk from error
                return f"{samples[index].name}: {first_line(error)}"

        progress = functools.partial(tqdm, desc=f"decoding {split}", unit="image", disable=count < 200)
        problems = list(progress(pool.map(decode, range(count)), total=count))
    kept = np.array([index for index, problem in enumerate(problems) if problem is None], np.int64)
    notes = []
    if flat := [samples[index].name for index in np.flatnonzero(is_flat)]:
        told = f"{len(flat)} of {count} {split} images have the same colour in every pixel"
        notes.append(f"{told} ({splits.some(flat)})")
    notes += pictures.describe_odd(
        ((sample.name, each) for sample, each in zip(samples, odd)), count, f"{split} images"
    )
    if bad := list(filter(None, problems)):
        shown = splits.some(bad).replace("\n", "\\n")
        unreadable = f"{len(bad)} of {count} {split} images cannot be read ({shown})"
        if not skip_bad or not len(kept):
            raise TpukitError(
                f"{unreadable}: replace them, or leave them out with skip_bad=True (--skip-bad)"
            )
        notes.append(f"{unreadable}: left out")
        for new, old in enumerate(kept):  # in place: no second copy in memory
            images[new] = images[old]
    told = np.array("\n".join(notes))
    return dict(images=images[: len(kept)], kept=kept, digests=digests[kept], notes=told)


class ImageSet:
    """One split, decoded once to uint8, in memory that all processes of a host share.

    `batch(indices, numbers)` -> dict of image (B, 3, S, S) uint8, label (B,) int64 and, in training, augment
    (B, NUM_UNIFORMS), what `augment.apply` needs on the device. draw: numbers -> augment; None for a test
    set. `notes`: sentences for the log."""

    def __init__(
        self,
        classes: list[str],
        samples: list[Sample],
        *,
        split: str,
        size: int,
        skip_bad: bool,
        levels: pictures.Levels | None = None,
        draw: Callable[[np.ndarray], np.ndarray] | None = None,
        notes: str = "",
    ):
        self.classes, self.draw, self.levels = classes, draw, levels
        self.notices: list[str] = []
        self.num_uniforms = NUM_UNIFORMS if draw else 0
        state = arrays.state_of(sample.path for sample in samples)
        key = [VERSION, size, skip_bad, levels, state, [sample.name for sample in samples]]
        decode = functools.partial(_decode, samples, size, skip_bad, split, levels)
        decoded = arrays.mapped(f"images-{split}", key, decode)
        samples = [samples[index] for index in decoded["kept"]]
        self.images = decoded["images"]
        self.digests = decoded["digests"].tolist()
        self.names = [sample.name for sample in samples]
        numbers = {name: number for number, name in enumerate(classes)}
        self.labels = np.array([numbers[sample.label] for sample in samples], np.int64)
        self.notes = "\n".join(filter(None, (notes, str(decoded["notes"]))))

    def __len__(self):
        return len(self.labels)

    def batch(self, indices, numbers=None):
        rows = dict(image=self.images[indices], label=self.labels[indices])
        return rows | self.sample_parameters(indices, numbers)

    # The same from arrays on the device

    def device_nbytes(self):
        return self.images.nbytes

    def device_arrays(self):
        return dict(image=np.asarray(self.images), label=self.labels)

    def sample_parameters(self, indices, numbers=None):
        return {} if numbers is None or not self.draw else dict(augment=self.draw(numbers))

    def compose(self, rows, parameters):
        return rows | parameters


def find_copies(train: ImageSet, test: ImageSet) -> list[str]:
    """Return sentences about images with the same pixels: test images that are training images, too, and
    images in two classes."""
    notices = splits.find_copies(train.digests, test.digests, test.names, "images")
    classes = collections.defaultdict(dict)  # digest -> {class: its first image with this digest}
    for data in (train, test):
        for digest, label, name in zip(data.digests, data.labels.tolist(), data.names):
            classes[digest].setdefault(label, name)
    if differing := [" = ".join(names.values()) for names in classes.values() if len(names) > 1]:
        notices.append(f"{len(differing)} images are in more than one class ({splits.some(differing)})")
    return notices
