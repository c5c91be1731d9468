"""Infrared small target sets on disk: images/, masks/ and lists of names, as IRSTD-1k, NUDT-SIRST and SIRST have them."""

import concurrent.futures
import math
from pathlib import Path

import numpy as np
from PIL import Image

from tpukit.host import arrays
from tpukit.host.errors import TpukitError
from tpukit.workloads.mshnet import augment

# Where the published sets keep their lists, relative to the set's folder.
LISTS = {
    "train": (
        "trainval.txt",
        "train.txt",
        "img_idx/train*.txt",
        "50_50/train.txt",
        "idx_427/trainval.txt",
        "idx_320/train.txt",
    ),
    "test": ("test.txt", "img_idx/test*.txt", "50_50/test.txt", "idx_427/test.txt", "idx_320/test.txt"),
}
IMAGE_ENDINGS = (".png", ".bmp", ".jpg", ".jpeg", ".tif", ".tiff")
FORMATS = ("PNG", "BMP", "JPEG", "TIFF")  # no others, whatever a file is called: Pillow hands an EPS to Ghostscript
MOST_PIXELS = 1 << 26  # 8192 x 8192; a small file can claim any size, and several are decoded at once
MASK_SUFFIXES = ("", "_pixels0")  # SIRST names its masks NAME_pixels0.png
READ = 3  # increase it whenever `_read_split` gives something else for the same files


class InfraredSet:
    """One split of a set, decoded once to uint8, in memory that all processes of a host share.

    `batch(indices, numbers)` -> dict of image (B, C, S, S) uint8 and mask (B, 1, S, S) uint8, where S is crop_size with
    augmentation (numbers: (B, 6) in [0, 1)) and base_size without (numbers: None). C is 1 where all images are grey, else 3.
    `compose` makes the same on a device, with the image in float32, not rounded to whole grey levels.
    """

    num_draws = augment.DRAWS

    def __init__(self, folder, split, *, base_size=256, crop_size=256, skip_bad=False):
        self.base_size, self.crop_size = base_size, crop_size
        folder = Path(folder)
        listing = find_list(folder, split)
        inside = [place for place in (folder / "images", folder / "masks") if place.is_dir()]
        key = [READ, skip_bad, _text(listing), arrays.content_key(*inside)]
        read = arrays.mapped(f"{folder.name}-{split}", key, lambda: _read_split(folder, listing, skip_bad))
        self.notes = f"{listing}: {read['notes']}" if read["notes"] else ""
        self.names = read["names"].tolist()
        self.images, self.masks = (_unpack(read[kind], read[f"{kind}_shapes"]) for kind in ("images", "masks"))
        shapes = [image.shape for image in self.images]
        self.colours = 3 if any(len(shape) > 2 for shape in shapes) else 1
        self.height, self.width = (max(shape[axis] for shape in shapes) for axis in (0, 1))

    def __len__(self):
        return len(self.names)

    def batch(self, indices, numbers=None):
        images, masks = [], []
        for index, sample in zip(indices, self._settings(indices, numbers)):
            image, mask = augment.on_host(self.images[index], self.masks[index], **sample)
            images.append(np.broadcast_to(image, (self.colours, *image.shape[1:])))
            masks.append(mask)
        return dict(image=np.stack(images), mask=np.stack(masks))

    def _settings(self, indices, numbers):
        """`augment.settings` for each sample."""
        for slot, index in enumerate(indices):
            height, width = self.images[index].shape[:2]
            if numbers is None:
                yield augment.settings((width, height), self.base_size)
            else:
                plan = augment.plan(numbers[slot], (width, height), self.base_size, self.crop_size)
                yield augment.settings((width, height), self.crop_size, **plan)

    # On the device

    def device_nbytes(self):
        return len(self) * (self.colours + 1) * self.height * self.width

    def device_arrays(self):
        made = [np.zeros((len(self), c, self.height, self.width), np.uint8) for c in (self.colours, 1)]
        for kind, into in zip((self.images, self.masks), made):
            for index, image in enumerate(kind):
                array = augment.planes(image)
                into[index, :, : array.shape[1], : array.shape[2]] = array
        return dict(zip(("image", "mask"), made))

    def sample_parameters(self, indices, numbers=None):
        samples = list(self._settings(indices, numbers))
        return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}

    def compose(self, rows, parameters):
        return dict(zip(("image", "mask"), augment.on_device(rows["image"], rows["mask"], **parameters)))


def find_list(folder, split):
    """The file that lists a split's names. Raises TpukitError naming the places that were looked at."""
    if not folder.is_dir():
        raise TpukitError(f"dataset folder {folder} does not exist")
    for pattern in LISTS[split]:
        if found := sorted(folder.glob(pattern)):
            return found[0]
    here = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
    raise TpukitError(
        f"no {split} list in {folder}: looked for {', '.join(LISTS[split])}. The folder holds {here}. "
        "It should hold images/, masks/, trainval.txt and test.txt."
    )


