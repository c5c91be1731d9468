"""Image files of users: which formats are opened, how large one may be, what transparent pixels show, grey
deeper than 8 bits, and errors that name the file."""

import collections
import concurrent.futures
import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageOps, TiffImagePlugin, UnidentifiedImageError

from tpukit.data import arrays
from tpukit.host.errors import TpukitError, as_unreadable, first_line
from tpukit.host.text import one_line
from tpukit.runs import weights
from tpukit_tasks.splits import some

# No others, whatever a file is called: Pillow runs Ghostscript on an EPS.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
STACKS = ("PNG", "WEBP", "GIF", "TIFF")  # may have several pages; what phones put into a JPEG is a preview
DEEP_ENDINGS = (".png", ".tif", ".tiff", ".pgm", ".pnm")  # formats that can have more than 8 bits of grey
ENDINGS = (".jpg", ".jpeg", ".jpe", ".jfif", *DEEP_ENDINGS, ".webp", ".bmp", ".gif", ".ppm")
# Endings of files that belong next to images: they are left out without a word.
BESIDE = ".txt .csv .tsv .json .jsonl .xml .md .html .yaml .yml .db .ini .py".split()
LEVELS = 256
PERCENTILES = (0, 0.5, 99.5, 100)
Levels = tuple[float, float]  # values of grey that become 0 and 255
MAX_PIXELS = 8192 * 8192  # a small file can claim any size, and several are decoded at once
GREY = 128  # transparent pixels are laid on it: neither a black nor a white shape is lost there
UNSIGNED, SIGNED = 1, 2  # in tag 339 of a TIFF
NUMBERS = {UNSIGNED: "unsigned", SIGNED: "signed", 3: "floating point"}


class Odd(NamedTuple):
    """What is to be told of a file's pixels."""

    is_transparent: bool = False
    not_finite: int = 0
    """pixels that are NaN or infinite"""


@contextlib.contextmanager
def opened(path: Path | str) -> Iterator[Image.Image]:
    """Context manager: the Pillow image of a file, not decoded yet.

    Raises whatever Pillow does, and TpukitError for more than MAX_PIXELS, for several pages or frames, for a
    TIFF of numbers that Pillow cannot read, and for colours deeper than 8 bits, of which it would keep the
    upper 8."""
    try:
        image = Image.open(path, formats=FORMATS)
    except UnidentifiedImageError:
        _require_known_numbers(path)
        raise
    with image:
        if image.width * image.height > MAX_PIXELS:
            raise TpukitError(
                f"its header declares {image.width}x{image.height} pixels, more than {MAX_PIXELS:,}"
            )
        if image.format in STACKS and getattr(image, "is_animated", False):
            raise TpukitError("it has several pages or frames: save the one that is meant as its own file")
        if _has_deep_colours(image):
            raise TpukitError("its channels have 16 bits: convert it to 8 bits, or to one channel of 16")
        yield image


def _require_known_numbers(path):
    """Raise TpukitError, which says what its numbers are, for a TIFF."""
    kind = ""
    with contextlib.suppress(Exception), open(path, "rb") as file:  # SyntaxError, struct's: it is no TIFF
        tags = TiffImagePlugin.ImageFileDirectory_v2(file.read(8))
        file.seek(tags.next)
        tags.load(file)
        bits = tags[TiffImagePlugin.BITSPERSAMPLE]
        number = NUMBERS.get(tags.get(TiffImagePlugin.SAMPLEFORMAT, (UNSIGNED,))[0], "other")
        kind = f"{len(bits)} x {bits[0]}-bit {number}"
    if kind:
        raise TpukitError(
            f"its pixels are {kind} numbers, which are not read: convert it to one channel of 16-bit unsigned"
            " or 32-bit floating point ones"
        )


def _number_of(image):
    """The tag of a TIFF that says what its numbers are; None of another format."""
    return image.tag_v2.get(TiffImagePlugin.SAMPLEFORMAT, (UNSIGNED,))[0] if image.format == "TIFF" else None


def _is_white_zero(image):
    """Whether a TIFF's least value is white, which Pillow turns round in 8 bits alone."""
    return image.format == "TIFF" and image.tag_v2.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == 0


def _most(image, number):
    """The largest value of a TIFF's numbers if they are unsigned, else 0."""
    bits = image.tag_v2.get(TiffImagePlugin.BITSPERSAMPLE, (16,))[0]
    return 2**bits - 1 if number == UNSIGNED else 0


def is_turned(path: Path) -> bool:
    """Return whether the EXIF orientation of a file says that it is stored turned or mirrored."""
    with Image.open(path, formats=FORMATS) as image:
        return "exif" in image.info and image.getexif().get(ExifTags.Base.Orientation, 1) != 1


def is_image(path: str) -> bool:
    """Return whether a file has the ending of an image."""
    return os.path.splitext(path)[1].lower() in ENDINGS


