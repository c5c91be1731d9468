"""The samples of a dataset of images: found in class folders or by lists, and split. No image is decoded."""

import collections
import contextlib
import math
import os
import re
import unicodedata
from pathlib import Path
from typing import NamedTuple

from tpukit.data.arrays import resolve
from tpukit.host.errors import TpukitError
from tpukit_tasks import pictures, splits
from tpukit_tasks.images.folders import find_deeper, find_in_class_folders
from tpukit_tasks.images.lists import Sample, find_lists, read_list
from tpukit_tasks.names import folded, number
from tpukit_tasks.splits import Listing

# Share of every class to test on, chosen by a hash of the file names, in a set without a test split.
TEST_SHARE = 0.2


class Found(NamedTuple):
    """The samples of a dataset; nothing is decoded."""

    classes: list[str]
    """sorted, as numbers if all are such"""
    samples: dict[str, list[Sample]]
    """those of train, and of val or test or both"""
    notices: list[str]
    """what was left out, or what else is to be known"""


_latest: dict[tuple[str, str], tuple[Listing, Found]] = {}  # the set that was found last, by its places


def find_samples(
    dataset_dir: Path | str, images_dir: Path | None = None, *, is_new_search: bool = False
) -> Found:
    """Find the samples of a folder or a CSV file, or return those that the last call found there, if no
    folder has changed since. Raises TpukitError for what cannot be trained on.

    is_new_search: look again in any case, for a disk that does not note when its folders change."""
    place = Path(dataset_dir)
    key = str(place.resolve()), str(images_dir and Path(images_dir).resolve())
    listing, found = _latest.get(key, (None, None))
    if listing and found and not is_new_search and listing.is_current():
        return found
    if not place.exists():
        raise TpukitError(f"dataset {place} does not exist")
    listing = Listing()
    found = _find_samples(place, images_dir, listing)
    _latest.clear()  # a large set's takes memory
    _latest[key] = listing, found
    return found


def _find_samples(place, images_dir, listing):
    samples, notices = _find_labelled(place, images_dir, listing)
    samples = _without_unlabelled(samples)
    notices += _find_unused(place.resolve(), samples, listing)
    if not any(sample.split in ("val", "test") for sample in samples):
        samples = _hold_out(samples)
        count = sum(sample.split == "test" for sample in samples)
        notices.append(
            f"{place} has no test images of its own, so {count} of its {len(samples)} images are held out: to"
            " choose them, name the two parts train and test, as folders or in a list"
        )
    by_split = collections.defaultdict(list)
    for sample in samples:
        by_split[sample.split or "train"].append(sample)
    names = {sample.label for sample in samples}
    classes = sorted(names, key=lambda name: (int(name) if name.isdecimal() else math.inf, name))
    notices += _find_alike(classes)
    notices += _find_missing(place, names, by_split)
    return Found(classes, dict(by_split), notices)


def _find_labelled(place, images_dir, listing):
    """Return (samples, sentences about what was found) of class folders, or else of a list. Raises
    TpukitError if there are no two classes."""
    samples, notices = [], []
    if place.is_dir():
        samples, notices = find_in_class_folders(str(place.resolve()), listing)
    lists = find_lists(place, listing)
    listed = ", ".join(path.name for path in lists)
    if len({sample.label for sample in samples}) < 2:
        with _with_deeper(place, listing):
            if len(lists) > 1:
                raise TpukitError(f"{place} has {len(lists)} CSV files ({listed}): give one as dataset_dir")
            if lists:
                listing.watch(str(lists[0]))
                samples, notices = read_list(lists[0], images_dir)
    elif lists:
        notices.append(
            f"{listed}: not read, because folders name the classes (give one as dataset_dir to use it)"
        )
    names = {sample.label for sample in samples}
    if len(names) >= 2:
        return samples, notices
    here = ", ".join(sorted(path.name for path in place.glob("*"))[:8]) or "nothing"
    below = listing.files_below(str(place)) if place.is_dir() else []
    deeper = [os.path.relpath(path, place) for path in below if path.lower().endswith(".csv") and not lists]
    csv = (
        [f"below it {len(deeper)} CSV files ({splits.some(deeper)}), to be given as dataset_dir"]
        if deeper
        else []
    )
    here = "; ".join([here, *csv, *pictures.left_out(below), *pictures.find_boxes(below)])
    with _with_deeper(place, listing):
        raise TpukitError(
            f"no images in {place} of two classes, only of {', '.join(names) or 'none'}: it should hold a"
            " folder of images for each class (in train/ and test/, or not), or a CSV file with paths and"
            f" labels (docs/YOUR_DATA.md); it has {here}"
        )


