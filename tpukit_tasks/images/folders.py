"""Images in class folders, which may lie in folders of their splits."""

import collections
import os
import re

from tpukit.host.errors import TpukitError
from tpukit_tasks import pictures, splits
from tpukit_tasks.images.lists import Sample
from tpukit_tasks.names import composed
from tpukit_tasks.splits import Listing

# Folders of sets that have no class folders
SEARCHED = 1000  # folders: enough to come past those beside the images
ALL_IMAGES = ("images", "image", "imgs", "img", "jpegimages")
# Words in the names of folders that hold the same pictures in another form each
VARIANTS = set(
    "color colour colored coloured rgb gray grey grayscale greyscale bw hsv segmented segmentation cropped"
    " masked resized raw original originals augmented processed preprocessed enhanced denoised nir ir"
    " infrared thermal depth edges".split()
)


def find_in_class_folders(folder: str, listing: Listing) -> tuple[list[Sample], list[str]]:
    """Return (the samples of the class folders in a folder, or in its split folders; sentences about the
    folders)."""
    folder = _unwrapped(folder, listing)
    children = _folders(folder, listing)
    named = _find_split_folders(children, listing)
    classes = [
        (each, split)
        for child, split in named.items()
        for each in _folders(_unwrapped(child, listing), listing)
    ]
    classes = classes if named else [(child, None) for child in children]
    images = {(class_folder, split): _images_below(class_folder, listing) for class_folder, split in classes}
    inner = _folders_in_classes(images)
    notices = _require_own_folders(inner) + _find_same_names(images)
    start = len(os.path.join(folder, ""))  # of a path in the folder
    if empty := [each[start:] for (each, _), paths in images.items() if not paths]:
        notices.append(f"{len(empty)} folders have no images, so they are not classes ({splits.some(empty)})")
    learned = {_name(each) for (each, split), paths in images.items() if paths and split in (None, "train")}
    notices += _doubtful_classes(sorted(learned))
    if deep := [
        f"{name}: {splits.some(sorted(within))}" for name, within in inner.items() if len(within) > 1
    ]:
        notices.append(
            f"{len(deep)} classes hold their images in several folders, which are no classes of their own"
            f" ({'; '.join(deep[:3])})"
        )
    samples = []
    for (class_folder, split), paths in images.items():
        label = _name(class_folder)
        samples += [Sample(composed(path[start:]), label, split, path) for path in paths]
    return samples, notices


def _find_split_folders(children, listing):
    """Return dict of folder -> split of those that are splits; empty if none is. A folder whose name has the
    word may be a class, as train_station or a flat train/. They are splits if one with just that name holds
    folders; if there are two splits, and one holds folders or both have just such names; or if no other
    folder has images."""
    named = {child: split for child in children if (split := splits.split_of(_name(child)))}
    exact = [child for child in named if _name(child).lower() in splits.SPLITS]
    filled = [child for child in named if _folders(_unwrapped(child, listing), listing)]
    others = [child for child in children if child not in named and _images_below(child, listing)]
    are_several = len({*named.values()}) > 1
    are_splits = {*exact} & {*filled} or are_several and (filled or len(exact) > 1) or not others
    return named if are_splits else {}


def _folders_in_classes(images):
    """Return the folders of images in each class: its name -> their paths in it, but for its own."""
    inner = collections.defaultdict(set)
    for (folder, _), paths in images.items():
        start = len(os.path.join(folder, ""))
        inner[_name(folder)] |= {composed(os.path.dirname(path[start:])) for path in paths} - {""}
    return inner


def _require_own_folders(inner):
    """Raise TpukitError for classes that hold folders of two equal names or more: they are variants of one
    set, as color/ and grayscale/, or hold images and masks, or splits. Of one equal name beside others, it
    depends on the names of the classes: return sentences about them."""
    holders = collections.defaultdict(set)  # a folder in classes -> the classes that hold one
    for name, folders in inner.items():
        for each in folders:
            holders[each].add(name)
    shared = {name: labels for name, labels in holders.items() if len(labels) > 1}
    if not shared or len(holders) == 1:  # as each class has its images/
        return []
    labels = sorted(set().union(*shared.values()))
    told = f"{', '.join(labels[:8])} hold the same folders ({splits.some(sorted(shared))})"
    are_variants = sum(not VARIANTS.isdisjoint(re.split("[-_ ]", label.lower())) for label in labels) > 1
    if len(shared) < 2 and not are_variants:
        if next(iter(shared)).lower() in ALL_IMAGES:
            return []
        return [f"{told}, which are no classes: if they should be, give one of {', '.join(labels[:8])}"]
    raise TpukitError(
        f"{told}, so they may be variants of one set: give one of them as dataset_dir. If they are the"
        " classes, let each hold its images without folders of these names; train/ and test/ belong above the"
        " classes"
    )


def _find_same_names(images):
    """Return a sentence if half of a class's images or more have the names of another's, as the same pictures
    in two forms have, and as counted images, such as image_001, may have in any case."""
    stems = collections.defaultdict(set)
    for (folder, _), paths in images.items():
        stems[_name(folder)] |= {os.path.splitext(os.path.basename(path))[0] for path in paths}
    named = {
        label: names
        for label, names in stems.items()
        if len({re.sub(r"\d+", "", name) for name in names}) > max(len(names) / 2, 2)
    }
    labels_of, both = collections.defaultdict(list), collections.defaultdict(list)
    for label in sorted(named):
        for name in named[label]:
            labels_of[name].append(label)
    for name, (first, *others) in labels_of.items():
        for other in others:
            both[first, other].append(name)
    same = [
        f"{len(names)} of {one} and {other} ({splits.some(sorted(names))})"
        for (one, other), names in sorted(both.items())
        if 2 * len(names) >= min(len(named[one]), len(named[other]))
    ]
    told = f"images of different classes have the same names: {'; '.join(same[:3])}"
    return [f"{told}: if these are the same pictures in several forms, they are no classes"] if same else []


def find_deeper(folder: str, listing: Listing) -> tuple[str, str] | None:
    """Return (the first folder below this one that has class folders, what it has); None if there is none."""
    waiting, seen = collections.deque(_folders(folder, listing)), 0
    while waiting and seen < SEARCHED:
        inner, seen = waiting.popleft(), seen + 1
        children = _folders(inner, listing)
        for parent in (*(each for each in children if splits.split_of(_name(each)) == "train"), inner):
            filled = [_name(each) for each in _folders(parent, listing) if _has_images(each, listing)]
            if len(filled) > 1:
                part = f"{_name(parent)}/ with " if parent != inner else ""
                return inner, f"{part}{len(filled)} folders of images ({splits.some(filled)})"
        waiting.extend(children)
    return None


def _has_images(folder, listing):
    return any(map(pictures.is_image, listing.files(folder)))


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


def _unwrapped(folder, listing):
    """Return the folder, or the one that is all that it holds: an archive's own top folder, or
    seg_train/seg_train/. One whose name is a split is kept, if it is not the same split again."""
    passed = set()  # a link may lead back
    while len(children := _folders(folder, listing)) == 1 and _folders(children[0], listing):
        if listing.real(folder) in passed:
            break
        passed.add(listing.real(folder))
        split = splits.split_of(_name(children[0]))
        if split and split != splits.split_of(_name(folder)):
            break
        folder = children[0]
    return folder


def _folders(folder, listing):
    return [each for each in listing.folders(folder) if not _name(each).startswith("__")]


def _images_below(folder, listing):
    return [path for path in listing.files_below(folder) if pictures.is_image(path)]


def _name(path):
    return composed(os.path.basename(path))
