"""What a task must implement, settings that are refused, and a task on its way to another process."""

import dataclasses
import inspect
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import refuses
from tpukit import MNIST, ImageClassifier, LanguageModel, MSHNet, Task, TpukitError
from tpukit.reporting.display import panels_of
from tpukit.runs.settings import from_settings
from tpukit_tools.subprocess_call import to_request


@pytest.mark.parametrize("method", ["datasets", "model", "optimizer", "loss", "predict", "evaluate"])
def test_a_task_that_leaves_a_method_out_is_told_which(method):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Empty(Task):
        name, dataset, score = "empty", "none", "x"

    arguments = inspect.signature(getattr(Empty(), method)).parameters.values()
    with pytest.raises(TpukitError, match=rf"Empty must implement {method}\(\)"):
        getattr(Empty(), method)(*[None for a in arguments if a.default is a.empty])


class Faces:
    """Images in any layout, without augmentation."""

    num_uniforms = 0

    def __init__(self, shape):
        self.images = np.arange(5 * np.prod(shape)).reshape(5, *shape)

    def __len__(self):
        return 5

    def batch(self, indices, numbers=None):
        return dict(image=self.images[indices], label=np.asarray(indices) + 1)


@pytest.mark.parametrize("shape", [(4, 6), (1, 4, 6), (3, 4, 6), (4, 6, 3)], ids=str)
def test_a_task_that_says_nothing_of_panels_and_examples_shows_its_images_and_tries_its_first_samples(shape):
    class Plain(Task):
        name, score = "plain", "x"

        def datasets(self):
            return Faces(shape), Faces(shape)

    task = Plain(dataset_dir=Path("faces"))
    batch, panels = task.example(7), panels_of(task)
    assert batch["label"].tolist() == [1, 2, 3, 4, 5, 1, 2]
    rows = panels(batch, np.arange(7))
    assert [title for [(title, _)] in rows[:2]] == ["✗ 1, predicted 0", "✗ 2, predicted 1"]
    assert panels(batch, batch["label"])[0][0][0] == "✓ 1, predicted 1"
    assert panels(batch, batch["label"] + 0.5)[0][0][0] == "1, predicted 1.5"  # neither right nor wrong
    [(title, image)] = panels(batch)[1]
    assert title == "2" and image.shape == ((4, 6, 3) if 3 in shape else (4, 6))
    wanted = {(1, 4, 6): lambda x: x[0], (3, 4, 6): lambda x: x.transpose(1, 2, 0)}.get(shape, lambda x: x)
    np.testing.assert_array_equal(image, wanted(batch["image"][1]))
    with refuses("Plain must implement panels()"):
        panels(dict(voltages=batch["image"]))
    with refuses("Plain must implement example()"):
        Plain().example(1)


WRONG = [
    *(dict(batch_size=size) for size in (0, -4)),
    *(dict(lr=rate) for rate in (-1.0, math.nan, math.inf)),
    *(dict(seed=seed) for seed in (-1, 2**63, 10**20)),
    *({name: 0} for name in ("log_every", "eval_every", "max_steps")),
    dict(num_workers=-1),
    *({name: -1.0} for name in ("clip_norm", "save_every_s")),
    dict(warmup_epochs=math.nan),
]
CHOICES = "precision schedule batch_norm compile data_on".split()
OF_ONE_TASK = [
    (MSHNet, dict(clip_norm=0.0)),
    (MSHNet, dict(ema_decay=2.0)),
    (MSHNet, dict(network="tiny")),
    (MNIST, dict(channels=0)),
    (ImageClassifier, dict(weight_decay=math.nan)),
    (ImageClassifier, dict(flip=1.5)),
    (LanguageModel, dict(test_share=1.5)),
    (LanguageModel, dict(lora_rank=0)),
    (LanguageModel, dict(adapter="drop")),
    *((MNIST, {name: "Cosine"}) for name in CHOICES),
]


@pytest.mark.parametrize("kind, wrong", [*((MNIST, wrong) for wrong in WRONG), *OF_ONE_TASK], ids=str)
def test_settings_that_no_training_can_have_are_refused_by_their_name(kind, wrong):
    ((name, value),) = wrong.items()
    rule = "[01] or more" if wrong in WRONG else "choose one of" if isinstance(value, str) else "must be"
    with pytest.raises(TpukitError, match=rf"{name}={value!r}: .*{rule}"):
        kind(**wrong)


@pytest.mark.parametrize(
    "given, wanted",
    [
        (dict(epochs="two"), "a whole number"),
        (dict(epochs="1"), "a whole number"),  # papermill -r EPOCHS 1
        (dict(epochs=1.5), "a whole number"),
        (dict(epochs=True), "a whole number"),
        (dict(epochs=None), "a whole number"),
        (dict(lr="fast"), "a number"),
        (dict(skip_bad="no"), "True or False"),
        (dict(freeze="backbone"), "a tuple, such as ('head',)"),
    ],
    ids=str,
)
def test_a_setting_of_another_type_is_one_sentence_that_names_it_as_a_notebook_does(given, wanted):
    ((name, value),) = given.items()
    with pytest.raises(TpukitError) as raised:
        MSHNet(**given)
    assert str(raised.value) == f"{name}={value!r} ({name.upper()} in a notebook): it must be {wanted}"


def test_whole_numbers_of_papermill_and_numpy_are_ints():
    given: dict[str, Any] = dict(epochs=1.0, batch_size=np.int64(8), patience=np.float32(3))
    task = MNIST(**given)
    assert [type(value) for value in (task.epochs, task.batch_size, task.patience)] == [int] * 3
    assert task == MNIST(epochs=1, batch_size=8, patience=3)


def test_an_empty_path_is_none_and_not_the_current_folder():
    given: dict[str, Any] = dict(dataset_dir="", weights="")
    assert MNIST(**given) == MNIST()


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
