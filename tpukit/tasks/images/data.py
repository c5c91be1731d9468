"""One's own images with a class each: folders of classes, a CSV file, or a Hugging Face dataset on disk;
decoded once.

Letters: N samples, B batch, S side of the images.
"""

import collections
import concurrent.futures
import contextlib
import csv
import functools
import hashlib
import io
import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps

from tpukit.host import arrays
from tpukit.host.errors import TpukitError, first_line
from tpukit.host.tables import GIB
from tpukit.tasks import pictures

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
SPLITS = {  # names of folders, of files and in a CSV's column of splits, in lower case
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
PATH_COLUMNS = "path file filename file_name filepath image image_path image_name image_id img id".split()
LABEL_COLUMNS = (
    "label",
    "labels",
    "class",
    "class_name",
    "category",
    "target",
    "species",
    "breed",
    "diagnosis",
    "y",
)
SPLIT_COLUMNS = ("split", "subset", "partition", "set")
REST = object()  # the key of the fields of a CSV's row that have no column
VERSION = 1  # of what `_decode` returns for the same files, which is cached


class Sample(NamedTuple):
    name: str
    """For messages; also what decides its split, where the dataset has none."""
    label: str
    split: str | None
    """train, val or test; None where the dataset does not say"""
    path: Path
    row: int | None = None
    """of a parquet or arrow file"""
    column: str = ""


class Found(NamedTuple):
    """What a dataset holds, not decoded yet."""

    classes: list
    """Names of the classes: sorted, as numbers where all are such, or in the order of a Hugging Face
    dataset."""
    splits: dict
    """train, and val or test or both -> list of `Sample`"""


def find_samples(place, *, path_column=None, label_column=None, images_dir=None, test_share=0.2):
    """`Found` of a folder or a CSV file. Raises TpukitError for what cannot be trained on; decodes
    nothing."""
    place = Path(place)
    if place.is_file():
        samples, order = _read_csv(place, path_column, label_column, images_dir), None
    else:
        samples, order = _find_in_folder(place, path_column, label_column, images_dir)
    names = {sample.label for sample in samples}
    classes = order or sorted(
        names, key=lambda name: (0, int(name), name) if name.isdecimal() else (1, 0, name)
    )
    if len(names) < 2:
        raise TpukitError(
            f"{place} has images of one class only, {', '.join(names)}: a classifier needs two or more"
        )
    splits = collections.defaultdict(list)
    for sample in _split_by_hash(samples, test_share):
        splits[sample.split].append(sample)
    for split in ("train", *sorted(splits.keys() - {"train"})):
        if missing := sorted(set(classes) - {sample.label for sample in splits[split]}):
            shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            fix = (
                "add images"
                if any(sample.split for sample in samples)
                else "give each class two images or more"
            )
            what = f"no image of {len(missing)} of {len(classes)} classes ({shown})"
            raise TpukitError(f"{place}: the {split} split has {what}: {fix}")
    return Found(classes, dict(splits))


def _split_by_hash(samples, test_share):
    """The samples with their split. Of a set without a test or val split, a share of every class, and at
    least one image of two, is for tests: those whose names come first by their SHA-256, so that every process
    and session chooses the same."""
    if any(sample.split in ("val", "test") for sample in samples):
        return [sample._replace(split=sample.split or "train") for sample in samples]
    by_class = collections.defaultdict(set)  # a file that a list names twice is one
    for sample in samples:
        by_class[sample.label].add(sample.name)
    held_out = set()
    for label, names in by_class.items():
        names = sorted(
            names, key=lambda name: hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
        )
        count = min(max(1, round(test_share * len(names))), len(names) - 1)
        held_out.update((label, name) for name in names[:count])
    return [
        sample._replace(split="test" if (sample.label, sample.name) in held_out else "train")
        for sample in samples
    ]


# Where the samples are


def _find_in_folder(folder, path_column, label_column, images_dir):
    """(samples, order of the classes or None) of a folder with class folders, with tables, or with a CSV
    file."""
    if not folder.is_dir():
        raise TpukitError(f"dataset {folder} does not exist")
    samples = _find_in_class_folders(folder)
    if len({sample.label for sample in samples}) < 2:
        if tables := sorted([*folder.rglob("*.parquet"), *folder.rglob("*.arrow")]):
            return _read_tables(folder, tables, label_column)
        if listed := _find_csv(folder, path_column, label_column):
            columns = (path_column, label_column, images_dir)
            return [sample for path, split in listed for sample in _read_csv(path, *columns, split)], None
    if not samples:
        here = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        raise TpukitError(
            f"no images in {folder}, which should hold a folder of images for each class (in train/ and"
            f" test/, or not), a CSV file with paths and labels, or a Hugging Face dataset: found {here}"
        )
    return samples, None


def _find_in_class_folders(folder):
    children = _folders(folder)
    while len(children) == 1 and children[0].name.lower() not in SPLITS and _folders(children[0]):
        folder, children = children[0], _folders(children[0])  # an archive's own top folder
    splits = {child: SPLITS.get(child.name.lower()) for child in children}
    tops = [(child, split) for child, split in splits.items() if split] or [(folder, None)]
    samples = []
    for top, split in tops:
        for place in _folders(top):
            paths = (path for path in _files_below(place) if path.suffix.lower() in IMAGE_ENDINGS)
            visible = (path for path in paths if not path.name.startswith("."))
            samples += [
                Sample(path.relative_to(folder).as_posix(), place.name, split, path) for path in visible
            ]
    return samples


def _files_below(folder):
    """The files below a folder, sorted. Raises OSError for a folder that cannot be read: nothing is left out
    silently."""

    def refuse(error):
        raise error

    return sorted(Path(place, name) for place, _, names in os.walk(folder, onerror=refuse) for name in names)


def _folders(folder):
    return sorted(
        path for path in folder.iterdir() if path.is_dir() and not path.name.startswith((".", "__"))
    )


def _find_csv(folder, path_column, label_column):
    """(CSV file, split or None) for every one in a folder that has a column of paths and one of labels."""
    found = []
    for path in sorted(filter(Path.is_file, folder.glob("*.csv"))):
        with _open_csv(path) as reader:
            names = reader.fieldnames or []
            if _column(names, path_column, PATH_COLUMNS) and _column(names, label_column, LABEL_COLUMNS):
                found.append((path, SPLITS.get(path.stem.lower())))
    if len(found) > 1 and not all(split for _, split in found):
        names = ", ".join(path.name for path, _ in found)
        raise TpukitError(
            f"{folder} has {len(found)} CSV files with paths and labels ({names}): give one as dataset_dir"
        )
    return found


@contextlib.contextmanager
def _open_csv(path):
    """Context manager: a csv.DictReader. Raises TpukitError for a file that is not UTF-8 text, or has no
    valid header."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        try:
            header = file.readline()
            file.seek(0)
            reader = csv.DictReader(file, delimiter=max(",;\t", key=header.count), restkey=REST, restval="")
            _ = reader.fieldnames  # reads the header
        except UnicodeDecodeError as error:
            raise TpukitError(f"{path} is not UTF-8 text ({error.reason}): save it as UTF-8") from error
        except csv.Error as error:
            raise TpukitError(f"{path}, line 1: no CSV ({first_line(error)})") from error
        yield reader


def _column(names, wanted, known):
    """The column of that name, or the first with a known one; None where there is none."""
    if wanted:
        return wanted if wanted in names else None
    return next((name for kind in known for name in names if name and name.strip().lower() == kind), None)


def _read_csv(path, path_column, label_column, images_dir, split=None):
    """The samples of a CSV file. Its paths are relative to images_dir, or else to its own folder, and may not
    leave it."""
    base = Path(images_dir or path.parent).resolve()
    samples = []
    with _open_csv(path) as reader:
        names = reader.fieldnames or []
        columns = _column(names, path_column, PATH_COLUMNS), _column(names, label_column, LABEL_COLUMNS)
        if None in columns:
            raise TpukitError(
                f"{path} has the columns {', '.join(map(str, names))}: name those of paths and labels as"
                " path_column and label_column"
            )
        of_split = _column(names, None, SPLIT_COLUMNS)
        try:
            for row in reader:
                name, label = (row[column].strip() for column in columns)
                if any(field.strip() for field in row.get(REST, ())):
                    raise TpukitError(
                        f"{path}, line {reader.line_num}: more fields than columns: put one with a comma in"
                        " quotes"
                    )
                if not name or not label:
                    raise TpukitError(
                        f"{path}, line {reader.line_num}: the {'label' if name else 'path'} is empty"
                    )
                own_split = SPLITS.get(row[of_split].strip().lower()) if of_split else None
                samples.append(
                    Sample(
                        name,
                        label,
                        own_split or split,
                        _inside(base, name, f"{path}, line {reader.line_num}"),
                    )
                )
        except (UnicodeDecodeError, csv.Error) as error:
            raise TpukitError(
                f"{path}, line {reader.line_num}: no CSV in UTF-8 ({first_line(error)})"
            ) from error
    if not samples:
        raise TpukitError(f"{path} lists no images")
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
    if path.suffix.lower() not in IMAGE_ENDINGS:
        path = next(
            (full for ending in IMAGE_ENDINGS if (full := path.with_name(path.name + ending)).is_file()), path
        )
    return path


# A Hugging Face dataset on disk: parquet files, or the arrow files of `save_to_disk`


def _read_tables(folder, tables, label_column):
    """(samples, order of the classes or None). Reads the labels alone."""
    samples, order = [], None
    for path in tables:
        schema = _read_schema(path)
        names, features = schema.names, _features(schema)
        images = [name for name in names if features.get(name, {}).get("_type") == "Image"]
        image = images[0] if images else _column(names, None, PATH_COLUMNS)
        is_class = [name for name in names if features.get(name, {}).get("_type") == "ClassLabel"]
        label = (
            label_column
            if label_column in names
            else (is_class or [_column(names, label_column, LABEL_COLUMNS)])[0]
        )
        if image is None or label is None:
            raise TpukitError(
                f"{path} has the columns {', '.join(names)}: name that of the labels as label_column"
            )
        order = _class_names(path, features.get(label, {})) or order
        labels = _read_column(path, label).to_pylist()
        split = _split_of(path.relative_to(folder))
        for row, value in enumerate(labels):
            if value is None or (order and isinstance(value, int) and not 0 <= value < len(order)):
                raise TpukitError(f"{path}, row {row}: {value} is not a label")
            name = order[value] if order and isinstance(value, int) else str(value)
            samples.append(
                Sample(f"{path.relative_to(folder).as_posix()}, row {row}", name, split, path, row, image)
            )
    return samples, order


def _class_names(path, feature):
    """The names that the Hugging Face library wrote of a column's classes, or None."""
    names = feature.get("names")
    if names and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise TpukitError(
            f"{path}: the names of its classes are {str(names)[:80]}, and must be a list of texts: save it"
            " again"
        )
    return names


def _split_of(path):
    """Of train/data-00000-of-00001.arrow or data/test-00000-of-00001.parquet; None where its names do not
    say."""
    words = (part.lower().partition("-")[0].partition(".")[0] for part in path.parts)
    return next((SPLITS[word] for word in words if word in SPLITS), None)


@contextlib.contextmanager
def _explain_table(path):
    """Context manager: raise what reading a table raises as a TpukitError. Gives the module pyarrow."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise TpukitError(f"{path}: reading it needs pyarrow: pip install pyarrow") from error
    if tuple(map(int, re.findall(r"\d+", pyarrow.__version__)[:3])) < (14, 0, 1):
        raise TpukitError(
            f"pyarrow {pyarrow.__version__} can run code from a table that it reads (CVE-2023-47248): install"
            " 14.0.1 or newer"
        )
    try:
        yield pyarrow
    except (pyarrow.ArrowException, OSError) as error:
        raise TpukitError(f"{path} is damaged ({first_line(error)}); copy or download it again") from error


def _read_schema(path):
    with _explain_table(path) as pyarrow:
        return (
            pyarrow.parquet.read_schema(path)
            if path.suffix == ".parquet"
            else _map_arrow(path, pyarrow).schema
        )


def _read_column(path, column):
    with _explain_table(path) as pyarrow:
        if path.suffix == ".parquet":
            return pyarrow.parquet.read_table(path, columns=[column]).column(column)
        return _map_arrow(path, pyarrow).column(column)


def _map_arrow(path, pyarrow):
    """The table of an arrow file, of which nothing is read before it is used."""
    source = pyarrow.memory_map(str(path))
    try:
        return pyarrow.ipc.open_stream(source).read_all()
    except pyarrow.ArrowInvalid:
        return pyarrow.ipc.open_file(source).read_all()


def _features(schema):
    """What the Hugging Face library wrote of the columns."""
    try:
        features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
        return {name: feature for name, feature in features.items() if isinstance(feature, dict)}
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return {}


_image_column = functools.lru_cache(maxsize=4)(_read_column)  # emptied once the images are decoded


def _open_row(sample):
    """The bytes of an image in a table, as a file."""
    value = _image_column(sample.path, sample.column)[sample.row].as_py()
    content = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(content, bytes):
        raise TpukitError("the table holds no image but a path: save the dataset with its images embedded")
    return io.BytesIO(content)


# The pixels


def read_image(file, size, fit):
    """An image -> (size, size, 3) uint8. fit: see `ImageClassifier`. file: a path, or an open file.

    Turned upright by its EXIF orientation; transparency is dropped; 16-bit grey maps its whole range to
    0..255. Raises what `pictures.opened` does."""
    with pictures.opened(file) as image:
        image.draft("RGB", (2 * size, 2 * size))  # a large JPEG is decoded at a fraction of its size
        image = ImageOps.exif_transpose(image)
        image = pictures.to_uint8(image).convert("RGB")
        if image.size != (size, size):
            scaled = image.resize if fit == "squash" else functools.partial(ImageOps.fit, image)
            image = scaled((size, size), Image.Resampling.BICUBIC)
        return np.asarray(image)


def _decode(samples, size, fit, skip_bad, what):
    """dict: images (N, 3, S, S) uint8, kept (N,) places in `samples`, notes. Decodes on all cores."""
    from tqdm.auto import tqdm

    needed, free = len(samples) * 3 * size * size, shutil.disk_usage(tempfile.gettempdir()).free
    if 2 * needed > free:  # once here, and once where they are kept
        raise TpukitError(
            f"{len(samples)} images of {size}x{size} take twice {needed / GIB:.1f} GiB of disk while they are"
            f" decoded, and {free / GIB:.1f} GiB are free: choose a smaller image_size"
        )
    with tempfile.TemporaryFile() as file, concurrent.futures.ThreadPoolExecutor() as pool:
        images = np.memmap(file, np.uint8, "w+", shape=(len(samples), 3, size, size))

        def decode(index):
            """What is wrong with an image, or None."""
            sample = samples[index]
            try:
                source = sample.path if sample.row is None else _open_row(sample)
                images[index] = read_image(source, size, fit).transpose(2, 0, 1)
            except MemoryError:
                raise
            except Exception as error:  # Pillow raises many types for a damaged file
                return f"{sample.name}: {first_line(error)}"

        found = pool.map(decode, range(len(samples)))
        problems = list(
            tqdm(found, desc=f"decoding {what}", unit="image", total=len(samples), disable=len(samples) < 200)
        )
        _image_column.cache_clear()
    kept = [index for index, problem in enumerate(problems) if problem is None]
    notes = ""
    if bad := [problem for problem in problems if problem]:
        shown = "; ".join(bad[:3]) + ("; ..." if len(bad) > 3 else "")
        if not skip_bad or not kept:
            raise TpukitError(
                f"{len(bad)} of {len(samples)} {what} images cannot be read ({shown}): replace them, or leave"
                " them out with skip_bad=True (--skip-bad)"
            )
        notes = f"left out {len(bad)} of {len(samples)} {what} images that cannot be read: {shown}"
        for new, old in enumerate(kept):
            images[new] = images[old]
    return dict(images=images[: len(kept)], kept=np.array(kept), notes=np.array(notes))


class ImageSet:
    """One split, decoded once to uint8, in memory that all processes of a host share.

    `batch(indices, numbers)` -> dict of image (B, 3, S, S) uint8, label (B,) int64 and, with numbers, augment
    (B, NUM_UNIFORMS), what `Augmentation.apply` needs on the device."""

    def __init__(self, samples, classes, *, size, fit, skip_bad, augmentation, what, notes=""):
        self.classes, self.augmentation, self.num_uniforms = classes, augmentation, augmentation.num_uniforms
        stats = {
            path: path.stat() for path in dict.fromkeys(sample.path for sample in samples) if path.is_file()
        }
        state = [(str(path.resolve()), stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()]
        names = [(sample.name, sample.row) for sample in samples]
        key = [VERSION, size, fit, skip_bad, state, names]
        decoded = arrays.mapped(f"images-{what}", key, lambda: _decode(samples, size, fit, skip_bad, what))
        samples = [samples[index] for index in decoded["kept"]]
        self.images, self.names = decoded["images"], [sample.name for sample in samples]
        number = {name: index for index, name in enumerate(classes)}
        self.labels = np.array([number[sample.label] for sample in samples], np.int64)
        self.notes = "\n".join(filter(None, (notes, str(decoded["notes"]))))

    def __len__(self):
        return len(self.labels)

    def batch(self, indices, numbers=None):
        return dict(
            image=self.images[indices], label=self.labels[indices], **self.sample_parameters(indices, numbers)
        )

    # The same from arrays on the device

    def device_nbytes(self):
        return self.images.nbytes

    def device_arrays(self):
        return dict(image=np.asarray(self.images), label=self.labels)

    def sample_parameters(self, indices, numbers=None):
        return (
            {}
            if numbers is None or not self.num_uniforms
            else dict(augment=self.augmentation.parameters(numbers))
        )

    def compose(self, rows, parameters):
        return rows | parameters
