"""Losses and gradients that are not finite, and gradient norms out of range."""

import dataclasses

import pytest
import torch

from tests.conftest import SMALL
from tpukit import MNIST, Run, train
from tpukit.devices.runtime import Runtime
from tpukit.training.metrics import Diverged


@dataclasses.dataclass(frozen=True, kw_only=True)
class Poisoned(MNIST):
    """MNIST whose loss is not a number from a given step on."""

    bad_from: int = 0

    def loss(self, model, batch, epoch):
        self.calls.append(1)
        return super().loss(model, batch, epoch) * (float("nan") if len(self.calls) >= self.bad_from else 1)


@pytest.mark.parametrize("bad_from", [1, 17, 29])
def test_a_nan_loss_stops_with_the_step_and_the_last_good_checkpoint(bad_from, digits, tmp_path, cpu):
    task = Poisoned(dataset_dir=digits, epochs=3, batch_size=8, log_every=10, bad_from=bad_from)
    object.__setattr__(task, "calls", [])
    run = Run.open(tmp_path, task)
    good = "there is no checkpoint yet" if bad_from <= 25 else "last good checkpoint is step-00000025.pt"
    with pytest.raises(Diverged, match=f"at step {bad_from}; .*{good}.*a lower lr"):
        train(task, run, runtime=cpu, progress=False)
    assert run.records("diverged")[0]["step"] == bad_from
    for c in run.checkpoints():
        saved = torch.load(run.path / "checkpoints" / c["file"], weights_only=True)["state"]["model"]
        assert all(torch.isfinite(v).all() for v in saved.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Starving(MNIST):
    """MNIST whose loss is a number, while its gradient from the second epoch on is none."""

    def loss(self, model, batch, epoch):
        loss = super().loss(model, batch, epoch)
        return loss + (next(model.parameters()).square().sum() * 0).sqrt() if epoch >= 1 else loss


def test_an_fp16_training_whose_every_gradient_overflows_ends_and_names_the_scale_of_its_loss(digits, tmp_path):
    task = Starving(dataset_dir=digits, epochs=3, batch_size=8, channels=4, log_every=1, num_workers=1)  # 25 steps per epoch
    run = Run.open(tmp_path, task)
    with pytest.raises(Diverged, match=r"at step 56 even with the loss scaled down to 3\.1e-05; .*step-00000050\.pt"):
        train(task, run, runtime=Runtime("cpu", "fp16"), progress=False)  # from 2 ** 16 to 2 ** -15: 31 steps are skipped
    assert run.records("diverged")[0]["step"] == 56
    assert all(r["loss"] < 9 for r in run.records("train"))


class Loud(MNIST):
    """MNIST whose loss, and so its gradient, is out of all proportion from the second epoch on."""

    def loss(self, model, batch, epoch):
        return super().loss(model, batch, epoch) * (1e9 if epoch >= 1 else 1.0)


@pytest.mark.parametrize("clip_norm, step", [(1e-3, 26), (None, 27)])
def test_an_unusual_gradient_norm_is_said_once_with_its_step(digits, tmp_path, cpu, capsys, clip_norm, step):
    task = Loud(dataset_dir=digits, epochs=3, lr=1e-12, clip_norm=clip_norm, **SMALL)  # read every 3 steps
    run = Run.open(tmp_path / "run", task)
    train(task, run, runtime=cpu, progress=False)
    assert [r["step"] for r in run.records("odd_norm")] == [step]  # once, though it stays so over two epochs
    assert capsys.readouterr().out.count(f"step {step}: the gradient norm left the range 1e-07 to 1000") == 1
    assert run.records("train")[-1]["grad_norm"] > 1e3  # as it was before it was clipped
