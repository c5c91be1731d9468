"""MNIST digits with a small convolutional network: the smallest complete task, the one to copy. The dataset
and its files are in `mnist_data.py`.

torch is imported where it is used, so that `tpukit train mnist --help` need not wait for it. Shapes: B
batch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from tpukit.data import arrays
from tpukit.runs.settings import require_at_least, setting
from tpukit.training.task import Task
from tpukit_tasks import mnist_data, pictures
from tpukit_tasks.mnist_data import Digits, read_split

if TYPE_CHECKING:
    from torch import Tensor, nn, optim


@dataclasses.dataclass(frozen=True, kw_only=True)
class MNIST(Task):
    """Handwritten digits (LeCun et al., 1998): over 98.5% of the test set after 4 epochs."""

    name: ClassVar[str] = "mnist"
    dataset: ClassVar[str] = "mnist"
    synthetic_size: ClassVar[int] = 6000
    synthetic_size_accelerator: ClassVar[int] = 12_000
    score: ClassVar[str] = "accuracy"
    score_names: ClassVar[dict[str, str]] = dict(accuracy="accuracy, share of test images")
    evaluation_keys: ClassVar[tuple[str, ...]] = ("label",)
    export_output: ClassVar[str] = (
        "the probability of each digit (batch, 10); images are white on black, 0..255"
    )

    epochs: int = setting(4, free=True)
    """Passes over the training set."""
    batch_size: int = 128
    """Global batch size: images in one optimizer step, over all cores."""
    lr: float = 0.05
    """Learning rate of SGD with momentum 0.9."""
    num_workers: int = setting(0, free=True)
    """Threads that make the batches; 0 prepares batches between steps (0.2 ms each on a CPU)."""
    channels: int = 32
    """Channels of the first convolution; the second has twice as many."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, 1, "channels")

    # What every task must have

    def datasets(self) -> tuple[Digits, Digits]:
        folder = self.dataset_dir
        assert folder is not None  # `check_dataset_dir` explained it
        return read_split(folder, "train"), read_split(folder, "test")

    def model(self) -> nn.Module:
        from torch import nn

        c = self.channels
        return nn.Sequential(
            nn.Conv2d(1, c, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),  # (B, c, 14, 14)
            nn.Conv2d(c, 2 * c, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),  # (B, 2c, 7, 7)
            nn.Flatten(), nn.Linear(2 * c * 49, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip

    def optimizer(self, model: nn.Module) -> optim.Optimizer:
        from torch.optim import SGD

        return SGD(model.parameters(), lr=self.lr, momentum=0.9)

    def loss(self, model: nn.Module, batch: dict[str, Tensor], epoch) -> Tensor:
        from torch.nn.functional import cross_entropy

        return cross_entropy(model(batch["image"].float() / 255).float(), batch["label"])

    def predict(self, model: nn.Module, batch: dict[str, Tensor], epoch=None) -> Tensor:
        logits = model(batch["image"].float() / 255)  # (B, 10)
        # -1, no digit: the largest of what is not a number would be one of them, and might be right.
        return logits.argmax(1).where(logits.isfinite().all(1), -1)  # (B,)

    def evaluate(self, predictions) -> dict[str, float]:
        """Return accuracy, in [0, 1], and images, how many were scored."""
        correct = images = 0
        for digit, batch in predictions:
            correct += int(((digit == batch["label"]) & batch["valid"]).sum())
            images += int(batch["valid"].sum())
        return dict(accuracy=correct / max(images, 1), images=images)

    # What a task may have: checks of a resumed run, data if there is none, pictures, a user's own files

    def data_signature(self, data: Digits) -> dict[str, str]:
        return {"labels": arrays.digest(data.labels.tolist())}

    download = staticmethod(mnist_data.download)
    synthesize = staticmethod(mnist_data.synthesize)

    def example(self, count: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(0)
        image = rng.integers(0, 256, (count, 1, 28, 28), np.uint8)
        return dict(image=image, label=rng.integers(0, 10, count))

    def exported(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        return model(inputs["image"].float() / 255).float().softmax(1)  # (B, 10)

    def read_files(self, paths, best) -> tuple[dict[str, np.ndarray], list[str]]:
        read = pictures.read_images(paths, lambda path: (mnist_data.read_digit(path), pictures.Odd()))
        return dict(image=np.stack(read)[:, None]), [path.name for path in paths]  # (N, 1, 28, 28)

    def results(self, batch, predictions) -> list[dict[str, int]]:
        return [dict(digit=int(digit)) for digit in predictions]
