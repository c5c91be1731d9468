"""Infrared small target sets on disk: images/, masks/ and lists of names, as IRSTD-1k, NUDT-SIRST and SIRST
have them.

A folder without lists, such as a user's own, is split by the names of its images.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import math
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from tpukit.host import arrays
from tpukit.host.errors import TpukitError
from tpukit.tasks import pictures
from tpukit.tasks.mshnet import augment

# Where the published sets keep their lists, relative to the set's folder.
LISTS = dict(
    train="trainval.txt train.txt img_idx/train*.txt 50_50/train.txt idx_427/trainval.txt idx_320/train.txt",
    test="test.txt img_idx/test*.txt 50_50/test.txt idx_427/test.txt idx_320/test.txt",
)
IMAGE_ENDINGS = (".png", ".bmp", ".jpg", ".jpeg", ".tif", ".tiff")
IMAGES_PER_TEST_IMAGE = 5  # without lists
VERSION = 5  # of what `_read_split` returns for the same files, which is cached


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
        listing, names = read_list(folder, split)
        key = [VERSION, skip_bad, names, arrays.content_key(folder / "images", folder / "masks")]
        decoded = arrays.mapped(
            f"{folder.name}-{split}", key, lambda: _read_split(folder, listing, names, skip_bad)
        )
        self.notes = str(decoded["notes"])
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
        for index, crop in self._crops(indices, numbers):
            image, mask = augment.on_host(self.images[index], self.masks[index], crop)
            images.append(np.broadcast_to(image, (self.colours, *image.shape[1:])))
            masks.append(mask)
        return dict(image=np.stack(images), mask=np.stack(masks))

    def _crops(self, indices, numbers) -> Iterator[tuple[int, augment.Crop]]:
        for slot, index in enumerate(indices):
            crop = augment.Crop(self.base_size, (self.base_size, self.base_size))
            if numbers is not None:
                size = self.images[index].shape[1::-1]  # (width, height)
                crop = augment.random_crop(numbers[slot], size, self.base_size, self.crop_size)
            yield index, crop

    # On the device

    def device_nbytes(self) -> int:
        return len(self) * (self.colours + 1) * self.height * self.width

    def device_arrays(self) -> dict[str, np.ndarray]:
        """Images of many sizes, each in the upper left corner of (N, C or 1, H, W) uint8."""
        padded = {}
        for name, originals, colours in (("image", self.images, self.colours), ("mask", self.masks, 1)):
            padded[name] = np.zeros((len(self), colours, self.height, self.width), np.uint8)
            for whole, original in zip(padded[name], originals):
                whole[:, : original.shape[0], : original.shape[1]] = augment.planes(original)
        return padded

    def sample_parameters(
        self, indices: Sequence[int], numbers: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        crops = self._crops(indices, numbers)
        samples = [augment.device_parameters(self.images[i].shape[1::-1], crop) for i, crop in crops]
        return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}

    def compose(self, rows: dict[str, Tensor], parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        image, mask = augment.on_device(rows["image"], rows["mask"], parameters)
        return dict(image=image, mask=mask)


def read_list(folder: Path, split: str) -> tuple[Path, list[str]]:
    """(The file that lists a split's names, its lines). Without any list, (images/, the names that are chosen
    of it).

    Raises TpukitError naming the places that were searched."""
    if not folder.is_dir():
        raise TpukitError(f"dataset folder {folder} does not exist")
    lists = {
        name: [path for each in patterns.split() for path in sorted(folder.glob(each)) if path.is_file()]
        for name, patterns in LISTS.items()
    }
    if lists[split]:
        listing = lists[split][0]
        try:
            return listing, listing.read_text("utf-8-sig").splitlines()  # Windows' editors write a mark first
        except UnicodeDecodeError as error:
            reason = f"{error.reason} at byte {error.start}"
            raise TpukitError(f"{listing} is not text in UTF-8 ({reason}): save it as UTF-8") from error
    images = folder / "images"
    if images.is_dir() and not any(lists.values()):
        return images, _split_by_name(list(_image_files(images).values()), split)
    here = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
    raise TpukitError(
        f"no {split} list in {folder}, which should hold images/, masks/, and both trainval.txt and test.txt"
        f" or no lists: looked for {LISTS[split].replace(' ', ', ')}; found {here}"
    )


def _image_files(folder):
    """dict of name without ending -> path."""
    paths = sorted(folder.glob("*"), reverse=True)
    return {path.stem: path for path in paths if path.suffix.lower() in IMAGE_ENDINGS}


def _split_by_name(paths, split):
    """The names of a split's images: always the same, though in no order that a camera or a person gave
    them."""
    if len(paths) < 2:
        raise TpukitError(
            f"images/ holds {len(paths)} images: it needs 2 or more, one to train on and one to test on"
        )
    paths = sorted(paths, key=lambda path: (zlib.crc32(os.fsencode(path.stem)), path.name))
    tests = math.ceil(len(paths) / IMAGES_PER_TEST_IMAGE)
    return sorted(path.name for path in (paths[:tests] if split == "test" else paths[tests:]))


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
    images, masks = _image_files(folder / "images"), _image_files(folder / "masks")
    decoded, bad = [], []  # (name, image, mask)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        pairs = [pool.submit(_read_pair, images, masks, name) for _, name in entries]
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
    notes = f"{listing}: left out {len(bad)} of {len(entries)} entries:\n{problems}" if bad else ""
    names, images, masks = zip(*decoded)
    # Kept with the arrays: at the start of a training no pixels are read.
    masks_digest = arrays.digest([[mask.shape, hashlib.sha256(mask).hexdigest()] for mask in masks])
    texts = dict(names=np.array(names), notes=np.array(notes), masks_digest=np.array(masks_digest))
    return dict(texts, **_pack("images", images), **_pack("masks", masks))


def _read_pair(images, masks, name):
    """(image, mask) of a name in a list, which is looked up in these folders' files and so leads nowhere
    else. Raises TpukitError with what is wrong."""
    ending = Path(name).suffix
    stem = name.removesuffix(ending) if ending.lower() in IMAGE_ENDINGS else name
    pixels = []
    for kind, path in (
        ("images", images.get(stem)),
        ("masks", masks.get(stem, masks.get(f"{stem}_pixels0"))),
    ):
        if path is None:
            raise TpukitError(f"no image {kind}/{stem}")
        try:
            pixels.append(read_image(path, grey=kind == "masks"))
        except Exception as error:  # Pillow raises many types for a damaged file
            raise TpukitError(f"{kind}/{path.name} is unreadable ({error})") from error
    sizes = [f"{one.shape[1]}x{one.shape[0]}" for one in pixels]
    if sizes[0] != sizes[1]:
        raise TpukitError(f"image is {sizes[0]}, mask is {sizes[1]}")
    return pixels


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
