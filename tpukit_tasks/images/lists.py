"""Lists of images and their classes: CSV files."""

import csv
import os
from pathlib import Path
from typing import NamedTuple

from tpukit.data.splits import Listing, resolve, split_of
from tpukit.host.errors import TpukitError, explained, reading
from tpukit_tasks import pictures

PATH_COLUMNS = "path file filename file_name filepath image image_path image_name image_id img id".split()
LABEL_COLUMNS = (
    "label labels class class_name category target species breed diagnosis classid class_id y".split()
)
SPLIT_COLUMNS = "split subset partition set usage".split()


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
    """Return (the samples of a CSV file, sentences about its columns). Its paths are relative to images_dir,
    or else to its own folder, and may not leave it. Decodes no image.

    Raises TpukitError for a file that is no CSV or lacks a column, for a row that does not give one image,
    one class and, if there is a column for it, one split, and if none of its images is there."""
    wrong = f"{path} is not a CSV file in UTF-8, so save a list as one, or give a folder or an archive (.zip)"
    with reading(path, wrong, TpukitError), open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, restval="")
        names, rows = reader.fieldnames or [], list(reader)
    image, label, split = (_column(names, usual) for usual in (PATH_COLUMNS, LABEL_COLUMNS, SPLIT_COLUMNS))
    if image is None or label is None:
        raise TpukitError(
            f"{path} has the columns {', '.join(names[:8])}: call that of paths image and that of classes"
            " label (one column, with one class in each row), and separate columns by commas"
        )
    others = [name for name in names if name.strip().lower() in LABEL_COLUMNS and name != label]
    notices = []
    if others:
        notices.append(f"{path.name}: its column {label.strip()} has the classes, not {', '.join(others)}")
    base = str(Path(images_dir or path.parent).resolve())
    folders: dict[str, str] = {}  # without links
    samples = []
    for number, row in enumerate(rows, 2):
        where = f"{path}, row {number}"
        name, class_name = row[image].strip(), row[label].strip()
        if None in row or not name or not class_name or class_name[0] == "[":
            raise TpukitError(f"{where}: it must have a path, one label, and no more fields than row 1")
        of_row = split_of(row[split]) if split else None
        if split and not of_row:
            raise TpukitError(
                f"{where}: its {split} is {row[split]!r} and must be train, val or test; or rename the column"
            )
        samples.append(Sample(name, class_name, of_row, _inside(base, name, folders, where)))
    if samples and not any(os.path.isfile(sample.path) for sample in samples):
        raise TpukitError(
            f"{path}: {samples[0].name} and all others are not in {base}: name the folder that they are in as"
            " images_dir (--images-dir)"
        )
    return samples, notices


def _column(names, usual):
    """Return the first column with a usual name, or None."""
    plain = {name.strip().lower(): name for name in reversed(names)}
    return next((plain[name] for name in usual if name in plain), None)


def _inside(base, name, folders, where):
    """Return the file of a name in a CSV, whose ending may be missing. Raises TpukitError for one outside of
    `base`. folders: see `resolve`."""
    # A list from elsewhere could name any file of the user's, whose picture would then be kept with the
    # predictions.
    with explained(f"{where}: {name!r} is not a valid path"):
        path = resolve(os.path.join(base, name), folders)
    if not f"{path}{os.sep}".startswith(os.path.join(base, "")):
        raise TpukitError(f"{where}: {name} is not in {base}: write paths relative to it, or to images_dir")
    return _with_ending(path)


def _with_ending(path):
    """Return the file of a path, whose ending may be missing."""
    if pictures.is_image(path):
        return path
    complete = (f"{path}{ending}" for ending in pictures.ENDINGS)
    return next(filter(os.path.isfile, complete), path)
