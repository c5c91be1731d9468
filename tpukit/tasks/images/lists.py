"""Lists of images and their classes: CSV files, and metadata.jsonl."""

import collections
import csv
import json
import re
from pathlib import Path
from typing import NamedTuple

from tpukit.host.errors import TpukitError, explained
from tpukit.tasks import pictures
from tpukit.tasks.splits import SPLITS, some, split_of

PATH_COLUMNS = "path file filename file_name filepath image image_path image_name image_id img id".split()
LABEL_COLUMNS = (
    "label labels class class_name category target species breed diagnosis classid class_id y".split()
)
TABLES = (".csv", ".tsv")
SPLIT_COLUMNS = "split subset partition set usage".split()


class Sample(NamedTuple):
    name: str
    """For messages; also what decides its split, if the dataset has none."""
    label: str
    split: str | None
    """train, val or test; None if the dataset does not say"""
    path: Path


def read_lists(place: Path, images_dir: Path | None) -> tuple[list[Sample], list[str]]:
    """Return (the samples of a CSV file, or of a folder with CSV files, in it or in its train/ and test/;
    sentences for the log).

    images_dir: see `ImageClassifier`. Decodes no image.

    Raises TpukitError for a damaged file, and for several CSV files that are not named after splits."""
    notices: list[str] = []
    if place.is_file():
        return _read_list(place, images_dir, None, notices), notices
    lists = [path for path in find_lists(place) if _lists_images(path)]
    by_split = {path: split_of(path.stem) for path in lists}
    if len(lists) > 1 and not all(by_split.values()):
        names = ", ".join(path.name for path in lists)
        raise TpukitError(f"{place} has {len(lists)} lists of images ({names}): give one as dataset_dir")
    if not lists:  # as Hugging Face's imagefolder has them
        for folder in sorted(place.glob("*/")):
            if split := split_of(folder.name):
                by_split |= {path: split for path in find_lists(folder) if _lists_images(path)}
    samples = []
    for path, split in by_split.items():
        samples += _read_list(path, images_dir, split, notices)
    return samples, notices


def find_lists(folder: Path) -> list[Path]:
    """Return the files in a folder that may list images; none in a file."""
    if not folder.is_dir():
        return []
    files = (path for path in sorted(folder.iterdir()) if path.is_file() and path.name[0] != ".")
    return [path for path in files if path.suffix.lower() in TABLES or path.name == "metadata.jsonl"]


def describe_lists(folder: Path) -> list[str]:
    """Return sentences about the columns of the lists in a folder; none if it has none."""
    columns = {path.name: _open_list(path)[0] for path in find_lists(folder)[:3]}
    told = [f"{name} has the columns {', '.join(names[:8])}" for name, names in columns.items()]
    return [*told, "those of images and labels should be called image and label"] if told else []


def _column(names, usual):
    """Return the first column with a usual name, or None."""
    plain = {name.strip().lower(): name for name in reversed(names)}
    return next((plain[name] for name in usual if name in plain), None)


def _open_list(path):
    """Return (names of the columns, rows as dicts of str). Raises TpukitError for a file that is no CSV, or
    no JSON in lines."""
    if path.suffix == ".jsonl":
        with explained(f"{path} does not hold a JSON object in each line"):
            rows = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
            names = list(dict.fromkeys(name for row in rows for name in row.keys()))
        return names, [
            {name: "" if row.get(name) is None else str(row[name]) for name in names} for row in rows
        ]
    wrong = f"{path} is not a CSV file in UTF-8, so save a list as one, or give a folder or an archive (.zip)"
    with open(path, newline="", encoding="utf-8-sig") as file, explained(wrong):
        delimiter = max(",;\t", key=file.readline().count)
        file.seek(0)
        reader = csv.DictReader(file, delimiter=delimiter, restval="")
        return reader.fieldnames or [], list(reader)


def _lists_images(path):
    names, rows = _open_list(path)
    has_labels = _column(names, LABEL_COLUMNS) or _classes_of_columns(names, rows)
    return _column(names, PATH_COLUMNS) and has_labels


