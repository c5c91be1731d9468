"""Lists of images and their classes: CSV files."""

import csv
from pathlib import Path
from typing import NamedTuple

from tpukit.host.errors import TpukitError, explained
from tpukit.tasks.splits import SPLITS

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
PATH_COLUMNS = "path file filename file_name filepath image image_path image_name image_id img id".split()
LABEL_COLUMNS = "label labels class class_name category target species breed diagnosis y".split()
SPLIT_COLUMNS = "split subset partition set".split()


class Sample(NamedTuple):
    name: str
    """For messages; also what decides its split, if the dataset has none."""
    label: str
    split: str | None
    """train, val or test; None if the dataset does not say"""
    path: Path


def read_lists(place: Path, images_dir: Path | None) -> list[Sample]:
    """Return the samples of a CSV file, or of a folder with CSV files; decode no image. images_dir: see
    `ImageClassifier`.

    Raises TpukitError for a damaged file, and for several CSV files that are not named after splits."""
    lists = [place] if place.is_file() else list(filter(_lists_images, sorted(place.glob("*.csv"))))
    if len(lists) > 1 and not all(path.stem.lower() in SPLITS for path in lists):
        names = ", ".join(path.name for path in lists)
        raise TpukitError(f"{place} has {len(lists)} lists of images ({names}): give one as dataset_dir")
    return [sample for path in lists for sample in _read_csv(path, images_dir)]


def _column(names, usual):
    """Return the first column with a usual name, or None."""
    plain = {name.strip().lower(): name for name in reversed(names)}
    return next((plain[name] for name in usual if name in plain), None)


def _open_csv(path):
    """Return (names of the columns, rows as dicts of str). Raises TpukitError for a file that is no CSV."""
    wrong = f"{path} is not a CSV file in UTF-8, so save it as one"
    with open(path, newline="", encoding="utf-8-sig") as file, explained(wrong):
        delimiter = max(",;\t", key=file.readline().count)
        file.seek(0)
        reader = csv.DictReader(file, delimiter=delimiter, restval="")
        return reader.fieldnames or [], list(reader)


def _lists_images(path):
    names = _open_csv(path)[0] if path.is_file() else []
    return _column(names, PATH_COLUMNS) and _column(names, LABEL_COLUMNS)


def _read_csv(path, images_dir):
    """Return the samples of a CSV file. Its paths are relative to images_dir, or else to its own folder, and
    may not leave it."""
    base = Path(images_dir or path.parent).resolve()
    names, rows = _open_csv(path)
    image, label = _column(names, PATH_COLUMNS), _column(names, LABEL_COLUMNS)
    if image is None or label is None:
        raise TpukitError(
            f"{path} has the columns {', '.join(names)}: rename those of images and labels to image and label"
        )
    split_column, samples = _column(names, SPLIT_COLUMNS), []
    for number, row in enumerate(rows, 2):
        where = f"{path}, row {number}"
        name, class_name = row[image].strip(), row[label].strip()
        if None in row or not name or not class_name:
            raise TpukitError(f"{where}: it must have a path, a label, and no more fields than row 1")
        split = SPLITS.get(row.get(split_column, "").strip().lower()) or SPLITS.get(path.stem.lower())
        samples.append(Sample(name, class_name, split, _inside(base, name, where)))
    return samples


def _inside(base, name, where):
    """Return the file of a name in a CSV, whose ending may be missing. Raises TpukitError for one outside of
    `base`."""
    # A list from elsewhere could name any file of the user's, whose picture would then be kept with the
    # predictions.
    with explained(f"{where}: {name!r} is not a valid path"):
        path = (base / name).resolve()
    if not path.is_relative_to(base):
        raise TpukitError(f"{where}: {name} is not in {base}; name the folder of the images as images_dir")
    if path.suffix.lower() in IMAGE_ENDINGS:
        return path
    complete = (path.with_name(path.name + ending) for ending in IMAGE_ENDINGS)
    return next(filter(Path.is_file, complete), path)
