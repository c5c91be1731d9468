"""The lists of an infrared set: its names, the image and the mask of each, and what is in no list.

A folder without lists, such as a user's own, is split by the names of its images."""

import collections
import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tpukit.data.splits import files_below, hold_out, some, split_of
from tpukit.host.errors import TpukitError, reading
from tpukit_tasks import pictures

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
    images = find_folder(folder, "images")
    if images.is_dir() and not any(lists.values()):
        return images, _split_by_name(images, split)
    here = ", ".join(sorted(path.name for path in folder.glob("*"))[:8]) or "nothing"
    raise TpukitError(
        f"no {split} list in {folder}, which should hold images/ and masks/, and both trainval.txt and"
        " test.txt, or train/ and test/ in images/ and in masks/, or neither: looked for"
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
    names = (line.strip().replace("\\", "/") for line in text.splitlines())  # as Windows writes paths
    return {number: name for number, name in enumerate(names, 1) if name}


def _split_by_name(images, split):
    """Return {number: name} of a split's images: by the folders train/ and test/ in images/, or a fifth of
    them all to test."""
    files = _image_files(images)
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


def find_folder(folder: Path, kind: str) -> Path:
    """Return the folder of a set's images or masks: that of the usual name, or the one whose last word is
    such a name, as in IRSTD1k_Img. Raises TpukitError for several."""
    if (folder / kind).is_dir():
        return folder / kind
    last_words = {path: re.split("[-_ ]", path.name.lower())[-1] for path in sorted(folder.glob("*/"))}
    found = [path for path, word in last_words.items() if word in FOLDERS[kind]]
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise TpukitError(f"{folder} has {len(found)} folders of {kind} ({names}): call one of them {kind}")
    return found[0] if found else folder / kind


def find_files(folder: Path) -> Files:
    """Return the files of a set's images and masks. Raises TpukitError for images without any mask."""
    images, masks = (find_folder(folder, kind) for kind in FOLDERS)
    files = Files(_image_files(images), _image_files(masks))
    if files.images and not files.masks:
        raise TpukitError(
            f"no masks in {masks}: there, each image needs one of its name and size, an image that is"
            " white where the targets are and black elsewhere; boxes in text files are not read"
        )
    return files


def _image_files(folder):
    files = {}
    for path in files_below(folder) if folder.is_dir() else []:
        if path.suffix.lower() in pictures.ENDINGS:
            files.setdefault(path.relative_to(folder).with_suffix("").as_posix(), []).append(path)
    return files


def _find(files, stems):
    """Return the paths of the first of these stems that exists."""
    return next((files[stem] for stem in stems if stem in files), [])


def _stem(name):
    ending = Path(name).suffix
    return name.removesuffix(ending) if ending.lower() in pictures.ENDINGS else name


def find_image(files: Files, name: str) -> list[Path]:
    """Return the paths of the image of a name in a list: if it has several formats, the one it names."""
    paths = _find(files.images, [_stem(name) + suffix for suffix in IMAGE_SUFFIXES])
    return [path for path in paths if path.name == Path(name).name] or paths


def _find_mask(files, name):
    stem = _stem(name)
    bases = dict.fromkeys(stem.removesuffix(suffix) for suffix in IMAGE_SUFFIXES)
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
    listed = [*train.values(), *test.values()]
    used = {path for name in listed for path in find_image(files, name)}
    masks = {path for stem in files.images for path in _find_mask(files, stem)}
    lists = [path for path in sorted(train_list.parent.glob("*.txt")) if split_of(path.stem)]
    counts = collections.Counter(listed)
    found = {
        "images are in no list, and not used": _unused(files.images, used),
        "masks belong to no image, and are not used": _unused(files.masks, masks),
        "lists are not used": [path.name for path in lists if path not in (train_list, test_list)],
        "names are in the lists more than once": [name for name, count in counts.items() if count > 1],
    }
    if not train_list.is_file():
        in_both = _folders_of(train.values()) & _folders_of(test.values())
        found[IN_BOTH] = sorted(in_both - {"."})
    notices = [_counted(names, text) for text, names in found.items() if names]
    return notices + pictures.left_out(files_below(find_folder(folder, "images")))


def _folders_of(names: Iterable[str]) -> set[str]:
    return {Path(name).parent.as_posix() for name in names}


def _unused(files, used):
    return [path.name for path in itertools.chain(*files.values()) if path not in used]


def _counted(names: Sequence[str], text: str) -> str:
    """Return a sentence: how many names there are, what is said of them, and the first of them."""
    return f"{len(names)} {text} ({some(names)})"
