"""Infrared small target sets, such as IRSTD-1k, NUDT-SIRST, SIRST and a user's own: the pixels of images and
masks, decoded once."""

import concurrent.futures
import contextlib
import functools
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from tpukit.data import arrays
from tpukit.data.arrays import Arrays
from tpukit.host.errors import TpukitError, as_unreadable
from tpukit.host.text import one_line, printable
from tpukit_tasks import pictures
from tpukit_tasks.mshnet import augment, lists
from tpukit_tasks.mshnet.measures import (
    has_flat_regions,
    measure_targets,
    require_instances,
    require_one_bright,
)
from tpukit_tasks.mshnet.scores import brightest

NOISE = 64  # in masks that are JPEG files: what is darker is not a label, and channels differ by less
VERSION = 14  # raise it if `_read_split` returns something else for the same files, because that is cached


class InfraredSet:
    """One split of a set, decoded once to uint8, in memory that all processes of a host share.

    `batch(indices, numbers)` -> dict of image (B, C, S, S) uint8 and mask (B, 1, S, S) uint8, where S is
    crop_size with augmentation (numbers: (B, 6) in [0, 1)) and base_size without (numbers: None). C is 1 if
    all images are grey, else 3. `compose` makes the same on a device, with the image in float32, not rounded
    to whole grey levels."""

    num_uniforms = augment.NUM_UNIFORMS

    def __init__(
        self,
        folder: Path,
        split: str,
        base_size: int = 256,
        crop_size: int = 256,
        skip_bad: bool = False,
        levels: pictures.Levels | None = None,
    ) -> None:
        self.split, self.base_size, self.crop_size = split, base_size, crop_size
        listing, names = lists.read_list(folder, split)
        files = lists.find_files(folder)
        names = lists.without_repeats(files, names)
        self.levels, levels_note = levels, ""
        if levels is None:
            listed = [path for name in names.values() for path in lists.find_image(files, name)]
            self.levels, levels_note = pictures.find_levels(listed)
        contents = arrays.content_key(itertools.chain(*files.images.values(), *files.masks.values()))
        key = [VERSION, skip_bad, names, self.levels, contents]
        read = functools.partial(_read_split, files, listing, names, skip_bad, self.levels)
        decoded = arrays.mapped(f"{folder.name}-{split}", key, read)
        used = f"{split}: {len(decoded['names'])} names of {listing}"
        if listing.is_dir() and split == "test":
            used += f", which has {len(files.images)}"
        self.notes = "\n".join(filter(None, (used, levels_note, str(decoded["notes"]))))
        self.targets = decoded["targets"]  # (N, 6), see `measure_targets`
        self.digests = decoded["digests"].tolist()
        self.names = decoded["names"].tolist()
        self.mask_digests = decoded["mask_digests"].tolist()
        self.samples = _unpacked(decoded["pixels"], decoded["shapes"])  # image planes, then the mask
        self.masks = [sample[-1] for sample in self.samples]  # (H, W) each
        channels, self.height, self.width = decoded["shapes"].max(0).tolist()
        self.colours = channels - 1
        self.notices = lists.find_unused(folder, files) if split == "train" else []

    def __len__(self) -> int:
        return len(self.names)

    def batch(self, indices: Sequence[int], numbers: np.ndarray | None = None) -> Arrays:
        crops = self._crops(indices, numbers)
        samples = [augment.on_host(self.samples[i][:-1], self.masks[i], crop) for i, crop in crops]
        images, masks = zip(*samples)
        return dict(image=np.stack(images), mask=np.stack(masks))

    def _crops(self, indices, numbers) -> Iterator[tuple[int, augment.Crop]]:
        for slot, index in enumerate(indices):
            crop = augment.Crop(self.base_size, (self.base_size, self.base_size))
            if numbers is not None:
                size = self.masks[index].shape[::-1]  # (width, height)
                crop = augment.random_crop(numbers[slot], size, self.base_size, self.crop_size)
            yield index, crop

    # On the device

    def device_nbytes(self) -> int:
        return len(self) * (self.colours + 1) * self.height * self.width

    def device_arrays(self) -> Arrays:
        """Return images of many sizes, each in the upper left corner of (N, C or 1, H, W) uint8."""
        pixels = np.zeros((len(self), self.colours + 1, self.height, self.width), np.uint8)
        for padded, sample in zip(pixels, self.samples):
            padded[:, : sample.shape[1], : sample.shape[2]] = sample
        return dict(image=pixels[:, :-1], mask=pixels[:, -1:])

    def sample_parameters(self, indices: Sequence[int], numbers: np.ndarray | None = None) -> Arrays:
        crops = self._crops(indices, numbers)
        samples = [augment.device_parameters(self.masks[i].shape[::-1], crop) for i, crop in crops]
        return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}

    def compose(self, rows: dict[str, Tensor], parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        image, mask = augment.on_device(rows["image"], rows["mask"], parameters)
        return dict(image=image, mask=mask)


def _unpacked(pixels, shapes):
    """Return views of arrays that lie one after another in a vector."""
    parts = np.split(np.asarray(pixels), np.cumsum(shapes.prod(1))[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes)]


def _read_split(files, listing, names, skip_bad, levels):
    """Return the arrays that `InfraredSet` keeps of a split. Decodes on all cores.

    listing, names: of `read_list`."""
    if not names:
        raise TpukitError(f"{listing} is empty: it should hold one image name per line")
    kept, samples, odd, bad, most = [], [], [], [], set()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        futures = [pool.submit(_read_pair, files, name, levels) for name in names.values()]
    for (number, name), future in zip(names.items(), futures):
        try:
            sample, told, brightest_of_file = future.result()
            samples.append(sample)
            most.add(brightest_of_file)
            kept.append(name)
            odd.append((name, told))
        except TpukitError as error:
            where = one_line(name if listing.is_dir() else f"line {number}: {name}")
            bad.append(f"  {where}: {printable(error).replace(printable(name), one_line(name))}")
    notes = [f"{len(bad)} of {len(names)} names of {listing} cannot be used:"] if bad else []
    notes += bad[:20] + ["  ..."] * (len(bad) > 20)
    if bad and not (skip_bad and samples):
        raise TpukitError("\n".join([*notes, "Fix them, or leave them out with skip_bad=True (--skip-bad)."]))
    notes += pictures.describe_odd(odd, len(kept), "images")
    notes += _whiten_numbered(files, kept, samples, most)
    require_one_bright([sample[-1] for sample in samples], kept)
    # Kept with the arrays, so that the start of a training run reads no pixels.
    channels = max(map(len, samples))
    pixels = [sample if len(sample) == channels else sample[[0, 0, 0, 1]] for sample in samples]
    return dict(
        names=np.array(kept),
        notes=np.array("\n".join(notes)),
        digests=np.array([hashlib.sha256(sample[:-1]).hexdigest() for sample in samples]),
        mask_digests=np.array([hashlib.sha256(sample[-1]).hexdigest() for sample in samples]),
        targets=np.array([measure_targets(sample[-1]) for sample in samples]),
        shapes=np.array([sample.shape for sample in pixels]),
        pixels=np.concatenate([sample.ravel() for sample in pixels]),
    )


def _whiten_numbered(files, names, samples, most):
    """Make all targets of these samples 255 if the masks of the whole set number them. Return a sentence
    about it. most: the largest values of the files. Raises TpukitError for values that may be no numbers."""
    dark = [index for index, sample in enumerate(samples) if (brightest(sample[-1]) < 128).any()]
    are_several = len({value for value in most if 0 < value < 128}) > 1
    if not (dark or are_several) or not _are_numbered([*itertools.chain(*files.masks.values())]):
        return []
    for index in dark:
        _, mask = lists.find_pair(files, names[index])
        samples[index][-1:] = read_mask(mask, are_numbered=True)
    told = f"{len(dark)} of {len(samples)} masks number their targets"
    return [f"{told}, as no mask of the set says otherwise: every value but 0 is one"] if dark else []


def _read_pair(files, name, levels):
    """Return (the planes of an image and its mask, (C + 1, H, W) uint8; what is to be told of the image; the
    largest value of the mask's file). Raises TpukitError with what is wrong."""
    image, mask = lists.find_pair(files, name)
    with _explained("images", image):
        planes, odd = read_telling(image, levels)
    with _explained("masks", mask):
        values, is_lossy = _read_values(mask)
        plane = _levelled(values, is_lossy, are_numbered=False)
    sizes = [f"{width}x{height}" for _, height, width in (planes.shape, plane.shape)]
    if sizes[0] != sizes[1]:
        raise TpukitError(f"image is {sizes[0]}, mask is {sizes[1]}")
    return np.concatenate([planes, plane]), odd, float(values.max())


@contextlib.contextmanager
def _explained(kind, path):
    """Context manager: raise what is wrong with an image file as a TpukitError that names it."""
    try:
        yield
        if pictures.is_turned(path):
            raise TpukitError("its EXIF orientation turns it: save image and mask upright, without EXIF")
    except Exception as error:  # Pillow raises many types for a damaged file
        if of_disk := as_unreadable(error, path):
            raise of_disk from error
        raise TpukitError(f"{kind}/{path.name} is unreadable ({error})") from error


def read_image(path: Path, levels: pictures.Levels | None = None) -> np.ndarray:
    """Return the planes of an image file: uint8, (1, H, W) for grey images and (3, H, W) for colour.

    If colours differ by one level at most, it is a grey image that some software has converted and rounded
    (as three of IRSTD-1k's). Raises what `pictures.read` does."""
    return read_telling(path, levels)[0]


def read_telling(path: Path, levels: pictures.Levels | None = None) -> tuple[np.ndarray, pictures.Odd]:
    """Return (what `read_image` does, what is to be told of it)."""
    image, odd = pictures.read(path, levels)
    planes = np.stack([np.asarray(plane) for plane in image.split()])
    if np.ptp(planes, axis=0).max() <= 1:
        planes = np.array(image.convert("L"))[None]
    return planes, odd


def _require_one_colour(planes):
    """Raise TpukitError for a mask (H, W, 3) that has a colour, and more than that and black."""
    if np.ptp(planes, axis=2).max() < NOISE:
        return
    colours = np.unique(planes.astype(np.int32) @ (1 << 16, 1 << 8, 1))
    if len(colours) > 2:
        raise TpukitError(f"it has {len(colours)} colours: targets must be white, all else black")


def read_mask(path: Path, *, are_numbered: bool = False) -> np.ndarray:
    """Return the plane of a mask file, uint8 (1, H, W): a pixel of 128 or more is a target. If black and one
    other value are all that it has, the other becomes 255; where it is transparent, it is black.

    Args:
        path: an image file.
        are_numbered: of the set, as `_are_numbered` finds out: every value but 0 becomes 255.

    Raises:
        TpukitError: as of `pictures.opened`, and for several colours."""
    return _levelled(*_read_values(path), are_numbered=are_numbered)


def _levelled(values, is_lossy, *, are_numbered):
    found = np.unique(values)
    if not is_lossy and (are_numbered or len(found) == 2 and found[0] == 0):  # a JPEG's noise is no label
        values = np.where(values > 0, 255, 0)
    elif found[-1] > 255:
        values = np.ceil(values / 257)
    elif values.dtype.kind == "f" and found[-1] <= 1:
        values = values * 255
    elif is_lossy and found[-1] >= 128:
        values = np.where(values < NOISE, 0, values)
    return values.clip(0, 255).astype(np.uint8)[None]


def _read_values(path):
    """(values (H, W) as a mask's file has them, whether its format is lossy)"""
    with pictures.opened(path) as image:
        is_lossy = image.format in ("JPEG", "MPO")
        if (values := pictures.deep_values(image)) is not None:
            if np.isinf(values).any():
                raise TpukitError("it has infinite values: make targets 255 and all else 0")
            return np.nan_to_num(values), is_lossy
        planes = np.array(image.convert("L" if image.mode in ("1", "L", "LA") else "RGB"))
        if (opacity := pictures.find_opacity(image)) is not None:
            planes[opacity == 0] = 0
    if planes.ndim == 2:
        return planes, is_lossy
    if not is_lossy:
        _require_one_colour(planes)
    return planes.max(2), is_lossy  # red is as bright as white


def _are_numbered(paths):
    """Return whether a set's masks number their targets: whole numbers of which none is above 127; or, with
    one number in each region, which soft edges have not, n, 2n, 3n, ..., or of 16 bits none in the upper
    half. Raises TpukitError for such values that may be no numbers."""
    numbers, is_flat = set(), True
    for path in paths:
        values, is_lossy = _mask_values(path)
        found = np.unique(values)
        if is_lossy or (found != np.rint(found)).any():
            return False
        numbers |= {*found.tolist()} - {0}
        is_flat = is_flat and has_flat_regions(values)
        if max(numbers, default=0) >= 128 and not is_flat:
            return False
    steps = np.diff([0, *sorted(numbers)])
    are_few = max(numbers, default=128) < 128 or 255 < max(numbers, default=0) < 2**15
    if not are_few and not (len(steps) > 2 and len({*steps.tolist()}) == 1):
        return False
    require_instances((path.name, _mask_values(path)[0]) for path in paths)
    return True


def _mask_values(path):
    """What `_read_values` returns; no values for a file that whoever decodes it says the error of."""
    try:
        return _read_values(path)
    except Exception:
        return np.zeros((1, 1)), False
