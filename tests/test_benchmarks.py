"""The benchmarks that stand in for a device still fit the loop that they measure."""

import subprocess
import sys

import pytest
import torch

from benchmarks import by_hand, loops, rows
from tests.conftest import ROOT
from tpukit import MNIST, MSHNet
from tpukit.devices.runtime import Runtime


def test_the_network_written_by_hand_computes_the_loss_and_gradients_of_mshnet():
    torch.manual_seed(1)  # in float32 some weights round a maximum to another pixel
    task = MSHNet(base_size=32, crop_size=32)
    loss, model = by_hand.Loss(), task.model()
    loss.network.load_state_dict(model.state_dict())
    batch = {name: torch.as_tensor(values) for name, values in task.example(2).items()}
    expected, found = task.loss(model, batch, epoch=task.warm_epoch + 1), loss(batch["image"], batch["mask"])
    torch.testing.assert_close(found, expected)
    expected.backward()
    found.backward()
    # The biases that batch norm takes away again have no gradient in one, and rounding alone in the other.
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    rounding = 1e-5 * max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, parameter in loss.network.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=rounding, rtol=1e-3)


def test_the_bare_loop_trains_the_same_network_on_the_same_batches_as_tpukits(digits, monkeypatch):
    losses = []

    def recorded(task, *arguments, loss=MNIST.loss):
        found = loss(task, *arguments)
        losses.append(found.detach())
        return found

    monkeypatch.setattr(MNIST, "loss", recorded)
    task = MNIST(dataset_dir=digits, batch_size=32, epochs=2, eval_every=9, log_every=999)
    assert loops.Bare(task, torch.device("cpu")).run() > 0
    bare, losses[:] = torch.stack(losses), []
    assert loops.Ours(task, Runtime("cpu")).run() > 0
    assert len(bare) == 2 * (len(task.datasets()[0]) // task.batch_size) > 2
    torch.testing.assert_close(torch.stack(losses), bare, rtol=1e-4, atol=1e-5)


def test_a_row_is_read_from_what_a_part_prints_and_peers_take_the_steps_of_the_bare_loop(capsys, monkeypatch):
    ways = loops.contenders(loops.Tiny(epochs=2, eval_every=9, log_every=999, steps=3), "cpu")
    taken, step = [], torch.optim.SGD.step
    monkeypatch.setattr(
        torch.optim.SGD, "step", lambda *given, **named: taken.append(1) or step(*given, **named)
    )
    for name in {*ways} & {"bare", "tpukit", "Fabric", "Lightning"}:  # accelerate takes the XLA device here
        assert ways[name].run() > 0
        assert len(taken) == 2 * 3, name
        taken.clear()
    rows.print_row(device="cpu", loop="bare", **rows.compare([2.0, 4.0], [1.0, 1.0]))
    read = rows.read_row(capsys.readouterr().out)
    assert read["loop"] == "bare" and read["times_first"] == 3.0 and read["rounds"] == 2
    assert rows.read_row("a library's own words") is None


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.long  # which has the large one
def test_a_small_campaign_of_kills_flipped_bits_and_faults_of_the_disk_loses_nothing():
    often = ["--kills", "5", "--flips", "4", "--read-faults", "6", "--write-faults", "6"]
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.campaign", *often],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0 and "lost: 0" in ran.stdout, ran.stdout + ran.stderr
