"""MNIST in memory, and its files: read, downloaded, or synthetic. Shapes: B batch, N samples."""

from __future__ import annotations

import contextlib
import gzip
import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tpukit.data import arrays
from tpukit.host.errors import TpukitError, explained, reading
from tpukit.host.text import printable
from tpukit_tasks import downloads, pictures

if TYPE_CHECKING:
    from torch import Tensor

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
    archive, part = Path(folder) / "mnist.npz", dict(train="train", test="t10k")[split]
    names = (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte")
    paths = [archive] if archive.is_file() else [_find(archive.parent, name) for name in names]
    key = [split, arrays.state_of(paths)]
    return Digits(**arrays.mapped(f"mnist-{split}", key, lambda: _read_files(paths, split)))


def _find(folder, name):
    """Return an IDX file, wherever torchvision or a person has put it below a folder."""
    for path in sorted([*folder.rglob(name), *folder.rglob(f"{name}.gz")]):
        if path.is_file():
            return path
    raise TpukitError(
        f"no MNIST in {folder}: it should hold mnist.npz, or the IDX files that "
        f"torchvision.datasets.MNIST('{folder}', download=True) fetches"
    )


def _read_files(paths, split):
    with reading(paths[0], f"{paths[0]} is damaged, so copy or download it again", TpukitError):
        if len(paths) == 1:
            with arrays.load(paths[0]) as stored:
                images, labels = stored[f"x_{split}"], stored[f"y_{split}"]
        else:
            images, labels = map(_read_idx, paths)
    is_right = labels.ndim == 1 and images.shape == (len(labels), 28, 28)
    for values, largest in ((images, 255), (labels, 9)):
        is_right = is_right and values.dtype.kind in "ui"
        is_right = is_right and 0 <= values.min(initial=0) <= values.max(initial=0) <= largest
    if not is_right:
        found = f"images {images.dtype} {images.shape}, labels {labels.dtype} {labels.shape}"
        expected = "integers, (N, 28, 28) from 0 to 255 and (N,) from 0 to 9"
        raise TpukitError(f"{paths[0]}: {found}; expected {expected}")
    return dict(images=images.astype(np.uint8), labels=labels.astype(np.uint8))


def _read_idx(path):
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    shape = np.frombuffer(data, ">u4", data[3], 4)  # after the magic number, which ends with their number
    return np.frombuffer(data, np.uint8, offset=4 + shape.nbytes).reshape(shape)


def read_digit(path: Path) -> np.ndarray:
    """An image file -> (28, 28) uint8, upright, white on black, as MNIST is."""
    digit = np.empty(0)
    for paper in (255, 0):  # a white one that is drawn on nothing is seen on black alone
        image, _ = pictures.read(path, colour=paper)
        digit = np.asarray(image.convert("L").resize((28, 28)))
        if np.ptp(digit):
            break
    return 255 - digit if digit.mean() > 127 else digit


def download(folder: Path) -> None:
    """Download the four original files by torchvision, which verifies their checksums. Raises TpukitError if
    that fails."""
    with explained("torchvision, which knows where it is, cannot be imported"):
        from torchvision.datasets import MNIST
    url = f"{MNIST.mirrors[0]}{MNIST.resources[0][0]}"
    downloads.check_reachable(url)
    print(printable(f"dataset mnist: downloading 11 MB ({url} and three more)"))
    hidden = contextlib.redirect_stderr(io.StringIO())  # four progress bars
    with explained(url), downloads.stall_timeout(), hidden:
        MNIST(folder, download=True)
    for path in folder.glob("MNIST/raw/*.gz"):
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
    np.savez_compressed(folder / "mnist.npz", x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
