"""Images with a class each, from class folders or lists: found, split, decoded once.

Shapes: N samples, B batch, S side of the images."""

import collections
import concurrent.futures
import functools
import hashlib
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps

from tpukit.host.errors import TpukitError, first_line
from tpukit.host.tables import GIB
from tpukit.tasks import arrays, pictures, splits
from tpukit.tasks.images.augment import NUM_UNIFORMS
from tpukit.tasks.images.lists import Sample, describe_lists, find_lists, read_lists

VERSION = 6  # of what `_decode` returns for the same files, which is cached
PAGE = "YOUR_DATA"  # of the docs
ALL_IMAGES = ("images", "image", "imgs", "img", "jpegimages")  # folders of sets that have no class folders


class Found(NamedTuple):
    """The samples of a dataset; nothing is decoded."""

    classes: list[str]
    """sorted, as numbers if all are such"""
    samples: dict[str, list[Sample]]
    """those of train, and of val or test or both"""
    notices: list[str]
    """what was left out, or what else is to be known"""
    held_out: str = ""
    """of a set without splits: how many of its images are its test set"""


def find_samples(dataset_dir: Path | str, images_dir: Path | None = None, test_share: float = 0.2) -> Found:
    """Find the samples of a folder or a CSV file. Raises TpukitError for what cannot be trained on."""
    place = Path(dataset_dir)
    if not place.exists():
        raise TpukitError(f"dataset {place} does not exist")
    samples, notices = _find_in_class_folders(place.resolve()) if place.is_dir() else ([], [])
    if len({sample.label for sample in samples}) < 2 and place.suffix not in splits.TABLES:
        listed, of_lists = read_lists(place, images_dir)
        if listed:
            samples, notices = listed, of_lists
    elif lists := find_lists(place):
        names = ", ".join(path.name for path in lists)
        notices.append(
            f"{names}: not read, because folders name the classes (give one as dataset_dir to use it)"
        )
    names = {sample.label for sample in samples}
    if len(names) < 2:
        if tables := splits.about_tables(place, PAGE):
            raise TpukitError(f"{place}: {tables}")
        here = ", ".join(sorted(path.name for path in place.glob("*"))[:8]) or "nothing"
        here += describe_lists(place)
        if left_out := pictures.left_out(splits.files_below(place) if place.is_dir() else []):
            here += f"; {left_out}"
        raise TpukitError(
            f"no images in {place} of two classes, only of {', '.join(names) or 'none'}: it should hold a"
            " folder of images for each class (in train/ and test/, or not), or a CSV file with paths and"
            f" labels; it has {here}"
        )
    samples = _without_unlabelled(samples)
    notices += _find_unused(place.resolve(), samples)
    has_splits = any(sample.split in ("val", "test") for sample in samples)
    held_out = ""
    if not has_splits:
        samples = _hold_out(samples, test_share)
        notices += _find_divided(samples)
        count = sum(sample.split == "test" for sample in samples)
        held_out = (
            f"{place} names no splits, so {count} of its {len(samples)} images are the test set: to test all,"
            " name them test and the training images train, as folders or in a list"
        )
    by_split = collections.defaultdict(list)
    for sample in samples:
        by_split[sample.split or "train"].append(sample)
    names = {sample.label for sample in samples}
    classes = sorted(names, key=lambda name: (int(name) if name.isdecimal() else math.inf, name))
    for split in ("train", *(by_split.keys() - {"train"} or {"test"})):
        missing = sorted(names - {sample.label for sample in by_split[split]})
        if not missing:
            continue
        count = f"{len(missing)} of {len(classes)} classes"
        lacks = f"the {split} split has no image of {count} ({splits.some(missing)})"
        if split == "train" or not has_splits:
            raise TpukitError(
                f"{place}: {lacks}: add some, in a set without splits two images or more of each class"
            )
        notices.append(f"{lacks}: its scores say nothing about them")
    return Found(classes, dict(by_split), notices, held_out)


def _without_unlabelled(samples):
    """Leave out a split whose only class is none of train's, as val/images/ has it if only a file that is not
    read has the labels."""
    classes = collections.defaultdict(set)
    for sample in samples:
        classes[sample.split].add(sample.label)
    unlabelled = {
        split
        for split in ("val", "test")
        if len(classes[split]) == 1 and not classes[split] & classes["train"]
    }
    return [sample for sample in samples if sample.split not in unlabelled]


