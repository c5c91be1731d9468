"""Lists of images and their classes: CSV files."""

import csv
import itertools
import os
import re
from pathlib import Path
from typing import NamedTuple

from tpukit.data.arrays import resolve
from tpukit.host.errors import TpukitError, explained, reading
from tpukit.host.text import one_line
from tpukit_tasks import pictures
from tpukit_tasks.names import MISSING, Lookup, composed, number
from tpukit_tasks.splits import Listing, files_below, some, split_of

# Names of columns, as `_plain` writes them: those of paths first, those of what may be part of one last
PATH_COLUMNS = (
    "path file filename file_name filepath file_path filepaths filenames fname image image_path img_path"
    " imagepath imgpath image_file img_file image_filename image_name img_name images image_id imageid img"
    " img_id id_code id"
).split()
LABEL_COLUMNS = (
    "label labels class class_name class_label label_name category target species breed diagnosis classid"
    " class_id label_id y"
).split()
DOUBTFUL = ("data_set", "dataset")  # are splits only if their values are
SPLIT_COLUMNS = (*"split subset partition set usage".split(), *DOUBTFUL)
UNREAD_SPLITS = (
    "is_valid is_val is_train is_test valid fold folds kfold".split()
)  # fastai's, cross-validation's
BOX_COLUMNS = "bbox xmin x_min x1 segmentation encodedpixels rle".split()
TRIED = 100  # rows whose files are looked for, to choose a column of paths
# Images of a class on average, of which fewer show that numbers, with a fraction or whole, are no classes
FEW, PAIR = 5, 2
NO_LABEL = "unknown unlabeled unlabelled undefined unspecified missing inf -inf".split()
MANY = 20  # different whole numbers: with gaps between them, they may be quantities


class Sample(NamedTuple):
    name: str
    """For messages; also what decides its split, if the dataset has none."""
    label: str
    split: str | None
    """train, val or test; None if the dataset does not say"""
    path: str


def find_lists(place: Path, listing: Listing) -> list[Path]:
    """Return the CSV files in a folder; of a place that is a file, itself."""
    if not place.is_dir():
        return [place]
    files = listing.files(str(place))
    return [Path(path) for path in files if path.lower().endswith(".csv") and os.path.isfile(path)]


def read_list(path: Path, images_dir: Path | None) -> tuple[list[Sample], list[str]]:
    """Return (the samples of a CSV file, sentences about its columns and rows). Its paths are relative to
    images_dir, or else to its own folder, and may not leave it. Decodes no image.

    Raises TpukitError for a file that is no CSV or lacks a column, for a row that does not give one image,
    one class and, if there is a column for it, one split, for a file in two classes, for quantities, and if
    none of its images is there."""
    wrong = f"{path} is not a CSV file in UTF-8, so save a list as one, or give a folder or an archive (.zip)"
    with reading(path, wrong, TpukitError), open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, restval="", skipinitialspace=True)
        names = reader.fieldnames or []
        rows = [(reader.line_num, row) for row in reader]
    base = str(Path(images_dir or path.parent).resolve())
    files = _Files(base)
    images, labels, parts = (_columns(names, usual) for usual in (PATH_COLUMNS, LABEL_COLUMNS, SPLIT_COLUMNS))
    # Other sets' names may be in a column of this name.
    parts = [
        name for name in parts if _plain(name) not in DOUBTFUL or any(split_of(row[name]) for _, row in rows)
    ]
    others = [name for name in names if name not in labels]
    image = _column_of_paths([*images, *others], rows, files) or (images or [None])[0] if labels else None
    if image is None or not labels:
        raise TpukitError(
            f"{path} has the columns {', '.join(names[:8])}: call that of paths image and that of classes"
            " label (one column, with one class in each row), and separate columns by commas"
        )
    label, split = labels[0], parts[0] if parts else None
    if twice := {name for name in (image, label, split) if names.count(name or "") > 1}:
        raise TpukitError(f"{path} has several columns {', '.join(map(str, twice))}: rename all but one")
    samples, notices = _read_rows(path, rows, (image, label, split), files)
    _require_classes(path, label, samples)
    if len(labels) > 1:
        others = ", ".join(labels[1:])
        notices.insert(
            0, f"{path.name}: its column {label.strip()} has the classes, as is usual, not {others}"
        )
    unread = [name.strip() for name in names if _plain(name) in UNREAD_SPLITS and name not in (image, label)]
    if unread and not split:
        notices.append(
            f"{path.name}: the splits in its column {unread[0]} are not used: for that, call a column split"
            " and write train, val or test in it"
        )
    if boxes := [name for name in names if _plain(name) in BOX_COLUMNS]:
        notices.append(
            f"{path.name}: boxes and outlines are not read ({', '.join(boxes)}): an image has a class"
        )
    if images != [image]:
        others = ", ".join(name for name in images if name != image) or "one of a usual name"
        notices.append(
            f"{path.name}: its column {image.strip()} has the paths, as its files are there, not {others}"
        )
    if samples and not any(os.path.isfile(sample.path) for sample in samples):
        here = some([each.relative_to(base).as_posix() for each in _images_below(base)]) or "no image"
        raise TpukitError(
            f"{path}: {samples[0].name} and all others of its column {image.strip()} are not in {base}, which"
            f" has {here}: name the folder that they are in as images_dir (--images-dir)"
        )
    return samples, notices + _doubtful_labels(path, label, samples)


