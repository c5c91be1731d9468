"""Images with a class each: folders of classes, a CSV file, or a Hugging Face dataset on disk;
decoded once.

Shapes: N samples, B batch, S side of the images."""

import collections
import concurrent.futures
import csv
import functools
import hashlib
import io
import json
import math
import os
import re
import shutil
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np
from PIL import Image, ImageOps

from tpukit.host import arrays
from tpukit.host.errors import TpukitError, first_line
from tpukit.host.tables import GIB
from tpukit.tasks import pictures

if TYPE_CHECKING:
    from tpukit.tasks.images.augment import Augmentation

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
SPLITS = {  # names of folders, of files and in a CSV's column of splits, in lower case
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
PATH_COLUMNS = "path file filename file_name filepath image image_path image_name image_id img id".split()
LABEL_COLUMNS = "label labels class class_name category target species breed diagnosis y".split()
SPLIT_COLUMNS = "split subset partition set".split()
VERSION = 1  # of what `_decode` returns for the same files, which is cached


class Sample(NamedTuple):
    name: str
    """For messages; also what decides its split, if the dataset has none."""
    label: str
    split: str | None
    """train, val or test; None if the dataset does not say"""
    path: Path
    row: int | None = None
    """of a parquet or arrow file"""
    column: str = ""


class Listing(NamedTuple):
    """What a dataset holds, not decoded yet."""

    classes: list[str]
    """Sorted, as numbers if all are such, or in the order of a Hugging Face dataset."""
    splits: dict[str, list[Sample]]
    """train, and val or test or both"""


def find_samples(
    dataset_dir: Path | str, *, images_dir: Path | None = None, test_share: float = 0.2
) -> Listing:
    """The samples of a folder or a CSV file. Raises TpukitError for what cannot be trained on; decodes
    nothing."""
    place = Path(dataset_dir)
    order = None
    if place.is_dir():
        samples = _find_in_class_folders(place)
        if len({sample.label for sample in samples}) < 2:
            if tables := _find_tables(place):
                samples, order = _read_tables(place, tables)
            elif lists := _find_csv(place):
                samples = [sample for path in lists for sample in _read_csv(path, images_dir)]
    elif place.is_file():
        samples = _read_csv(place, images_dir)
    else:
        raise TpukitError(f"dataset {place} does not exist")
    if not samples:
        here = ", ".join(sorted(path.name for path in place.glob("*"))[:8]) or "nothing"
        raise TpukitError(
            f"no images in {place}, which should hold a folder of images for each class (in train/ and"
            f" test/, or not), a CSV file with paths and labels, or a Hugging Face dataset: it has {here}"
        )
    names = {sample.label for sample in samples}
    if len(names) < 2:
        raise TpukitError(f"{place} has images of one class only, {', '.join(names)}: a classifier needs two")
    classes = order or sorted(names, key=lambda name: (int(name) if name.isdecimal() else math.inf, name))
    splits = collections.defaultdict(list)
    for sample in _split_by_hash(samples, test_share):
        splits[sample.split].append(sample)
    if not splits.keys() & {"val", "test"}:
        raise TpukitError(f"{place} has one image of each class, and none to test: add more")
    for split in ("train", *sorted(splits.keys() - {"train"})):
        if missing := sorted(set(classes) - {sample.label for sample in splits[split]}):
            shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise TpukitError(
                f"{place}: the {split} split has no image of {len(missing)} of {len(classes)} classes"
                f" ({shown}): add some, in a set without splits two images or more of each class"
            )
    return Listing(classes, dict(splits))


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
        count = min(max(1, round(test_share * len(names))), len(names) - 1)
        held_out.update((label, name) for name in sorted(names, key=_sha256)[:count])
    return [
        sample._replace(split="test" if (sample.label, sample.name) in held_out else "train")
        for sample in samples
    ]


def _sha256(name):
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()


# Folders


def _find_in_class_folders(folder):
    children = _folders(folder)
    while len(children) == 1 and children[0].name.lower() not in SPLITS and _folders(children[0]):
        folder, children = children[0], _folders(children[0])  # an archive's own top folder
    tops = [(child, SPLITS[child.name.lower()]) for child in children if child.name.lower() in SPLITS]
    return [
        Sample(path.relative_to(folder).as_posix(), class_folder.name, split, path)
        for top, split in tops or [(folder, None)]
        for class_folder in _folders(top)
        for path in _images_below(class_folder)
    ]


def _images_below(folder):
    """Its images, sorted. Raises OSError for a folder that cannot be read: nothing is left out silently."""

    def refuse(error):
        raise error

    paths = sorted(Path(place, name) for place, _, names in os.walk(folder, onerror=refuse) for name in names)
    return [path for path in paths if path.suffix.lower() in IMAGE_ENDINGS and path.name[0] != "."]


def _folders(folder):
    found = (path for path in folder.iterdir() if not path.name.startswith((".", "__")))
    return sorted(path for path in found if path.is_dir())


# CSV files


def _find_csv(folder):
    """The CSV files of a folder that have a column of paths and one of labels. Raises TpukitError for several
    that are not named after splits."""
    found = []
    for path in sorted(filter(Path.is_file, folder.glob("*.csv"))):
        names, _ = _open_csv(path)
        if _column(names, PATH_COLUMNS) and _column(names, LABEL_COLUMNS):
            found.append(path)
    if len(found) > 1 and not all(path.stem.lower() in SPLITS for path in found):
        names = ", ".join(path.name for path in found)
        raise TpukitError(f"{folder} has {len(found)} lists of images ({names}): give one as dataset_dir")
    return found


def _open_csv(path):
    """(names of the columns, rows as dicts of str) of a CSV file. Raises TpukitError for a file that is
    none."""
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


def _column(names, known):
    """The first column with a known name, or None."""
    plain = {name.strip().lower(): name for name in reversed(names)}
    return next((plain[name] for name in known if name in plain), None)


def _read_csv(path, images_dir):
    """The samples of a CSV file. Its paths are relative to images_dir, or else to its own folder, and may not
    leave it."""
    base = Path(images_dir or path.parent).resolve()
    names, rows = _open_csv(path)
    path_column, label_column, split_column = (
        _column(names, known) for known in (PATH_COLUMNS, LABEL_COLUMNS, SPLIT_COLUMNS)
    )
    if path_column is None or label_column is None:
        raise TpukitError(
            f"{path} has the columns {', '.join(names)}: rename those of paths and labels to path and label"
        )
    if not rows:
        raise TpukitError(f"{path} lists no images")
    samples = []
    for number, row in enumerate(rows, 2):
        where = f"{path}, row {number}"
        if None in row:
            raise TpukitError(f"{where}: it has more fields than the {len(names)} columns of row 1")
        name, label = row[path_column].strip(), row[label_column].strip()
        if not name or not label:
            raise TpukitError(f"{where}: the {'label' if name else 'path'} is empty")
        split = SPLITS.get(row.get(split_column, "").strip().lower()) or SPLITS.get(path.stem.lower())
        samples.append(Sample(name, label, split, _inside(base, name, where)))
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


# Hugging Face datasets on disk: parquet files, or the arrow files of `save_to_disk`


def _find_tables(folder):
    """Its tables, sorted, without those that the Hugging Face library caches of the same samples."""
    found = [*folder.rglob("*.parquet"), *folder.rglob("*.arrow")]
    return sorted(path for path in found if not path.name.startswith("cache-"))


def _read_tables(folder, tables):
    """(samples, order of the classes or None). Reads the labels alone."""
    samples, order = [], None
    for path in tables:
        schema = _read_column(path)
        names, features = schema.names, _features(schema)
        of_kind = {features.get(name, {}).get("_type"): name for name in reversed(names)}
        image = of_kind.get("Image") or _column(names, PATH_COLUMNS)
        label = of_kind.get("ClassLabel") or _column(names, LABEL_COLUMNS)
        if image is None or label is None:
            raise TpukitError(
                f"{path} has the columns {', '.join(names)}: rename those of images and labels to image and"
                " label"
            )
        order = _class_names(path, features.get(label, {})) or order
        where = path.relative_to(folder)
        for row, value in enumerate(_read_column(path, label).to_pylist()):
            if order and isinstance(value, int):
                value = order[value] if 0 <= value < len(order) else None
            if value is None:
                raise TpukitError(f"{path}, row {row}: it has no label of a known class")
            name = f"{where.as_posix()}, row {row}"
            samples.append(Sample(name, str(value), _split_of(where), path, row, image))
    return samples, order


def _features(schema):
    """What the Hugging Face library wrote of the columns: dict of name -> dict."""
    try:
        features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
        return {name: feature for name, feature in features.items() if isinstance(feature, dict)}
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return {}


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
    """Of train/data-00000-of-00001.arrow or data/test-00000-of-00001.parquet; None if its names do not
    say."""
    words = (part.lower().partition("-")[0].partition(".")[0] for part in path.parts)
    return next((SPLITS[word] for word in words if word in SPLITS), None)


def _read_column(path, column=None):
    """A column of a table, a pyarrow.ChunkedArray; without a name the table's schema. Raises TpukitError for
    a damaged file."""
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
        if path.suffix == ".parquet":
            file = pyarrow.parquet.ParquetFile(path)
            return file.read([column]).column(column) if column else file.schema_arrow
        table = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).read_all()  # nothing is copied
        return table.column(column) if column else table.schema
    except (pyarrow.ArrowException, OSError) as error:
        raise TpukitError(f"{path} is damaged ({first_line(error)}); copy or download it again") from error


