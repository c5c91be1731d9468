"""Infrared small target sets on disk: images/, masks/ and lists of names, as IRSTD-1k, NUDT-SIRST and SIRST
have them.

A folder without lists, such as a user's own, is split by the names of its images.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from tpukit.host import arrays
from tpukit.host.errors import TpukitError
from tpukit.tasks import pictures
from tpukit.tasks.mshnet import augment
from tpukit.tasks.splits import hold_out

# Where the published sets keep their lists, relative to the set's folder.
LISTS = dict(
    train="trainval.txt train.txt img_idx/train*.txt 50_50/train.txt idx_427/trainval.txt idx_320/train.txt",
    test="test.txt img_idx/test*.txt 50_50/test.txt idx_427/test.txt idx_320/test.txt",
)
IMAGE_ENDINGS = (".png", ".bmp", ".jpg", ".jpeg", ".tif", ".tiff")
TEST_SHARE = 0.2  # of the images, without lists
VERSION = 6  # of what `_read_split` returns for the same files, which is cached


class InfraredSet:
    """One split of a set, decoded once to uint8, in memory that all processes of a host share.

    `batch(indices, numbers)` -> dict of image (B, C, S, S) uint8 and mask (B, 1, S, S) uint8, where S is
    crop_size with augmentation (numbers: (B, 6) in [0, 1)) and base_size without (numbers: None). C is 1
    where all images are grey, else 3. `compose` makes the same on a device, with the image in float32, not
    rounded to whole grey levels."""

    num_uniforms = augment.NUM_UNIFORMS

    def __init__(
        self, folder: Path, split: str, base_size: int = 256, crop_size: int = 256, skip_bad: bool = False
    ) -> None:
        self.base_size, self.crop_size = base_size, crop_size
        folder = Path(folder)
        listing, lines = read_list(folder, split)
        key = [VERSION, skip_bad, lines, arrays.content_key(folder / "images", folder / "masks")]
        decoded = arrays.mapped(
            f"{folder.name}-{split}", key, lambda: _read_split(folder, listing, lines, skip_bad)
        )
        self.notes = str(decoded["notes"])
        self.names = decoded["names"].tolist()
        self.masks_digest = str(decoded["masks_digest"])
        self.samples = _unpacked(decoded["pixels"], decoded["shapes"])  # image planes, then the mask
        self.masks = [sample[-1] for sample in self.samples]  # (H, W) each
        channels, self.height, self.width = decoded["shapes"].max(0).tolist()
        self.colours = channels - 1

    def __len__(self) -> int:
        return len(self.names)

    def batch(self, indices: Sequence[int], numbers: np.ndarray | None = None) -> dict[str, np.ndarray]:
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

    def device_arrays(self) -> dict[str, np.ndarray]:
        """Images of many sizes, each in the upper left corner of (N, C or 1, H, W) uint8."""
        pixels = np.zeros((len(self), self.colours + 1, self.height, self.width), np.uint8)
        for padded, sample in zip(pixels, self.samples):
            padded[:, : sample.shape[1], : sample.shape[2]] = sample
        return dict(image=pixels[:, :-1], mask=pixels[:, -1:])

    def sample_parameters(
        self, indices: Sequence[int], numbers: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        crops = self._crops(indices, numbers)
        samples = [augment.device_parameters(self.masks[i].shape[::-1], crop) for i, crop in crops]
        return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}

    def compose(self, rows: dict[str, Tensor], parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        image, mask = augment.on_device(rows["image"], rows["mask"], parameters)
        return dict(image=image, mask=mask)


def _unpacked(pixels, shapes):
    """Views of arrays that lie one after another in a vector."""
    parts = np.split(np.asarray(pixels), np.cumsum(shapes.prod(1))[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes)]


def read_list(folder: Path, split: str) -> tuple[Path, list[str]]:
    """(The file that lists a split's names, its lines). Without any list, (images/, the names that are chosen
    of it).

    Raises TpukitError naming the places that were searched."""
    lists = {
        name: [path for each in patterns.split() for path in sorted(folder.glob(each)) if path.is_file()]
        for name, patterns in LISTS.items()
    }
    if lists[split]:
        # Windows' editors write a mark first. In another encoding a name is shown with what is no UTF-8.
        return lists[split][0], lists[split][0].read_text("utf-8-sig", errors="replace").splitlines()
    images = folder / "images"
    if images.is_dir() and not any(lists.values()):
        return images, _split_by_name(list(_image_files(images).values()), split)
    here = ", ".join(sorted(path.name for path in folder.glob("*"))[:8]) or "nothing"
    raise TpukitError(
        f"no {split} list in {folder}, which should hold images/, masks/, and both trainval.txt and test.txt"
        f" or no lists: looked for {LISTS[split].replace(' ', ', ')}; found {here}"
    )


def _image_files(folder):
    """dict of name without ending -> path."""
    paths = sorted(folder.glob("*"), reverse=True)
    return {path.stem: path for path in paths if path.suffix.lower() in IMAGE_ENDINGS}


def _split_by_name(paths, split):
    """Return the names of a split's images."""
    if len(paths) < 2:
        raise TpukitError(
            f"images/ holds {len(paths)} images: it needs 2 or more, one to train on and one to test on"
        )
    tests = hold_out([path.stem for path in paths], TEST_SHARE)
    return sorted(path.name for path in paths if (path.stem in tests) == (split == "test"))