def left_out(paths: Iterable[Path | str]) -> list[str]:
    """Return a sentence that counts the files, by their endings, that are not read as images; none if there
    are none."""
    rest = [Path(path) for path in paths if not str(path).lower().endswith((*ENDINGS, *BESIDE))]
    # A file without an ending may be an image, README and LICENSE are none.
    rest = [path for path in rest if path.name[0] != "." and not (path.name.isupper() and not path.suffix)]
    counts = collections.Counter(path.suffix.lower() for path in rest)
    listed = ", ".join(f"{count} {ending or 'without an ending'}" for ending, count in counts.most_common(5))
    return [f"files that are not read, and so left out: {listed} (convert images to PNG)"] if counts else []


# What files of these endings have at their start or end if they hold boxes or outlines
MARKS = {
    ".json": re.compile(rb'"(bbox|segmentation|shapes|regions|annotations)"\s*:'),
    ".xml": re.compile(rb"<(bndbox|polygon)>"),
    ".txt": re.compile(rb"^\d+(\s+[01]?\.\d+){4}", re.MULTILINE),  # YOLO's
}
PEEKED, LOOKED_AT = 65536, 1000  # bytes at both ends of a file; files


def find_boxes(paths: Iterable[Path | str]) -> list[str]:
    """Return a sentence that counts the files, by their endings, that hold boxes or outlines; none if there
    are none."""
    candidates = [path for path in map(Path, paths) if path.suffix.lower() in MARKS][:LOOKED_AT]
    found = collections.defaultdict(list)
    for path in candidates:
        with contextlib.suppress(OSError), open(path, "rb") as file:
            ends = file.read(PEEKED)
            file.seek(max(0, path.stat().st_size - PEEKED))
            if MARKS[path.suffix.lower()].search(ends + file.read()):
                found[path.suffix.lower()].append(path.name)
    listed = ", ".join(f"{len(names)} {ending} ({some(names)})" for ending, names in found.items())
    return [f"boxes or outlines, which are not read, in {listed}"] if listed else []


# Colours and grey deeper than 8 bits


def _has_deep_colours(image):
    """Whether Pillow is about to keep 8 bits of 16. It can keep all of them only for grey."""
    if _is_deep(image) or not image.tile:
        return False
    how = image.tile[0][3]  # as "RGB;16B" of a PNG, or ("RGB", the largest value) of a PPM
    return how[-1] >= LEVELS if image.format == "PPM" and isinstance(how, tuple) else ";16" in str(how)


def _is_deep(image):
    """Whether grey is not in 0 to 255: I;16, I;16B, I, F, and signed numbers of 8 bits."""
    return image.mode.startswith(("I", "F")) or image.mode == "L" and _number_of(image) == SIGNED


def deep_values(image: Image.Image) -> np.ndarray | None:
    """Return the values (H, W) of grey deeper than 8 bits, upright, in float64; None of another image."""
    if not _is_deep(image):
        return None
    number, values = _number_of(image), np.asarray(ImageOps.exif_transpose(image))
    if number == UNSIGNED and values.dtype == np.int32:  # Pillow has no uint32
        values = values.view(np.uint32)
    if number == SIGNED and values.dtype == np.uint8:  # nor int8
        values = values.view(np.int8)
    values = values.astype(np.float64)
    return _most(image, number) - values if _is_white_zero(image) else values


def _on_colour(image, colour):
    """Return (the image in mode L or RGB, its transparent pixels laid on a grey value; an `Odd` of it).
    What a file stores below them differs from one program to the next."""
    is_grey = image.mode in ("1", "L", "LA")
    opacity = find_opacity(image)
    if is_transparent := opacity is not None and opacity.min() < LEVELS - 1:
        below = Image.new("RGBA", image.size, (colour, colour, colour, LEVELS - 1))
        image = Image.alpha_composite(below, image.convert("RGBA"))
    return image.convert("L" if is_grey else "RGB"), Odd(bool(is_transparent))


def find_opacity(image: Image.Image) -> np.ndarray | None:
    """Return the opacity (H, W) uint8 of the pixels of an image; None if the file has none. A palette and one
    of the colours may be transparent, too."""
    return np.asarray(image.convert("RGBA").getchannel("A")) if image.has_transparency_data else None


def read(
    path: Path | str, levels: Levels | None = None, *, colour: int = GREY, draft: int = 0
) -> tuple[Image.Image, Odd]:
    """Read the picture of a file as training and predictions see it: upright by its EXIF orientation, on one
    colour, in 8 bits.

    Args:
        path: an image file.
        levels: of the training set, for grey deeper than 8 bits.
        colour: the grey value on which transparent pixels are laid.
        draft: a large JPEG may be decoded at a fraction of its size, at least this many pixels.

    Returns:
        (the image, in mode L or RGB; what is to be told of it)

    Raises:
        TpukitError: as `opened`; for deep grey without levels or finite numbers, or so far from the levels
            that nothing would be visible."""
    with opened(path) as image:
        if draft:
            image.draft("RGB", (draft, draft))
        values = deep_values(image)
        if values is None:
            return _on_colour(ImageOps.exif_transpose(image), colour)
    return _scaled(values, levels), Odd(not_finite=int((~np.isfinite(values)).sum()))


