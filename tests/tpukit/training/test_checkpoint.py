"""What a run that was stopped or killed restores from its checkpoint, and which checkpoints it refuses."""

import dataclasses
import json
import os
import random
import shutil
import subprocess

import numpy as np
import pytest
import torch
from PIL import Image

from tests import warm
from tests.conftest import SMALL, best_weights, checkpoint, exact, flip, refuses, same
from tests.tasks.cdeit import small as cdeit
from tests.tasks.mshnet.small import Narrow
from tests.tpukit.devices.emulated_gpu import EmulatedRuntime
from tests.tpukit.training.conftest import DIGITS, train_in
from tpukit import MNIST, ImageClassifier, Run, train
from tpukit.devices.runtime import Runtime
from tpukit.host.signals import StopSignal
from tpukit.runs.weights import epoch_of
from tpukit.training.checkpoint import differences
from tpukit.training.setup import Trainer
from tpukit_tools.subprocess_call import to_request


class Drawing(MNIST):
    """Draws on the device: for dropout, and in its predictions."""

    def model(self):
        return super().model().insert(7, torch.nn.Dropout(0.5))

    def predict(self, model, batch, epoch=None):
        logits = model(batch["image"].float() / 255)
        return (logits + 10 * torch.rand_like(logits)).argmax(1)


SMALL_MSHNET = SMALL | dict(base_size=32, crop_size=32, warm_epoch=1, batch_size=4)
FEW_STEPS = DIGITS | dict(batch_size=20)  # ten in an epoch
RESUMED = {  # device, task, its settings, the epochs of each session
    "plain": ("cpu", MNIST, FEW_STEPS, (2, 4)),
    "fp16 and its scaler": ("cpu", MNIST, FEW_STEPS | dict(precision="fp16"), (2, 4)),
    "schedule": ("cpu", MNIST, FEW_STEPS | dict(warmup_epochs=1.5), (1, 3)),
    "fine-tuning": ("cpu", MNIST, FEW_STEPS | dict(freeze=("0",)), (1, 2)),
    "both phases and the augmentation of MSHNet": ("cpu", Narrow, SMALL_MSHNET, (1, 3, 4)),
    "on XLA": ("xla", MNIST, FEW_STEPS, (2, 4)),
    "random numbers": ("cpu", Drawing, FEW_STEPS, (1, 3)),
    "random numbers on XLA": ("xla", Drawing, FEW_STEPS, (1, 3)),
    "random numbers in captured steps": ("emulated", Drawing, FEW_STEPS, (1, 3)),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * ("on XLA" in case)) for case in RESUMED]
)
def test_a_run_trained_in_several_sessions_equals_one_of_a_single_session(
    case, digits, infrared, tmp_path, request
):
    device, kind, settings, sessions = RESUMED[case]
    data = infrared if kind is Narrow else digits
    task = kind(dataset_dir=data, epochs=sessions[-1], **settings)

    def trained(name, epochs):
        runtime = Runtime("cpu", task.precision) if device == "cpu" else request.getfixturevalue(device)
        runtime = EmulatedRuntime() if device == "emulated" else runtime
        return train_in(tmp_path / name, dataclasses.replace(task, epochs=epochs), runtime)

    straight = trained("straight", sessions[-1])
    *_, parted = [trained("parted", epochs) for epochs in sessions]
    assert exact(parted) == exact(straight) and len(exact(straight)) > 10
    assert same(best_weights(parted), best_weights(straight))
    assert bool(checkpoint(parted)["scaler"]) == (task.precision == "fp16")
    losses = [record["loss"] for record in straight.records("epoch")]
    assert losses[-1] < losses[0] or kind is Narrow


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_goes_on_with_as_many_ranks_has_their_random_states_and_with_others_new_ones(
    ranks, digits, tmp_path, cpu
):
    run = train_in(tmp_path / "run", Drawing(dataset_dir=digits, epochs=1, seed=3, **FEW_STEPS), cpu)
    saved = checkpoint(run)
    run.save(saved | dict(random=saved["random"] * ranks), 10)
    task = Drawing(dataset_dir=digits, epochs=2, seed=3, **FEW_STEPS)
    Trainer(task, Run.open(run.path, task), cpu, StopSignal())
    drawn = torch.rand(3)
    torch.set_rng_state(saved["random"][0]["cpu"])
    if ranks == 2:
        cpu.seed(int(torch.randint(2**31, ())))
    assert torch.equal(drawn, torch.rand(3))


