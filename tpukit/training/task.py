"""What a training task must implement: `Task`; and tasks on their way to another process."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import numpy as np

from tpukit.host.errors import TpukitError
from tpukit.host.json_types import has_type
from tpukit.runs.run import Run
from tpukit.runs.settings import setting, settings_dict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from tpukit.devices.runtime import Runtime
    from tpukit.launching.job import Plan
    from tpukit.training.data import Batch

    Arrays = dict[str, np.ndarray]  # a batch on the host: names -> (B, ...)

# What the title of a panel begins with where a prediction was right or wrong.
RIGHT, WRONG = "\u2713", "\u2717"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A training task. Its fields are its whole configuration; copy `tasks/mnist.py` to write your own.

    A subclass has a `name` and a `score`, and implements the six methods that follow. All else has a default.
    Fields declared with `setting(free=True)` may change when a run is resumed."""

    name: ClassVar[str]
    """What the command line calls it."""
    score: ClassVar[str]
    """The evaluation score that decides which weights are best; larger is better."""

    def datasets(self) -> tuple:
        """(training set, test set). Each has `len()` and `batch(indices, numbers) -> dict of numpy arrays`,
        and may have `notes`, a str for the log, and `notices`, sentences that `show_labels` puts into a box.
        `num_uniforms` of the training set: random numbers for each sample's augmentation (0 if none);
        `numbers` holds them, (B, num_uniforms) float64, uniform in [0, 1), and is None in an evaluation.

        A dataset that can be kept on the device implements four methods more:
        `device_arrays()` -> dict of arrays (N, ...), uploaded once; `device_nbytes()`, their size in bytes;
        `sample_parameters(indices, numbers)` -> dict of arrays (B, ...), the few numbers sent for each batch;
        `compose(rows, parameters)` -> the batch, from rows of the arrays, as tensors on the device."""
        raise self._missing("datasets")

    def model(self) -> nn.Module:
        """The torch.nn.Module, on the CPU."""
        raise self._missing("model")

    def optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer of a model that already lies on the device."""
        raise self._missing("optimizer")

    def loss(self, model: nn.Module, batch: Batch, epoch: int | Tensor) -> Tensor:
        """Scalar loss of a batch (dict of device tensors), computed in float32. Runs under autocast; no
        `.item()` here.

        epoch: from 0. On XLA and on one GPU a 0-d tensor, so that all epochs are one graph: choose by
        `torch.where`, not by `if`."""
        raise self._missing("loss")

    def predict(self, model: nn.Module, batch: Batch, epoch: int | Tensor | None = None) -> Any:
        """What `evaluate` needs from the model for a batch: one tensor or a pytree of them. One compiled
        graph on XLA. On one GPU a batch may have more samples than `batch_size`.

        epoch: as for `loss`, the one that the weights come from, for a model that has a warm-up; None for
        finished weights."""
        raise self._missing("predict")

    def evaluate(self, predictions: Iterable[tuple[Any, Batch]]) -> dict:
        """dict of scores from an iterable of (prediction, batch), both on the CPU, each with `valid` (B,)
        bool."""
        raise self._missing("evaluate")

    def _missing(self, method: str) -> TpukitError:
        kind = type(self).__name__
        return TpukitError(f"{kind} must implement {method}() for this: tpukit/tasks/mnist.py shows how")

    # What a task may say of itself

    dataset: ClassVar[str] = ""
    """The name under which `find_dataset` looks for its data; empty for a task that needs no
    `dataset_dir`."""
    score_names: ClassVar[dict[str, str]] = {}
    """The scores that get a curve, with the name and the unit that it shows; if empty, all scores do."""
    published: ClassVar[dict[str, float]] = {}
    """The paper's scores on its own dataset, drawn as a line in the curves."""
    evaluation_keys: ClassVar[tuple[str, ...] | None] = None
    """Arrays of a batch that `evaluate` and `save_predictions` need besides `valid`, the ones that are read
    back from the device; None for all."""
    needs_own_data: ClassVar[bool] = False
    """Whether the command line stops where the data are missing, and takes a synthetic set only where it was
    asked to."""
    dataset_parts: ClassVar[tuple[str, ...]] = ()
    """Folders that the dataset consists of, in lower case; `archives.unpack` leaves them where they are."""
    synthetic_size: ClassVar[int] = 0
    """Samples of the synthetic dataset, train and test together, by default."""
    synthetic_size_accelerator: ClassVar[int] = 0
    """The same on a TPU or a GPU; 0: as many as without."""
    export_output: ClassVar[str] = "the prediction"
    """What `exported` computes, for those who use the file."""
    export_preprocessing = ""
    """How an image becomes an input of it, where the graph does not do that."""

    # Its settings

    dataset_dir: Path | None = setting(None, free=True)
    """Folder of the dataset; `find_dataset` finds it."""
    epochs: int = setting(10, free=True)
    """Passes over the training set."""
    batch_size: int = 16
    """Global batch size: samples in one optimizer step, over all cores."""
    lr: float = 0.01
    """Learning rate."""
    seed: int = 0
    """Decides the initial weights, the order of the samples and the augmentation."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """fp32 (on GPUs without TF32, on a TPU without bf16 passes), bf16, fp16, or auto: bf16 on TPU and newer
    GPUs, fp16 with a loss scaler on older GPUs, fp32 on CPU."""
    weights: Path | None = None
    """Weights to start from: a .safetensors, .pth, .pt, .pkl or .tar file of this model."""
    clip_norm: float | None = None
    """Scale gradients of a larger norm down to it; None: do not clip."""
    schedule: Literal["constant", "cosine"] = "constant"
    """The learning rate after the warm-up. cosine: down to `final_lr` at the end of `epochs`."""
    warmup_epochs: float = 0.0
    """Epochs in which the learning rate rises from nearly 0 to `lr`, in equal steps."""
    final_lr: float = 0.0
    """Share of the learning rate that the cosine schedule ends with."""
    freeze: tuple[str, ...] = ()
    """Parts of the model that do not train, by the names of its modules or parameters; "backbone" is all but
    its last layer. Their batch norms use the running statistics; their dropout still drops."""
    micro_batches: int = setting(1, free=True)
    """Parts of a batch whose gradients are computed one after the other and added up, for less memory. The
    step is the same, except that batch norm takes its statistics of each part, and for a loss that is not a
    mean over samples."""
    patience: int | None = setting(None, free=True)
    """Stop after this many evaluations in a row without a better score; None: train all epochs."""
    ema_decay: float | None = None
    """Score and keep a moving average of the weights, with this decay every 10 steps; None: the weights."""
    log_every: int = setting(20, free=True)
    """Steps between two records. Reading the loss waits for the device, so not every step."""
    eval_every: int = setting(1, free=True)
    """Epochs between two evaluations; the last epoch is always evaluated."""
    save_every_s: float = setting(60.0, free=True)
    """Seconds between two checkpoints; more where they would take over 1% of the time."""
    batch_norm: Literal["per-core", "synced", "frozen"] = "per-core"
    """Statistics of batch norm on several cores. per-core: each core's share of the batch, rank 0's running
    ones are kept. synced: the whole global batch (GPUs; parallel="spmd" does so on TPU anyway). frozen: the
    running ones, which no longer change; scale and offset still train."""
    num_workers: int = setting(2, free=True)
    """Threads that read and augment the batches; 0 prepares them between steps."""
    channels_last: Literal["auto", "yes", "no"] = setting("auto", free=True)
    """Keep images with their channels innermost in memory. auto: for networks whose weights are mostly of
    convolutions, on CPUs, and in bf16 or fp16 on GPUs with tensor cores. XLA chooses its own layouts."""
    torch_compile: Literal["no", "default", "reduce-overhead", "max-autotune"] = setting("no", free=True)
    """Compile the model by torch.compile in this mode, on GPUs and CPUs (XLA compiles anyway), without CUDA
    graphs of its own: `cuda_graph` captures the whole step."""
    cuda_graph: bool = setting(True, free=True)
    """On GPUs, capture the whole step as a CUDA graph and replay it; the log says why if it cannot."""
    data_on: Literal["auto", "device", "host"] = setting("auto", free=True)
    """Where the decoded samples lie. device: all of them on every core, so that a batch is an index,
    augmented there. host: threads make the batches. auto: the device, if it is an accelerator with at least
    eight times the memory; else the host."""

    def __post_init__(self) -> None:
        """Raise TpukitError for a setting that no training can have. A whole float becomes an int."""
        # A class of the user's may have annotations that only its own module understands.
        known = next(kind for kind in type(self).__mro__ if kind.__module__.startswith("tpukit."))
        declared = get_type_hints(known)
        for field in dataclasses.fields(known):
            self._check_type(field.name, declared[field.name])
        ones = ("batch_size", "log_every", "eval_every", "micro_batches", "patience")
        zeros = ("epochs", "num_workers", "seed", "lr", "clip_norm", "warmup_epochs", "save_every_s")
        self.require_at_least(1, *ones)
        self.require_at_least(0, *zeros)
        self.require_shares("final_lr", "ema_decay")

    def _check_type(self, name: str, declared: Any) -> None:
        """Raise TpukitError for a setting of another type than declared, and make an int of a whole float."""
        value: Any = getattr(self, name)
        kinds = {declared, *get_args(declared)}
        if get_origin(declared) is Literal:
            if value not in get_args(declared):
                raise TpukitError(f"{name}={value!r}: choose one of {', '.join(get_args(declared))}")
            return
        if type(value) in kinds:
            return
        is_number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
        is_whole = is_number and (isinstance(value, int) or float(value).is_integer())
        rules = {
            bool: (isinstance(value, bool), "True or False"),
            int: (is_whole, "a whole number"),
            float: (is_number, "a number"),
        }
        for kind in kinds & rules.keys():
            is_right, wanted = rules[kind]
            if not is_right:
                raise TpukitError(f"{name}={value!r} ({name.upper()} in a notebook): it must be {wanted}")
        if int in kinds and not isinstance(value, int):
            object.__setattr__(self, name, int(value))  # of papermill, or of NumPy

    def require_at_least(self, least: float, *names: str) -> None:
        """Raise TpukitError for a setting with a smaller value, NaN, or one that 64 bits do not hold. None is
        fine."""
        for name in names:
            self._require(name, lambda value: least <= value < 2**63, f"it must be {least} or more")

    def require_shares(self, *names: str) -> None:
        """Raise TpukitError for a setting that is not from 0 to 1. None is fine."""
        for name in names:
            self._require(name, lambda value: 0 <= value <= 1, "it must be from 0 to 1")

    def _require(self, name: str, is_right: Callable[[Any], bool], rule: str) -> None:
        value = getattr(self, name)
        if value is not None and not is_right(value):
            raise TpukitError(f"{name}={value!r}: {rule}")

    # What it may override

    def test_set(self) -> Any:
        """The test set alone, for which the training set need not be there."""
        return self.datasets()[1]

    def check_dataset_dir(self) -> None:
        """Raise TpukitError if a dataset is needed and none was given."""
        if self.dataset and self.dataset_dir is None:
            raise TpukitError(
                f"{type(self).__name__} needs a dataset_dir: find_dataset(env, {self.dataset!r}) finds one"
            )

    def data_signature(self, data: Any) -> dict[str, str | list[str]]:
        """What must be the same in the data when a run is resumed, by the name that errors use, whatever
        folder the data is in: a str, such as a digest of `arrays.digest`, or a list of str.

        data: the training set, which a resumed run refuses if this differs, or the test set: then the best
        score so far is dropped."""
        return {}

    def metadata(self, data: Any) -> dict[str, str]:
        """Strings to keep with the best weights, because they only make sense with these. data: the training
        set."""
        return {}

    def example(self, count: int) -> Arrays:
        """A batch to try the model with, dict of arrays; by default the first samples of the training set. A
        task that makes one up can be planned and tried without data."""
        if self.dataset_dir is None:
            raise self._missing("example")
        data, _ = self.datasets()
        return data.batch(np.arange(count) % len(data), None)

    def head(self, model: nn.Module) -> list[str]:
        """Return the names of the parameters that freeze="backbone" leaves to train: those of the last
        layer."""
        from tpukit.training.layers import find_head

        return find_head(model)

    def predictor(
        self, model: nn.Module, runtime: Runtime, epoch: int | None = None
    ) -> Callable[[Batch], object]:
        """A function batch -> prediction on the device, for `evaluate`; a task that predicts in several steps
        overrides it."""
        return runtime.inference(functools.partial(self.predict, model, epoch=runtime.as_graph_input(epoch)))

    def rates(self, model: nn.Module, runtime: Runtime, samples_per_s: float) -> dict[str, float]:
        """What else to record of the speed of a training, by names for the report, from its samples a
        second, over all cores."""
        return {}

    def panels(self, batch: Arrays | Batch, prediction: Any = None) -> list[list[tuple[str, Any]]]:
        """How to show a batch: for each sample a list of (title, array), the array (H, W) or (H, W, 3), or
        (title, text).

        batch: dict of arrays from the dataset. prediction: from `predict`, on the CPU, or None to show the
        data alone. A title that begins with ✓ or ✗ gets a green or a red frame. By default `image`, titled by
        what has one value a sample: `label`, and the prediction."""
        if "image" not in batch:
            raise self._missing("panels")
        images, titles = np.asarray(batch["image"]), [[] for _ in batch["image"]]
        if images.ndim == 4 and images.shape[1] in (1, 3):
            images = np.moveaxis(images, 1, -1)  # (B, C, H, W) -> (B, H, W, C)
        images = images[..., 0] if images.shape[3:] == (1,) else images
        for word, values in {"": batch.get("label"), "predicted ": prediction}.items():
            for title, value in zip(titles, values if np.ndim(values) == 1 else ()):
                title.append(f"{word}{value}")
        titles = [", ".join(title) for title in titles]
        label, guess = np.asarray(batch.get("label", ())), np.asarray(prediction)
        if guess.ndim == 1 and guess.dtype.kind in "iu" and label.shape == guess.shape:
            titles = [marked(*pair) for pair in zip(titles, label == guess)]
        return [[panel] for panel in zip(titles, images)]

    def check_labels(self, data: Any) -> tuple[list[str], Sequence[int]]:
        """(sentences about a dataset's samples and labels, the most important first; indices of samples to
        look at)."""
        return [f"{len(data)} samples"], []

    def save_predictions(self, folder: Path, predictions: list, data: Any) -> None:
        """Write the predictions on the test set to a folder. predictions: list of what `evaluate` gets. data:
        the test set."""

    def load_predictions(self, folder: Path) -> tuple[Batch, Tensor] | None:
        """(batch, predictions) as `save_predictions` wrote them, for `panels`; None if there are none. `name`
        in the batch, if there is one, names each sample. A picture shows some, evenly spaced; of a task with
        a `saved_title` the first, under that title."""

    # For a user's own files

    def read_files(self, paths: Sequence[Path], best: Path) -> tuple[Arrays, list[str]]:
        """A user's own files, without labels: (dict of arrays (N, ...) for `predict`, N names). Arrays that a
        user gives come as files, too: NAME.png of uint8, uint16 and bool, NAME.npy of all others.

        best: the file of the weights, whose metadata may say how the input was normalised. `panels` shows
        such a batch. Raises TpukitError naming a file that cannot be read.

        A task that takes samples of any size has a method `split` besides, see `prediction.split`."""
        raise self._missing("read_files")

    def results(self, batch: Arrays, predictions: Any) -> list[dict]:
        """What a user gets of predictions for files of his own: a dict for each sample, of numbers, strings,
        lists of dicts (each is a line of the table), and arrays, which are saved as files: (H, W) of bool as
        a mask.

        batch, predictions: arrays (N, ...), as `panels` gets them."""
        values = np.asarray(predictions)
        return [dict(prediction=value if np.ndim(value) else value.item()) for value in values]

    def export_inputs(self, batch: Arrays) -> Arrays:
        """The inputs of the exported graph, dict of arrays (B, ...), from a batch of the dataset or of
        `example`. With a class attribute `export_multiple` their height and width are any multiples of it."""
        return dict(image=batch["image"])

    def exported(self, model: nn.Module, inputs: Batch) -> Tensor:
        """What the exported graph computes, a float32 tensor (B, ...), from raw inputs: normalisation belongs
        in here.

        inputs: dict of tensors, as of `export_inputs`. `export_output` says what comes out."""
        return self.predict(model, inputs).float()

    # For a dataset and a compiler of its own

    @staticmethod
    def download(folder: Path) -> None:
        """Download the real dataset into an empty folder and verify its checksums. Raises TpukitError if that
        fails."""
        raise TpukitError("tpukit does not download it")

    @staticmethod
    def synthesize(folder: Path, size: int, rng: np.random.Generator) -> None:
        """Write a synthetic dataset of `size` samples into a folder, in the layout of the real one."""
        raise TpukitError("tpukit has no synthetic data for it")

    def launch_plan(self, *others: Any) -> Plan | None:
        """Return what `launch(function, task, run)` has to know of the call; None without a run."""
        from tpukit.training.launch_plan import launch_plan

        return launch_plan(self, *others) if others and isinstance(others[0], Run) else None

    def libtpu_args(self, batch_size: int) -> str:
        """Flags of a TPU's compiler that suit the task, as in LIBTPU_INIT_ARGS. batch_size: one core's. See
        `open_runtime`."""
        return ""


def marked(title: str, is_right: bool) -> str:
    """The title of a panel, with the sign of a right or a wrong prediction."""
    return f"{RIGHT if is_right else WRONG} {title}"


# A task in another process


def model_settings(task: Task) -> dict:
    """The settings that a result depends on, without paths, for JSON: they go with the best weights."""
    fixed = [f.name for f in dataclasses.fields(task) if not f.metadata.get("free") and f.name != "weights"]
    return {name: value for name, value in settings_dict(task).items() if name in fixed}


def from_settings(kind: type[Task], given: dict) -> Task:
    """The task of a class with settings as `settings_dict` gives them; paths and tuples, which JSON does not
    have, come back. What is given for no field of the class is left out. Raises TypeError for a value of
    another type, as damaged files have."""
    types, fields = get_type_hints(kind), {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: _as_declared(types[name], given[name]) for name in fields & given.keys()})


def _as_declared(declared: Any, value: Any) -> Any:
    kinds = {declared, *get_args(declared)}
    if isinstance(value, list) and (tuples := [kind for kind in kinds if get_origin(kind) is tuple]):
        return tuple(_as_declared(tuples[0], item) for item in value)
    if isinstance(value, str) and Path in kinds:
        return Path(value)
    is_plain = all(isinstance(kind, type) for kind in get_args(declared) or [declared])
    if is_plain and not has_type(value, declared):
        raise TypeError(f"{value!r} is not of type {getattr(declared, '__name__', declared)}")
    return value


def to_request(task: Task) -> dict:
    """What a fresh process needs to import the class and give it the same settings, for JSON: read by
    `from_request`.

    Raises TpukitError for the class of a notebook cell."""
    kind = type(task)
    if kind.__module__ == "__main__":
        raise TpukitError(
            f"{kind.__name__} is defined in a notebook cell, from which another process cannot import it:"
            " move it to a module"
        )
    module = sys.modules[kind.__module__]
    depth = module.__name__.count(".") + hasattr(module, "__path__")
    folder = str(Path(str(module.__file__)).resolve().parents[depth])
    return dict(module=module.__name__, folder=folder, kind=kind.__qualname__, settings=settings_dict(task))


def from_request(request: dict) -> Task:
    """In the fresh process: the task of a request of `to_request`."""
    # last, so that files next to the class cannot shadow installed packages
    sys.path.append(request["folder"])
    kind = getattr(importlib.import_module(request["module"]), request["kind"])
    return from_settings(kind, request["settings"])
