"""The state of a training: put together for a checkpoint, and restored from one. Both are collective."""

import dataclasses
import itertools
import time

import torch

from tpukit.devices.optimizers import state_tensors
from tpukit.host.errors import TpukitError
from tpukit.runs import weights
from tpukit.training import metrics

FORMAT = 4  # of a checkpoint's state
TRAIN_ANEW = "train anew in another run folder (--run, in a notebook RUN_NAME)"


@dataclasses.dataclass
class TrainState:
    """Where a run stands. All of it goes into a checkpoint."""

    step: int = 0
    epoch_loss: float = 0.0
    """summed over the steps of this epoch that were synced so far"""
    evaluated: int = 0
    """epochs evaluated, or skipped"""
    best: float | None = None
    """the best score so far"""
    best_on: str = ""
    """what that score was taken on, see `Task.evaluation_signature`"""
    evaluations_without_best: int = 0
    """in a row, up to the last one"""


def save(trainer, interval):
    """Start writing a checkpoint on rank 0: model, average, optimizer, loss scaler, random states, and the
    `TrainState`.

    interval: a fresh `metrics.Interval`.
    """
    started, runtime = time.monotonic(), trainer.runtime
    random = runtime.world.gather(runtime.random_state())
    if runtime.world.rank == 0:
        content = dict(
            format=FORMAT,
            train_size=len(trainer.data),
            data_signature=trainer.data_signature,
            test_signature=trainer.test_signature,
            optimizer_signature=trainer.optimizer_signature,
            state=dataclasses.asdict(trainer.state),
            sums=interval.sums,
            model=runtime.host(trainer.model.state_dict()),
            averaged=runtime.host(trainer.ema.model.state_dict()) if trainer.ema else {},
            optimizer=runtime.host(trainer.optimizer.state_dict()),
            scaler=runtime.scaler.state_dict() if runtime.scaler else {},
            random=random,  # every rank's
        )
        trainer.saver.save(content, trainer.state.step, cost_s=time.monotonic() - started)


def restore(trainer):
    """(state, sums) of the newest checkpoint after loading the rest of it; of a new run where there is none.

    Raises TpukitError for a checkpoint of another version or dataset.
    """
    run, runtime, task, size = trainer.run, trainer.runtime, trainer.task, len(trainer.data)
    _check_newest_is_on_rank_0(run, runtime.world)
    # Rank 0 reads for all: other hosts need not see its disk.
    saved = runtime.world.broadcast(_read(run, task) if runtime.world.rank == 0 else None)
    if saved is None:
        return TrainState(), metrics.new_sums(runtime)
    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        raise TpukitError(
            f"{run.path} was written by another version of tpukit: start a new run, and pass this run's"
            " best.safetensors as weights= to keep its result"
        )
    if saved["train_size"] != size:
        raise TpukitError(
            f"{run.path} was trained on {saved['train_size']} samples, {task.dataset_dir} has {size}: use the"
            " dataset that it started with, or choose another run folder"
        )
    # Runs of earlier versions have no signatures.
    if what := _differences(saved.get("data_signature", {}), trainer.data_signature):
        raise TpukitError(
            f"{run.path} was trained on other data than {task.dataset_dir} holds now, with other {what}: use"
            f" the dataset that it started with, or {TRAIN_ANEW}"
        )
    _check_code(trainer, saved)
    trainer.model.load_state_dict(saved["model"])
    if trainer.ema:
        trainer.ema.model.load_state_dict(saved["averaged"])
    for group, own in zip(saved["optimizer"]["param_groups"], trainer.optimizer.param_groups):
        for name in (
            "capturable",
            "fused",
        ):  # as this device counts the steps and updates, not as the other one did
            if name in own:
                group[name] = own[name]
    try:
        trainer.optimizer.load_state_dict(saved["optimizer"])
    except (ValueError, KeyError) as error:  # of a run that has no signature
        raise TpukitError(
            f"{run.path} was trained with another optimizer than {type(task).__name__}.optimizer() makes now "
            f"({error!r}): undo the change, or {TRAIN_ANEW}"
        ) from error
    _lay_out_as_parameters(trainer.optimizer)
    if runtime.scaler and saved["scaler"]:
        runtime.scaler.load_state_dict(saved["scaler"])
    of_average = trainer.ema.model.buffers() if trainer.ema else []
    runtime.separate([*trainer.model.buffers(), *of_average, *state_tensors(trainer.optimizer)])
    state = TrainState(**saved["state"])
    if what := _differences(saved.get("test_signature", {}), trainer.test_signature):
        state.best = None  # which no score on these samples can be compared with
        trainer.run.print(
            f"the test set of {task.dataset_dir} has changed since, with other {what}: the scores so far are"
            " those of the old one. `tpukit test` scores the weights that were kept on the new one; or"
            f" {TRAIN_ANEW}"
        )
    if len(saved["random"]) == runtime.world.size:
        runtime.set_random_state(saved["random"][runtime.world.rank])
    else:  # the number of ranks has changed, and there is no state for the new ones
        runtime.seed((task.seed, state.step))
    sums = metrics.new_sums(runtime, saved["sums"])
    runtime.sync()
    return state, sums