def test_a_checkpoint_of_another_version_is_refused(trained, cpu):
    task, run = trained
    run.save(checkpoint(run) | dict(format=0), 99)
    with refuses(run.path, "best.safetensors"):
        train(dataclasses.replace(task, epochs=9), run, runtime=cpu, progress=False)


def rename_a_class(folder):
    for split in ("train", "test"):
        (folder / split / "bar").rename(folder / split / "a bar")


def swap_two_files_of_two_classes(folder):
    first, second = (next((folder / "train" / label).iterdir()) for label in ("bar", "ring"))
    first.rename(folder / "train/ring" / first.name)
    second.rename(folder / "train/bar" / second.name)


def correct_a_label(folder):
    with np.load(folder / "mnist.npz") as file:
        content = dict(file)
    content["y_train"][7] = (content["y_train"][7] + 1) % 10
    np.savez(folder / "mnist.npz", **content)


def correct_a_mask(folder):
    path = folder / "masks" / f"{(folder / 'trainval.txt').read_text().split()[0]}.png"
    mask = np.array(Image.open(path))
    mask[0, 0] = 255
    Image.fromarray(mask).save(path)


def swap_two_samples(folder):
    first, second, *_ = sorted((folder / "train").iterdir())
    contents = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(contents)


TINY = ImageClassifier(model_name="test_resnet", image_size=32, pretrained="no", **SMALL)
CHANGED = {
    "class": ("shapes", TINY, rename_a_class, ["classes"]),
    "file": ("shapes", TINY, swap_two_files_of_two_classes, ["file names and labels"]),
    "digit": ("digits", MNIST(**DIGITS), correct_a_label, ["labels"]),
    "mask": ("infrared", Narrow(base_size=32, crop_size=32, **SMALL), correct_a_mask, ["masks"]),
    "sample": ("tank", cdeit.Tiny(sampling_steps=1, **cdeit.SMALL), swap_two_samples, ["files"]),
}


@pytest.mark.parametrize("changed", CHANGED)
def test_the_signature_of_a_training_set_names_what_changed_in_it_and_not_where_it_lies(
    changed, tmp_path, request
):
    data, task, change, named = CHANGED[changed]
    if data == "shapes":
        pytest.importorskip("timm")
    original, copy = request.getfixturevalue(data), tmp_path / "moved" / "copy"
    shutil.copytree(original, copy)

    def signature(folder):
        moved = dataclasses.replace(task, dataset_dir=folder)
        return moved.data_signature(moved.datasets()[0])

    before = signature(original)
    assert signature(copy) == before
    change(copy)
    assert set(named) <= set(differences(before, signature(copy)))


def test_a_resumed_run_refuses_other_labels_and_takes_the_same_ones_in_another_folder(digits, tmp_path, cpu):
    copy, run = tmp_path / "moved" / "copy", tmp_path / "run"
    shutil.copytree(digits, copy)
    task = MNIST(**DIGITS | dict(batch_size=40))
    for epochs, folder in ((1, digits), (2, copy)):
        train_in(run, dataclasses.replace(task, epochs=epochs, dataset_dir=folder), cpu)
    records = exact(Run.find(run))
    correct_a_label(copy)
    for epochs in (2, 3):  # a run that has all its epochs does not show the scores of other labels either
        with refuses(run, copy, "--run", "RUN_NAME", "labels"):
            train_in(run, dataclasses.replace(task, epochs=epochs, dataset_dir=copy), cpu)
    assert exact(Run.find(run)) == records


