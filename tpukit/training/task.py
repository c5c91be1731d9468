"""`Task`: the settings of a training run, and the methods that it must implement or may override."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_type_hints

import numpy as np

from tpukit.host.errors import TpukitError
from tpukit.runs.run import Run
from tpukit.runs.settings import as_declared, require_at_least, require_shares, setting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from tpukit.devices.runtime import Runtime
    from tpukit.host.environment import Environment
    from tpukit.launching.job import LaunchedCall
    from tpukit.training.data import Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A training task. Its fields are its whole configuration; copy `tpukit_tasks/mnist.py` to write your
    own.

    A subclass has a `name` and a `score`, and implements the six methods that follow. All else has a default.
    Fields declared with `setting(free=True)` may change when a run is resumed.

    Other modules declare the methods that only they call:

    - `tpukit.reporting.display.Displayed` to show samples, labels, predictions and scores,
    - `tpukit.training.metrics.Rated` to record other speeds,
    - `tpukit.inference.own_files.OwnFiles` to predict a user's own files,
    - `tpukit_tools.export.Exportable` to export,
    - `tpukit.data.datasets.Findable` to find a dataset by name."""

    name: ClassVar[str]
    """Its name on the command line."""
    score: ClassVar[str]
    """The evaluation score that decides which weights are best; larger is better."""

    def datasets(self) -> tuple:
        """Open the training set and the test set.

        Each set has `len()` and `batch(indices, numbers)`, which returns a dict of numpy arrays. It may have
        `notes`, a str for the log, and `notices`, sentences that `show_labels` puts into a box.
        `num_uniforms` of the training set: random numbers for each sample's augmentation (0 if none);
        `numbers` holds them, (B, num_uniforms) float64, uniform in [0, 1), and is None in an evaluation.

        A training set whose loss is not a mean over samples may have `shares(indices)`: for the samples of a
        step, on all cores, (B,) float32 numbers that their losses are to be multiplied by, such as B over the
        tokens of the step. `loss` finds those of its samples in `batch["share"]`, and returns the mean of
        the products.

        A set that can be kept on the device has four more methods. `device_arrays()` returns a dict of arrays
        (N, ...), uploaded once, and `device_nbytes()` their size in bytes. `sample_parameters(indices,
        numbers)` returns a dict of arrays (B, ...), the few numbers sent for each batch. `compose(rows,
        parameters)` returns the batch, made of rows of the arrays, as tensors on the device.

        Returns:
            (training set, test set)."""
        raise self._missing("datasets")

    def model(self) -> nn.Module:
        """Make the torch.nn.Module, on the CPU."""
        raise self._missing("model")

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Make the optimizer.

        Args:
            model: the model, which already lies on the device.

        Returns:
            An optimizer of the parameters that train."""
        raise self._missing("optimizer")

    def loss(self, model: nn.Module, batch: Batch, epoch: int | Tensor) -> Tensor:
        """Compute the loss of a batch. Runs under autocast; no `.item()` here.

        Args:
            model: the model, on the device.
            batch: dict of tensors (B, ...) on the device.
            epoch: from 0. On XLA, on GPUs and with compile="yes" a 0-d tensor, so that all epochs are one
                graph: choose by `torch.where`, not by `if`.

        Returns:
            A scalar, computed in float32."""
        raise self._missing("loss")

    def predict(self, model: nn.Module, batch: Batch, epoch: int | Tensor | None = None) -> Any:
        """Predict a batch, for `evaluate`. It is one compiled graph on XLA.

        Args:
            model: the model, on the device.
            batch: dict of tensors (B, ...) on the device. On one GPU it may have more samples than
                `batch_size`.
            epoch: as in `loss`, for a model that has a warm-up: the epoch that the weights come from, or None
                if they are finished.

        Returns:
            A tensor (B, ...), or a pytree of them."""
        raise self._missing("predict")

    def evaluate(self, predictions: Iterable[tuple[Any, Batch]]) -> dict:
        """Compute the scores of predictions.

        Args:
            predictions: iterable of (prediction, batch), both on the CPU. Each batch has `valid`, (B,) bool:
                False for samples that only fill it up.

        Returns:
            A dict of scores, with `score` among them."""
        raise self._missing("evaluate")

    def _missing(self, method: str) -> TpukitError:
        kind = type(self).__name__
        return TpukitError(f"{kind} must implement {method}() for this: tpukit_tasks/mnist.py shows how")

    # What a task may say of itself

    dataset: ClassVar[str] = ""
    """The name under which `find_dataset` looks for its data; empty for a task that needs no
    `dataset_dir`."""
    score_names: ClassVar[dict[str, str]] = {}
    """The scores that get a curve, with the name and the unit that it shows; if empty, all scores do."""
    evaluation_keys: ClassVar[tuple[str, ...] | None] = None
    """Arrays of a batch that `evaluate` and `save_predictions` need besides `valid`; only these are read back
    from the device. None: all."""

    # Its settings

    dataset_dir: Path | None = setting(None, free=True)
    """Folder of the dataset; `find_dataset` finds it."""
    epochs: int = setting(10, free=True)
    """Passes over the training set."""
    max_steps: int | None = setting(None, free=True)
    """Optimizer steps to train, in place of `epochs`; None: all steps of the epochs."""
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
    """Largest norm of the gradients; larger ones are scaled down to it. None: no clipping."""
    schedule: Literal["constant", "cosine"] = "constant"
    """The learning rate after the warm-up. cosine: down to 0 at the last step."""
    warmup_epochs: float = 0.0
    """Epochs in which the learning rate rises from nearly 0 to `lr`, in equal steps."""
    freeze: tuple[str, ...] = ()
    """Parts of the model that do not train, by the names of its modules or parameters; "backbone" is all but
    its last layer, if the task has a `head`. Their batch norms use the running statistics; their dropout
    still drops."""
    micro_batches: int = setting(1, free=True)
    """Compute the gradients of a batch in this many parts and add them up, to save memory. The step is the
    same, except that batch norm takes its statistics from each part, and except for a loss that is not a mean
    over samples."""
    patience: int | None = setting(None, free=True)
    """Stop after this many evaluations in a row without a better score; None: train all epochs."""
    ema_decay: float | None = None
    """Score and save a moving average of the weights, with this decay every 10 steps. None: the weights."""
    log_every: int = setting(20, free=True)
    """Steps between two records. Reading the loss waits for the device, so don't record every step."""
    eval_every: int = setting(1, free=True)
    """Epochs between two evaluations; the last step is always followed by one."""
    eval_every_steps: int | None = setting(None, free=True)
    """Optimizer steps between two evaluations, in place of `eval_every`; None: epochs."""
    save_every_s: float = setting(60.0, free=True)
    """Seconds between two checkpoints."""
    batch_norm: Literal["per-core", "frozen"] = "per-core"
    """Statistics of batch norm on several cores. per-core: of each core's share of the batch; rank 0's
    running statistics are kept. frozen: the running statistics, which no longer change; scale and offset
    still train."""
    num_workers: int = setting(2, free=True)
    """Threads that read and augment the batches; 0 prepares them between steps."""
    compile: Literal["auto", "yes", "no"] = setting("auto", free=True)
    """auto: the training step is one graph, on GPUs captured and replayed, and plain PyTorch on CPUs. yes: on
    GPUs and CPUs torch.compile compiles the loss and the model, too, which takes minutes at first. no: Python
    runs every step, operation by operation, so that you can debug it."""
    data_on: Literal["auto", "device", "host"] = setting("auto", free=True)
    """Where the decoded samples lie. device: all of them on every core, so that a batch is an index,
    augmented there. host: threads make the batches. auto: the device, if it is an accelerator and they
    take at most 2 GiB, or an eighth of a larger GPU; else the host."""

    def __post_init__(self) -> None:
        """Raise TpukitError for a setting that no training run can have. A whole float becomes an int."""
        # A class of the user's may have annotations that only its own module understands.
        known = next(
            kind
            for kind in type(self).__mro__
            if kind.__module__.partition(".")[0] in ("tpukit", "tpukit_tasks")
        )
        declared = get_type_hints(known)
        for field in dataclasses.fields(known):
            value = as_declared(field.name, getattr(self, field.name), declared[field.name])
            object.__setattr__(self, field.name, value)
        ones = ("batch_size", "log_every", "eval_every", "micro_batches", "patience")
        ones += ("max_steps", "eval_every_steps")
        zeros = ("epochs", "num_workers", "seed", "lr", "clip_norm", "warmup_epochs", "save_every_s")
        require_at_least(self, 1, *ones)
        require_at_least(self, 0, *zeros)
        if self.clip_norm == 0:
            raise TpukitError(f"clip_norm={self.clip_norm!r}: it must be more than 0; None is no clipping")
        require_shares(self, "ema_decay")

    # What it may override

    def choose_settings(self, env: Environment) -> Self:
        """Return the task with the settings filled in that were left None and depend on the data or the
        machine, as its batch size may. Called once, where a run opens, whose config keeps what was chosen for
        later sessions, or where a tool uses the task without a run; constructing a task reads no data.

        Args:
            env: this machine, as `detect()` returns it.

        Returns:
            The task itself if there is nothing to choose, as here.

        Raises:
            TpukitError: for data that cannot be trained on."""
        return self

    def test_set(self) -> Any:
        """Return the test set alone, even if there is no training set."""
        return self.datasets()[1]

    def data_signature(self, data: Any) -> dict[str, str]:
        """Return what must be the same in the data when a run is resumed, whatever folder the data is in.

        Args:
            data: the training set, which a resumed run refuses if this differs; or the test set, for which
                the best score so far is then dropped.

        Returns:
            Digests, made by `arrays.digest`, under the names that errors use."""
        return {}

    def metadata(self, data: Any) -> dict[str, str]:
        """Return what to keep with the best weights, because they only make sense with it.

        Args:
            data: the training set.

        Returns:
            Strings by name."""
        return {}

    def example(self, count: int) -> dict[str, np.ndarray]:
        """Make a batch to try the model with; by default the first samples of the training set. A task that
        makes one up can be planned and tried without data.

        Args:
            count: number of samples, B.

        Returns:
            A dict of arrays (B, ...)."""
        if self.dataset_dir is None:
            raise self._missing("example")
        data, _ = self.datasets()
        return data.batch(np.arange(count) % len(data), None)

    def head(self, model: nn.Module) -> list[str]:
        """Name the parameters that freeze="backbone" leaves to train: those of the last layer.

        Args:
            model: the model.

        Returns:
            Names, as in `model.named_parameters()`.

        Raises:
            TpukitError: if the task does not implement it."""
        kind = type(self).__name__
        raise TpukitError(f"{kind} must implement head() for freeze='backbone'; or name the parts to freeze")

    def predictor(
        self, model: nn.Module, runtime: Runtime, epoch: int | None = None
    ) -> Callable[[Batch], object]:
        """Make the function that predicts for `evaluate`; a task that predicts in several steps overrides it.

        Args:
            model: the model, on the device.
            runtime: this core's `Runtime`.
            epoch: the epoch that the weights come from, as in `predict`.

        Returns:
            A function batch -> prediction, both on the device."""
        number = runtime.as_graph_input("epoch", epoch)
        return runtime.inference(functools.partial(self.predict, model, epoch=number))

    def save_predictions(self, folder: Path, predictions: list, data: Any) -> None:
        """Write the predictions on the test set to a folder; by default nothing.

        Args:
            folder: the run's folder predictions/.
            predictions: list of (prediction, batch), as `evaluate` gets them.
            data: the test set."""

    def for_launch(self, *others: Any) -> LaunchedCall | None:
        """Return what `launch(function, task, run)` must know about the call.

        Args:
            *others: the function's other arguments, the run first.

        Returns:
            The plan of the launch; None without a run."""
        from tpukit.training.launched_call import launched_call

        if not others or not isinstance(others[0], Run):
            return None
        return launched_call(others[0].choose_settings(self), *others)


def check_dataset_dir(task: Task) -> None:
    """Raise TpukitError if a task needs a dataset and was given none."""
    if task.dataset and task.dataset_dir is None:
        raise TpukitError(
            f"{type(task).__name__} needs a dataset_dir: find_dataset({task.dataset!r}) finds one"
        )