def _text(listing):
    try:
        return listing.read_text("utf-8-sig")  # Windows' editors put a mark before the first name
    except UnicodeDecodeError as error:
        raise TpukitError(f"{listing} is no text in UTF-8 ({error.reason} at byte {error.start}): save it as UTF-8") from error


def _pack(name, images):
    """Images of any sizes as one vector of pixels and their shapes (N, 3), the last one 0 for grey images."""
    shapes = [(*image.shape, 0)[:3] for image in images]
    return {name: np.concatenate([image.reshape(-1) for image in images]), f"{name}_shapes": np.array(shapes)}


def _unpack(pixels, shapes):
    """The images that `_pack` packed, as views."""
    pixels, shapes = np.asarray(pixels), [tuple(int(n) for n in shape if n) for shape in shapes]
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    return [pixels[end - math.prod(shape) : end].reshape(shape) for end, shape in zip(ends, shapes)]


def _read_split(folder, listing, skip_bad):
    """Names and pixels of a split as a dict of arrays, and `notes` about entries that were left out. Decodes on all cores."""
    from tqdm.auto import tqdm

    entries = [(number, line.strip()) for number, line in enumerate(_text(listing).splitlines(), 1) if line.strip()]
    if not entries:
        raise TpukitError(f"{listing} is empty: it should hold one image name a line")
    names, images, masks, bad, notes = [], [], [], [], ""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        read = pool.map(lambda e: _read_pair(folder, e[1]), entries)
        shown = tqdm(read, desc=f"decoding {listing.stem}", total=len(entries), unit="image", disable=len(entries) < 200)
        for (number, name), (image, mask, problem) in zip(entries, shown):
            if problem:
                bad.append(f"  line {number}: {name}: {problem}")
            else:
                names.append(name), images.append(image), masks.append(mask)
    if bad:
        shown = "\n".join(bad[:20] + [f"  ... and {len(bad) - 20} more"] * (len(bad) > 20))
        if not skip_bad:
            raise TpukitError(
                f"{len(bad)} of {len(entries)} entries of {listing} cannot be used:\n{shown}\n"
                "Fix them, or leave them out with skip_bad=True (--skip-bad)."
            )
        notes = f"left out {len(bad)} of {len(entries)} entries:\n{shown}"
        if not names:
            raise TpukitError(f"{listing}: no entry is left")
    return dict(names=np.array(names), notes=np.array(notes), **_pack("images", images), **_pack("masks", masks))


def _read_pair(folder, name):
    """(image, mask, None), or (None, None, what is wrong)."""
    stem = name.rsplit(".", 1)[0] if Path(name).suffix.lower() in IMAGE_ENDINGS else name
    image_path = _first_file(folder / "images", stem, ("",))
    mask_path = _first_file(folder / "masks", stem, MASK_SUFFIXES)
    if image_path is None or mask_path is None:
        return None, None, f"no {'image' if image_path is None else 'mask'} in {'images' if image_path is None else 'masks'}/"
    pair = []
    for path in (image_path, mask_path):
        try:
            pair.append(read_image(path, grey=path is mask_path))
        except Exception as error:  # Pillow raises many types for a damaged file
            return None, None, f"{path.relative_to(folder)} is unreadable ({error})"
    image, mask = pair
    if image.shape[:2] != mask.shape[:2]:
        sizes = [f"{p.shape[1]}x{p.shape[0]}" for p in pair]
        return None, None, f"image is {sizes[0]}, mask is {sizes[1]}"
    return image, mask, None


def _first_file(folder, stem, suffixes):
    for suffix in suffixes:
        for ending in IMAGE_ENDINGS:
            path = folder / f"{stem}{suffix}{ending}"
            if path.is_file():
                return path
    return None


def read_image(path, *, grey=False):
    """An image file -> uint8, (H, W) for grey images and (H, W, 3) for colour.

    Modes: L, RGB, P (palette), RGBA (alpha is dropped), LA, 1, and 16-bit grey, whose whole range 0..65535 maps to 0..255.
    Colours that differ by one level at most are a grey image that some program has converted and rounded (three of IRSTD-1k's
    are such). Raises whatever Pillow does, and TpukitError for more than `MOST_PIXELS`, before anything is decoded.
    """
    with Image.open(path, formats=FORMATS) as image:
        if image.width * image.height > MOST_PIXELS:
            raise TpukitError(f"it claims {image.width}x{image.height} pixels, more than {MOST_PIXELS:,}")
        if image.mode.startswith("I"):  # I;16, I;16B, I: 16-bit files
            wide = np.asarray(image).astype(np.float64)
            return np.rint(wide.clip(0, 65535) / 257).astype(np.uint8)
        if grey or image.mode in ("1", "L", "LA"):
            return np.array(image.convert("L"))
        image = image.convert("RGB")
        colours = np.array(image)
        return np.array(image.convert("L")) if np.ptp(colours, axis=2).max() <= 1 else colours
