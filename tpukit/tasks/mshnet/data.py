"""Infrared small target sets on disk: images/, masks/ and lists of names, as IRSTD-1k, NUDT-SIRST and SIRST
have them.

A folder without lists, such as a user's own, is split by the names of its images.
"""

from __future__ import annotations

import codecs
import collections
import concurrent.futures
import functools
import hashlib
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import ImageOps
from torch import Tensor

from tpukit.host.errors import TpukitError
from tpukit.tasks import arrays, pictures
from tpukit.tasks.mshnet import augment
from tpukit.tasks.mshnet.scores import brightest, regions
from tpukit.tasks.splits import files_below, hold_out, some, split_of

# Where the published sets keep their lists, relative to the set's folder.
LISTS = dict(
    train="trainval.txt train.txt img_idx/train*.txt 50_50/train.txt idx_427/trainval.txt idx_320/train.txt",
    test="test.txt img_idx/test*.txt 50_50/test.txt idx_427/test.txt idx_320/test.txt",
)
FOLDERS = dict(images=("images", "image", "imgs", "img"), masks=("masks", "mask", "labels", "label", "gt"))
# An image NAME, or NAME_img, has the mask NAME, NAME_mask, ...
IMAGE_SUFFIXES = ("", "_img", "_image")
MASK_SUFFIXES = ("", "_pixels0", "_mask", "_masks", "_gt", "_label")
TEST_SHARE = 0.2  # of the images, without lists
NOISE = 64  # of masks that are JPEG files: what is darker is not a label, and channels differ by less
VERSION = 10  # of what `_read_split` returns for the same files, which is cached


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
        listing, names = read_list(folder, split)
        images, masks = (find_folder(folder, kind) for kind in FOLDERS)
        files = _image_files(images), _image_files(masks)
        if files[0] and not files[1]:
            raise TpukitError(
                f"no masks in {masks}: there, each image needs one of its name and size, an image that is"
                " white where the targets are and black elsewhere; boxes in text files are not read"
            )
        self.levels, levels_note = levels, ""
        if levels is None:
            listed = [path for name in names.values() for path in _find_image(files[0], name)]
            self.levels, levels_note = pictures.find_levels(listed)
        contents = arrays.content_key(itertools.chain(*files[0].values(), *files[1].values()))
        key = [VERSION, skip_bad, names, self.levels, contents]
        decoded = arrays.mapped(
            f"{folder.name}-{split}", key, lambda: _read_split(files, listing, names, skip_bad, self.levels)
        )
        used = f"{split}: {len(decoded['names'])} names of {listing}"
        if listing == images and split == "test":
            used += f", which has {len(files[0])}"
        self.notes = "\n".join(filter(None, (used, levels_note, str(decoded["notes"]))))
        self.targets = decoded["targets"]  # (N, 5), see `_measure_targets`
        self.levels_used = decoded["levels_used"]  # (N,) how many values an image has
        self.digests = decoded["digests"].tolist()
        self.names = decoded["names"].tolist()
        self.mask_digests = decoded["mask_digests"].tolist()
        self.samples = _unpacked(decoded["pixels"], decoded["shapes"])  # image planes, then the mask
        self.masks = [sample[-1] for sample in self.samples]  # (H, W) each
        channels, self.height, self.width = decoded["shapes"].max(0).tolist()
        self.colours = channels - 1
        self.notices = _find_unused(folder, images, files) if split == "train" else []

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
        """Return images of many sizes, each in the upper left corner of (N, C or 1, H, W) uint8."""
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
    """Return views of arrays that lie one after another in a vector."""
    parts = np.split(np.asarray(pixels), np.cumsum(shapes.prod(1))[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes)]


def read_list(folder: Path, split: str) -> tuple[Path, dict[int, str]]:
    """Return the file that lists a split's names, and {number of the line: name}. Without any list, images/
    and the names that are chosen from it.

    Raises TpukitError naming the places that were searched."""
    lists = {name: _find_lists(folder, patterns) for name, patterns in LISTS.items()}
    if found := lists[split]:
        if len(found) > 1:
            names = ", ".join(path.name for path in found)
            raise TpukitError(
                f"{found[0].parent} has {len(found)} {split} lists ({names}): keep one there, move the others"
            )
        return found[0], _read_lines(found[0])
    images = find_folder(folder, "images")
    if images.is_dir() and not any(lists.values()):
        return images, _split_by_name(images, split)
    here = ", ".join(sorted(path.name for path in folder.glob("*"))[:8]) or "nothing"
    raise TpukitError(
        f"no {split} list in {folder}, which should hold images/ and masks/, and both trainval.txt and"
        " test.txt, or train/ and test/ in images/ and in masks/, or neither: looked for"
        f" {LISTS[split].replace(' ', ', ')}; found {here}"
    )


def _find_lists(folder, patterns):
    """Return the files of the first of these patterns that has any."""
    found = (sorted(filter(Path.is_file, folder.glob(pattern))) for pattern in patterns.split())
    return next(filter(None, found), [])