def test_damaged_best_weights_are_named_and_give_way_to_those_of_the_next_evaluation(
    digits, tmp_path, cpu, capsys
):
    task = MNIST(dataset_dir=digits, epochs=1, lr=1e-12, **DIGITS)  # so small that no later score is better
    run = train_in(tmp_path / "run", task, cpu)
    train_in(run.path, dataclasses.replace(task, epochs=2), cpu)
    assert epoch_of(run.path / "best.safetensors") == 0
    flip(run.path / "best.safetensors")
    train_in(run.path, dataclasses.replace(task, epochs=3), cpu)
    assert "best.safetensors is damaged" in capsys.readouterr().out
    assert run.records("evaluation")[2]["kept"] and epoch_of(run.path / "best.safetensors") == 2


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_run_whose_test_labels_changed_says_so_and_compares_no_score_with_the_old_ones(
    epochs, digits, tmp_path, cpu, capsys
):
    data = tmp_path / "digits"
    shutil.copytree(digits, data)
    task = MNIST(dataset_dir=data, epochs=1, **DIGITS)
    run = train_in(tmp_path / "run", task, cpu)
    with np.load(data / "mnist.npz") as file:
        content = dict(file, y_test=(file["y_test"] + 5) % 10)
    np.savez(data / "mnist.npz", **content)
    old = checkpoint(run)["state"]["best"]
    scores = train(dataclasses.replace(task, epochs=epochs), run, runtime=cpu, progress=False)
    out = capsys.readouterr().out
    assert all(word in out for word in ("test set", str(data), "labels", "tpukit test", "--run", "RUN_NAME"))
    state = checkpoint(run)["state"]
    assert (scores["accuracy"] == state["best"] < old) if epochs == 2 else "nothing left to do" in out


def edited(layers=(8,), make=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9)):
    """A class of a notebook's cell, which may be edited between two sessions."""

    class Mine(MNIST):
        def model(self):
            hidden = [torch.nn.Sequential(torch.nn.LazyLinear(size), torch.nn.ReLU()) for size in layers]
            model = torch.nn.Sequential(torch.nn.Flatten(), *hidden, torch.nn.LazyLinear(10))
            model(torch.zeros(1, 1, 28, 28))
            return model

        def optimizer(self, model):
            return make(model.parameters())

    return Mine