def _scaled(values, levels):
    finite = values[np.isfinite(values)]
    if not len(finite):
        raise TpukitError("none of its pixels is a finite number")
    least, most = finite.min(), finite.max()
    if levels is None:
        raise TpukitError(
            f"its grey values are {least:g} to {most:g}, deeper than 8 bits, and nothing says how the"
            " training set's were scaled: convert it to 8 bits as those were"
        )
    low, high = levels
    if most < low or least > high:
        raise TpukitError(
            f"its grey values are {least:g} to {most:g}, and the training set's {low:g} to {high:g}: nothing"
            " of it would be visible, so convert it to the same unit"
        )
    scaled = np.nan_to_num((values - low) * ((LEVELS - 1) / (high - low)))
    return Image.fromarray(np.rint(scaled.clip(0, LEVELS - 1)).astype(np.uint8))


def find_levels(paths: Sequence[Path | str]) -> tuple[Levels | None, str]:
    """Return (the levels that a set of images is scaled by, a sentence for the log); (None, "") if none is
    deeper than 8 bits.

    From half a percent to 99.5 % of the pixels, and as much again at both ends, as far as there are such
    values: a broken pixel counts for nothing, and a few bright ones keep their place."""
    deep = [path for path in paths if str(path).lower().endswith(DEEP_ENDINGS)]
    key = arrays.state_of(deep)
    ranges = arrays.mapped("grey-levels", key, lambda: dict(ranges=_measure(deep)))["ranges"]
    if not len(ranges):
        return None, ""
    least, lows, highs, most = np.asarray(ranges).T
    low, high = np.percentile(lows, 1), np.percentile(highs, 99)
    span = high - low
    low, high = max(least.min(), low - span), min(most.max(), high + span)
    high = high if high > low else low + 1
    note = (
        f"{len(ranges)} of {len(paths)} images have grey deeper than 8 bits, or signed: the training set's"
        f" {low:g} to {high:g} become 0 to {LEVELS - 1}, in predictions, too"
    )
    return (float(low), float(high)), note


def _measure(paths):
    """(N, 4): the least value, two percentiles, and the largest of each image that is deeper than 8 bits. One
    that cannot be read is left to whoever decodes it."""

    def measure(path):
        try:
            with opened(path) as image:
                values = deep_values(image)
        except Exception as error:  # Pillow raises many types for a damaged file
            if of_disk := as_unreadable(error, Path(path)):
                raise of_disk from error
            return None
        if values is None or not (is_number := np.isfinite(values)).any():
            return None
        return np.percentile(values[is_number], PERCENTILES)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = [each for each in pool.map(measure, paths) if each is not None]
    return np.array(found).reshape(-1, 4)


def kept_levels(file: Path | None) -> Levels | None:
    """Return the levels that a training run kept with its weights; None if there are none."""
    kept = weights.metadata(file).get("grey_levels", "") if file else ""
    try:
        low, high = map(float, kept.split())
    except ValueError:
        return None
    return (low, high) if -np.inf < low < high < np.inf else None


def format_levels(levels: Levels | None) -> dict[str, str]:
    """Return what a task keeps of levels with its weights, for `kept_levels`."""
    return dict(grey_levels=f"{levels[0]!r} {levels[1]!r}") if levels else {}


def describe_opening(levels: Levels | None) -> str:
    """Return, for those who use an exported network, how an image file is opened as in training."""
    scaled = f" grey from {levels[0]:g} to {levels[1]:g} becomes 0 to 255, rounded;" if levels else ""
    return f"turn it upright by its EXIF orientation, lay transparent pixels on the value {GREY};{scaled}"


def describe_odd(found: Iterable[tuple[str, Odd]], count: int, kind: str) -> list[str]:
    """Return sentences that count the images with transparent pixels, and with numbers that are not finite.

    found: (name, what is to be told of it) of each. count, kind: of all, such as 20 training images."""
    found = list(found)
    transparent = [name for name, odd in found if odd.is_transparent]
    told = f"{len(transparent)} of {count} {kind} have transparent pixels ({some(transparent)})"
    sentences = [f"{told}: laid on grey {GREY}, in predictions, too"] if transparent else []
    broken = [f"{odd.not_finite} in {one_line(name)}" for name, odd in found if odd.not_finite]
    told = f"{len(broken)} of {count} {kind} have pixels that are NaN or infinite ({some(broken)})"
    return [*sentences, f"{told}: NaN becomes black, in predictions, too"] if broken else sentences


def read_images(paths: Iterable[Path], read: Callable[[Path], tuple[np.ndarray, Odd]]) -> list[np.ndarray]:
    """Return the images of a user's own files, and print which have numbers that are not finite.

    read: file -> (image, what is to be told of it).

    Raises:
        TpukitError: naming the first that cannot be read."""
    images, found = [], []
    for path in paths:
        try:
            image, odd = read(path)
        except Exception as error:  # Pillow raises many types for a damaged file
            if of_disk := as_unreadable(error, path):
                raise of_disk from error
            raise TpukitError(f"{path} is not a readable image ({first_line(error)})") from error
        images.append(image)
        found.append((path.name, odd._replace(is_transparent=False)))
    for sentence in describe_odd(found, len(images), "images"):
        print(sentence)
    return images
