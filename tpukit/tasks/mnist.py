"""MNIST digits with a small convolutional network: the smallest complete task, the one to copy.

torch is imported where it is used, so that `tpukit train mnist --help` need not wait for it. Letters: B
batch."""

import contextlib
import dataclasses
import gzip
import hashlib
import io
from pathlib import Path
from typing import ClassVar

import numpy as np

from tpukit.host import arrays, downloads
from tpukit.host.errors import TpukitError
from tpukit.host.tables import printable
from tpukit.runs.run import setting
from tpukit.tasks import pictures
from tpukit.training.task import Task

SHA256 = {  # of the original files, unpacked
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}


class Digits:
    """One split, in memory that all processes of a host share.

    `batch` gives image (B, 1, 28, 28) uint8 and label (B,) int64."""

    num_uniforms = 0  # no augmentation

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.labels)

    def batch(self, indices, numbers=None):
        return dict(image=self.images[indices][:, None], label=self.labels[indices].astype(np.int64))

    # The same from arrays on the device; a dataset without these four methods is streamed

    def device_nbytes(self):
        return self.images.nbytes

    def device_arrays(self):
        return dict(image=self.images[:, None], label=self.labels.astype(np.int64))

    def sample_parameters(self, indices, numbers=None):
        return {}  # each sample needs its index only

    def compose(self, rows, parameters):
        return rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class MNIST(Task):
    """Handwritten digits (LeCun et al., 1998): over 98.5% of the test set after 4 epochs."""

    name: ClassVar[str] = "mnist"
    dataset: ClassVar[str] = "mnist"
    dataset_parts: ClassVar[tuple[str, ...]] = ("raw",)
    synthetic_size: ClassVar[int] = 6000
    synthetic_size_accelerator: ClassVar[int] = 12_000
    score: ClassVar[str] = "accuracy"
    score_names: ClassVar[dict[str, str]] = dict(accuracy="accuracy, share of test images")
    evaluation_keys: ClassVar[tuple[str, ...]] = ("label",)
    export_output: ClassVar[str] = (
        "the probability of each digit (batch, 10), for white digits on black, 0 to 255"
    )

    epochs: int = setting(4, free=True)
    """Passes over the training set."""
    batch_size: int = 128
    """Global batch size: images in one optimizer step, over all cores."""
    lr: float = 0.05
    """Learning rate of SGD with momentum 0.9."""
    num_workers: int = setting(0, free=True)
    """Threads that make the batches; 0 makes them between steps, where one takes 0.2 ms on a CPU."""
    channels: int = 32
    """Channels of the first convolution; the second has twice as many."""

    def __post_init__(self):
        super().__post_init__()
        self.require_at_least(1, "channels")

    def datasets(self):
        return read_split(Path(self.dataset_dir), "train"), read_split(Path(self.dataset_dir), "test")

    def data_signature(self, data):
        return {"labels": arrays.digest(data.labels.tolist())}

    def model(self):
        from torch import nn

        c = self.channels
        return nn.Sequential(
            nn.Conv2d(1, c, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),  # (B, c, 14, 14)
            nn.Conv2d(c, 2 * c, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),  # (B, 2c, 7, 7)
            nn.Flatten(), nn.Linear(2 * c * 49, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip

    def optimizer(self, model):
        from torch.optim import SGD

        return SGD(model.parameters(), lr=self.lr, momentum=0.9)

    def loss(self, model, batch, epoch):
        from torch.nn.functional import cross_entropy

        return cross_entropy(model(batch["image"].float() / 255).float(), batch["label"])

    def predict(self, model, batch, epoch=None):
        return model(batch["image"].float() / 255).argmax(1)  # (B,)

    def exported(self, model, inputs):
        return model(inputs["image"].float() / 255).float().softmax(1)  # (B, 10)

    def evaluate(self, predictions):
        """dict: accuracy in [0, 1], images."""
        correct = images = 0
        for digit, batch in predictions:
            correct += int(((digit == batch["label"]) & batch["valid"]).sum())
            images += int(batch["valid"].sum())
        return dict(accuracy=correct / max(images, 1), images=images)

    @staticmethod
    def download(folder):
        """The four original files, by torchvision."""
        try:
            from torchvision.datasets import MNIST as Published
        except Exception as error:  # not installed, or made for another torch
            raise TpukitError(
                f"torchvision, which knows where it is, cannot be imported ({error})"
            ) from error
        url = f"{Published.mirrors[0]}{Published.resources[0][0]}"
        downloads.check_reachable(url)
        print(printable(f"dataset mnist: downloading 11 MB ({url} and three more)"))
        try:
            with downloads.stall_timeout(), contextlib.redirect_stderr(io.StringIO()):  # four progress bars
                Published(folder, download=True)
            files = {name: folder / "MNIST" / "raw" / name for name in SHA256}
            found = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
        except Exception as error:  # urllib, http, gzip and torchvision raise many types
            raise TpukitError(f"{url}: {' '.join(str(error).split())[:300]}") from error
        if damaged := [name for name in SHA256 if found[name] != SHA256[name]]:
            raise TpukitError(f"{url}: not the original files, by the SHA-256 of {', '.join(damaged)}")
        for path in files.values():
            path.with_name(f"{path.name}.gz").unlink(missing_ok=True)

    @staticmethod
    def synthesize(folder, size, rng):
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
        cut = size * 5 // 6
        train = dict(x_train=images[:cut], y_train=labels[:cut])
        np.savez_compressed(folder / "mnist.npz", **train, x_test=images[cut:], y_test=labels[cut:])

    def example(self, count):
        rng = np.random.default_rng(0)
        return dict(
            image=rng.integers(0, 256, (count, 1, 28, 28), np.uint8), label=rng.integers(0, 10, count)
        )

    def panels(self, batch, prediction=None):
        images = np.asarray(batch["image"])
        titles = (
            [str(int(label)) for label in batch["label"]] if "label" in batch else ["your own"] * len(images)
        )
        if prediction is not None:
            titles = [f"{title}, predicted {int(digit)}" for title, digit in zip(titles, prediction)]
        return [[(title, image[0])] for title, image in zip(titles, images)]

    def results(self, batch, predictions):
        return [dict(digit=int(digit)) for digit in predictions]

    def read_files(self, paths, best):
        images = pictures.read_images(paths, read_digit)
        return dict(image=np.stack(images)[:, None]), [path.name for path in paths]


def read_digit(path):
    """An image file -> (28, 28) uint8, white on black, as MNIST is."""
    with pictures.opened(path) as image:
        digit = np.asarray(pictures.to_uint8(image).convert("L").resize((28, 28)))
    return 255 - digit if digit.mean() > 127 else digit


def read_split(folder, split):
    """`Digits` from mnist.npz (x_train, y_train, x_test, y_test) or from the original IDX files, packed or
    not."""
    key = [split, arrays.content_key(*_idx_folders(folder), like=("mnist.npz", "*-idx?-ubyte*"))]
    return Digits(**arrays.mapped(f"mnist-{split}", key, lambda: _read_arrays(folder, split)))


def _read_arrays(folder, split):
    archive = folder / "mnist.npz"
    try:
        if archive.is_file():
            with arrays.load(archive) as found:
                return _checked(archive, found[f"x_{split}"], found[f"y_{split}"])
        part = "train" if split == "train" else "t10k"
        images, labels = (
            _read_idx(folder, f"{part}-{kind}-ubyte", n)
            for kind, n in (("images-idx3", 3), ("labels-idx1", 1))
        )
        return _checked(folder, images, labels)
    except TpukitError:
        raise
    except Exception as error:  # numpy, zipfile and gzip raise many types for a damaged file
        raise TpukitError(
            f"{folder}: its MNIST files are damaged ({error}); copy or download them again"
        ) from error


def _checked(place, images, labels):
    """dict of images (N, 28, 28) and labels (N,), both uint8. Raises TpukitError for any others."""
    for what, values, shape, largest in (("images", images, (28, 28), 255), ("labels", labels, (), 9)):
        is_shape = values.ndim > 0 and values.shape[1:] == shape
        if (
            not is_shape
            or values.dtype.kind not in "ui"
            or (values.size and not 0 <= values.min() <= values.max() <= largest)
        ):
            wanted = f"whole numbers from 0 to {largest} in the shape ({', '.join(('N', *map(str, shape)))})"
            raise TpukitError(f"{place}: its {what} are {values.dtype} {values.shape}, and must be {wanted}")
    if len(images) != len(labels):
        raise TpukitError(f"{place} has {len(images)} images and {len(labels)} labels: each image needs one")
    return dict(images=images.astype(np.uint8), labels=labels.astype(np.uint8))


def _idx_folders(folder):
    return [place for place in (folder, folder / "raw", folder / "MNIST/raw") if place.is_dir()]


def _read_idx(folder, name, dimensions):
    for place in _idx_folders(folder):
        for path, opener in ((place / name, open), (place / f"{name}.gz", gzip.open)):
            if path.is_file():
                with opener(path, "rb") as file:
                    data = file.read()
                shape = np.frombuffer(data, ">u4", dimensions, 4)
                return np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
    raise TpukitError(
        f"no MNIST in {folder}: it should hold mnist.npz, or the IDX files that "
        f"torchvision.datasets.MNIST('{folder}', download=True) fetches"
    )


# The seven segments of a synthetic digit, each from (y, x) to (y, x), and which of them make the digits 0 to
# 9
SEGMENTS = dict(a=((0, 0), (0, 8)), b=((0, 8), (8, 8)), c=((8, 8), (16, 8)), d=((16, 0), (16, 8)))
SEGMENTS |= dict(e=((8, 0), (16, 0)), f=((0, 0), (8, 0)), g=((8, 0), (8, 8)))
SEGMENTS_OF = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgcde", "abc", "abcdefg", "abcdfg")
