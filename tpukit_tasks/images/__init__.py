"""Image classification on your own images, by any network of timm or torchvision.

torch is imported where it is used, so that the help of the command line need not wait for it. Shapes: B
batch, S side of the images, K classes."""

import dataclasses
import functools
import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np

from tpukit.data import arrays
from tpukit.host import files
from tpukit.host.errors import TpukitError, explained, reading
from tpukit.host.spreadsheets import as_csv
from tpukit.host.text import say
from tpukit.runs import weights
from tpukit.runs.settings import require_at_least, require_shares, setting
from tpukit.training.task import Task
from tpukit_tasks import pictures
from tpukit_tasks.finite import require_finite
from tpukit_tasks.images import augment, models
from tpukit_tasks.images.data import ImageSet, find_copies, read_telling
from tpukit_tasks.images.samples import find_samples
from tpukit_tasks.images.synthetic import shapes_set
from tpukit_tasks.names import composed
from tpukit_tasks.splits import SPLITS, some

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor
    from torch.nn import Module

    from tpukit.host.environment import Environment
    from tpukit.host.tables import Table

CONFUSION_CLASSES = 30  # up to so many, the confusion matrix is among the scores of every evaluation
IMAGENET_CLASSES = 1000
REPLACED = "to train a last layer for these, give the file as pretrained=PATH (--pretrained PATH)"
NOT_FINITE = "not finite"  # in the place of a class: the network gave NaN or infinity
WORST = 16  # images that are kept to be shown: mistakes first, the largest loss first
MOST_NAMED = 20  # classes in a sentence about their order
FEW = 10  # images of a class, below which `check_labels` warns
# Defaults of a training run; a small set gets more epochs, so that there are STEPS, and smaller batches.
EPOCHS, BATCH_SIZE, STEPS = 10, 64, 200


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageClassifier(Task):
    """Image classification on your own images, with a network of timm (or torchvision), fine-tuned or from
    scratch.

    dataset_dir: a folder of class folders, with train/ and test/ (or val/) above them or not; or a CSV file
    with paths and labels, or its folder."""

    name: ClassVar[str] = "images"
    dataset: ClassVar[str] = "my-images"
    needs_own_data: ClassVar[bool] = True
    dataset_parts: ClassVar[tuple[str, ...]] = tuple(SPLITS)
    synthetic_size: ClassVar[int] = 480
    synthetic_size_accelerator: ClassVar[int] = 2400
    synthesize = staticmethod(shapes_set)
    score: ClassVar[str] = "accuracy"
    score_names: ClassVar[dict[str, str]] = dict(accuracy="accuracy, share of test images")
    evaluation_keys: ClassVar[tuple[str, ...]] = ("label",)
    saved_title: ClassVar[str] = "Test images, the hardest first"
    export_output: ClassVar[str] = "one score for each class, before softmax, in the order of `classes`"

    epochs: int | None = setting(None, free=True)  # pyright: ignore[reportIncompatibleVariableOverride]
    """Passes over the training set. None: 10, or more for a small set, to make 200 steps."""
    batch_size: int | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Global batch size: images in one optimizer step, over all cores. None: about a sixteenth of the
    training images, from 8 to 64."""
    lr: float = 1e-3
    """Learning rate of AdamW. Use a third of it for a large pretrained network."""
    weight_decay: float = 0.05
    """Weight decay of AdamW; not for biases and norms."""
    model_name: str = "resnet18"
    """A classification model of timm, or of torchvision if timm is not installed."""
    pretrained: str = "auto"
    """Start from pretrained weights: yes, no, auto (if they are found, else random ones) or a file. They come
    from timm's cache or the internet. The last layer is replaced if its classes differ."""
    image_size: int | None = None
    """Side of the images in pixels, as the network gets them: the short side is scaled to it and the middle
    kept. None: as in the run that `weights` come from, else the network's own."""
    images_dir: Path | None = setting(None, free=True)
    """Folder that the paths in a CSV are relative to, and may not leave; None: the folder of the CSV."""
    skip_bad: bool = False
    """Leave out images that are missing or cannot be read, instead of stopping."""
    flip: float = 0.5
    """Share of the training images that are mirrored, left to right. 0 for digits and letters."""
    crop: float = 0.5
    """Smallest share of an image's area that a random crop keeps, enlarged to the whole size; 1: no crops."""
    colour: float = 0.2
    """Brightness, contrast and saturation of training images each change by up to this share; 0: none."""
    label_smoothing: float = 0.1
    """Share of each label that is spread evenly over all classes."""

    def __post_init__(self):
        super().__post_init__()
        require_at_least(self, 1, "image_size")
        require_at_least(self, 0, "weight_decay")
        require_shares(self, "flip", "crop", "colour", "label_smoothing")
        if self.crop == 0:
            raise TpukitError("crop=0: it must be more than 0")

    def choose_settings(self, env: "Environment") -> Self:
        """Return the task with a batch size and epochs for its dataset; without one, for a large one.

        Args:
            env: this machine, on which none of this depends.

        Returns:
            The task, which keeps what it was given."""
        batch_size, epochs = self.batch_size, self.epochs
        if batch_size is not None and epochs is not None:
            return self
        count = BATCH_SIZE * STEPS
        if self.dataset_dir is not None:
            count = len(self._find_samples(is_new_search=True).samples["train"])
        if batch_size is None:
            sixteenth = 2 ** round(math.log2(count / 16))
            batch_size = min(BATCH_SIZE, max(8, sixteenth), max(2, count // 2))
        if epochs is None:
            epochs = max(EPOCHS, math.ceil(STEPS / max(count // batch_size, 1)))
        return dataclasses.replace(self, batch_size=batch_size, epochs=epochs)

    # Data

    def datasets(self) -> tuple[ImageSet, ImageSet]:
        found = self._find_samples()
        pretrained, weights_note = self._find_pretrained()
        is_random = pretrained is None and not self.weights
        levels, levels_note = self._levels(found)
        classes = _listed(found.classes)
        notes = [classes, levels_note] if is_random else [weights_note, classes, levels_note]
        draw = functools.partial(augment.draw, **self._augmentation)
        data = self._open(found, levels, "train", draw=draw, notes="\n".join(filter(None, notes)))
        test = self._open(found, levels, "val", "test")
        data.notices += found.notices + find_copies(data, test) + self._unnamed_classes(found)
        if is_random:
            data.notices.append(f"{weights_note}. To train from these, a few hundred photos are not enough")
        return data, test

    def test_set(self) -> ImageSet:
        """Open test/ if there is one; of a set with a val/ alone, that."""
        found = self._find_samples()
        levels, _ = self._levels(found)
        test = self._open(found, levels, "test", "val")
        test.notices += found.notices + self._unnamed_classes(found)
        return test

    def _unnamed_classes(self, found):
        """A sentence if the file of the weights does not say which of its outputs is which class."""
        is_file = self.weights is None and self.pretrained not in ("auto", "yes", "no")
        file = Path(self.pretrained) if is_file else self.weights
        if file is None or "classes" in weights.metadata(file):
            return []
        order, natural = found.classes, sorted(found.classes, key=_natural)
        listed = ", ".join(order[:MOST_NAMED]) + (", ..." if len(order) > MOST_NAMED else "")
        kept = f"; a last layer of {len(order)} outputs is kept" if is_file else ""
        told = (
            f"{file} does not name its classes: taken as {listed} (numbers by value, else alphabetical){kept}"
        )
        if natural != order:
            told += f". timm's own training has the order {', '.join(natural[:MOST_NAMED])}"
        return [told + ". If it was trained in another order, rename the folders so that they sort in it"]

    def _open(self, found, levels, *splits, **options):
        split = next(name for name in splits if name in found.samples)
        options |= dict(split=split, size=self._size(), skip_bad=self.skip_bad, levels=levels)
        return ImageSet(found.classes, found.samples[split], **options)

    def _levels(self, found):
        """(`pictures.Levels` or None, a sentence for the log). By other levels than in training, an image
        would be another for these weights."""
        if kept := pictures.kept_levels(self.weights):
            return kept, ""
        return pictures.find_levels([sample.path for sample in found.samples["train"]])

    def _find_samples(self, *, is_new_search=False):
        assert self.dataset_dir is not None  # see `check_dataset_dir`
        found = find_samples(self.dataset_dir, self.images_dir, is_new_search=is_new_search)
        if (kept := self._classes_of_weights()) and kept != found.classes:
            raise TpukitError(
                f"weights {self.weights} were trained for {_listed(kept)}, {self.dataset_dir} has"
                f" {_listed(found.classes)}: {REPLACED}"
            )
        count = None if kept else self._outputs_of_weights
        if count not in (None, len(found.classes)):
            raise TpukitError(
                f"weights {self.weights} are of a network of {count} classes, {self.dataset_dir} has"
                f" {_listed(found.classes)}: give a dataset of those {count} classes; or {REPLACED}"
            )
        return found

    @functools.cached_property
    def _outputs_of_weights(self):
        """How many classes the file of the weights has; None without one, or if it is of another network."""
        return models.outputs(self._network(), self.weights) if self.weights else None

    @functools.cached_property
    def class_names(self) -> list[str]:
        """Names of the classes: of the run that `weights` is from, or of the dataset; without both numbers,
        as many as the file has outputs, or ImageNet has classes."""
        if kept := self._classes_of_weights():
            return kept
        if self.dataset_dir is not None:
            return self._find_samples().classes
        count = self._outputs_of_weights
        names = [f"class {number}" for number in range(count or IMAGENET_CLASSES)]
        if count:
            say(
                f"{self.weights} does not name its classes: they are called {names[0]} to {names[-1]}, by the"
                " numbers of its outputs"
            )
        return names

    def _classes_of_weights(self):
        """Names of the classes that a run kept with its weights; None for a file from elsewhere."""
        kept = self._kept_with_weights()
        if not kept:
            return None
        with explained(f"weights {self.weights} do not say what their classes are"):
            return [composed(str(name)) for name in json.loads(kept["classes"])]

    def _kept_with_weights(self):
        """The metadata of `weights` from a run of this task; empty for a file from elsewhere."""
        kept = weights.metadata(self.weights) if self.weights else {}
        return kept if kept.get("task") == self.name else {}

    def data_signature(self, data):
        labels = arrays.digest([data.names, data.labels.tolist()])
        return {"classes": arrays.digest(data.classes), "file names and labels": labels}

    def metadata(self, data):
        kept = dict(classes=json.dumps(data.classes), model_name=self.model_name, image_size=self._size())
        return kept | pictures.format_levels(data.levels)

    @property
    def export_preprocessing(self) -> str:
        size, levels = self._size(), pictures.kept_levels(self.weights)
        return (
            f"{pictures.describe_opening(levels)} to RGB; scale the short side to {size}"
            f" pixels (bicubic), keep the middle {size}x{size}; uint8, (3, rows, columns)"
        )

    def example(self, count):
        rng, size = np.random.default_rng(0), self._size()
        image = rng.integers(0, 256, (count, 3, size, size), np.uint8)
        numbers = rng.random((count, augment.NUM_UNIFORMS))
        parameters = augment.draw(numbers, **self._augmentation)
        return dict(image=image, label=np.arange(count) % 2, augment=parameters)

    @property
    def _augmentation(self):
        return dict(flip=self.flip, crop=self.crop, colour=self.colour)

    # Model

    def _network(self):
        return models.describe(self.model_name)

    def _size(self):
        kept = self._kept_with_weights().get("image_size")
        return self.image_size or int(kept or self._network().size)

    def _find_pretrained(self):
        """(file or None, a sentence for the log). Without anything to train on, no weights are looked for."""
        if self.weights:
            return None, f"{self.model_name}: weights of {self.weights}"
        wanted = "no" if self.dataset_dir is None and self.pretrained == "auto" else self.pretrained
        return models.find_pretrained(self._network(), wanted)

    def model(self) -> "Module":
        pretrained, _ = self._find_pretrained()
        named = weights.metadata(pretrained).get("classes") if pretrained else None
        others = named is not None and named != json.dumps(self.class_names)
        return models.build(
            self._network(), len(self.class_names), self._size(), pretrained, replace_head=others
        )

    def head(self, model: "Module") -> list[str]:
        heads = tuple(f"{name}." for name in models.heads(model))
        return [name for name, _ in model.named_parameters() if name.startswith(heads)]

    def optimizer(self, model):
        from tpukit.devices.optimizers import adamw

        return adamw(model, self.lr, self.weight_decay)

    def loss(self, model: "Module", batch: "dict[str, Tensor]", epoch: "Tensor | int") -> "Tensor":
        from torch.nn.functional import cross_entropy

        image = batch["image"]
        if "augment" in batch:
            image = augment.apply(image, batch["augment"], **self._augmentation)
        logits = self._logits(model, image)  # (B, K)
        return cross_entropy(logits, batch["label"], label_smoothing=self.label_smoothing)

    def predict(self, model: "Module", batch: "dict[str, Tensor]", epoch=None) -> "Tensor":
        return self._logits(model, batch["image"])  # (B, K)

    def _logits(self, model, image):
        network = self._network()
        return model(augment.normalise(image, network.mean, network.std)).float()

    # Scores and predictions

    def evaluate(self, predictions):
        """Return accuracy, in [0, 1]; images, how many were scored; not_finite, for how many of them the
        network gave no finite numbers, if there are any: they count as mistakes; and confusion, a row of
        predicted classes for each true one, if there are at most 30."""
        logits, labels = _gather(predictions)
        predicted, names = _predicted(logits), self.class_names[: logits.shape[1]]
        scores: dict = dict(accuracy=float((predicted == labels).double().mean()), images=len(labels))
        count = len(names)
        if not_finite := int((predicted == logits.shape[1]).sum()):
            scores["not_finite"], names = not_finite, [*names, NOT_FINITE]
        if count <= CONFUSION_CLASSES:
            pairs = labels * len(names) + predicted
            counts = pairs.bincount(minlength=len(names) ** 2).view(len(names), -1).tolist()
            scores["confusion"] = dict(classes=names, counts=counts)
        return scores

    def save_predictions(self, folder, predictions, data):
        """Write predictions.csv, the largest loss first; and worst.npz, the mistakes, then what is right,
        each with the largest loss first."""
        from torch.nn.functional import cross_entropy

        logits, labels = _gather(predictions)
        losses = cross_entropy(logits, labels, reduction="none")
        probabilities, predicted = logits.softmax(1).amax(1), _predicted(logits)
        names, order = [*data.classes, NOT_FINITE], losses.argsort(descending=True, stable=True).numpy()
        rows = []
        for i in order:
            shares = round(float(probabilities[i]), 4), round(float(losses[i]), 4)
            rows.append((data.names[i], names[labels[i]], names[predicted[i]], *shares))
        table = as_csv(("file", "class", "predicted", "probability", "loss"), rows)
        files.write_atomic(folder / "predictions.csv", table, durable=False)
        is_right = (predicted == labels).numpy()
        worst = order[np.argsort(is_right[order], kind="stable")][:WORST]
        with files.atomic_file(folder / "worst.npz") as file:
            shown = dict(image=data.images[worst], name=np.array([data.names[i] for i in worst]))
            shown |= dict(label=labels[worst].numpy(), prediction=logits[worst].numpy())
            np.savez_compressed(file, **shown)

    def load_predictions(self, folder):
        path = folder / "worst.npz"
        if not path.is_file():
            return None
        again = f"{path} is damaged; `tpukit test` writes it again"
        with reading(path, again, TpukitError), arrays.load(path) as saved:
            return {name: saved[name] for name in ("image", "label", "name")}, saved["prediction"]

    @staticmethod
    def verdict(scores: dict, last: dict) -> str:
        from tpukit_tasks.images import shown

        return shown.verdict(scores, last)

    @staticmethod
    def figures(scores: dict) -> "dict[str, Figure | Table]":
        from tpukit_tasks.images import shown

        return shown.figures(scores)

    def panels(self, batch, prediction=None):
        import torch

        images = torch.as_tensor(np.asarray(batch["image"]))
        if "augment" in batch:
            parameters = torch.as_tensor(np.asarray(batch["augment"]))
            images = augment.apply(images, parameters, **self._augmentation)
        images = images.round().byte().permute(0, 2, 3, 1).numpy()  # (B, S, S, 3)
        titles = [""] * len(images)
        if "label" in batch:
            titles = [self.class_names[label] for label in batch["label"]]
        if prediction is not None:
            titles = [_verdict(*pair) for pair in zip(titles, self._named(prediction))]
        return [[panel] for panel in zip(titles, images)]

    def check_labels(self, data: ImageSet) -> tuple[list[str], list[int]]:
        counts = np.bincount(data.labels, minlength=len(data.classes))
        fewest, most = counts.argmin(), counts.argmax()
        spread = f"{counts[fewest]} of {data.classes[fewest]} to {counts[most]} of {data.classes[most]}"
        if counts[fewest] == counts[most]:
            spread = f"{counts[most]} of each"
        sentences = [f"{len(data)} training images of {len(data.classes)} classes: {spread}"]
        if small := [name for name, count in zip(data.classes, counts) if count < FEW]:
            sentences.append(f"fewer than {FEW} images to learn from: {_listed(small)}")
        return sentences, [data.labels.tolist().index(label) for label in np.flatnonzero(counts)]

    def read_files(self, paths, best):
        size = self._size()
        levels = pictures.kept_levels(best)
        images = pictures.read_images(paths, lambda path: read_telling(path, size, levels))
        return dict(image=np.stack(images).transpose(0, 3, 1, 2)), [path.name for path in paths]

    def results(self, batch, predictions):
        """Return class and probability. Raises TpukitError for what is not finite."""
        require_finite(predictions)
        return self._named(predictions)

    def _named(self, predictions):
        import torch

        logits = torch.as_tensor(np.asarray(predictions)).double()
        classes = [*self.class_names[: logits.shape[1]], NOT_FINITE]
        names = [classes[index] for index in _predicted(logits)]
        shares = logits.softmax(1).amax(1).tolist()
        return [{"class": name, "probability": share} for name, share in zip(names, shares)]


def _predicted(logits):
    """(N, K) -> (N,): the class of the largest, the first of equal ones; K if any is not finite."""
    return logits.argmax(1).where(logits.isfinite().all(1), logits.shape[1])


def _verdict(name, result):
    """Return the title of an image: the class that was predicted, and its own if that is known."""
    predicted = f"{result['class']} {result['probability']:.0%}"
    mark = "\u2713" if name == result["class"] else "\u2717"  # it colours the frame
    return f"{mark} {name}, predicted {predicted}" if name else predicted


def _gather(predictions):
    """(logits (N, K) float64, labels (N,)), tensors, of the valid samples of what `evaluate` gets."""
    import torch

    pairs = [(logits[batch["valid"]], batch["label"][batch["valid"]]) for logits, batch in predictions]
    logits, labels = (torch.cat(parts) for parts in zip(*pairs))
    return logits.double(), labels


def _natural(name):
    """A key by which c2 comes before c10, as timm sorts."""
    parts = re.split(r"(\d+)", name.lower())  # each second one is a number
    return [int(part) if index % 2 else part for index, part in enumerate(parts)]


def _listed(names):
    return f"{len(names)} classes ({some(names)})"
