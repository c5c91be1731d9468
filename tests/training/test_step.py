"""One training step: precision and clipping."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.conftest import SMALL, checkpoint, exact
from tpukit import MNIST, MSHNet, Run, train
from tpukit.devices.runtime import Runtime


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_reduced_precision_trains_and_fp16_resumes_with_its_scaler(precision, digits, tmp_path):
    task = MNIST(dataset_dir=digits, epochs=8, precision=precision, channels=4, **SMALL)
    runtime = Runtime("cpu", precision)
    run = Run.open(tmp_path / "straight", task)
    scores = train(task, run, runtime=runtime, progress=False)
    assert scores["accuracy"] > 0.3 and run.records("epoch")[-1]["loss"] < 0.6 * run.records("epoch")[0]["loss"]
    assert bool(checkpoint(run)["scaler"]) == (precision == "fp16")
    for epochs in (4, 8):
        part = dataclasses.replace(task, epochs=epochs)
        train(part, Run.open(tmp_path / "parted", part), runtime=Runtime("cpu", precision), progress=False)
    assert exact(Run.find(tmp_path / "parted")) == exact(run)


def test_the_loss_is_computed_in_float32_under_autocast(infrared):
    runtime = Runtime("cpu", "bf16")
    task = MSHNet(dataset_dir=infrared, base_size=32, crop_size=32)
    batch = {k: torch.as_tensor(v) for k, v in task.datasets()[0].batch([0, 1], np.full((2, 6), 0.3)).items()}
    with runtime.autocast():
        model = task.model()
        assert model.conv_init(torch.zeros(1, 3, 8, 8)).dtype == torch.bfloat16
        assert task.loss(model, batch, epoch=9).dtype == torch.float32


def test_a_gradient_above_the_norm_is_scaled_down_to_it_and_a_small_one_left_alone(cpu):
    for size, wanted in ((10.0, 1.0), (0.5, 0.5)):
        weight = torch.nn.Parameter(torch.zeros(4))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        direction = torch.tensor([0.6, 0.0, 0.8, 0.0])
        cpu.backward((weight * direction * size).sum(), optimizer)
        norm = cpu.clip_gradients(optimizer, 1.0)
        cpu.optimizer_step(optimizer)
        assert float(norm) == pytest.approx(size) and torch.allclose(weight, -wanted * direction)