def _read_lines(path):
    """Return {number: name} of the lines of a list. Windows' editors write a mark first, in UTF-8 or UTF-16;
    in another encoding, a name is shown with what is not UTF-8."""
    content = path.read_bytes()
    is_utf16 = content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    lines = content.decode("utf-16" if is_utf16 else "utf-8-sig", errors="replace").splitlines()
    names = (line.strip().replace("\\", "/") for line in lines)  # as Windows writes paths
    return {number: name for number, name in enumerate(names, 1) if name}


def find_folder(folder: Path, kind: str) -> Path:
    """Return the folder of a set's images or masks: that of the usual name, or the one whose last word is
    such a name, as in IRSTD1k_Img. Raises TpukitError for several."""
    if (folder / kind).is_dir():
        return folder / kind
    last_words = {path: re.split("[-_ ]", path.name.lower())[-1] for path in sorted(folder.glob("*/"))}
    found = [path for path, word in last_words.items() if word in FOLDERS[kind]]
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise TpukitError(f"{folder} has {len(found)} folders of {kind} ({names}): call one of them {kind}")
    return found[0] if found else folder / kind


def _image_files(folder):
    """Return {name without ending, relative to the folder: paths}, several of an image in several formats."""
    files = {}
    for path in files_below(folder) if folder.is_dir() else []:
        if path.suffix.lower() in pictures.ENDINGS:
            files.setdefault(path.relative_to(folder).with_suffix("").as_posix(), []).append(path)
    return files


def _find(files, stems):
    """Return the paths of the first of these stems that exists."""
    return next((files[stem] for stem in stems if stem in files), [])


def _stem(name):
    ending = Path(name).suffix
    return name.removesuffix(ending) if ending.lower() in pictures.ENDINGS else name


def _find_image(images, name):
    """Return the paths of the image of a name in a list: if it has several formats, the one it names."""
    paths = _find(images, [_stem(name) + suffix for suffix in IMAGE_SUFFIXES])
    return [path for path in paths if path.name == Path(name).name] or paths


def _find_mask(masks, name):
    stem = _stem(name)
    bases = dict.fromkeys(stem.removesuffix(suffix) for suffix in IMAGE_SUFFIXES)
    return _find(masks, [base + suffix for base in bases for suffix in MASK_SUFFIXES])


def _find_unused(folder, images, files):
    """Return sentences about what is in a set's folders and in no split."""
    image_files, mask_files = files
    (train_list, train), (test_list, test) = (read_list(folder, split) for split in LISTS)
    listed = [*train.values(), *test.values()]
    used = {path for name in listed for path in _find_image(image_files, name)}
    masks = {path for stem in image_files for path in _find_mask(mask_files, stem)}
    lists = [path for path in sorted(train_list.parent.glob("*.txt")) if split_of(path.stem)]
    trained, tested = ({Path(name).parent.as_posix() for name in names.values()} for names in (train, test))
    is_listed = train_list.is_file()
    found = {
        "images are in no list, and not used": [
            path.name for path in itertools.chain(*image_files.values()) if path not in used
        ],
        "masks belong to no image, and are not used": [
            path.name for path in itertools.chain(*mask_files.values()) if path not in masks
        ],
        "lists are not used": [path.name for path in lists if path not in (train_list, test_list)],
        "names are in the lists more than once": [
            name for name, count in collections.Counter(listed).items() if count > 1
        ],
        "folders are in training and test: if these are sequences, their frames look alike, so put each"
        " sequence into one list, trainval.txt or test.txt": []
        if is_listed
        else sorted((trained & tested) - {"."}),
    }
    notices = [_counted(names, text) for text, names in found.items() if names]
    if left_out := pictures.left_out(files_below(images)):
        notices.append(left_out)
    return notices


def _counted(names, text):
    return f"{len(names)} {text} ({some(names)})"


def _split_by_name(images, split):
    """Return {number: name} of a split's images: by the folders train/ and test/ in images/, or a fifth of
    them all to test."""
    files = _image_files(images)
    if len(files) < 2:
        raise TpukitError(
            f"images/ holds {len(files)} images: it needs 2 or more, one to train on and one to test on"
        )
    of_folders = {stem: split_of(stem.rpartition("/")[0].split("/")[0]) for stem in files}
    if {"train"} < {*of_folders.values()} and all(of_folders.values()):
        tests = {stem for stem, of_folder in of_folders.items() if of_folder != "train"}
    else:
        tests = hold_out(files, TEST_SHARE)
    chosen = [stem for stem in files if (stem in tests) == (split == "test")]
    # A stem of several formats stays without an ending, and is refused.
    names = [stem + files[stem][0].suffix if len(files[stem]) == 1 else stem for stem in chosen]
    return dict(enumerate(sorted(names), 1))


