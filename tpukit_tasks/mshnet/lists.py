"""The lists of an infrared set: its names, the image and the mask of each, and what is in no list.

A folder without lists, such as a user's own, is split by the names of its images."""

import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tpukit.host.errors import TpukitError, reading
from tpukit_tasks import pictures
from tpukit_tasks.names import composed, folded
from tpukit_tasks.splits import files_below, hold_out, some, split_of

# Where the published sets keep their lists, relative to the set's folder.
LISTS = dict(
    train="trainval.txt train.txt img_idx/train*.txt 50_50/train.txt idx_427/trainval.txt idx_320/train.txt",
    test="test.txt img_idx/test*.txt 50_50/test.txt idx_427/test.txt idx_320/test.txt",
)
FOLDERS = dict(images=("images", "image", "imgs", "img"), masks=("masks", "mask", "labels", "label", "gt"))
# An image NAME, or NAME_img, has the mask NAME, NAME_mask, ...
IMAGE_SUFFIXES = ("", "_img", "_image")
MASK_SUFFIXES = ("", "_pixels0", "_mask", "_masks", "_gt", "_label")
TEST_SHARE = 0.2  # share of the images to test on, without lists
IN_BOTH = (
    "folders are in training and test: if these are sequences, their frames look alike, so put each sequence"
    " into one list, trainval.txt or test.txt"
)


class Files(NamedTuple):
    """Of a set's images and masks: name without ending, relative to the folder -> paths, several of an image
    in several formats."""

    images: dict[str, list[Path]]
    masks: dict[str, list[Path]]


def read_list(folder: Path, split: str) -> tuple[Path, dict[int, str]]:
    """Return the file that lists a split's names, and {number of the line: name}. Without any list, images/
    and the names that are chosen from it.

    Raises TpukitError naming the places that were searched."""
    lists = {name: _find_lists(folder, patterns) for name, patterns in LISTS.items()}
    if found := lists[split]:
        if len(found) > 1:
            names = ", ".join(path.name for path in found)
            raise TpukitError(
                f"{found[0].parent} has {len(found)} {split} lists ({names}): keep one there, move the others"
            )
        return found[0], _read_lines(found[0])
    places = _find_folders(folder, "images")
    if places and not any(lists.values()):
        _require_masks_of_splits(folder, places)
        return places.get("", folder), _split_by_name(places, split)
    here = ", ".join(sorted(path.name for path in folder.glob("*"))[:8]) or "nothing"
    raise TpukitError(
        f"no {split} list in {folder}, which should hold images/ and masks/, and both trainval.txt and"
        " test.txt, or train/ and test/, in images/ and in masks/ or above them, or neither: looked for"
        f" {LISTS[split].replace(' ', ', ')}; found {here}"
    )


def _find_lists(folder, patterns):
    """Return the files of the first of these patterns that has any."""
    found = (sorted(filter(Path.is_file, folder.glob(pattern))) for pattern in patterns.split())
    return next(filter(None, found), [])


def _read_lines(path):
    """Return {number: name} of the lines of a list. Raises TpukitError for one that is not in UTF-8."""
    with reading(path, f"{path} is not in UTF-8, so save it in that encoding", TpukitError):
        text = path.read_text("utf-8-sig")  # Windows' editors write a mark first
    lines = (composed(line.strip()) for line in text.splitlines())
    names = (line.replace("\\", "/").removeprefix("./") for line in lines)  # as Windows writes paths
    return {number: name for number, name in enumerate(names, 1) if name}


def _require_masks_of_splits(folder, places):
    """Raise TpukitError if the images of a split have a folder, and masks have one for other splits alone."""
    masks = _find_folders(folder, "masks")
    of_splits = {split or split_of(path.name): path for split, path in masks.items()}
    if len(places) < 2 or not of_splits or None in of_splits or places.keys() <= of_splits.keys():
        return
    lacking = [path for split, path in places.items() if split not in of_splits]
    images, here = (
        ", ".join(f"{path.relative_to(folder)}/" for path in paths) for paths in (lacking, of_splits.values())
    )
    raise TpukitError(
        f"{folder}: no folder has masks of the images in {images}; masks are in {here} alone. Add theirs, or"
        f" move {images} out of {folder}: then a fifth of the other images is held out to test on"
    )