def _hold_out(samples, test_share):
    """Return the samples with a split: a share of every class is for tests."""
    by_class = collections.defaultdict(set)  # a file that a list names twice is one
    for sample in samples:
        by_class[sample.label].add(sample.name)
    tests = {label: splits.hold_out(names, test_share) for label, names in by_class.items()}
    return [
        sample._replace(split="test" if sample.name in tests[sample.label] else "train") for sample in samples
    ]


def _find_divided(samples):
    """Return a sentence if folders in the class folders have images in training and in test."""
    divided = collections.defaultdict(lambda: collections.defaultdict(set))  # class -> folder -> splits
    for sample in samples:
        folder = Path(sample.name).parent
        if folder.parts[:1] == (sample.label,):
            divided[sample.label][folder.as_posix()].add(sample.split)
    several = [folders for folders in divided.values() if len(folders) > 1]
    both = [name for folders in several for name, found in folders.items() if "/" in name and len(found) > 1]
    if not both:
        return []
    return [
        f"{len(both)} folders in classes have images in training and in test ({splits.some(both)}): if these"
        " are videos or patients, their images look alike, so sort whole ones into train/ and test/"
    ]


def _find_unused(place, samples):
    """Return sentences that count the files at a place that are no samples: images by their folders, and
    files that are not read as images by their endings."""
    used = {sample.path for sample in samples}
    if place.is_dir():
        below, base = splits.files_below(place), place
    else:  # a list in a folder that may hold anything: look only where its images are
        folders = filter(Path.is_dir, sorted({path.parent for path in used}))
        below = [path for folder in folders for path in sorted(folder.iterdir()) if path.is_file()]
        base = place.parent
    others = [path for path in below if path.suffix.lower() in pictures.ENDINGS and path not in used]
    unused = [os.path.relpath(path.parent, base) for path in others if path.resolve() not in used]
    notices = []
    if unused:
        counts = [f"{count} in {folder}/" for folder, count in collections.Counter(unused).most_common()]
        notices.append(
            f"{len(unused)} images are not used, because no folder or list gives them a class and a split:"
            f" {splits.some(counts)}"
        )
    return notices + list(filter(None, [pictures.left_out(below)]))


def _find_in_class_folders(folder):
    """Return (the samples of the class folders in a folder, or in its split folders; sentences about the
    folders)."""
    folder = _unwrapped(folder)
    children = _folders(folder)
    if split_folders := _find_split_folders(children):
        classes = [
            (each, split) for child, split in split_folders.items() for each in _folders(_unwrapped(child))
        ]
        notices = []
    else:
        classes = [(child, None) for child in children]
        notices = _common_names(children)
    images = {(class_folder, split): _images_below(class_folder) for class_folder, split in classes}
    if empty := [each.relative_to(folder).as_posix() for (each, _), paths in images.items() if not paths]:
        notices.append(f"{len(empty)} folders have no images, so they are not classes ({splits.some(empty)})")
    learned = {each.name for (each, split), paths in images.items() if paths and split in (None, "train")}
    notices += _doubtful_classes(sorted(learned))
    samples = [
        Sample(path.relative_to(folder).as_posix(), class_folder.name, split, path)
        for (class_folder, split), paths in images.items()
        for path in paths
    ]
    return samples, notices


def _find_split_folders(children):
    """Return dict of folder -> split of those that are splits; empty if none is. A folder whose name merely
    has the word, as train_station, is one only if it holds folders of classes, as others do, or if all are
    splits without such folders, of which a list may tell."""
    named = {child: split for child in children if (split := splits.split_of(child.name))}
    if not named:
        return {}
    exact = {child: split for child, split in named.items() if child.name.lower() in splits.SPLITS}
    others = [child for child in children if child not in named and _images_below(child)]
    inner = {child: {each.name for each in _folders(_unwrapped(child))} for child in named}
    trained, tested = set(), set()
    for child, split in named.items():
        (trained if split == "train" else tested).update(inner[child])
    have_classes = any(inner[child] for child in exact) or trained & tested
    is_alone = len(trained) > 1 and not any(map(_folders, others))
    are_flat = len({*exact.values()}) > 1 or len({*named.values()}) > 1 and not others
    return named if have_classes or is_alone or are_flat else {}


def _common_names(children):
    """Return a sentence if all of some folders hold folders of the same names, which may be the classes."""
    names = [{each.name for each in _folders(child)} for child in children]
    common = sorted(set.intersection(*names)) if len(names) > 1 else []
    if len(common) < 2:
        return []
    return [
        f"the classes {splits.some([child.name for child in children])} all hold the folders"
        f" {splits.some(common)}: if those are the classes, call the folders above them train and test"
    ]