def _read_split(files, listing, names, skip_bad, levels):
    """Return the arrays that `InfraredSet` keeps of a split. Decodes on all cores.

    files: of images and masks, by `_image_files`. listing, names: of `read_list`."""
    if not names:
        raise TpukitError(f"{listing} is empty: it should hold one image name per line")
    kept, samples, bad, stacks, turned = [], [], [], [], []
    with concurrent.futures.ThreadPoolExecutor() as pool:
        futures = [pool.submit(_read_pair, files, name, levels) for name in names.values()]
    for (number, name), future in zip(names.items(), futures):
        try:
            sample, is_stack, is_turned = future.result()
        except TpukitError as error:
            where = name if listing.is_dir() else f"line {number}: {name}"
            bad.append(f"  {where}: {error}")
            continue
        kept.append(name)
        samples.append(sample)
        stacks += [name] * is_stack
        turned += [name] * is_turned
    notes = [f"{len(bad)} of {len(names)} names of {listing} cannot be used:"] if bad else []
    notes += bad[:20] + ["  ..."] * (len(bad) > 20)
    if bad and not (skip_bad and samples):
        raise TpukitError("\n".join([*notes, "Fix them, or leave them out with skip_bad=True (--skip-bad)."]))
    if stacks:
        notes.append(_counted(stacks, "images have several pages or frames; only the first is used"))
    if turned:
        notes.append(_counted(turned, "images are turned upright by EXIF orientation: are their masks?"))
    # Kept with the arrays, so that the start of a training run reads no pixels.
    channels = max(map(len, samples))
    pixels = [sample if len(sample) == channels else sample[[0, 0, 0, 1]] for sample in samples]
    return dict(
        names=np.array(kept),
        notes=np.array("\n".join(notes)),
        digests=np.array([hashlib.sha256(sample[:-1]).hexdigest() for sample in samples]),
        mask_digests=np.array([hashlib.sha256(sample[-1]).hexdigest() for sample in samples]),
        targets=np.array([_measure_targets(sample[-1]) for sample in samples]),
        levels_used=np.array([np.count_nonzero(np.bincount(sample[:-1].ravel())) for sample in samples]),
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
    """Return (the planes of an image and its mask, (C + 1, H, W); whether the image has several pages;
    whether it was turned).

    The name is looked up among these files, and so leads nowhere else. Raises TpukitError with what is
    wrong."""
    images, masks = files
    image = _one(_find_image(images, name), images, "images", name)
    mask = _one(_find_mask(masks, name), masks, "masks", name)
    read_grey = functools.partial(read_image, levels=levels)
    planes = []
    for kind, path, read in (("images", image, read_grey), ("masks", mask, read_mask)):
        try:
            planes.append(read(path))
        except Exception as error:  # Pillow raises many types for a damaged file
            raise TpukitError(f"{kind}/{path.name} is unreadable ({error})") from error
    sizes = [f"{width}x{height}" for _, height, width in (each.shape for each in planes)]
    is_turned = pictures.is_turned(image)
    if sizes[0] != sizes[1]:
        turned = "; the image is turned by its EXIF orientation, so save both upright" if is_turned else ""
        raise TpukitError(f"image is {sizes[0]}, mask is {sizes[1]}{turned}")
    return np.concatenate(planes), pictures.is_stack(image), is_turned


def _one(paths, files, kind, name):
    """Return the only one of some paths. Raises TpukitError for several or none, naming what is there."""
    if len(paths) > 1:
        found = ", ".join(path.name for path in paths)
        raise TpukitError(f"{kind}/ has {found}: keep one of them")
    if not paths:
        numbered = [stem for stem in files if re.fullmatch(re.escape(_stem(name)) + r"\D*\d+", stem)]
        if kind == "masks" and numbered:
            raise TpukitError(
                f"masks/ has {', '.join(numbered[:3])}: put all targets of an image into one mask"
            )
        here = ", ".join(f"{stem}{files[stem][0].suffix}" for stem in list(files)[:3])
        raise TpukitError(f"no image {kind}/{_stem(name)}; {kind}/ has {here or 'no images'}")
    return paths[0]


def read_image(path: Path, levels: pictures.Levels | None = None) -> np.ndarray:
    """Return the planes of an image file: uint8, (1, H, W) for grey images and (3, H, W) for colour.

    Turned upright by its EXIF orientation. Modes: L, RGB, P (palette), RGBA (alpha is dropped), LA, 1, and
    grey of 16 or 32 bits, see `pictures.to_uint8`. If colours differ by one level at most, it is a grey image
    that some software has converted and rounded (as three of IRSTD-1k's). Raises what `pictures.opened` does.
    """
    with pictures.opened(path) as image:
        image = pictures.to_uint8(ImageOps.exif_transpose(image), levels)
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
    """Return the plane of a mask file, uint8 (1, H, W), upright as an image: a pixel of 128 or more is a
    target. If black and one other value are all that it has, the other becomes 255. Raises what
    `pictures.opened` does, and TpukitError for several colours."""
    with pictures.opened(path) as opened:
        is_lossy = opened.format in ("JPEG", "MPO")
        image = ImageOps.exif_transpose(opened)
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