def _split_by_name(places, split):
    """Return {number: name} of a split's images: by the folders train/ and test/ in images/ or above it, or a
    fifth of them all to test."""
    files = _image_files(places)
    if len(files) < 2:
        raise TpukitError(
            f"images/ holds {len(files)} images: it needs 2 or more, one to train on and one to test on"
        )
    of_folders = {stem: split_of(stem.rpartition("/")[0].split("/")[0]) for stem in files}
    if {"train"} < {*of_folders.values()} and all(of_folders.values()):
        tests = {stem for stem, of_folder in of_folders.items() if of_folder != "train"}
    else:
        tests = hold_out(files, TEST_SHARE)
    chosen = [stem for stem in files if (stem in tests) == (split == "test")]
    # A stem of several formats stays without an ending, and is refused.
    names = [stem + files[stem][0].suffix if len(files[stem]) == 1 else stem for stem in chosen]
    return dict(enumerate(sorted(names), 1))


def _find_folders(folder, kind):
    """Return the folders of a set's images or masks: {"": its own}, or those of its splits, train/images/ or
    train_images/, by the name of each; none if there are none. Raises TpukitError for several others."""
    found = _named(folder, kind)
    splits = {split_of(path.name): path for path in found}
    if len(found) > 1 and len(splits) == len(found) and None not in splits:
        return splits
    if found:
        return {"": _alone(folder, kind, found)}
    of_splits = [path for path in sorted(folder.glob("*/")) if split_of(path.name)]
    inner = {path: _named(path, kind) for path in of_splits}
    return {path.name: _alone(path, kind, found) for path, found in inner.items() if found}


def _alone(folder, kind, found):
    """Return the only one of these folders. Raises TpukitError for several."""
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise TpukitError(f"{folder} has {len(found)} folders of {kind} ({names}): call one of them {kind}")
    return found[0]


def _named(folder, kind):
    """Return the folder of the usual name for images or masks, or those whose last word is such a name, as in
    IRSTD1k_Img."""
    if (folder / kind).is_dir():
        return [folder / kind]
    last_words = {path: re.split("[-_ ]", path.name.lower())[-1] for path in sorted(folder.glob("*/"))}
    return [path for path, word in last_words.items() if word in FOLDERS[kind]]


def find_files(folder: Path) -> Files:
    """Return the files of a set's images and masks. Raises TpukitError for images without any mask, and for
    folders of splits that images and masks do not share."""
    images, masks = (_find_folders(folder, kind) for kind in FOLDERS)
    files = Files(_image_files(images), _image_files(masks))
    if "" in images and masks and "" not in masks:
        here = ", ".join(f"{path.relative_to(folder)}/" for path in masks.values())
        raise TpukitError(
            f"{folder}: masks are in {here} and all images in {images[''].name}/: move the images into"
            " folders of the same splits, or all masks into masks/"
        )
    _require_own_masks(files)
    if files.images and not files.masks:
        where = ", ".join(map(str, masks.values())) or folder / "masks"
        boxes = "; ".join(pictures.find_boxes(files_below(folder))) or "boxes in text files are not read"
        raise TpukitError(
            f"no masks in {where}: there, each image needs one of its name and size, an image that is"
            f" white where the targets are and black elsewhere; {boxes}"
        )
    return files


def _require_own_masks(files):
    """Raise TpukitError for a mask that images of two splits would share, as all have one folder of masks."""
    images = {}  # a mask -> the first image that has it
    for stem, (image, *_) in files.images.items():
        for mask in _find_mask(files, stem):
            if (other := images.setdefault(mask, image)).parent != image.parent:
                places = f"{other.parent.name}/ and {image.parent.name}/"
                raise TpukitError(
                    f"masks/{mask.name} would be the mask of an image in {places}: rename one image and give"
                    " it a mask of its own, or give each split a folder of masks"
                )


def _image_files(places):
    """Return the image files below some folders: stem, after the name of the split -> paths."""
    files: dict[str, list[Path]] = {}
    for split, folder in places.items():
        for path in files_below(folder):
            if path.suffix.lower() in pictures.ENDINGS:
                stem = path.relative_to(folder).with_suffix("")
                files.setdefault(composed((split / stem).as_posix()), []).append(path)
    return files


