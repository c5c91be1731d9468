"""Lists of images and their classes: CSV files, and Hugging Face datasets on disk, as parquet files or as the
arrow files of `save_to_disk`."""

import csv
import functools
import io
import json
import threading
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tpukit.host.errors import TpukitError, first_line
from tpukit.tasks import saved
from tpukit.tasks.saved import SPLITS

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
    row: int | None = None
    """of a saved dataset's file, whose column holds the image"""
    column: str = ""


def read_tables(place: Path, images_dir: Path | None) -> tuple[list[Sample], list[str]]:
    """(samples, classes in the order of a saved dataset, else []) of a CSV file, or of a folder with a saved
    dataset or with CSV files; decodes no image. images_dir: see `ImageClassifier`.

    Raises TpukitError for a damaged file, and for several CSV files that are not named after splits."""
    samples, classes = [], []
    for path, split in saved.find_files(place, saved.ENDINGS) if place.is_dir() else ():
        rows, names = _read_saved(path, path.relative_to(place), split)
        samples += rows
        classes = names or classes
    lists = []
    if not samples:
        lists = [place] if place.is_file() else list(filter(_lists_images, sorted(place.glob("*.csv"))))
    if len(lists) > 1 and not all(path.stem.lower() in SPLITS for path in lists):
        names = ", ".join(path.name for path in lists)
        raise TpukitError(f"{place} has {len(lists)} lists of images ({names}): give one as dataset_dir")
    return samples + [sample for path in lists for sample in _read_csv(path, images_dir)], classes


def _column(names, usual):
    """The first column with a usual name, or None."""
    plain = {name.strip().lower(): name for name in reversed(names)}
    return next((plain[name] for name in usual if name in plain), None)


def _columns(path, names, kinds):
    """The columns of images and of labels. kinds: those that the Hugging Face library knows as such."""
    image = kinds.get("Image") or _column(names, PATH_COLUMNS)
    label = kinds.get("ClassLabel") or _column(names, LABEL_COLUMNS)
    if image is None or label is None:
        raise TpukitError(
            f"{path} has the columns {', '.join(names)}: rename those of images and labels to image and label"
        )
    return image, label


# CSV files


def _open_csv(path):
    """(names of the columns, rows as dicts of str). Raises TpukitError for a file that is no CSV."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            delimiter = max(",;\t", key=file.readline().count)
            file.seek(0)
            reader = csv.DictReader(file, delimiter=delimiter, restval="")
            return reader.fieldnames or [], list(reader)
    except (csv.Error, UnicodeDecodeError) as error:
        raise TpukitError(
            f"{path} is not a CSV file in UTF-8 ({first_line(error)}): save it as one"
        ) from error


def _lists_images(path):
    names = _open_csv(path)[0] if path.is_file() else []
    return _column(names, PATH_COLUMNS) and _column(names, LABEL_COLUMNS)


def _read_csv(path, images_dir):
    """The samples of a CSV file. Its paths are relative to images_dir, or else to its own folder, and may not
    leave it."""
    base = Path(images_dir or path.parent).resolve()
    names, rows = _open_csv(path)
    image, label = _columns(path, names, {})
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
    """The file of a name in a CSV, whose ending may be missing. Raises TpukitError for one outside of
    `base`."""
    # A list from elsewhere could name any file of the user's, whose picture would then be kept with the
    # predictions.
    try:
        path = (base / name).resolve()
    except (OSError, ValueError) as error:
        raise TpukitError(f"{where}: {name!r} is not a valid path ({error})") from error
    if not path.is_relative_to(base):
        raise TpukitError(f"{where}: {name} is not in {base}; name the folder of the images as images_dir")
    if path.suffix.lower() in IMAGE_ENDINGS:
        return path
    complete = (path.with_name(path.name + ending) for ending in IMAGE_ENDINGS)
    return next(filter(Path.is_file, complete), path)


# Saved datasets


def _read_saved(path, name, split):
    """(samples, names of the classes or []) of a parquet or arrow file, of which the labels alone are read.
    name: its path in the dataset's folder."""
    schema = _read_column(path)
    features = _features(schema)
    kinds = {features.get(column, {}).get("_type"): column for column in reversed(schema.names)}
    image, label = _columns(path, schema.names, kinds)
    classes = features.get(label, {}).get("names") or []
    if not isinstance(classes, list) or not all(isinstance(one, str) for one in classes):
        raise TpukitError(f"{path}: its class names, {str(classes)[:80]}, must be a list of texts")
    samples = []
    for row, value in enumerate(_read_column(path, label).to_pylist()):
        if classes and isinstance(value, int):
            value = classes[value] if 0 <= value < len(classes) else None
        if value is None:
            raise TpukitError(f"{path}, row {row}: it has no label of a known class")
        samples.append(Sample(f"{name.as_posix()}, row {row}", str(value), split, path, row, image))
    return samples, classes


def _features(schema):
    """What the Hugging Face library wrote of the columns: dict of name -> dict."""
    try:
        features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
        return {name: feature for name, feature in features.items() if isinstance(feature, dict)}
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return {}


def _read_column(path, column=None):
    """A column, a pyarrow.ChunkedArray; without a name the schema. Raises TpukitError for a damaged file."""
    with saved.reading(path) as pyarrow:
        if path.suffix == ".parquet":
            file = pyarrow.parquet.ParquetFile(path)
            return file.read([column]).column(column) if column else file.schema_arrow
        table = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).read_all()  # nothing is copied
        return table.column(column) if column else table.schema


image_column = functools.lru_cache(maxsize=4)(_read_column)  # to be emptied once the images are decoded
_reading = threading.Lock()  # or every thread would read a column of its own, of gigabytes


def open_sample(sample: Sample) -> Path | BinaryIO:
    """Its file, or the bytes of the image in a table as an open file."""
    if sample.row is None:
        return sample.path
    with _reading:
        column = image_column(sample.path, sample.column)
    value = column[sample.row].as_py()
    content = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(content, bytes):
        raise TpukitError("the table holds no image but a path: save the dataset with its images embedded")
    return io.BytesIO(content)