def _read_split(folder, listing, lines, skip_bad):
    """Return the arrays that `InfraredSet` keeps of a split. Decodes on all cores. listing, lines: of
    `read_list`."""
    entries = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if not entries:
        raise TpukitError(f"{listing} is empty: it should hold one image name per line")
    files = _image_files(folder / "images"), _image_files(folder / "masks")
    samples, bad = {}, []
    with concurrent.futures.ThreadPoolExecutor() as pool:
        futures = [pool.submit(_read_pair, *files, name) for _, name in entries]
    for (number, name), future in zip(entries, futures):
        try:
            samples[number, name] = future.result()
        except TpukitError as error:
            bad.append(f"  line {number}: {name}: {error}")
    notes = f"{len(bad)} of {len(entries)} entries of {listing} cannot be used:\n" if bad else ""
    notes += "\n".join(bad[:20] + ["  ..."] * (len(bad) > 20))
    if bad and not (skip_bad and samples):
        raise TpukitError(f"{notes}\nFix them, or leave them out with skip_bad=True (--skip-bad).")
    # Kept with the arrays: at the start of a training no pixels are read.
    masks = [[sample.shape[1:], hashlib.sha256(sample[-1]).hexdigest()] for sample in samples.values()]
    channels = max(map(len, samples.values()))
    pixels = [sample if len(sample) == channels else sample[[0, 0, 0, 1]] for sample in samples.values()]
    return dict(
        names=np.array([name for _, name in samples]),
        notes=np.array(notes),
        masks_digest=np.array(arrays.digest(masks)),
        shapes=np.array([sample.shape for sample in pixels]),
        pixels=np.concatenate([sample.ravel() for sample in pixels]),
    )


def _read_pair(images, masks, name):
    """The planes of an image and its mask, (C + 1, H, W), of a name in a list, which is looked up in these
    folders' files and so leads nowhere else. Raises TpukitError with what is wrong."""
    ending = Path(name).suffix
    stem = name.removesuffix(ending) if ending.lower() in IMAGE_ENDINGS else name
    paths = dict(images=images.get(stem), masks=masks.get(stem, masks.get(f"{stem}_pixels0")))
    planes = []
    for kind, path in paths.items():
        if path is None:
            raise TpukitError(f"no image {kind}/{stem}")
        try:
            planes.append(read_image(path, grey=kind == "masks"))
        except Exception as error:  # Pillow raises many types for a damaged file
            raise TpukitError(f"{kind}/{path.name} is unreadable ({error})") from error
    sizes = [f"{width}x{height}" for _, height, width in (each.shape for each in planes)]
    if sizes[0] != sizes[1]:
        raise TpukitError(f"image is {sizes[0]}, mask is {sizes[1]}")
    return np.concatenate(planes)


def read_image(path: Path, *, grey: bool = False) -> np.ndarray:
    """The planes of an image file: uint8, (1, H, W) for grey images and (3, H, W) for colour.

    Modes: L, RGB, P (palette), RGBA (alpha is dropped), LA, 1, and 16-bit grey, whose whole range 0..65535
    maps to 0..255. Colours that differ by one level at most are a grey image that some software has converted
    and rounded (three of IRSTD-1k's are such). Raises what `pictures.opened` does."""
    with pictures.opened(path) as image:
        image = pictures.to_uint8(image)
        image = image.convert("L" if grey or image.mode in ("1", "L", "LA") else "RGB")
        planes = np.stack([np.asarray(plane) for plane in image.split()])
        return planes if np.ptp(planes, axis=0).max() > 1 else np.array(image.convert("L"))[None]
