"""Save and restore the state of a training run. Both are collective."""

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from tpukit.devices.optimizers import state_tensors
from tpukit.devices.runtime import Runtime
from tpukit.host.errors import TpukitError
from tpukit.runs import weights
from tpukit.runs.run import Run
from tpukit.training import metrics
from tpukit.training.saver import Saver
from tpukit.training.task import Task

FORMAT = 6  # version of a checkpoint's state
SET_BY_DEVICE = ("capturable", "fused", "foreach")  # settings of an optimizer
TRAIN_ANEW = "train anew in another run folder (--run, in a notebook RUN_NAME)"


@dataclasses.dataclass
class TrainState:
    """The position of a training run. All of it goes into a checkpoint."""

    step: int = 0
    epoch_loss: float = 0.0
    """summed over the steps of this epoch that were synced so far"""
    evaluated: float = 0
    """epochs that had passed at the last evaluation or end of an epoch"""
    best: float | None = None
    """the best score so far"""
    evaluations_without_best: int = 0
    """in a row, up to the last one"""


class Origin(NamedTuple):
    """Signatures of the data and the optimizer that a run was started with. It must be resumed with the same,
    but for the test set."""

    train_set: dict[str, str]
    test_set: dict[str, str]
    optimizer_settings: dict[str, str]


def save(
    saver: Saver, runtime: Runtime, parts: dict, origin: Origin, state: TrainState, sums: dict[str, float]
) -> None:
    """Start writing a checkpoint on rank 0, with the random states of all ranks.

    parts: `TrainingStep.parts`. sums: of a fresh `metrics.Interval`."""
    random = runtime.random_states()  # on all ranks
    if runtime.world.rank == 0:
        saver.wait()  # or two states would be in memory
        content = dict(
            format=FORMAT, **origin._asdict(), state=dataclasses.asdict(state), sums=dict(sums), random=random
        )
        for name, part in parts.items():
            kept = saver.copy_of(part, state.step)
            content[name] = {} if part is None else kept or runtime.to_cpu(part.state_dict())
        saver.save(content, state.step)


def restore(
    run: Run, task: Task, runtime: Runtime, parts: dict, origin: Origin
) -> tuple[TrainState, dict[str, float]]:
    """Load the newest checkpoint into the parts, as `save` gets them. Returns (state, sums), fresh ones if
    there is none.

    Raises TpukitError for a checkpoint of another version, dataset, model or optimizer.
    """
    # Rank 0 reads for all: if the newest checkpoint is damaged, all continue from the same older one.
    read = (run.restore(), run.has_whole_best()) if runtime.world.rank == 0 else None
    saved, has_whole_best = runtime.world.broadcast(read)
    if saved is None:
        return TrainState(), metrics.SUMS
    _check_origin(run, task, saved, origin, parts["model"])
    _load_optimizer(parts["optimizer"], saved["optimizer"])
    buffers = []
    for name in ("model", "averaged", "scaler"):
        if parts[name] is not None and saved[name]:
            parts[name].load_state_dict(saved[name])
            buffers += getattr(parts[name], "buffers", list)()
    runtime.unalias([*buffers, *state_tensors(parts["optimizer"])])
    state = TrainState(**saved["state"])
    if not has_whole_best:
        state.best = None
    if changed := differences(saved["test_set"], origin.test_set):
        state.best = None  # not comparable with scores on these samples
        run.print(
            f"the test set of {task.dataset_dir}, or how it is scored, has changed since, with other"
            f" {' and '.join(changed)}: the scores so far are those of the old one. `tpukit test` scores the"
            f" kept weights on the new one; or {TRAIN_ANEW}"
        )
    runtime.set_random_states(saved["random"])
    runtime.sync()
    return state, saved["sums"]


def _check_origin(run: Run, task: Task, saved: object, origin: Origin, model: nn.Module) -> None:
    """Raise TpukitError, naming what differs, unless a checkpoint is of this version, of this training set,
    and of the model and the optimizer that the code of the task makes now."""
    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        raise TpukitError(
            f"{run.path} was written by another version of tpukit: start a new run, and pass this run's"
            " best.safetensors as weights= to keep its result"
        )
    code = type(task).__name__
    if changed := differences(saved["train_set"], origin.train_set):
        data = f"on other data than {task.dataset_dir} holds now"
        raise _changed(run, f"{data}, with other {' and '.join(changed)}")
    if what := weights.differences(saved["model"], model.state_dict()):
        raise _changed(run, f"with another model than {code}.model() makes now: {what}")
    old, new = saved["optimizer_settings"], origin.optimizer_settings
    changed = [f"{name} was {old[name]}, is {new[name]}" for name in differences(old, new)]
    if changed:
        what = ", ".join(changed[:3])
        raise _changed(run, f"with another optimizer than {code}.optimizer() makes now: {what}")


def _changed(run: Run, what: str) -> TpukitError:
    return TpukitError(f"{run.path} was trained {what}. Undo the change, or {TRAIN_ANEW}")


def data_signature(task: Task, data: Any) -> dict[str, str]:
    """Return the signature of one of a task's datasets: its size, and what the task adds."""
    return {"number of samples": str(len(data)), **task.data_signature(data)}


def optimizer_signature(optimizer: Optimizer) -> dict[str, str]:
    """Return the settings that the code of the task gives to a new optimizer, as setting -> text."""
    signature = {"optimizer": type(optimizer).__name__, "groups": str(len(optimizer.param_groups))}
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name not in SET_BY_DEVICE and isinstance(value, (bool, int, float, tuple, str)):
                signature[f"{name} of group {number}"] = str(value)
        signature[f"parameters of group {number}"] = str(len(group["params"]))
    return signature


def differences(saved: dict[str, str], expected: dict[str, str]) -> list[str]:
    """Return the names of the values that differ between two signatures. What only one of them has is left
    out: another version of torch may have more settings."""
    return [name for name in saved if name in expected and saved[name] != expected[name]]


def _load_optimizer(optimizer: Optimizer, saved: dict) -> None:
    """Load an optimizer's state, and keep how this device counts its steps, updates, and lays out memory."""
    for saved_group, group in zip(saved["param_groups"], optimizer.param_groups):
        for name in {"capturable", "fused"} & group.keys():
            saved_group[name] = group[name]
    optimizer.load_state_dict(saved)
    # Fused updates on a GPU need the layout of the parameter; the run may come from another one.
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            has_its_shape = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            if has_its_shape and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
