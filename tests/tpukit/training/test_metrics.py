"""What is recorded of an interval, and losses and gradients that are not finite."""

import dataclasses

import pytest
import torch

from tests.tpukit.training.conftest import DIGITS, train_in
from tpukit import MNIST, Run
from tpukit.devices.distributed import World
from tpukit.devices.runtime import Runtime
from tpukit.runs.settings import setting
from tpukit.training.metrics import Diverged


@dataclasses.dataclass(frozen=True, kw_only=True)
class Poisoned(MNIST):
    """MNIST whose loss is not a number from a given step on."""

    bad_from: int = setting(0, free=True)
    calls: list = dataclasses.field(default_factory=list, metadata=dict(free=True))

    def loss(self, model, batch, epoch):
        self.calls.append(1)
        return super().loss(model, batch, epoch) * (float("nan") if len(self.calls) >= self.bad_from else 1)


@pytest.mark.parametrize("bad_from", [1, 17, 29])
def test_a_nan_loss_stops_with_the_step_and_the_last_good_checkpoint(bad_from, digits, tmp_path, cpu):
    task = Poisoned(dataset_dir=digits, epochs=3, bad_from=bad_from, **DIGITS | dict(log_every=10))
    good = "there is no checkpoint yet"
    if bad_from > 25:
        train_in(tmp_path, dataclasses.replace(task, epochs=1), cpu)
        good = "last good checkpoint is step-00000025.pt"
    with pytest.raises(Diverged, match=f"at step {bad_from}; .*{good}.*a lower lr"):
        train_in(tmp_path, task, cpu)
    run = Run.find(tmp_path)
    assert [record["step"] for record in run.records("diverged")] == [bad_from]
    for c in run.checkpoints():
        saved = torch.load(run.path / "checkpoints" / c["file"], weights_only=True)["state"]["model"]
        assert all(torch.isfinite(v).all() for v in saved.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Starving(MNIST):
    """MNIST whose loss is a number, while its gradient from the second epoch on is none."""

    def loss(self, model, batch, epoch):
        loss = super().loss(model, batch, epoch)
        return loss + (next(model.parameters()).square().sum() * 0).sqrt() if epoch >= 1 else loss


def test_an_fp16_training_whose_every_gradient_overflows_ends_and_names_the_scale_of_its_loss(
    digits, tmp_path
):
    task = Starving(dataset_dir=digits, epochs=3, **DIGITS | dict(log_every=1))  # 25 steps per epoch
    run = train_in(tmp_path, dataclasses.replace(task, epochs=1), Runtime("cpu", "fp16"))
    with pytest.raises(
        Diverged, match=r"at step 56 even with the loss scaled down to 3\.1e-05; .*step-00000025\.pt"
    ):
        # from 2 ** 16 to 2 ** -15: 31 steps are skipped
        train_in(tmp_path, task, Runtime("cpu", "fp16"))
    assert run.records("diverged")[0]["step"] == 56
    assert all(r["loss"] < 9 for r in run.records("train"))


def test_memory_of_every_device_of_every_rank_is_recorded(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(
        Runtime, "memory", lambda self: [(self.world.rank + 1.0, 16.0), (self.world.rank + 5.0, 16.0)]
    )

    class Two(World):
        def all_gather(self, mine):  # the other rank says the same of its own devices
            if isinstance(mine, list):
                return [mine, mine]
            memory = [(peak + 10, total) for peak, total in mine["memory"]]
            return [mine, dict(mine, memory=memory)]

    task = MNIST(dataset_dir=digits, epochs=1, batch_size=16, log_every=99)
    runtime = Runtime("cpu")
    runtime.world = Two(0, 1)
    run = train_in(tmp_path, task, runtime)
    memory = run.records("train")[-1]["speed"]["memory"]
    assert memory == [[1.0, 16.0], [5.0, 16.0], [11.0, 16.0], [15.0, 16.0]]
