"""Infrared small target sets, such as IRSTD-1k, NUDT-SIRST, SIRST and a user's own: the pixels of images and
masks, decoded once."""

import concurrent.futures
import functools
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from tpukit.data import arrays, pictures
from tpukit.data.arrays import Arrays
from tpukit.host.errors import TpukitError, as_unreadable
from tpukit_tasks.mshnet import augment, lists
from tpukit_tasks.mshnet.scores import brightest, regions

NOISE = 64  # in masks that are JPEG files: what is darker is not a label, and channels differ by less
VERSION = 11  # raise it if `_read_split` returns something else for the same files, because that is cached


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
        self.targets = decoded["targets"]  # (N, 5), see `_measure_targets`
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
    kept, samples, bad = [], [], []
    with concurrent.futures.ThreadPoolExecutor() as pool:
        futures = [pool.submit(_read_pair, files, name, levels) for name in names.values()]
    for (number, name), future in zip(names.items(), futures):
        try:
            samples.append(future.result())
            kept.append(name)
        except TpukitError as error:
            where = name if listing.is_dir() else f"line {number}: {name}"
            bad.append(f"  {where}: {error}")
    notes = [f"{len(bad)} of {len(names)} names of {listing} cannot be used:"] if bad else []
    notes += bad[:20] + ["  ..."] * (len(bad) > 20)
    if bad and not (skip_bad and samples):
        raise TpukitError("\n".join([*notes, "Fix them, or leave them out with skip_bad=True (--skip-bad)."]))
    # Kept with the arrays, so that the start of a training run reads no pixels.
    channels = max(map(len, samples))
    pixels = [sample if len(sample) == channels else sample[[0, 0, 0, 1]] for sample in samples]
    return dict(
        names=np.array(kept),
        notes=np.array("\n".join(notes)),
        digests=np.array([hashlib.sha256(sample[:-1]).hexdigest() for sample in samples]),
        mask_digests=np.array([hashlib.sha256(sample[-1]).hexdigest() for sample in samples]),
        targets=np.array([_measure_targets(sample[-1]) for sample in samples]),
        shapes=np.array([sample.shape for sample in pixels]),
        pixels=np.concatenate([sample.ravel() for sample in pixels]),
    )


def _measure_targets(mask):
    """Return of a mask (H, W) uint8: its brightest value; the shares of the image that all its targets, the
    smallest and the largest one cover; how many regions are darker than a target. The last four are 0 without
    any."""
    areas = [area / mask.size for area, _ in regions(mask >= 128)]
    dark = np.count_nonzero(brightest(mask) < 128)
    return float(mask.max()), sum(areas), min(areas, default=0.0), max(areas, default=0.0), dark


def _read_pair(files, name, levels):
    """Return the planes of an image and its mask, (C + 1, H, W) uint8. Raises TpukitError with what is
    wrong."""
    image, mask = lists.find_pair(files, name)
    read_grey = functools.partial(read_image, levels=levels)
    planes = []
    for kind, path, read in (("images", image, read_grey), ("masks", mask, read_mask)):
        try:
            planes.append(read(path))
            if pictures.is_turned(path):
                raise TpukitError("its EXIF orientation turns it: save image and mask upright, without EXIF")
        except Exception as error:  # Pillow raises many types for a damaged file
            if of_disk := as_unreadable(error, path):
                raise of_disk from error
            raise TpukitError(f"{kind}/{path.name} is unreadable ({error})") from error
    sizes = [f"{width}x{height}" for _, height, width in (each.shape for each in planes)]
    if sizes[0] != sizes[1]:
        raise TpukitError(f"image is {sizes[0]}, mask is {sizes[1]}")
    return np.concatenate(planes)


def read_image(path: Path, levels: pictures.Levels | None = None) -> np.ndarray:
    """Return the planes of an image file: uint8, (1, H, W) for grey images and (3, H, W) for colour.

    Modes: L, RGB, P (palette), RGBA (alpha is dropped), LA, 1, and those of `pictures.upright_uint8`. If
    colours differ by one level at most, it is a grey image that some software has converted and rounded (as
    three of IRSTD-1k's). Raises what `pictures.opened` does."""
    with pictures.opened(path) as image:
        image = pictures.upright_uint8(image, levels)
        image = image.convert("L" if image.mode in ("1", "L", "LA") else "RGB")
        planes = np.stack([np.asarray(plane) for plane in image.split()])
        return planes if np.ptp(planes, axis=0).max() > 1 else np.array(image.convert("L"))[None]


def _require_one_colour(planes):
    """Raise TpukitError for a mask (H, W, 3) that has a colour, and more than that and black."""
    if np.ptp(planes, axis=2).max() < NOISE:
        return
    colours = np.unique(planes.astype(np.int32) @ (1 << 16, 1 << 8, 1))
    if len(colours) > 2:
        raise TpukitError(f"it has {len(colours)} colours: targets must be white, all else black")


def read_mask(path: Path) -> np.ndarray:
    """Return the plane of a mask file, uint8 (1, H, W): a pixel of 128 or more is a target. If black and one
    other value are all that it has, the other becomes 255. Raises what `pictures.opened` does, and
    TpukitError for several colours."""
    with pictures.opened(path) as image:
        is_lossy = image.format in ("JPEG", "MPO")
        if image.mode.startswith(("I", "F")):
            values = np.asarray(image).astype(np.float64)
        else:
            planes = np.asarray(image.convert("L" if image.mode in ("1", "L", "LA") else "RGB"))
            values = planes if planes.ndim == 2 else planes.max(2)  # red is as bright as white
            if planes.ndim == 3 and not is_lossy:
                _require_one_colour(planes)
    found = np.unique(values)
    if len(found) == 2 and found[0] == 0 and not is_lossy:  # the noise of a JPEG is not a label
        values = np.where(values == found[1], 255, 0)
    elif found[-1] > 255:
        values = values / 257
    elif values.dtype.kind == "f" and found[-1] <= 1:
        values = values * 255
    elif is_lossy and found[-1] >= 128:
        values = np.where(values < NOISE, 0, values)
    return np.nan_to_num(values).clip(0, 255).astype(np.uint8)[None]