EDITS = {
    "wider": (edited((16,)), ["1.0.weight", "(8, 784)", "(16, 784)"]),
    "deeper": (edited((8, 8)), ["2.0.weight"]),
    "optimizer": (edited(make=torch.optim.Adam), ["SGD", "Adam"]),
    "momentum": (edited(make=lambda weights: torch.optim.SGD(weights, lr=0.01)), ["momentum", "0.9", "0"]),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_run_whose_code_was_edited_is_refused_naming_the_first_difference(edit, digits, tmp_path, cpu):
    kind, named = EDITS[edit]
    settings = dict(dataset_dir=digits, **SMALL)
    train_in(tmp_path, edited()(epochs=1, **settings), cpu)
    run = train_in(tmp_path, edited()(epochs=2, **settings), cpu)  # the same code resumes
    with refuses(tmp_path, "RUN_NAME", *named):
        train(kind(epochs=3, **settings), run, runtime=cpu, progress=False)


KILLED = """
import json, os, sys, time
from pathlib import Path

from tpukit import Run, train
from tpukit.devices.runtime import Runtime
from tpukit.training.checkpoint import differences
from tpukit.training.loop import Trainer
from tpukit_tools.subprocess_call import from_request

folder, device = Path(sys.argv[1]), sys.argv[2]
request, runs = map(json.loads, sys.argv[3:])
if device == "xla":
    from tpukit.devices.xla import XLARuntime as Runtime
task = from_request(request)

def killed(whole, at, signal=9):
    calls = []
    def call(*arguments, **how):
        calls.append(1)
        if len(calls) == at:
            os.kill(os.getpid(), signal)
        return whole(*arguments, **how)
    return call

def train_in_a_process(name, place="", at=0):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if place == "between steps":
        Trainer.take_step = killed(Trainer.take_step, at)
    elif place == "by SIGTERM":
        Trainer.take_step = killed(Trainer.take_step, at, signal=15)
    elif place == "while the disk is written":  # by the thread of the saver, among others
        os.fsync, os.replace = killed(os.fsync, at), killed(os.replace, at)
    elif place == "while an epoch is scored":
        score = killed(type(task).evaluate, at)
        type(task).evaluate = lambda self, predictions: (time.sleep(0.2), score(self, predictions))[1]
    train(task, Run.open(folder / name, task), runtime=Runtime(device), progress=False)
    sys.stdout.flush()
    os._exit(0)

assert train_in_a_process("straight") == 0
codes = []
for number, kills in enumerate(runs):
    codes += [train_in_a_process(f"killed-{number}", place, at) for place, at in kills]
    assert train_in_a_process(f"killed-{number}") == 0
print("KILLED", codes.count(-9) + codes.count(128 + 15))
"""
EVERYTHING = dict(schedule="cosine", warmup_epochs=1.5, micro_batches=2, patience=4)
EVERYTHING |= dict(freeze=("0",), ema_decay=0.5, epochs=40, batch_size=20, channels=4, lr=0.1)
PLACES = ("between steps", "while the disk is written", "while an epoch is scored")
BETWEEN, WRITING, SCORING = PLACES


def chosen(count):
    """Kills at random places."""
    choice = random.Random(7)
    kills = [(choice.choice(PLACES), choice.randint(2, 9)) for _ in range(count)]
    return [(place, 1 if place == SCORING else at) for place, at in kills]


PLAIN = dict(epochs=3, batch_size=8, channels=4)
PLACE_BY_PLACE = [
    [(BETWEEN, at) for at in (5, 23, 24, 2, 11)],
    [(WRITING, at) for at in (4, 9, 10, 15, 17, 22, 30)],
    [(SCORING, at) for at in (1, 1, 2)],
]
DRAWN = [[("by SIGTERM", 13), (BETWEEN, 5), ("by SIGTERM", 2), (SCORING, 1), (BETWEEN, 18)]]
KILLS = {  # device, recipe, the kills of each run: each before that step, or that call, of its session
    "place by place": ("cpu", PLAIN, PLACE_BY_PLACE),
    "with every setting": ("cpu", EVERYTHING, [chosen(12)]),
    "on XLA with every setting": ("xla", EVERYTHING, [chosen(12)]),
    "with random numbers": ("cpu", PLAIN, DRAWN),
    "on XLA with random numbers": ("xla", PLAIN, DRAWN),
}


def assert_that_kills_change_nothing(task, runs, folder, device="cpu"):
    """Train straight, and once for each of the runs with its kills. Returns (the straight run, its state)."""
    command = [*warm.python(), "-c", KILLED, str(folder), device, json.dumps(to_request(task))]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    pipes = dict(capture_output=True, text=True, timeout=550)
    ran = subprocess.run([*command, json.dumps(runs)], env=environ, **pipes)
    assert f"KILLED {sum(map(len, runs))}" in ran.stdout, ran.stdout[-2000:] + ran.stderr[-2000:]
    assert "resuming at step" in ran.stdout, "no checkpoint was found by any session"
    straight = Run.find(folder / "straight")
    wanted = checkpoint(straight)
    for number in range(len(runs)):
        killed = Run.find(folder / f"killed-{number}")
        assert exact(killed) == exact(straight) and same(best_weights(killed), best_weights(straight))
        state = checkpoint(killed)
        assert wanted["state"] == state["state"] and same(wanted["model"], state["model"])
        assert task.ema_decay is None or same(wanted["averaged"], state["averaged"])
    return straight, wanted


@pytest.mark.slow
@pytest.mark.parametrize("device, recipe, runs", KILLS.values(), ids=KILLS)
def test_killing_the_process_again_and_again_changes_nothing_that_is_logged(
    device, recipe, runs, digits, tmp_path, request
):
    """Every setting: a schedule, micro-batches, patience, frozen and averaged weights."""
    request.getfixturevalue(device)  # skips where there is none
    kind = Drawing if runs is DRAWN else MNIST
    task = kind(dataset_dir=digits, log_every=3, save_every_s=0.0, num_workers=1, seed=5, **recipe)
    straight, wanted = assert_that_kills_change_nothing(task, runs, tmp_path, device)
    if recipe is EVERYTHING:
        assert straight.records("stopped") and wanted["state"]["step"] < 400, "it did not stop early"
        assert len({record["lr"] for record in straight.records("train")}) > 50
