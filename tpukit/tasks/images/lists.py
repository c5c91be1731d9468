"""Lists of images and their classes: CSV files, and metadata.jsonl."""

import contextlib
import csv
import json
from pathlib import Path
from typing import NamedTuple

from tpukit.host.errors import TpukitError, explained
from tpukit.tasks import pictures
from tpukit.tasks.splits import SPLITS, split_of

PATH_COLUMNS = "path file filename file_name filepath image image_path image_name image_id img id".split()
LABEL_COLUMNS = (
    "label labels class class_name category target species breed diagnosis classid class_id y".split()
)
SPLIT_COLUMNS = "split subset partition set".split()


class Sample(NamedTuple):
    name: str
    """For messages; also what decides its split, if the dataset has none."""
    label: str
    split: str | None
    """train, val or test; None if the dataset does not say"""
    path: Path


def read_lists(place: Path, images_dir: Path | None) -> list[Sample]:
    """Return the samples of a CSV file, or of a folder with CSV files, in it or in its train/ and test/.

    images_dir: see `ImageClassifier`. Decodes no image.

    Raises TpukitError for a damaged file, and for several CSV files that are not named after splits."""
    if place.is_file():
        return _read_list(place, images_dir, None)
    lists = [path for path in find_lists(place) if _lists_images(path)]
    by_split = {path: split_of(path.stem) for path in lists}
    if len(lists) > 1 and not all(by_split.values()):
        names = ", ".join(path.name for path in lists)
        raise TpukitError(f"{place} has {len(lists)} lists of images ({names}): give one as dataset_dir")
    if not lists:  # as Hugging Face's imagefolder has them
        folders = {folder: split_of(folder.name) for folder in sorted(place.glob("*/"))}
        by_split = {
            path: split
            for folder, split in folders.items()
            for path in (find_lists(folder) if split else [])
            if _lists_images(path)
        }
    return [sample for path, split in by_split.items() for sample in _read_list(path, images_dir, split)]


def find_lists(folder: Path) -> list[Path]:
    """Return the files in a folder that may list images."""
    return [
        path
        for path in sorted(folder.glob("*.csv")) + sorted(folder.glob("metadata.jsonl"))
        if path.is_file()
    ]


def describe_lists(folder: Path) -> str:
    """Return a sentence about the columns of the lists in a folder; empty if it has none."""
    columns = {path.name: _open_list(path)[0] for path in find_lists(folder)[:3]}
    listed = "; ".join(f"{name} has the columns {', '.join(names[:8])}" for name, names in columns.items())
    return f"; {listed}: those of images and labels should be called image and label" if listed else ""


def _column(names, usual):
    """Return the first column with a usual name, or None."""
    plain = {name.strip().lower(): name for name in reversed(names)}
    return next((plain[name] for name in usual if name in plain), None)


def _open_list(path):
    """Return (names of the columns, rows as dicts of str). Raises TpukitError for a file that is no CSV, or
    no JSON in lines."""
    if path.suffix == ".jsonl":
        with explained(f"{path} does not hold a JSON object in each line"):
            values = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
            rows = [{name: str(value) for name, value in row.items()} for row in values]
        return list(rows[0]) if rows else [], rows
    wrong = f"{path} is not a CSV file in UTF-8, so save it as one"
    with open(path, newline="", encoding="utf-8-sig") as file, explained(wrong):
        delimiter = max(",;\t", key=file.readline().count)
        file.seek(0)
        reader = csv.DictReader(file, delimiter=delimiter, restval="")
        return reader.fieldnames or [], list(reader)


def _lists_images(path):
    names, _ = _open_list(path)
    return _column(names, PATH_COLUMNS) and _column(names, LABEL_COLUMNS)


def _read_list(path, images_dir, split):
    """Return the samples of a list. Its paths are relative to images_dir, or else to its own folder, and may
    not leave it. split: of a row that does not say, None if neither the file does."""
    names, rows = _open_list(path)
    image, label = _column(names, PATH_COLUMNS), _column(names, LABEL_COLUMNS)
    if image is None or label is None:
        raise TpukitError(
            f"{path} has the columns {', '.join(names)}: rename those of images and labels to image and label"
        )
    base = Path(images_dir or _folder_of_images(path, [row[image].strip() for row in rows[:20]])).resolve()
    split_column, samples = _column(names, SPLIT_COLUMNS), []
    for number, row in enumerate(rows, 2):
        where = f"{path}, row {number}"
        name, class_name = row[image].strip(), row[label].strip()
        if None in row or not name or not class_name:
            raise TpukitError(f"{where}: it must have a path, a label, and no more fields than row 1")
        of_row = (
            SPLITS.get(row.get(split_column, "").strip().lower()) or split or SPLITS.get(path.stem.lower())
        )
        samples.append(Sample(name, class_name, of_row, _inside(base, name, where)))
    return samples


def _folder_of_images(path, names):
    """Return the folder that a list's paths are relative to: its own, or the only one in it that has images
    of such names."""
    own = path.parent
    folders = [own, *sorted(own.glob("*/"))]
    found = [folder for folder in folders if any(map(Path.is_file, _complete(folder, names)))]
    if own not in found and len(found) > 1:
        listed = ", ".join(folder.name for folder in found)
        raise TpukitError(f"{path}: its images are in {listed}: name the folder as images_dir (--images-dir)")
    return found[0] if found and own not in found else own


def _complete(folder, names):
    for name in names:
        with contextlib.suppress(ValueError):  # NUL: `_inside` names the row
            yield _with_ending(folder / name)


def _inside(base, name, where):
    """Return the file of a name in a CSV, whose ending may be missing. Raises TpukitError for one outside of
    `base`."""
    # A list from elsewhere could name any file of the user's, whose picture would then be kept with the
    # predictions.
    with explained(f"{where}: {name!r} is not a valid path"):
        path = (base / name).resolve()
    if not path.is_relative_to(base):
        raise TpukitError(f"{where}: {name} is not in {base}; name the folder of the images as images_dir")
    return _with_ending(path)


def _with_ending(path):
    """Return the file of a path, whose ending may be missing."""
    if path.suffix.lower() in pictures.ENDINGS:
        return path
    complete = (path.with_name(path.name + ending) for ending in pictures.ENDINGS)
    return next(filter(Path.is_file, complete), path)
