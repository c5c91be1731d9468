"""The learning rate over a training, against torch's own schedulers."""

import pytest
import torch
from torch.optim import lr_scheduler

from tests.tpukit.training.conftest import DIGITS, train_in
from tpukit import CDEIT, MNIST, MSHNet
from tpukit.training.schedule import lr_factor

STEPS = 5  # of an epoch


def cosine_after_warm_up(optimizer, task):
    warm_up = round(task.warmup_epochs * STEPS)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, (task.max_steps or task.epochs * STEPS) - warm_up)
    if not warm_up:
        return cosine
    linear = lr_scheduler.LinearLR(optimizer, 1 / (warm_up + 1), total_iters=warm_up)
    return lr_scheduler.SequentialLR(optimizer, [linear, cosine], [warm_up])


def warm_up_alone(optimizer, task):
    return lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / (2 * STEPS + 1)))


SCHEDULES = {
    "cosine": (dict(schedule="cosine"), cosine_after_warm_up),
    "after a warm-up": (dict(schedule="cosine", warmup_epochs=1.4), cosine_after_warm_up),
    "over steps": (dict(schedule="cosine", warmup_epochs=1.4, max_steps=23), cosine_after_warm_up),
    "warm-up alone": (dict(warmup_epochs=2.0), warm_up_alone),
}
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "Adam": lambda p: torch.optim.Adam(p, 0.1, weight_decay=1e-2),
    "foreach AdamW": lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.1, foreach=True),
    "fused AdamW": lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.1, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.5),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("settings, scheduler", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_steps_are_those_of_torchs_schedulers_with_every_optimizer(
    optimizer, settings, scheduler, as_tensor, cpu
):
    task = MNIST(epochs=6, **settings)
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Linear(4, 3, dtype=torch.float64) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    our_optimizer, their_optimizer = optimizer(ours.parameters()), optimizer(theirs.parameters())
    schedule = scheduler(their_optimizer, task)
    start = ours.weight.detach().clone()
    for step in range(task.max_steps or task.epochs * STEPS):
        x = torch.randn(8, 4, dtype=torch.float64)
        factor = lr_factor(task, step, STEPS)
        assert 0.1 * factor == pytest.approx(schedule.get_last_lr()[0], rel=1e-9, abs=1e-12)
        for model, made in ((ours, our_optimizer), (theirs, their_optimizer)):
            made.zero_grad()
            model(x).square().mean().backward()
        cpu.optimizer_step(our_optimizer, torch.tensor(factor, dtype=torch.float64) if as_tensor else factor)
        their_optimizer.step()
        schedule.step()
        torch.testing.assert_close(ours.weight, theirs.weight, atol=1e-10, rtol=1e-10)
    assert float((ours.weight.detach() - start).abs().max()) > 0.01
    assert our_optimizer.param_groups[0]["lr"] == 0.1  # a checkpoint holds the number that it started with


def test_without_a_schedule_a_step_gets_no_factor_and_beyond_the_last_one_that_of_the_end():
    assert all(lr_factor(task(), 7, 10) is None for task in (MNIST, MSHNet, CDEIT))
    task = MNIST(epochs=2, schedule="cosine", warmup_epochs=3)
    assert lr_factor(task, 10**6, 10) == lr_factor(MNIST(epochs=0, schedule="cosine"), 5, 10) == 0


def test_a_resumed_run_says_that_more_epochs_bend_the_cosine(digits, tmp_path, cpu):
    def said(epochs, **settings):
        run = train_in(tmp_path, MNIST(**DIGITS, dataset_dir=digits, epochs=epochs, **settings), cpu)
        lines = (run.path / "log.txt").read_text().splitlines()
        return [line for line in lines if "planned for" in line]

    assert not said(2, schedule="cosine") and not said(2, schedule="cosine")
    [line] = said(4, schedule="cosine")
    assert "planned for 2 epochs and is now for 4:" in line and "50.0% of lr instead of 0.0%" in line
    assert said(4, schedule="cosine") == said(3, schedule="cosine") == [line]  # nothing left to do
