"""Scoring weights: `test` for a run, `Evaluator` for the epochs of a training run."""

import concurrent.futures
import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from tpukit.devices import open_runtime
from tpukit.devices.runtime import Runtime
from tpukit.host import environment, files, known_errors
from tpukit.host.bars import tqdm
from tpukit.host.errors import TpukitError
from tpukit.host.signals import StopSignal
from tpukit.host.text import GIB
from tpukit.runs import weights
from tpukit.runs.run import Run
from tpukit.runs.settings import model_settings
from tpukit.training import schedule
from tpukit.training.checkpoint import TrainState
from tpukit.training.data import BatchLoader
from tpukit.training.notes import log_notes
from tpukit.training.prediction import predict_set
from tpukit.training.saver import Saver
from tpukit.training.task import Task, check_dataset_dir

EVALUATION_BATCH = 32


def test(task: Task, run: Run, *, runtime: Runtime | None = None, progress: bool = True) -> dict:
    """Score the run's best weights on the test set. What the task keeps of its predictions is written to the
    run's folder predictions/.

    Args:
        task: the task of the run. Its `weights` are scored if the run has no best ones.
        run: the run.
        runtime: this core's, as `launch` gives it; None: test opens the one device of this process.
        progress: show a progress bar.

    Returns:
        The scores, on every rank."""
    with known_errors.explain_known_errors():
        best = run.path / "best.safetensors"
        path = task.weights if task.weights and not files.exists(best) else best
        task = dataclasses.replace(task, weights=path)
        check_dataset_dir(task)
        task = run.choose_settings(task)
        model = task.model()
        weights.load(model, path)
        data = task.test_set()
        runtime = runtime or open_runtime(environment.detect(), task.precision)
        size = -(-task.batch_size // runtime.cores) * runtime.cores  # a share for each core
        run = run if runtime.world.rank == 0 else run.read_only()
        run.print(f"testing {path} on {runtime}: {len(data)} samples, batch {size}")
        model = runtime.to_device(model)
        log_notes(run, data, runtime)
        loader = BatchLoader(data, runtime, on=task.data_on, workers=task.num_workers)
        name, total = f"testing {task.name}", -(-len(data) // size)
        predicted, scores = [], {}
        is_off = run.is_launched or not (progress and run.echo)
        with tqdm(total=total, desc=name, unit="batch", disable=is_off) as bar:
            epoch = weights.epoch_of(path)
            batches = predict_set(task, model, loader, runtime, epoch=epoch, batch_size=size)
            for number, pairs in enumerate(batches, 1):
                predicted += pairs
                bar.update()
                run.write_progress(name=name, unit="batch", step=number, total=total)
        if runtime.world.rank == 0:
            folder = run.path / "predictions"
            folder.mkdir(parents=True, exist_ok=True)
            task.save_predictions(folder, predicted, data)
            scores = scores_of(task, predicted)
        return runtime.world.broadcast(scores)


vars(test)["rounds_batch_up"] = True  # see `launched_call`


def scores_of(task: Task, predictions: list) -> dict:
    """Return the scores of `task.evaluate`, with plain numbers in place of numpy's and torch's. Raises
    TpukitError if that cannot be recorded, or has no score that decides which weights are best."""
    scores = task.evaluate(predictions)
    try:
        plain = json.loads(json.dumps(scores, default=lambda value: value.tolist()))
        if not isinstance(plain[task.score], (int, float)):
            raise TypeError(f"{task.score} is no number")
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise TpukitError(
            f"{type(task).__name__}.evaluate() must return a dict of numbers, with {task.score!r}, which"
            f" decides what is best; got {scores!r:.100} ({error!r})"
        ) from error
    return plain


def evaluation_batch(batch_size: int, loader: BatchLoader) -> int:
    """Return how many samples to predict at once in a training run of batches of `batch_size`: more on one
    GPU, because the host takes longer to launch a small batch than the GPU to compute it. Not if the host
    makes the batches, which would hold several large ones."""
    runtime = loader.runtime
    if runtime.device.type != "cuda" or runtime.world.size > 1 or loader.resident is None:
        return batch_size
    if runtime.memory()[0][1] < 8 * GIB:
        return batch_size
    # Predicting a sample takes about a tenth of the memory of training on it.
    return max(batch_size, min(EVALUATION_BATCH, 8 * batch_size))


@dataclasses.dataclass(frozen=True)
class Scoring:
    """A step of a training run whose scores are being computed: on rank 0."""

    step: int
    epochs: float  # that have passed
    loss: float
    predict_s: float
    scores: concurrent.futures.Future[dict]
    model: nn.Module
    weights: dict[str, Tensor]
    """on the CPU; {} if they are not the best"""


class Evaluator:
    """Evaluates a training run: predicts at once, and computes the scores while the run goes on."""

    def __init__(
        self, task: Task, run: Run, runtime: Runtime, loader: BatchLoader, train_data: Any, saver: Saver
    ) -> None:
        self.task, self.run, self.runtime, self.saver = task, run, runtime, saver
        self.loader, self.train_data = loader, train_data
        self.executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="scores")
        self.batch_size = evaluation_batch(task.batch_size, loader)
        self.pending: Scoring | None = None
        self.scores: dict | None = None  # the last ones

    def evaluate(
        self, model: nn.Module, state: TrainState, epochs: float, loss: float, stop: StopSignal
    ) -> None:
        """Predict the test set with the weights of a step, and start scoring the predictions. A process on
        its own stops between two batches if a signal came; several ranks stop together, afterwards.

        The weights are copied if they are the best so far, or if scoring takes longer than a tenth of the
        time of predicting: then training goes on meanwhile, unless patience waits for the scores."""
        started = time.monotonic()
        size, predicted, epoch = self.batch_size, [], math.ceil(epochs) - 1
        batches = predict_set(self.task, model, self.loader, self.runtime, epoch=epoch, batch_size=size)
        with buffers_of_rank_0(model, self.runtime), contextlib.closing(batches):
            for pairs in batches:
                predicted += pairs
                if self.runtime.world.size == 1:
                    stop.check()
        if self.runtime.world.rank == 0:
            predict_s = time.monotonic() - started
            scores = self.executor.submit(scores_of, self.task, predicted)
            concurrent.futures.wait([scores], predict_s / 10 if self.task.patience is None else None)
            is_kept = not scores.done() or not scores.exception() and self.is_best(scores.result(), state)
            kept = self.runtime.to_cpu(model.state_dict() if is_kept else {})
            self.pending = Scoring(state.step, epochs, loss, predict_s, scores, model, kept)

    def is_best(self, scores: dict, state: TrainState) -> bool:
        """Return whether scores are better than those of all evaluations before."""
        best = -math.inf if state.best is None or math.isnan(state.best) else state.best
        return state.best is None or scores[self.task.score] > best

    def has_scores(self) -> bool:
        """Return True if there are scores to collect, and `collect` need not wait."""
        return self.pending is not None and self.pending.scores.done()

    def collect(self, state: TrainState) -> None:
        """Wait for the scores that are being computed, if there are any, and record them, in the `TrainState`
        too; keep the best weights."""
        task, done = self.task, self.pending
        if done is None:
            return
        # First what may raise: then nothing is recorded, and the weights can be scored again.
        self.scores = done.scores.result()
        is_best = self.is_best(self.scores, state)
        metadata = task.metadata(self.train_data) if is_best else {}
        self.pending = None
        names = task.score_names or {name: name for name in self.scores}  # those of the charts, without units
        floats = [name for name in names if isinstance(self.scores.get(name), float)]
        numbers = [(names[name].partition(",")[0], self.scores[name]) for name in floats]
        self.record_end(state, done.step, done.epochs, done.loss, dict(numbers))
        speed, epoch = dict(seconds=done.predict_s), math.ceil(done.epochs) - 1
        self.run.log("evaluation", done.step, epoch=epoch, scores=self.scores, kept=is_best, speed=speed)
        state.evaluations_without_best += 1
        if is_best:
            state.best, state.evaluations_without_best = self.scores[task.score], 0
            settings = json.dumps(model_settings(task))
            values = dict(task=task.name, step=done.step, epoch=epoch, settings=settings)
            self.saver.best = (done.weights, {**values, task.score: state.best, **metadata}, done.model)

    def record_end(self, state: TrainState, step: int, epochs: float, loss: float, shown: dict) -> None:
        """Record and print the end of an epoch, or an evaluation within one. loss: the mean of this epoch so
        far. shown: scores to print by their names, if there are any."""
        if epochs == int(epochs):
            self.run.log("epoch", step, epoch=int(epochs) - 1, loss=loss)
        words = "".join(f", {name} {value:.4g}" for name, value in shown.items())
        self.run.print(f"{schedule.moment(step, epochs)}: loss {loss:.4f}{words}")
        state.evaluated = epochs


@contextlib.contextmanager
def buffers_of_rank_0(model: nn.Module, runtime: Runtime) -> Iterator[None]:
    """Context manager: every rank's model has rank 0's buffers (the running statistics of batch norm), which
    are those that are saved."""
    modules = [module for module in model.modules() if module._buffers]
    own = [dict(module._buffers) for module in modules]
    if runtime.world.size > 1:
        rank_0s = runtime.world.broadcast(runtime.to_cpu(own))
        # Exchanged, not overwritten: XLA would compile the next training step once more.
        for module, buffers in zip(modules, rank_0s):
            module._buffers.update(runtime.put({n: v for n, v in buffers.items() if v is not None}))
    try:
        yield
    finally:
        for module, buffers in zip(modules, own):
            module._buffers.update(buffers)
