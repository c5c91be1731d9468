"""Images in class folders, which may lie in folders of their splits."""

from pathlib import Path

from tpukit.tasks import pictures, splits
from tpukit.tasks.images.lists import Sample

# Folders of sets that have no class folders
ALL_IMAGES = ("images", "image", "imgs", "img", "jpegimages")


def find_in_class_folders(folder: Path) -> tuple[list[Sample], list[str]]:
    """Return (the samples of the class folders in a folder, or in its split folders; sentences about the
    folders)."""
    folder = _unwrapped(folder)
    children = _folders(folder)
    named = _find_split_folders(children)
    classes = [(each, split) for child, split in named.items() for each in _folders(_unwrapped(child))]
    classes = classes if named else [(child, None) for child in children]
    notices = [] if named else _common_names(children)
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