def _doubtful_classes(names):
    """Return a sentence if a class has the name that sets of other kinds give to the folder of all their
    images."""
    found = [name for name in names if name.lower() in ALL_IMAGES]
    if not found or len(names) < 2:
        return []
    return [
        f"the classes {splits.some(names)} may be images and their masks or annotations: if so, sort"
        f" {found[0]}/ into a folder for each class, or, with masks of small targets, use MSHNet"
    ]


def _unwrapped(folder):
    """Return the folder, or the one that is all that it holds: an archive's own top folder, or
    seg_train/seg_train/. One whose name is a split is kept, if it is not the same split again."""
    while len(children := _folders(folder)) == 1 and _folders(children[0]):
        split = splits.split_of(children[0].name)
        if split and split != splits.split_of(folder.name):
            break
        folder = children[0]
    return folder


def _folders(folder):
    found = (path for path in folder.iterdir() if not path.name.startswith((".", "__")))
    return sorted(path for path in found if path.is_dir())


def _images_below(folder):
    return [path for path in splits.files_below(folder) if path.suffix.lower() in pictures.ENDINGS]


def find_copies(train: "ImageSet", test: "ImageSet") -> list[str]:
    """Return sentences about images with the same pixels: test images that are training images, too, and
    images in two classes."""
    notices, learned = [], set(train.digests)
    classes = collections.defaultdict(dict)  # of each digest, class -> the first image in it
    if leaked := [name for name, digest in zip(test.names, test.digests) if digest in learned]:
        notices.append(
            f"{len(leaked)} of {len(test)} test images are training images, too ({splits.some(leaked)}): the"
            " scores say nothing about new images"
        )
    for data in (train, test):
        for digest, label, name in zip(data.digests, data.labels.tolist(), data.names):
            classes[digest].setdefault(label, name)
    if differing := [" = ".join(names.values()) for names in classes.values() if len(names) > 1]:
        notices.append(f"{len(differing)} images are in more than one class ({splits.some(differing)})")
    return notices


# The pixels


def read_image(path: Path, size: int, levels: pictures.Levels | None = None) -> np.ndarray:
    """An image -> (size, size, 3) uint8: its short side is scaled to the size, and the middle kept.

    Turned upright by its EXIF orientation; transparency is dropped; for grey deeper than 8 bits see
    `pictures.to_uint8`. Raises what `pictures.opened` does."""
    with pictures.opened(path) as image:
        image.draft("RGB", (2 * size, 2 * size))  # a large JPEG is decoded at a fraction of its size
        image = pictures.to_uint8(ImageOps.exif_transpose(image), levels).convert("RGB")
        return np.asarray(ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC))


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
        digests, is_flat, is_stack = np.zeros(count, "U64"), np.zeros(count, bool), np.zeros(count, bool)

        def decode(index):
            """Return what is wrong with an image, or None."""
            path = samples[index].path
            try:
                images[index] = read_image(path, size, levels).transpose(2, 0, 1)
                digests[index] = hashlib.sha256(images[index].tobytes()).hexdigest()
                is_flat[index] = not np.ptp(images[index], (1, 2)).any()
                is_stack[index] = pictures.is_stack(path)
            except Exception as error:  # Pillow raises many types for a damaged file
                return f"{samples[index].name}: {first_line(error)}"

        progress = functools.partial(tqdm, desc=f"decoding {split}", unit="image", disable=count < 200)
        problems = list(progress(pool.map(decode, range(count)), total=count))
    kept = np.array([index for index, problem in enumerate(problems) if problem is None], np.int64)
    notes = []
    for which, what in (
        (is_flat, "have the same colour in every pixel; their transparency is not used"),
        (is_stack, "have several pages or frames; only the first is used"),
    ):
        if names := [samples[index].name for index in np.flatnonzero(which)]:
            notes.append(f"{len(names)} of {count} {split} images {what} ({splits.some(names)})")
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
    return dict(
        images=images[: len(kept)], kept=kept, digests=digests[kept], notes=np.array("\n".join(notes))
    )


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
        state = arrays.state_of(sample.path for sample in samples if sample.path.is_file())
        key = [VERSION, size, skip_bad, levels, state, [sample.name for sample in samples]]
        decoded = arrays.mapped(
            f"images-{split}", key, lambda: _decode(samples, size, skip_bad, split, levels)
        )
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