def _plain(name):
    return re.sub(r"[\s-]+", "_", name.strip().lower())


def _columns(names, usual):
    """Return the columns with a usual name, the most usual first."""
    plain = {_plain(name): name for name in reversed(names)}
    return [plain[name] for name in usual if name in plain]


def _column_of_paths(columns, rows, files):
    """Return the first of these columns whose files are there; None if there is none."""
    for column in columns:
        values = (row[column].strip() for _, row in rows[:TRIED])
        if any(value not in MISSING and files.is_there(value) for value in values):
            return column
    return None


class _Files:
    """The files that a CSV names, relative to a folder that they may not leave."""

    def __init__(self, base):
        self.base, self.lookup, self.folders = base, Lookup(), {}

    def is_there(self, name):
        try:
            return os.path.isfile(self.find(name, "")[0])
        except TpukitError:
            return False

    def find(self, name, where):
        """Return (the file of a name, whose ending may be missing; whether its name is written otherwise).
        Raises TpukitError for one outside of the folder."""
        # A list from elsewhere could name any file of the user's, whose picture would then be kept with the
        # predictions.
        name = name.replace("\\", "/")  # as Windows writes paths
        path, is_other = os.path.join(self.base, name), False
        with explained(f"{where}: {name!r} is not a valid path"):
            if not os.path.isfile(path) and (found := self.lookup.find(self.base, name)):
                path, is_other = found, not found.startswith(os.path.normpath(path))
            path = resolve(path, self.folders)
        if not f"{path}{os.sep}".startswith(os.path.join(self.base, "")):
            told = f"{where}: {one_line(name)} is not in {self.base}"
            raise TpukitError(f"{told}: write paths relative to it, or to images_dir")
        return path, is_other


