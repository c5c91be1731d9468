"""Image files of users: which formats are opened, how large one may be, 16 bits, and errors that name the
file."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image

from tpukit.host.errors import TpukitError, first_line

# No others, whatever a file is called: Pillow runs Ghostscript on an EPS.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
T = TypeVar("T")
MAX_PIXELS = 8192 * 8192  # a small file can claim any size, and several are decoded at once


@contextlib.contextmanager
def opened(path: Path | str) -> Iterator[Image.Image]:
    """Context manager: the Pillow image of a file, not decoded yet.

    Raises whatever Pillow does, and TpukitError for more than MAX_PIXELS."""
    with Image.open(path, formats=FORMATS) as image:
        if image.width * image.height > MAX_PIXELS:
            raise TpukitError(
                f"its header declares {image.width}x{image.height} pixels, more than {MAX_PIXELS:,}"
            )
        yield image


def to_uint8(image: Image.Image) -> Image.Image:
    """A Pillow image of 16-bit grey with its whole range 0..65535 mapped to 0..255; any other as it is."""
    if not image.mode.startswith("I"):  # I;16, I;16B, I
        return image
    values = np.asarray(image).astype(np.float64).clip(0, 65535) / 257
    return Image.fromarray(np.rint(values).astype(np.uint8))


def read_images(paths: Iterable[Path], read: Callable[[Path], T]) -> list[T]:
    """[read(path)] of files of a user's own. Raises TpukitError, which names the first that cannot be
    read."""
    images = []
    for path in paths:
        try:
            images.append(read(path))
        except Exception as error:  # Pillow raises many types for a damaged file
            raise TpukitError(f"{path} is not a readable image ({first_line(error)})") from error
    return images
