"""What a task must implement, settings that are refused, and a task on its way to another process."""

import dataclasses
import inspect
import json
import math
from pathlib import Path

import pytest

from tpukit import CDEIT, MNIST, ImageClassifier, MSHNet, Task, TpukitError
from tpukit.training.task import from_settings, to_request


@pytest.mark.parametrize(
    "method", ["datasets", "model", "optimizer", "loss", "predict", "evaluate", "panels"]
)
def test_a_task_that_leaves_a_method_out_is_told_which(method):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Empty(Task):
        name, dataset, score = "empty", "none", "x"

    arguments = inspect.signature(getattr(Empty(), method)).parameters.values()
    with pytest.raises(TpukitError, match=rf"Empty must implement {method}\(\)"):
        getattr(Empty(), method)(*[None for a in arguments if a.default is a.empty])


WRONG = [
    dict(batch_size=0),
    dict(batch_size=-4),
    dict(log_every=0),
    dict(eval_every=0),
    dict(num_workers=-1),
    dict(seed=-1),
]
WRONG += [
    dict(seed=10**20),
    dict(lr=-1.0),
    dict(lr=math.nan),
    dict(lr=math.inf),
    dict(clip_norm=-1.0),
    dict(save_every_s=-1.0),
]
WRONG += [dict(warmup_epochs=math.nan)]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
@pytest.mark.parametrize("task", [MNIST, MSHNet, CDEIT, ImageClassifier])
def test_settings_that_no_training_can_have_are_refused_by_their_name(task, wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(TpukitError, match=rf"{name}={value}: .* [01] or more"):
        task(**wrong)


@pytest.mark.parametrize(
    "task, wrong",
    [
        (MSHNet, dict(ema_decay=2.0)),
        (MNIST, dict(channels=0)),
        (ImageClassifier, dict(mixup=math.inf)),
        (ImageClassifier, dict(weight_decay=math.nan)),
        (ImageClassifier, dict(flip=1.5)),
    ],
    ids=str,
)
def test_settings_of_one_task_that_make_no_sense_are_refused_by_their_name(task, wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(TpukitError, match=f"{name}={value}: "):
        task(**wrong)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Own(MNIST):
    """A task with settings of every type."""

    notes: Path | None = Path("notes")
    places: tuple[Path, ...] = (Path("a"), Path("b"))
    sizes: tuple[int, ...] | None = (3, 4)


def test_a_task_arrives_in_another_process_as_it_was_sent(digits):
    task = Own(dataset_dir=digits, weights="w.pth", batch_size=4, places=(Path("c"),), sizes=None)
    request = json.loads(json.dumps(to_request(task)))
    received = from_settings(Own, request["settings"] | dict(of_an_older_version=1))
    assert received == dataclasses.replace(task, weights=Path("w.pth")) and isinstance(received.notes, Path)
    assert from_settings(Own, {}) == Own()
