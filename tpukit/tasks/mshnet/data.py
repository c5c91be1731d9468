"""Infrared small target sets on disk: images/, masks/ and lists of names, as IRSTD-1k, NUDT-SIRST and SIRST
have them.

A folder without lists, such as a user's own, is split by the names of its images.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import math
import os
import posixpath
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tpukit.host import arrays
from tpukit.host.errors import TpukitError
from tpukit.tasks import pictures
from tpukit.tasks.mshnet import augment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

# Where the published sets keep their lists, relative to the set's folder.
LISTS = dict(
    train="trainval.txt train.txt img_idx/train*.txt 50_50/train.txt idx_427/trainval.txt idx_320/train.txt",
    test="test.txt img_idx/test*.txt 50_50/test.txt idx_427/test.txt idx_320/test.txt",
)
IMAGE_ENDINGS = (".png", ".bmp", ".jpg", ".jpeg", ".tif", ".tiff")
MASK_SUFFIXES = ("", "_pixels0")  # SIRST names its masks NAME_pixels0.png
IMAGES_PER_TEST_IMAGE = 5  # without lists
VERSION = 4  # of what `_read_split` returns for the same files, which is cached


class InfraredSet:
    """One split of a set, decoded once to uint8, in memory that all processes of a host share.

    `batch(indices, numbers)` -> dict of image (B, C, S, S) uint8 and mask (B, 1, S, S) uint8, where S is
    crop_size with augmentation (numbers: (B, 6) in [0, 1)) and base_size without (numbers: None). C is 1
    where all images are grey, else 3. `compose` makes the same on a device, with the image in float32, not
    rounded to whole grey levels."""

    num_uniforms = augment.NUM_UNIFORMS

    def __init__(
        self, folder: Path, split: str, *, base_size: int = 256, crop_size: int = 256, skip_bad: bool = False
    ) -> None:
        self.base_size, self.crop_size = base_size, crop_size
        folder = Path(folder)
        listing, lines = read_list(folder, split)
        inside = [part for part in (folder / "images", folder / "masks") if part.is_dir()]
        key = [VERSION, skip_bad, "\n".join(lines), arrays.content_key(*inside)]
        name = f"{folder.name}-{split}"
        decoded = arrays.mapped(name, key, lambda: _read_split(folder, listing, lines, skip_bad))
        self.notes = f"{listing}: {decoded['notes']}" if decoded["notes"] else ""
        self.names = decoded["names"].tolist()
        self.masks_digest = str(decoded["masks_digest"])
        self.images = _unpack(decoded["images"], decoded["images_shapes"])
        self.masks = _unpack(decoded["masks"], decoded["masks_shapes"])
        self.colours = 3 if any(image.ndim == 3 for image in self.images) else 1
        self.height, self.width = (max(image.shape[axis] for image in self.images) for axis in (0, 1))

    def __len__(self) -> int:
        return len(self.names)

    def batch(self, indices: Sequence[int], numbers: np.ndarray | None = None) -> dict[str, np.ndarray]:
        images, masks = [], []
        for index, parameters in zip(indices, self._resampling(indices, numbers)):
            image, mask = augment.on_host(self.images[index], self.masks[index], parameters)
            images.append(np.broadcast_to(image, (self.colours, *image.shape[1:])))
            masks.append(mask)
        return dict(image=np.stack(images), mask=np.stack(masks))

    def _resampling(self, indices, numbers):
        """Yield `augment.resampling` of each sample."""
        for slot, index in enumerate(indices):
            size = self.images[index].shape[1::-1]  # (width, height)
            if numbers is None:
                yield augment.resampling(size, self.base_size)
            else:
                crop = augment.random_crop(numbers[slot], size, self.base_size, self.crop_size)
                yield augment.resampling(size, self.crop_size, crop)

    # On the device

    def device_nbytes(self) -> int:
        return len(self) * (self.colours + 1) * self.height * self.width

    def device_arrays(self) -> dict[str, np.ndarray]:
        size = self.height, self.width
        return dict(image=_pad(self.images, self.colours, *size), mask=_pad(self.masks, 1, *size))

    def sample_parameters(
        self, indices: Sequence[int], numbers: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        samples = list(self._resampling(indices, numbers))
        return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}

    def compose(self, rows: dict[str, Tensor], parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        image, mask = augment.on_device(rows["image"], rows["mask"], parameters)
        return dict(image=image, mask=mask)


def _pad(images, colours, height, width):
    """Images of many sizes, each in the upper left corner of (N, C, H, W) uint8."""
    padded = np.zeros((len(images), colours, height, width), np.uint8)
    for index, image in enumerate(images):
        plane = augment.planes(image)
        padded[index, :, : plane.shape[1], : plane.shape[2]] = plane
    return padded


def read_list(folder: Path, split: str) -> tuple[Path, list[str]]:
    """(The file that lists a split's names, its lines). Without any list, (images/, the names that are chosen
    of it).

    Raises TpukitError naming the places that were searched."""
    if not folder.is_dir():
        raise TpukitError(f"dataset folder {folder} does not exist")
    if lists := _lists(folder, split):
        listing = lists[0]
        try:
            return listing, listing.read_text("utf-8-sig").splitlines()  # Windows' editors write a mark first
        except UnicodeDecodeError as error:
            reason = f"{error.reason} at byte {error.start}"
            raise TpukitError(f"{listing} is not text in UTF-8 ({reason}): save it as UTF-8") from error
    images = folder / "images"
    if images.is_dir() and not any(_lists(folder, name) for name in LISTS):
        names = [path.name for path in images.iterdir() if path.suffix.lower() in IMAGE_ENDINGS]
        return images, _split_by_name(names, split)
    here = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
    raise TpukitError(
        f"no {split} list in {folder}, which should hold images/, masks/, and both trainval.txt and test.txt"
        f" or no lists: looked for {LISTS[split].replace(' ', ', ')}; found {here}"
    )


def _lists(folder, split):
    found = [path for pattern in LISTS[split].split() for path in sorted(folder.glob(pattern))]
    return [path for path in found if path.is_file()]


def _split_by_name(names, split):
    """Those of the names that belong to a split: always the same, though in no order that a camera or a
    person gave them."""
    if len(names) < 2:
        raise TpukitError(
            f"images/ holds {len(names)} images: it needs 2 or more, one to train on and one to test on"
        )
    names = sorted(names, key=lambda name: (zlib.crc32(os.fsencode(Path(name).stem)), name))
    tests = math.ceil(len(names) / IMAGES_PER_TEST_IMAGE)
    return sorted(names[:tests] if split == "test" else names[tests:])


def _pack(name, images):
    """Images of any sizes as one vector of pixels and their shapes (N, 3), the last one 0 for grey images."""
    shapes = [(*image.shape, 0)[:3] for image in images]
    return {name: np.concatenate([image.reshape(-1) for image in images]), f"{name}_shapes": np.array(shapes)}


def _unpack(pixels, shapes):
    """The images that `_pack` packed, as views."""
    shapes = [shape if shape[2] else shape[:2] for shape in shapes.tolist()]
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(np.split(np.asarray(pixels), ends[:-1]), shapes)]


def _read_split(folder, listing, lines, skip_bad):
    """Names, pixels and `notes` of a split as a dict of arrays. Decodes on all cores. listing, lines: of
    `read_list`."""
    from tqdm.auto import tqdm

    entries = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if not entries:
        raise TpukitError(f"{listing} is empty: it should hold one image name per line")
    decoded, bad = [], []  # (name, image, mask)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        pairs = [pool.submit(_read_pair, folder, name) for _, name in entries]
        progress = tqdm(pairs, desc=f"decoding {listing.stem}", unit="image", disable=len(pairs) < 200)
        for (number, name), pair in zip(entries, progress):
            try:
                decoded.append((name, *pair.result()))
            except TpukitError as error:
                bad.append(f"  line {number}: {name}: {error}")
    problems = "\n".join(bad[:20] + [f"  ... and {len(bad) - 20} more"] * (len(bad) > 20))
    if bad and not (skip_bad and decoded):
        raise TpukitError(
            f"{len(bad)} of {len(entries)} entries of {listing} cannot be used:\n{problems}\n"
            "Fix them, or leave them out with skip_bad=True (--skip-bad)."
        )
    notes = f"left out {len(bad)} of {len(entries)} entries:\n{problems}" if bad else ""
    names, images, masks = zip(*decoded)
    # Kept with the arrays: at the start of a training no pixels are read.
    masks_digest = arrays.digest([[mask.shape, hashlib.sha256(mask).hexdigest()] for mask in masks])
    texts = dict(names=np.array(names), notes=np.array(notes), masks_digest=np.array(masks_digest))
    return dict(texts, **_pack("images", images), **_pack("masks", masks))


def _read_pair(folder, name):
    """(image, mask) of a name in a list. Raises TpukitError with what is wrong."""
    # A list from elsewhere could name any file of the user's, whose picture would then be kept with the
    # predictions. What counts is the name: folders of a dataset may be links, as on Kaggle.
    if not posixpath.normpath(f"images/{name}").startswith("images/"):
        raise TpukitError("the name leads out of images/; name a file in it")
    stem = name.rsplit(".", 1)[0] if Path(name).suffix.lower() in IMAGE_ENDINGS else name
    image = _read_first(folder, [f"images/{stem}"])
    mask = _read_first(folder, [f"masks/{stem}{suffix}" for suffix in MASK_SUFFIXES], grey=True)
    if image.shape[:2] != mask.shape[:2]:
        (height, width), (mask_height, mask_width) = image.shape[:2], mask.shape[:2]
        raise TpukitError(f"image is {width}x{height}, mask is {mask_width}x{mask_height}")
    return image, mask


def _read_first(folder, stems, grey=False):
    """The pixels of the first image file with one of these names, without ending, that is there."""
    for stem in stems:
        for ending in (*IMAGE_ENDINGS, *map(str.upper, IMAGE_ENDINGS)):
            if (folder / f"{stem}{ending}").is_file():
                try:
                    return read_image(folder / f"{stem}{ending}", grey=grey)
                except Exception as error:  # Pillow raises many types for a damaged file
                    raise TpukitError(f"{stem}{ending} is unreadable ({error})") from error
    raise TpukitError(f"no image {stems[0]}")


def read_image(path: Path, *, grey: bool = False) -> np.ndarray:
    """An image file -> uint8, (H, W) for grey images and (H, W, 3) for colour.

    Modes: L, RGB, P (palette), RGBA (alpha is dropped), LA, 1, and 16-bit grey, whose whole range 0..65535
    maps to 0..255. Colours that differ by one level at most are a grey image that some software has converted
    and rounded (three of IRSTD-1k's are such). Raises what `pictures.opened` does."""
    with pictures.opened(path) as image:
        image = pictures.to_uint8(image)
        if grey or image.mode in ("1", "L", "LA"):
            return np.array(image.convert("L"))
        image = image.convert("RGB")
        colours = np.array(image)
        return np.array(image.convert("L")) if np.ptp(colours, axis=2).max() <= 1 else colours