def _read_list(path, images_dir, split, notices):
    """Return the samples of a list. Its paths are relative to images_dir, or else to its own folder, and may
    not leave it. split: of a row that does not say, None if neither the file does. notices: get sentences."""
    names, rows = _open_list(path)
    image, label = _column(names, PATH_COLUMNS), _column(names, LABEL_COLUMNS)
    columns = [] if label else _classes_of_columns(names, rows)
    if image is None or not (label or columns):
        raise TpukitError(
            f"{path} has the columns {', '.join(names)}: rename those of images and labels to image and label"
        )
    for row in rows:
        row[image] = row[image].strip().replace("\\", "/")  # as Windows writes paths
    base = Path(images_dir or _folder_of_images(path, [row[image] for row in rows[:20]])).resolve()
    split_column = _split_column(path, names, rows, split, notices)
    samples = []
    for number, row in enumerate(rows, 2):
        where = f"{path}, row {number}"
        name = row[image]
        class_name = row[label].strip() if label else _class_of_row(row, columns, where)
        if None in row or not name or not class_name:
            raise TpukitError(f"{where}: it must have a path, a label, and no more fields than row 1")
        if re.fullmatch(r"\[.*\]", class_name):
            raise TpukitError(f"{where}: the label {class_name} is a list, and an image can have one class")
        of_row = split_of(row.get(split_column, "")) or split or SPLITS.get(path.stem.lower())
        samples.append(Sample(name, class_name, of_row, _inside(base, name, where)))
    notices += _doubts(path, samples)
    return samples


def _classes_of_columns(names, rows):
    """Return the columns that hold 0 or 1 for a class each; none if there are fewer than two."""
    found = [name for name in names if {row[name].strip() for row in rows} <= {"0", "1", "0.0", "1.0"}]
    return found if len(found) > 1 and rows else []


def _class_of_row(row, columns, where):
    """Return the one column that is 1. Raises TpukitError for several, or none."""
    found = [name for name in columns if float(row[name]) == 1]
    if len(found) != 1:
        listed = f"{some(found)} are 1" if found else f"none of {some(columns)} is 1"
        raise TpukitError(f"{where}: {listed}, and an image must have one class")
    return found[0].strip()


def _split_column(path, names, rows, split, notices):
    """Return the column that names splits, or None. Raises TpukitError if only some of its values do."""
    column = _column(names, SPLIT_COLUMNS)
    if column is None:
        return None
    counts = collections.Counter(row[column].strip() for row in rows)
    unknown = {value: count for value, count in counts.items() if not split_of(value)}
    listed = ", ".join(f"{value or 'nothing'} in {count} rows" for value, count in list(unknown.items())[:5])
    if len(unknown) == len(counts):
        notices.append(f"{path.name}: the column {column} names no splits ({listed}): not used")
        return None
    if unknown and not split:
        raise TpukitError(f"{path}: its column {column} must have train, val or test, and has {listed}")
    return column


def _doubts(path, samples):
    """Return sentences about what a list may not mean."""
    notices, classes = [], {sample.label for sample in samples}
    counts = collections.Counter(sample.name for sample in samples)
    if repeated := [name for name, count in counts.items() if count > 1]:
        notices.append(
            f"{path.name}: {len(repeated)} images ({some(repeated)}) are listed more than once, and so count"
            " more than once"
        )
    parts = {name: re.split(r"[|;,\s]+", name) for name in classes}
    several = [name for name in classes if len(parts[name]) > 1 and classes & {*parts[name]}]
    if several:
        notices.append(
            f"{path.name}: {len(several)} classes look like several at once, such as {min(several)};"
            " each is learned as a class of its own"
        )
    return notices


def _folder_of_images(path, names):
    """Return the folder that a list's paths are relative to: its own, or the only one in it that has images
    of such names."""
    own = path.parent
    folders = [own, *sorted(own.glob("*/"))]
    found = [each for each in folders if any(_with_ending(each / name).is_file() for name in names)]
    if own not in found and len(found) > 1:
        listed = ", ".join(folder.name for folder in found)
        raise TpukitError(f"{path}: its images are in {listed}: name the folder as images_dir (--images-dir)")
    return found[0] if found and own not in found else own


def _inside(base, name, where):
    """Return the file of a name in a CSV, whose ending may be missing. Raises TpukitError for one outside of
    `base`."""
    # A list from elsewhere could name any file of the user's, whose picture would then be kept with the
    # predictions.
    with explained(f"{where}: {name!r} is not a valid path"):
        path = (base / name).resolve()
    if not path.is_relative_to(base) or re.match("[A-Za-z]:/", name):
        raise TpukitError(f"{where}: {name} is not in {base}: write paths relative to it, or to images_dir")
    return _with_ending(path)


def _with_ending(path):
    """Return the file of a path, whose ending may be missing."""
    if path.suffix.lower() in pictures.ENDINGS:
        return path
    complete = (path.parent / f"{path.name}{ending}" for ending in pictures.ENDINGS)
    return next(filter(Path.is_file, complete), path)