_image_column = functools.lru_cache(maxsize=4)(_read_column)  # emptied once the images are decoded
_reading = threading.Lock()  # or every thread would read a column of its own, of gigabytes


def _open_row(sample):
    """The bytes of an image in a table, as a file."""
    with _reading:
        column = _image_column(sample.path, sample.column)
    value = column[sample.row].as_py()
    content = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(content, bytes):
        raise TpukitError("the table holds no image but a path: save the dataset with its images embedded")
    return io.BytesIO(content)


# The pixels


def read_image(file: Path | BinaryIO, size: int) -> np.ndarray:
    """An image -> (size, size, 3) uint8: its short side is scaled to the size, and the middle kept.

    Turned upright by its EXIF orientation; transparency is dropped; 16-bit grey maps its whole range to
    0..255. Raises what `pictures.opened` does."""
    with pictures.opened(file) as image:
        image.draft("RGB", (2 * size, 2 * size))  # a large JPEG is decoded at a fraction of its size
        image = pictures.to_uint8(ImageOps.exif_transpose(image)).convert("RGB")
        if image.size != (size, size):
            image = ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)
        return np.asarray(image)


def _decode(samples, size, skip_bad, what):
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
                images[index] = read_image(source, size).transpose(2, 0, 1)
            except MemoryError:
                raise
            except Exception as error:  # Pillow raises many types for a damaged file
                return f"{sample.name}: {first_line(error)}"

        count = len(samples)
        progress = functools.partial(tqdm, desc=f"decoding {what}", unit="image", disable=count < 200)
        problems = list(progress(pool.map(decode, range(count)), total=count))
        _image_column.cache_clear()
    kept = [index for index, problem in enumerate(problems) if problem is None]
    notes = ""
    if bad := list(filter(None, problems)):
        shown = "; ".join(bad[:3]).replace("\n", "\\n") + ("; ..." if len(bad) > 3 else "")
        notes = f"left out {len(bad)} of {count} {what} images that cannot be read: {shown}"
        if not skip_bad or not kept:
            raise TpukitError(
                f"{len(bad)} of {count} {what} images cannot be read ({shown}): replace them, or leave them"
                " out with skip_bad=True (--skip-bad)"
            )
        for new, old in enumerate(kept):
            images[new] = images[old]
    return dict(images=images[: len(kept)], kept=np.array(kept), notes=np.array(notes))


