"""What a run that was stopped or killed restores from its checkpoint, and which checkpoints it refuses."""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch

from tests.conftest import SMALL, best_weights, exact, refuses, same
from tpukit import MNIST, MSHNet, Run, train


@pytest.mark.parametrize("device", ["cpu", pytest.param("xla", marks=pytest.mark.slow)])
def test_two_and_two_epochs_equal_four(device, digits, tmp_path, request):
    runtime = request.getfixturevalue(device)
    task = MNIST(dataset_dir=digits, epochs=4, **SMALL)
    straight = Run.open(tmp_path / "straight", task)
    train(task, straight, runtime=runtime, progress=False)
    for epochs in (2, 4):
        part = dataclasses.replace(task, epochs=epochs)
        parted = Run.open(tmp_path / "parted", part)
        train(part, parted, runtime=runtime, progress=False)
    assert exact(parted) == exact(straight) and len(exact(straight)) > 30
    assert same(best_weights(parted), best_weights(straight))


@pytest.mark.slow
def test_mshnet_resumes_exactly_across_its_phases_with_augmentation(infrared, tmp_path, cpu):
    task = MSHNet(dataset_dir=infrared, epochs=4, warm_epoch=1, base_size=32, crop_size=32, batch_size=4, log_every=3)
    straight = Run.open(tmp_path / "straight", task)
    train(task, straight, runtime=cpu, progress=False)
    for epochs in (1, 3, 4):
        part = dataclasses.replace(task, epochs=epochs)
        train(part, Run.open(tmp_path / "parted", part), runtime=cpu, progress=False)
    assert exact(Run.find(tmp_path / "parted")) == exact(straight)


KILLED = """
import os, sys
from pathlib import Path
from tpukit import MNIST, Run, train
from tpukit.training.loop import Trainer
from tpukit.devices.runtime import Runtime

folder, data, kill_at, save_every_s = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
task = MNIST(dataset_dir=data, epochs=3, batch_size=8, log_every=3, save_every_s=save_every_s, seed=5)
steps = 0
whole_step = Trainer.take_step

def step(self, *args):
    global steps
    steps += 1
    if steps == kill_at:
        os.kill(os.getpid(), 9)
    whole_step(self, *args)

Trainer.take_step = step
train(task, Run.open(folder, task), runtime=Runtime("cpu"), progress=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize("save_every_s, kills", [(0.0, (5, 23, 24)), (300.0, (11, 44, 18))])
def test_killing_the_process_again_and_again_changes_nothing_that_is_logged(save_every_s, kills, digits, tmp_path, cpu):
    """Each kill comes before that step of its session: with a checkpoint after every step, and with epochs' ends only."""
    task = MNIST(dataset_dir=digits, epochs=3, batch_size=8, log_every=3, seed=5)
    straight = Run.open(tmp_path / "straight", task)
    train(task, straight, runtime=cpu, progress=False)
    codes = []
    for kill_at in (*kills, 999):
        command = [sys.executable, "-c", KILLED, str(tmp_path / "killed"), str(digits), str(kill_at), str(save_every_s)]
        codes.append(subprocess.run(command, capture_output=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}).returncode)
    assert codes == [-9, -9, -9, 0]
    assert exact(Run.find(tmp_path / "killed")) == exact(straight)


@pytest.mark.parametrize("name, value, datum", [("format", 0, "best.safetensors"), ("train_size", 77, 77)])
def test_a_checkpoint_of_another_version_or_dataset_is_refused(name, value, datum, trained, cpu):
    task, run = trained
    path = run.path / "checkpoints" / run.checkpoints()[0]["file"]
    state = torch.load(path, weights_only=True)["state"]
    run.save(state | {name: value}, 99)
    with refuses(run.path, datum):
        train(dataclasses.replace(task, epochs=9), run, runtime=cpu, progress=False)