@contextlib.contextmanager
def _with_deeper(place, listing):
    """Context manager: say in an error where class folders are, if some lie below."""
    try:
        yield
    except TpukitError as error:
        deeper = find_deeper(str(place), listing) if place.is_dir() else None
        if not deeper:
            raise
        folder, what = deeper
        raise TpukitError(f"{folder} has {what}: give it as dataset_dir. Else: {error}") from None


def _without_unlabelled(samples):
    """Leave out a split whose only class is none of train's, as val/images/ has it if only a file that is not
    read has the labels."""
    classes = collections.defaultdict(set)
    for sample in samples:
        classes[sample.split].add(sample.label)
    of_one_class = [split for split in ("val", "test") if len(classes[split]) == 1]
    unlabelled = [split for split in of_one_class if not classes[split] & classes["train"]]
    return [sample for sample in samples if sample.split not in unlabelled]


def _hold_out(samples):
    """Return the samples with a split: a share of every class is for tests."""
    by_class = collections.defaultdict(set)  # a file that a list names twice is one
    for sample in samples:
        by_class[sample.label].add(sample.name)
    tests = {label: splits.hold_out(names, TEST_SHARE) for label, names in by_class.items()}
    return [
        Sample(name, label, "test" if name in tests[label] else "train", path)
        for name, label, _, path in samples
    ]


def _find_unused(place, samples, listing):
    """Return sentences that count the files at a place that are no samples: images by their folders, and
    files that are not read as images by their endings."""
    used = {sample.path for sample in samples}
    folders = sorted({os.path.dirname(path) for path in used})
    for folder in folders:  # which a list may name though it is missing
        listing.watch(folder)
    if place.is_dir():
        below, base = listing.files_below(str(place)), place
    else:  # a list in a folder that may hold anything: look only where its images are
        below, base = [], place.parent
        for folder in filter(os.path.isdir, folders):
            with os.scandir(folder) as entries:
                below += sorted(entry.path for entry in entries if entry.is_file())
    others = [path for path in below if pictures.is_image(path) and path not in used]
    real: dict[str, str] = {}  # folders without links
    others = [path for path in others if resolve(path, real) not in used]
    unused = [os.path.relpath(os.path.dirname(path), base) for path in others]
    notices = []
    if unused:
        counts = [f"{count} in {folder}/" for folder, count in collections.Counter(unused).most_common()]
        notices.append(
            f"{len(unused)} images are not used, because no folder or list gives them a class and a split:"
            f" {splits.some(counts)}"
        )
    return notices + pictures.left_out(below)


def _find_alike(classes):
    """Return sentences about classes whose names differ in nothing but case, or are one number."""
    notices = []
    for what, key in {
        "names differ only in case, width or blanks": _unspaced,
        "names are the same number": _number_or_name,
    }.items():
        by_name = collections.defaultdict(list)
        for name in classes:
            by_name[key(name)].append(name)
        alike = [", ".join(names) for names in by_name.values() if len(names) > 1]
        notices += [f"different classes whose {what}: {'; '.join(alike)}"] if alike else []
    return notices


def _number_or_name(name):
    return name if (found := number(name)) is None else found


def _unspaced(name):
    name = unicodedata.normalize("NFKC", name)  # a full-width letter as a usual one
    return " ".join(re.sub("[\u200b\ufeff]", "", folded(name)).split())  # without those of no width


def _find_missing(place, names, by_split):
    """Return sentences about test splits that lack some of the classes. Raises TpukitError if training does,
    or if there is no test image."""
    notices = []
    for split in ("train", *(by_split.keys() - {"train"} or {"test"})):
        missing = sorted(names - {sample.label for sample in by_split[split]})
        if not missing:
            continue
        count = f"{len(missing)} of {len(names)} classes"
        lacks = f"the {split} split has no image of {count} ({splits.some(missing)})"
        if split == "train" or not by_split[split]:
            raise TpukitError(
                f"{place}: {lacks}: add some, in a set without splits two images or more of each class"
            )
        notices.append(f"{lacks}: its scores say nothing about them")
    return notices