def _find(files, stems):
    """Return the paths of the first of these stems that exists."""
    return next((files[stem] for stem in stems if stem in files), [])


def _stem(name):
    name, ending = composed(name), Path(name).suffix
    return name.removesuffix(ending) if ending.lower() in pictures.ENDINGS else name


def find_image(files: Files, name: str) -> list[Path]:
    """Return the paths of the image of a name in a list: if it has several formats, the one it names."""
    paths = _find(files.images, [_stem(name) + suffix for suffix in IMAGE_SUFFIXES])
    return [path for path in paths if folded(path.name) == folded(Path(name).name)] or paths


def without_repeats(files: Files, names: dict[int, str]) -> dict[int, str]:
    """Return the names of a list but for those of an image that is named before."""
    found: dict[tuple, int] = {}
    for number, name in names.items():
        found.setdefault(tuple(find_image(files, name)) or (name,), number)
    return {number: names[number] for number in found.values()}


def _find_mask(files, name):
    """Return the masks of a name; one without the folder of its split, if all splits have one of masks."""
    stem = _stem(name)
    first, _, rest = stem.partition("/")
    stems = [stem, rest] if rest and split_of(first) else [stem]
    bases = dict.fromkeys(each.removesuffix(suffix) for each in stems for suffix in IMAGE_SUFFIXES)
    return _find(files.masks, [base + suffix for base in bases for suffix in MASK_SUFFIXES])


def find_pair(files: Files, name: str) -> tuple[Path, Path]:
    """Return the image and the mask of a name in a list, which is looked up among these files, and so leads
    nowhere else. Raises TpukitError if there is none or several."""
    image = _one(find_image(files, name), files.images, "images", name)
    return image, _one(_find_mask(files, name), files.masks, "masks", name)


def _one(paths, files, kind, name):
    """Return the only one of some paths. Raises TpukitError for several or none, naming what is there."""
    if len(paths) > 1:
        found = ", ".join(path.name for path in paths)
        raise TpukitError(f"{kind}/ has {found}: keep one of them")
    if not paths:
        here = ", ".join(f"{stem}{files[stem][0].suffix}" for stem in list(files)[:3])
        raise TpukitError(f"no image {kind}/{_stem(name)}; {kind}/ has {here or 'no images'}")
    return paths[0]


def find_unused(folder: Path, files: Files) -> list[str]:
    """Return sentences about what is in a set's folders and in no split."""
    (train_list, train), (test_list, test) = (read_list(folder, split) for split in LISTS)
    repeated = []
    for names in (train, test):
        once = without_repeats(files, names)
        repeated += [name for number, name in names.items() if number not in once]
    listed = [*train.values(), *test.values()]
    used = {path for name in listed for path in find_image(files, name)}
    masks = {path for stem in files.images for path in _find_mask(files, stem)}
    beside = train_list.parent if train_list.is_file() else folder
    lists = [path for path in sorted(beside.glob("*.[tT][xX][tT]")) if split_of(path.stem)]
    found = {
        "images are in no list, and not used": _unused(files.images, used),
        "masks belong to no image, and are not used": _unused(files.masks, masks),
        "lists are not used": [path.name for path in lists if path not in (train_list, test_list)],
        "names are in a list more than once, and count once": repeated,
    }
    if not train_list.is_file():
        in_both = _folders_of(train.values()) & _folders_of(test.values())
        found[IN_BOTH] = sorted(in_both - {"."})
    notices = [_counted(names, text) for text, names in found.items() if names]
    below = itertools.chain(*map(files_below, _find_folders(folder, "images").values()))
    return notices + pictures.left_out(below)


def _folders_of(names: Iterable[str]) -> set[str]:
    return {Path(name).parent.as_posix() for name in names}


def _unused(files, used):
    return [path.name for path in itertools.chain(*files.values()) if path not in used]


def _counted(names: Sequence[str], text: str) -> str:
    """Return a sentence: how many names there are, what is said of them, and the first of them."""
    return f"{len(names)} {text} ({some(names)})"