def _read_rows(path, rows, columns, files):
    """Return (samples, sentences about rows)."""
    image, label, split = columns
    first: dict[str, tuple[int, str]] = {}  # of a file, its row and class
    samples, listed, written_otherwise, repeated = [], set(), [], []
    for line, row in rows:
        where = f"{path}, row {line}"
        name, class_name = composed(row[image].strip()), composed(row[label].strip())
        if None in row or not name or not class_name or class_name[0] in "[{":
            raise TpukitError(f"{where}: it must have a path, one label, and no more fields than row 1")
        for column, value in ((image, name), (label, class_name)):
            if value in MISSING:
                raise TpukitError(
                    f"{where}: its {column.strip()} is {value}, as pandas writes a missing one: fill it in,"
                    " or leave out the row (if it is a class, call it otherwise)"
                )
        if "://" in name:
            raise TpukitError(f"{where}: {name} is an address: download it, and give its file")
        of_row = split_of(row[split]) if split else None
        if split and not of_row:
            raise TpukitError(
                f"{where}: its {split} is {row[split]!r} and must be train, val or test; or rename the column"
            )
        file, is_other = files.find(row[image].strip(), where)
        written_otherwise += [name] * is_other
        earlier, known = first.setdefault(file, (line, class_name))
        if known != class_name:
            classes = f"{class_name} here and {known} in row {earlier}"
            raise TpukitError(f"{where}: {one_line(name)} is {classes}: an image has one class")
        if (file, of_row) in listed:
            repeated.append(name)
            continue
        listed.add((file, of_row))
        samples.append(Sample(name, class_name, of_row, file))
    found = {
        "paths are written otherwise than their files, in case or Unicode form": written_otherwise,
        "rows name a file again, which counts once": repeated,
    }
    return samples, [
        f"{path.name}: {len(names)} {text} ({some(names)})" for text, names in found.items() if names
    ]


def _images_below(base):
    """Return the first images below a folder."""
    with explained(f"{base} cannot be searched"):
        found = (each for each in files_below(Path(base)) if pictures.is_image(str(each)))
        return list(itertools.islice(found, 2))


# What labels are


def _numbers(names):
    """Return labels as numbers, sorted; none if they are not all such."""
    numbers = [each for name in names if (each := number(name)) is not None]
    return sorted({*numbers}) if len(numbers) == len(names) else []


def _require_classes(path, label, samples):
    """Raise TpukitError for a column of quantities: numbers that nearly each image has one of its own of."""
    numbers = _numbers({sample.label for sample in samples})
    few = PAIR if all(map(float.is_integer, numbers)) else FEW
    if len(numbers) > FEW and len(numbers) * few > len(samples):
        raise TpukitError(
            f"{path}: its column {label.strip()} holds quantities ({samples[0].label}, ...), {len(numbers)}"
            f" different numbers for {len(samples)} images, and classes are learned: call the column of"
            " classes label, or sort the numbers into a few ranges"
        )


def _doubtful_labels(path, label, samples):
    """Return sentences about labels that may be quantities, or several in one cell."""
    names = sorted({sample.label for sample in samples})
    notices, numbers = [], _numbers(names)
    if none := [name for name in names if _may_mean_none(name)]:
        notices.append(
            f"{path.name}: the label {some(none)} is learned as a class: leave out its rows if it marks"
            " images without a label"
        )
    if numbers:
        have_gaps = len(numbers) > MANY and numbers[-1] - numbers[0] >= len(numbers)
        if have_gaps or not all(map(float.is_integer, numbers)):
            notices.append(
                f"{path.name}: each of the {len(numbers)} numbers of its column {label.strip()}"
                f" ({numbers[0]:g} to {numbers[-1]:g}) is learned as a class of its own, not as a quantity"
            )
    elif several := [name for name in names if _is_several(name, names)]:
        notices.append(
            f"{path.name}: {len(several)} labels look like several in one cell ({some(several)}): each is"
            " learned as a class of its own, as an image has one"
        )
    return notices


def _may_mean_none(label):
    """Return whether a label may say that there is none: a negative number, a mark, or a usual word."""
    value = number(label)
    return value is not None and value < 0 or label.lower() in NO_LABEL or not re.search(r"[^\W_]", label)


def _is_several(label, labels):
    """Return whether a label is made of several: of marks that separate, or of other labels."""
    parts = re.split(r"\s*[|;,/&+]\s*|\s+", label)
    return re.search(r"\w\s*[|;]\s*\w", label) or len(parts) > 1 and all(part in labels for part in parts)
