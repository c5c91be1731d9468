"""MNIST in memory, and its files: read, downloaded, or synthetic. Shapes: B batch, N samples."""

from __future__ import annotations

import contextlib
import gzip
import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tpukit.host import arrays, downloads, files
from tpukit.host.errors import TpukitError
from tpukit.host.tables import printable
from tpukit.tasks import pictures

if TYPE_CHECKING:
    from torch import Tensor

SHA256 = {  # of the original files, unpacked
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
FOLDERS = ("", "raw", "MNIST/raw")  # where the original files may lie
# The seven segments of a synthetic digit, each from (y, x) to (y, x), and which of them make 0 to 9
SEGMENTS = dict(a=((0, 0), (0, 8)), b=((0, 8), (8, 8)), c=((8, 8), (16, 8)), d=((16, 0), (16, 8)))
SEGMENTS |= dict(e=((8, 0), (16, 0)), f=((0, 0), (8, 0)), g=((8, 0), (8, 8)))
SEGMENTS_OF = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgcde", "abc", "abcdefg", "abcdfg")


class Digits:
    """One split, in memory that all processes of a host share. A batch has image (B, 1, 28, 28) uint8 and
    label (B,) int64."""

    num_uniforms = 0  # random numbers for each sample: no augmentation

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self.images, self.labels = images, labels  # (N, 28, 28) and (N,), both uint8

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices, numbers=None) -> dict[str, np.ndarray]:
        return dict(image=self.images[indices][:, None], label=self.labels[indices].astype(np.int64))

    # With these four methods, which one may leave out, the digits stay on the device, and a batch is a list
    # of indices.

    def device_nbytes(self) -> int:
        return self.images.nbytes

    def device_arrays(self) -> dict[str, np.ndarray]:
        return dict(image=self.images[:, None], label=self.labels.astype(np.int64))

    def sample_parameters(self, indices, numbers=None) -> dict[str, np.ndarray]:
        return {}  # what a sample needs besides its index

    def compose(self, rows, parameters) -> dict[str, Tensor]:
        return rows


def read_split(folder: Path | str, split: str) -> Digits:
    """`train` or `test` from mnist.npz (x_train, y_train, x_test, y_test) or from the original IDX files,
    packed or not. Raises TpukitError for a folder without them, and for damaged ones."""
    folder = Path(folder)
    present = [folder / name for name in FOLDERS if (folder / name).is_dir()]
    key = [split, arrays.content_key(*present, like=("mnist.npz", "*-idx?-ubyte*"))]
    return Digits(**arrays.mapped(f"mnist-{split}", key, lambda: _read_files(folder, split)))


def _read_files(folder, split):
    archive, part = folder / "mnist.npz", "train" if split == "train" else "t10k"
    names = [f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"]
    source = archive if archive.is_file() else folder
    paths = [] if source is archive else [_find(folder, name) for name in names]
    try:
        if source is archive:
            with arrays.load(archive) as stored:
                images, labels = stored[f"x_{split}"], stored[f"y_{split}"]
        else:
            images, labels = map(_read_idx, paths)
    except Exception as error:  # numpy, zipfile and gzip raise many types for a damaged file
        raise TpukitError(f"{source} is damaged ({error}); copy or download it again") from error
    for name, values, shape, largest in (("images", images, (28, 28), 255), ("labels", labels, (), 9)):
        is_right = values.ndim > 0 and values.shape[1:] == shape and values.dtype.kind in "ui"
        if not is_right or (values.size and not 0 <= values.min() <= values.max() <= largest):
            expected = f"integers from 0 to {largest}, (N{', 28, 28' if shape else ''})"
            raise TpukitError(f"{source}: its {name} are {values.dtype} {values.shape}; expected {expected}")
    if len(images) != len(labels):
        raise TpukitError(f"{source} has {len(images)} images and {len(labels)} labels: each image needs one")
    return dict(images=images.astype(np.uint8), labels=labels.astype(np.uint8))


def _find(folder, name):
    for path in (folder / place / f"{name}{ending}" for place in FOLDERS for ending in ("", ".gz")):
        if path.is_file():
            return path
    raise TpukitError(
        f"no MNIST in {folder}: it should hold mnist.npz, or the IDX files that "
        f"torchvision.datasets.MNIST('{folder}', download=True) fetches"
    )


def _read_idx(path):
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    shape = np.frombuffer(data, ">u4", data[3], 4)  # after the magic number, which ends with their number
    return np.frombuffer(data, np.uint8, offset=4 + shape.nbytes).reshape(shape)


def read_digit(path: Path) -> np.ndarray:
    """An image file -> (28, 28) uint8, white on black, as MNIST is."""
    with pictures.opened(path) as image:
        digit = np.asarray(pictures.to_uint8(image).convert("L").resize((28, 28)))
    return 255 - digit if digit.mean() > 127 else digit


def download(folder: Path) -> None:
    """The four original files, by torchvision. Raises TpukitError where that fails, or they are not those."""
    try:
        from torchvision.datasets import MNIST
    except Exception as error:  # not installed, or made for another torch
        raise TpukitError(f"torchvision, which knows where it is, cannot be imported ({error})") from error
    url = f"{MNIST.mirrors[0]}{MNIST.resources[0][0]}"
    downloads.check_reachable(url)
    print(printable(f"dataset mnist: downloading 11 MB ({url} and three more)"))
    raw = folder / "MNIST" / "raw"
    try:
        with downloads.stall_timeout(), contextlib.redirect_stderr(io.StringIO()):  # four progress bars
            MNIST(folder, download=True)
        damaged = [name for name, known in SHA256.items() if files.sha256(raw / name) != known]
    except Exception as error:  # urllib, http, gzip and torchvision raise many types
        raise TpukitError(f"{url}: {' '.join(str(error).split())[:300]}") from error
    if damaged:
        raise TpukitError(f"{url}: not the original files, by the SHA-256 of {', '.join(damaged)}")
    for path in raw.glob("*.gz"):
        path.unlink()


def synthesize(folder: Path, size: int, rng: np.random.Generator) -> None:
    """mnist.npz with seven-segment figures, shifted, of random thickness, in noise."""
    images = np.zeros((size, 28, 28), np.float32)
    labels = rng.integers(0, 10, size)
    for image, label in zip(images, labels):
        top, left, thick = rng.integers(2, 8), rng.integers(4, 12), rng.integers(1, 4)
        for segment in SEGMENTS_OF[label]:
            (y0, x0), (y1, x1) = SEGMENTS[segment]
            image[top + y0 : top + y1 + thick, left + x0 : left + x1 + thick] = rng.uniform(150, 255)
    images = (images + rng.normal(0, 20, images.shape)).clip(0, 255).astype(np.uint8)
    labels = labels.astype(np.uint8)
    (x_train, x_test), (y_train, y_test) = (np.split(values, [size * 5 // 6]) for values in (images, labels))
    archive = folder / "mnist.npz"
    np.savez_compressed(archive, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