class ImageSet:
    """One split, decoded once to uint8, in memory that all processes of a host share.

    `batch(indices, numbers)` -> dict of image (B, 3, S, S) uint8, label (B,) int64 and, with numbers, augment
    (B, NUM_UNIFORMS), what `Augmentation.apply` needs on the device. `notes`: sentences for the log."""

    def __init__(
        self,
        samples: list[Sample],
        classes: list[str],
        *,
        size: int,
        skip_bad: bool,
        augmentation: "Augmentation",
        what: str,
        notes: str = "",
    ):
        self.classes, self.augmentation, self.num_uniforms = classes, augmentation, augmentation.num_uniforms
        paths = filter(Path.is_file, dict.fromkeys(sample.path for sample in samples))
        stats = [(str(path.resolve()), path.stat()) for path in paths]
        state = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
        names = [(sample.name, sample.row) for sample in samples]
        key = [VERSION, size, skip_bad, state, names]
        decoded = arrays.mapped(f"images-{what}", key, lambda: _decode(samples, size, skip_bad, what))
        samples = [samples[index] for index in decoded["kept"]]
        self.images, self.names = decoded["images"], [sample.name for sample in samples]
        number = {name: index for index, name in enumerate(classes)}
        self.labels = np.array([number[sample.label] for sample in samples], np.int64)
        self.notes = "\n".join(filter(None, (notes, str(decoded["notes"]))))

    def __len__(self):
        return len(self.labels)

    def batch(self, indices, numbers=None):
        rows = dict(image=self.images[indices], label=self.labels[indices])
        return rows | self.sample_parameters(indices, numbers)

    # The same from arrays on the device

    def device_nbytes(self):
        return self.images.nbytes

    def device_arrays(self):
        return dict(image=np.asarray(self.images), label=self.labels)

    def sample_parameters(self, indices, numbers=None):
        if numbers is None or not self.num_uniforms:
            return {}
        return dict(augment=self.augmentation.parameters(numbers))

    def compose(self, rows, parameters):
        return rows | parameters
