"""MSHNet: infrared small target detection (Liu et al., CVPR 2024).

torch is imported where it is used, so that the help of the command line need not wait for it.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from tpukit.data import arrays
from tpukit.data.arrays import Arrays
from tpukit.host.errors import TpukitError, check_installed
from tpukit.runs import weights
from tpukit.runs.settings import setting
from tpukit.training.task import Task
from tpukit_tasks import pictures
from tpukit_tasks.finite import require_finite
from tpukit_tasks.mshnet.synthetic import infrared_set
from tpukit_tasks.splits import find_copies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path
    from types import ModuleType

    from matplotlib.figure import Figure
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from tpukit.training.data import Batch
    from tpukit_tasks.mshnet.data import InfraredSet
    from tpukit_tasks.mshnet.overlay import Panels

check_installed("scipy")  # which the scores need: missed now, and not after an epoch

MAX_SIDE = 8192  # pixels, as of `pictures.MAX_PIXELS`


@dataclasses.dataclass(frozen=True, kw_only=True)
class MSHNet(Task):
    """Infrared small target detection with the multi-scale head network and the SLS loss; defaults are the
    published recipe."""

    name: ClassVar[str] = "mshnet"
    dataset: ClassVar[str] = "IRSTD-1k"
    dataset_parts: ClassVar[tuple[str, ...]] = ("images", "masks", "img_idx", "50_50", "idx_427", "idx_320")
    synthetic_size: ClassVar[int] = 40
    synthetic_size_accelerator: ClassVar[int] = 400
    synthesize = staticmethod(infrared_set)
    score: ClassVar[str] = "iou"
    score_names: ClassVar[dict[str, str]] = dict(
        iou="IoU",
        niou="nIoU, mean of the images' IoU",
        pd="Pd, share of targets found",
        fa="Fa, false pixels per pixel",
    )
    evaluation_keys: ClassVar[tuple[str, ...]] = ("mask",)
    export_output: ClassVar[str] = (
        "probability of a target (batch, 1, height, width); images RGB, or grey three times"
    )
    export_multiple: ClassVar[int] = 16

    network: Literal["published", "small"] = "published"
    """Channels of the network's stages: published, 4,065,513 parameters, or small, 174,537 parameters."""
    epochs: int = setting(400, free=True)
    """Passes over the training set."""
    batch_size: int = 4
    """Global batch size: images in one optimizer step, over all cores."""
    lr: float = 0.05
    """Learning rate of Adagrad."""
    base_size: int = 256
    """Images are evaluated at base_size x base_size; in training their long side is scaled to 0.5 to 2 times
    it."""
    crop_size: int = 256
    """Side of the training crops, a multiple of 16."""
    warm_epoch: int = 5
    """Last epoch of the warm-up phase (counted from 0), which trains one output with a plain IoU loss."""
    skip_bad: bool = False
    """Leave out list entries whose image or mask is missing or unreadable, instead of stopping."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("base_size", "crop_size"):
            if (size := getattr(self, name)) not in range(16, MAX_SIDE + 1, 16):
                needed = f"a multiple of 16 up to {MAX_SIDE}, as the network halves it four times"
                raise TpukitError(f"{name}={size} (IMAGE_SIZE in a notebook): it must be {needed}")

    def datasets(self) -> tuple[InfraredSet, InfraredSet]:
        from tpukit_tasks.mshnet import labels
        from tpukit_tasks.mshnet.data import InfraredSet

        assert self.dataset_dir is not None  # `check_dataset_dir` explained it
        settings = (self.base_size, self.crop_size, self.skip_bad)
        # With other levels than in training, these weights would see another image.
        train = InfraredSet(self.dataset_dir, "train", *settings, pictures.kept_levels(self.weights))
        test = InfraredSet(self.dataset_dir, "test", *settings, train.levels)
        labels.require_no_borders(train)
        labels.require_no_borders(test)
        labels.require_targets(train)
        copies = find_copies(train.digests, test.digests, test.names, "images")
        train.notices += labels.notices(train) + copies
        test.notices += labels.notices(test)
        return train, test

    def model(self) -> nn.Module:
        from torch.nn import init

        from tpukit_tasks.mshnet.model import CHANNELS, MSHNetModel

        model = MSHNetModel(CHANNELS[self.network])
        # The last convolution copies the output that the warm-up trains, the first of its four channels.
        # Random weights, as published, can saturate the sigmoid on the wrong side, so that it hardly learns.
        assert model.final.bias is not None
        init.dirac_(model.final.weight)
        init.zeros_(model.final.bias)
        return model

    def head(self, model: nn.Module) -> list[str]:
        """Name the outputs of all scales, too: the warm-up trains one of them, and not the last layer."""
        return [name for name, _ in model.named_parameters() if name.startswith(("output_", "final."))]

    def optimizer(self, model: nn.Module) -> Optimizer:
        from torch.optim import Adagrad

        return Adagrad(model.parameters(), lr=self.lr)

    def loss(self, model: nn.Module, batch: Batch, epoch: int | Tensor) -> Tensor:
        image = batch["image"]
        return network_for(image).loss(model, image, batch["mask"], warm_up=epoch <= self.warm_epoch)

    def predict(self, model: nn.Module, batch: Batch, epoch: int | Tensor | None = None) -> Tensor:
        image = batch["image"]
        warm_up = epoch is not None and epoch <= self.warm_epoch
        return network_for(image).predict(model, image, warm_up)  # (B, 1, H, W) logits

    def evaluate(self, predictions: Iterable[tuple[Tensor, Batch]], threshold: float = 0.5) -> dict:
        """Return the scores of `scores.summary`.

        Args:
            predictions: logits (B, 1, H, W), with their batches.
            threshold: probability, in (0, 1), above which a pixel belongs to a target."""
        from tpukit_tasks.mshnet import scores

        counts = []
        for logits, batch in predictions:
            labels = batch["mask"].numpy()[:, 0] >= 128
            rows = zip(logits.float().numpy()[:, 0], labels, batch["valid"])
            counts += [scores.count(image, label, threshold) for image, label, valid in rows if valid]
        return scores.summary(counts)

    @staticmethod
    def download(folder: Path) -> None:
        raise TpukitError("its authors share it on Google Drive and Baidu, see github.com/RuiZhang97/ISNet")

    def data_signature(self, data: InfraredSet) -> dict[str, str]:
        masks = [[mask.shape, digest] for mask, digest in zip(data.masks, data.mask_digests)]
        return {"image names": arrays.digest(data.names), "masks": arrays.digest(masks)}

    def metadata(self, data: InfraredSet) -> dict[str, str]:
        side = max(data.height, data.width)
        return dict(image_side=str(side), **pictures.format_levels(data.levels))

    def check_labels(self, data: InfraredSet) -> tuple[list[str], list[int]]:
        from tpukit_tasks.mshnet.labels import check

        return check(data)

    def example(self, count: int) -> Arrays:
        rng, size = np.random.default_rng(0), self.crop_size
        image = rng.integers(0, 256, (count, 1, size, size), np.uint8)
        return dict(image=image, mask=np.where(image > 250, 255, 0).astype(np.uint8))

    @staticmethod
    def verdict(scores: dict, last: dict) -> str:
        from tpukit_tasks.mshnet import shown

        return shown.verdict(scores, last)

    @staticmethod
    def figures(scores: dict) -> dict[str, Figure]:
        from tpukit_tasks.mshnet import shown

        return shown.figures(scores)

    def panels(self, batch: Arrays, prediction=None, threshold: float = 0.5) -> list[Panels]:
        """Show where the small targets of each image are, which were found, and a window large enough to see
        their pixels.

        Args:
            batch: `image`, and `mask` if it is known.
            prediction: logits (B, 1, H, W).
            threshold: as in `evaluate`."""
        from scipy import special

        from tpukit_tasks.mshnet import overlay

        masks = [np.asarray(batch["mask"])[:, 0] >= 128] if "mask" in batch else []
        if prediction is not None:
            masks.append(np.asarray(prediction)[:, 0] > special.logit(threshold))
        return [overlay.row(*sample) for sample in zip(np.asarray(batch["image"]), *masks)]

    def export_inputs(self, batch: Arrays) -> Arrays:
        image = np.asarray(batch["image"])
        return dict(image=image.repeat(3 // image.shape[1], 1))  # (B, 1 or 3, H, W) -> (B, 3, H, W)

    @property
    def export_preprocessing(self) -> str:
        levels = pictures.kept_levels(self.weights)
        return (
            f"{pictures.describe_opening(levels)} scale the long side to {self.base_size} pixels or, if that"
            f" is more, to {self._smallest_scale:g} times its length (bilinear); uint8, (3, rows, columns)"
        )

    def exported(self, model: nn.Module, inputs: Batch) -> Tensor:
        return self.predict(model, inputs).sigmoid()

    # A user's own images, of any size

    @functools.cached_property
    def _smallest_scale(self):
        """Return the factor by which the training run of `weights` shrank its largest images; a half, as for
        IRSTD-1k's, if they do not say."""
        side = weights.metadata(self.weights).get("image_side", "") if self.weights else ""
        known = re.fullmatch("[1-9][0-9]{0,4}", side)  # Python refuses to read long numbers
        return min(self.base_size / int(side), 1.0) if known else 0.5

    def read_files(self, paths: Iterable[Path], best: Path) -> tuple[Arrays, list[str]]:
        """Read images in their own size; several at once must have the same. Those that come with tpukit
        have their masks, too, so that `panels` tells hits from misses."""
        from tpukit.inference.trained import DEMO_FOLDER
        from tpukit_tasks.mshnet.data import read_mask, read_telling

        paths, levels = list(paths), pictures.kept_levels(best)
        images = pictures.read_images(paths, lambda path: read_telling(path, levels))
        images = [planes.repeat(3 // len(planes), 0) for planes in images]  # (3, H, W) each
        batch = dict(image=np.stack(images))
        if all(path.parent == DEMO_FOLDER for path in paths):
            batch["mask"] = np.stack([read_mask(DEMO_FOLDER / "masks" / path.name) for path in paths])
        return batch, [path.name for path in paths]

    def split(self, batch: Arrays) -> tuple[list[Arrays], Callable[[list], np.ndarray]]:
        from tpukit_tasks.mshnet import windows

        image = batch["image"][0]
        scaled = windows.scale(image, self.base_size, self._smallest_scale)
        rows, join = windows.split(scaled, self.base_size)
        return [dict(image=row) for row in rows], lambda parts: windows.resize(join(parts), image.shape[1:])

    def results(self, batch: Arrays, predictions, threshold: float = 0.5) -> list[dict]:
        """Return height, width, targets (how many), mask (H, W) bool in the image's own pixels, and boxes as
        of `scores.boxes`.

        Args:
            batch: not used.
            predictions: logits (N, 1, H, W).
            threshold: as in `evaluate`.

        Raises:
            TpukitError: for what is not finite."""
        from tpukit_tasks.mshnet.scores import boxes

        require_finite(predictions)
        found = [boxes(logits, threshold) for logits in np.asarray(predictions)[:, 0]]
        return [
            dict(height=mask.shape[0], width=mask.shape[1], targets=len(rows), mask=mask, boxes=rows)
            for mask, rows in found
        ]


def network_for(image: Tensor) -> ModuleType:
    """The module whose `loss` and `predict` compute on an image's device: the plain network, or on XLA its
    version for TPUs, with the same weights and results."""
    from tpukit.devices.tensors import is_on_xla

    if is_on_xla(image):
        from tpukit_tasks.mshnet.tpu import network
    else:
        from tpukit_tasks.mshnet import model as network
    return network
