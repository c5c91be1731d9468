"""Images with a class each, from class folders or lists: found, split, decoded once.

Shapes: N samples, B batch, S side of the images."""

import collections
import concurrent.futures
import functools
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from tpukit.host.errors import TpukitError, first_line
from tpukit.host.tables import GIB
from tpukit.tasks import arrays, pictures, splits
from tpukit.tasks.images.augment import NUM_UNIFORMS
from tpukit.tasks.images.lists import IMAGE_ENDINGS, Sample, read_lists
from tpukit.tasks.splits import SPLITS

VERSION = 2  # of what `_decode` returns for the same files, which is cached
PAGE = "YOUR_DATA"  # of the docs


def find_samples(
    dataset_dir: Path | str, images_dir: Path | None = None, test_share: float = 0.2
) -> tuple[list[str], dict[str, list[Sample]]]:
    """Return (classes, samples) of a folder or a CSV file; decode nothing.

    classes: sorted, as numbers if all are such. samples: those of train, and of val or test or both. Raises
    TpukitError for what cannot be trained on."""
    place = Path(dataset_dir)
    if not place.exists():
        raise TpukitError(f"dataset {place} does not exist")
    samples = _find_in_class_folders(place) if place.is_dir() else []
    if len({sample.label for sample in samples}) < 2 and place.suffix not in splits.TABLES:
        samples = read_lists(place, images_dir) or samples
    names = {sample.label for sample in samples}
    if len(names) < 2:
        if tables := splits.about_tables(place, PAGE):
            raise TpukitError(f"{place}: {tables}")
        here = ", ".join(sorted(path.name for path in place.glob("*"))[:8]) or "nothing"
        raise TpukitError(
            f"no images in {place} of two classes, only of {', '.join(names) or 'none'}: it should hold a"
            " folder of images for each class (in train/ and test/, or not), or a CSV file with paths and"
            f" labels; it has {here}"
        )
    classes = sorted(names, key=lambda name: (int(name) if name.isdecimal() else math.inf, name))
    by_split = collections.defaultdict(list)
    for sample in _with_split(samples, test_share):
        by_split[sample.split].append(sample)
    for split in ("train", *(by_split.keys() - {"train"} or {"test"})):
        if missing := sorted(set(classes) - {sample.label for sample in by_split[split]}):
            shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise TpukitError(
                f"{place}: the {split} split has no image of {len(missing)} of {len(classes)} classes"
                f" ({shown}): add some, in a set without splits two images or more of each class"
            )
    return classes, dict(by_split)


def _with_split(samples, test_share):
    """Return the samples with their split. Of a set without a test or val split, a share of every class is
    for tests."""
    if any(sample.split in ("val", "test") for sample in samples):
        return [sample._replace(split=sample.split or "train") for sample in samples]
    by_class = collections.defaultdict(set)  # a file that a list names twice is one
    for sample in samples:
        by_class[sample.label].add(sample.name)
    tests = {label: splits.hold_out(names, test_share) for label, names in by_class.items()}
    return [
        sample._replace(split="test" if sample.name in tests[sample.label] else "train") for sample in samples
    ]


def _find_in_class_folders(folder):
    children = _folders(folder)
    while len(children) == 1 and children[0].name.lower() not in SPLITS and _folders(children[0]):
        folder, children = children[0], _folders(children[0])  # an archive's own top folder
    tops = [(child, SPLITS[child.name.lower()]) for child in children if child.name.lower() in SPLITS]
    return [
        Sample(path.relative_to(folder).as_posix(), class_folder.name, split, path)
        for top, split in tops or [(folder, None)]
        for class_folder in _folders(top)
        for path in _images_below(class_folder)
    ]


def _folders(folder):
    found = (path for path in folder.iterdir() if not path.name.startswith((".", "__")))
    return sorted(path for path in found if path.is_dir())


def _images_below(folder):
    """Its images, sorted. Raises OSError for a folder that cannot be read: nothing is left out silently."""

    def refuse(error):
        raise error

    paths = sorted(Path(place, name) for place, _, names in os.walk(folder, onerror=refuse) for name in names)
    return [path for path in paths if path.suffix.lower() in IMAGE_ENDINGS and path.name[0] != "."]


# The pixels


def read_image(path: Path, size: int) -> np.ndarray:
    """An image -> (size, size, 3) uint8: its short side is scaled to the size, and the middle kept.

    Turned upright by its EXIF orientation; transparency is dropped; 16-bit grey maps its whole range to
    0..255. Raises what `pictures.opened` does."""
    with pictures.opened(path) as image:
        image.draft("RGB", (2 * size, 2 * size))  # a large JPEG is decoded at a fraction of its size
        image = pictures.to_uint8(ImageOps.exif_transpose(image)).convert("RGB")
        return np.asarray(ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC))


def _decode(samples, size, skip_bad, split):
    """Decode on all cores. Return a dict: images (N, 3, S, S) uint8, kept (N,) places in `samples`, notes."""
    from tqdm.auto import tqdm

    count, needed = len(samples), len(samples) * 3 * size * size
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if 2 * needed > free:  # once here, and once where they are kept
        raise TpukitError(
            f"{count} images of {size}x{size} take twice {needed / GIB:.1f} GiB of disk while they are"
            f" decoded, and {free / GIB:.1f} GiB are free: choose a smaller image_size"
        )
    with tempfile.TemporaryFile() as file, concurrent.futures.ThreadPoolExecutor() as pool:
        images = np.memmap(file, np.uint8, "w+", shape=(count, 3, size, size))

        def decode(index):
            """Return what is wrong with an image, or None."""
            try:
                images[index] = read_image(samples[index].path, size).transpose(2, 0, 1)
            except Exception as error:  # Pillow raises many types for a damaged file
                return f"{samples[index].name}: {first_line(error)}"

        progress = functools.partial(tqdm, desc=f"decoding {split}", unit="image", disable=count < 200)
        problems = list(progress(pool.map(decode, range(count)), total=count))
    kept = np.array([index for index, problem in enumerate(problems) if problem is None], np.int64)
    notes = ""
    if bad := list(filter(None, problems)):
        shown = "; ".join(bad[:3]).replace("\n", "\\n") + ("; ..." if len(bad) > 3 else "")
        notes = f"left out {len(bad)} of {count} {split} images that cannot be read: {shown}"
        if not skip_bad or not len(kept):
            raise TpukitError(
                f"{len(bad)} of {count} {split} images cannot be read ({shown}): replace them, or leave them"
                " out with skip_bad=True (--skip-bad)"
            )
        for new, old in enumerate(kept):  # in place: no second copy in memory
            images[new] = images[old]
    return dict(images=images[: len(kept)], kept=kept, notes=np.array(notes))


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
        draw: Callable[[np.ndarray], np.ndarray] | None = None,
        notes: str = "",
    ):
        self.classes, self.draw = classes, draw
        self.notices: list[str] = []
        self.num_uniforms = NUM_UNIFORMS if draw else 0
        paths = filter(Path.is_file, dict.fromkeys(sample.path for sample in samples))
        stats = [(str(path.resolve()), path.stat()) for path in paths]
        state = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
        key = [VERSION, size, skip_bad, state, [sample.name for sample in samples]]
        decoded = arrays.mapped(f"images-{split}", key, lambda: _decode(samples, size, skip_bad, split))
        samples = [samples[index] for index in decoded["kept"]]
        self.images = decoded["images"]
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