def _read(run, task):
    """The state of the newest checkpoint. Its best score is that of the best weights that are there."""
    saved = run.restore()
    if saved and saved.get("format") == FORMAT and saved["state"]["best"] is not None:
        if (about := run.mend_best()) is not None:
            saved["state"]["best"] = float(about[task.score]) if task.score in about else None
    return saved


def _check_code(trainer, saved):
    """Raise TpukitError naming the first tensors, or settings of the optimizer, that differ from those of the
    checkpoint: the code of the task has changed."""
    path, kind = trainer.run.path, type(trainer.task).__name__
    if different := weights.differences(saved["model"], trainer.model.state_dict()):
        raise TpukitError(
            f"{path} was trained with another model than {kind}.model() makes now: {different}\n"
            f"Undo the change, or {TRAIN_ANEW}"
        )
    old, new = saved.get("optimizer_signature", {}), trainer.optimizer_signature
    # Another version of torch may have more settings.
    changed = [
        f"{name} was {old[name]}, is {new[name]}" for name in old if name in new and old[name] != new[name]
    ]
    if changed:
        raise TpukitError(
            f"{path} was trained with another optimizer than {kind}.optimizer() makes now:"
            f" {', '.join(changed[:3])}. Undo the change, or {TRAIN_ANEW}"
        )


def _differences(saved, own):
    """What differs between two of `Task.data_signature`, in words; "" where nothing does."""
    different = [name for name in saved if name in own and saved[name] != own[name]]
    return " and ".join(_describe_difference(name, saved[name], own[name]) for name in different)


def _describe_difference(name, saved, own):
    if not (isinstance(saved, list) and isinstance(own, list)):
        return name
    pairs = itertools.zip_longest(saved, own, fillvalue="none")
    number, (old, new) = next((number, pair) for number, pair in enumerate(pairs, 1) if pair[0] != pair[1])
    return f"{name} (number {number} was {old}, is {new})"


def _lay_out_as_parameters(optimizer):
    """Give the optimizer's state the memory layout of its parameters, which fused updates on a GPU require: a
    run may have been saved where channels were not last."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if (
                isinstance(value, torch.Tensor)
                and value.shape == parameter.shape
                and value.stride() != parameter.stride()
            ):
                state[name] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def _check_newest_is_on_rank_0(run, world):
    mine = max((checkpoint["step"] for checkpoint in run.checkpoints()), default=0)
    newest = [int(row[0]) for row in world.all_gather([mine])]
    if max(newest) > newest[0]:
        raise TpukitError(
            f"{run.path}: rank 0's newest checkpoint there is of step {newest[0]} (0: none), but rank"
            f" {newest.index(max(newest))} has one of step {max(newest)}. Start the host that has the run"
            " with --node-rank 0, or put the run on a disk that all hosts share."
        )
