"""A step that is captured as a CUDA graph gives what an eager one gives: the numbers, on `emulated_gpu`."""

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import SMALL, checkpoint, exact, same
from tests.tasks.mshnet.small import Narrow
from tests.tpukit.devices.conftest import outcome, take_step
from tests.tpukit.devices.emulated_gpu import EmulatedRuntime
from tests.tpukit.training.conftest import train_in
from tpukit import MNIST
from tpukit.devices import cuda_graph
from tpukit.training import trial

STEPS = 12


@pytest.fixture(autouse=True)
def without_a_trial(monkeypatch):
    monkeypatch.setattr(trial, "try_out", lambda *_: "")


# One step function


def adagrad(parameters):
    return torch.optim.Adagrad(parameters, 0.01)  # counts its steps on the host


def adamw(parameters):
    return torch.optim.AdamW(parameters, 0.01)  # which the runtime lets count on the device


def momentum(parameters):
    return torch.optim.SGD(parameters, 0.01, momentum=0.9)


@pytest.mark.parametrize(
    "optimizer, dropout, ragged_at", [(momentum, False, None), (adagrad, True, None), (adamw, True, 7)]
)
def test_captured_steps_equal_eager_ones_bit_for_bit_and_another_shape_ends_the_capture(
    optimizer, dropout, ragged_at, emulated
):
    gpu = EmulatedRuntime()
    losses, state, _ = outcome(gpu, optimizer, True, dropout, STEPS, ragged_at)
    assert len(emulated.graphs) == 1 and emulated.launches == (ragged_at or STEPS) - cuda_graph.WARM_UP
    wanted_losses, wanted_state, _ = outcome(gpu, optimizer, False, dropout, STEPS, ragged_at)
    assert losses == wanted_losses and all(map(torch.equal, state, wanted_state))
    captured, *refused = gpu.compile_events
    assert captured["programs"] == 1 and len(refused) == (ragged_at is not None)
    why = "image went from (8, 1, 28, 28) to (6, 1, 28, 28): the last batch is ragged"
    assert all(event["programs"] == 0 and why in event["why"][0] for event in refused)


@pytest.mark.parametrize("peak, launches", [(30, STEPS - 3), (50, 0)])
def test_a_step_that_takes_more_than_half_of_the_memory_is_not_captured(
    peak, launches, emulated, monkeypatch
):
    monkeypatch.setattr(EmulatedRuntime, "memory", lambda self: [(peak * 2**30, 80 * 2**30)])
    gpu = EmulatedRuntime()
    outcome(gpu, adagrad, True, steps=STEPS)
    (event,) = gpu.compile_events
    assert emulated.launches == launches and (event["why"] == []) == (launches > 0)


@pytest.mark.parametrize(
    "what, reason",
    [
        ("a value read on the host", "not permitted when stream is capturing"),
        ("a new setting", "the optimizer's seen is new"),
        ("a decay that the host computes", "Adagrad computes with numbers on the host"),
    ],
)
def test_a_step_that_a_replay_would_not_repeat_is_not_captured_and_the_record_says_why(
    what, reason, emulated
):
    gpu, calls = EmulatedRuntime(), []
    model = gpu.to_device(torch.nn.Linear(2, 2))
    decay = 0.1 if what == "a decay that the host computes" else 0.0
    made = torch.optim.Adagrad(model.parameters(), 0.01, lr_decay=decay)

    def step(x):
        calls.append(1)
        if what == "a value read on the host":
            x.sum().item()
        if what == "a new setting":
            made.param_groups[0]["seen"] = len(calls)
        loss = model(x).sum()
        take_step(gpu, loss, made)
        return loss.detach()

    compiled = gpu.compile(step, mutates=(model, made))
    for _ in range(STEPS):
        compiled(torch.ones(3, 2))
    (event,) = gpu.compile_events
    assert event["programs"] == 0 and reason in event["why"][0]
    # A setting shows before the capture, which changes nothing.
    assert emulated.launches == 0 and len(calls) == STEPS + (what != "a new setting")


# Whole trainings


@pytest.mark.slow
def test_a_captured_training_equals_an_eager_one_over_both_phases_and_resumes_in_between(
    infrared, tmp_path, emulated
):
    gpu = EmulatedRuntime()
    recipe = dict(batch_size=2, base_size=32, crop_size=32, num_workers=1, log_every=3, eval_every=2)
    recipe |= dict(ema_decay=0.9, clip_norm=0.1, warmup_epochs=2.5, micro_batches=2)
    task = Narrow(dataset_dir=infrared, epochs=4, warm_epoch=1, freeze=("conv_init",), **recipe)
    eager = train_in(tmp_path / "eager", dataclasses.replace(task, compile="no"), gpu)
    assert not emulated.launches
    captured = train_in(tmp_path / "captured", task, gpu)
    assert len(emulated.graphs) == 1 and emulated.launches == 32 - cuda_graph.WARM_UP  # for both phases
    for epochs in (2, 4):
        parted = train_in(tmp_path / "parted", dataclasses.replace(task, epochs=epochs), gpu)
    theirs = checkpoint(eager)
    for mine in (checkpoint(captured), checkpoint(parted)):
        assert same(mine["model"], theirs["model"]) and same(mine["averaged"], theirs["averaged"])
        states = (found["optimizer"]["state"].values() for found in (mine, theirs))
        assert all(same(a, b) for a, b in zip(*states, strict=True))
    assert exact(captured) == exact(eager)
    steps = [[record for record in exact(run) if record["kind"] == "train"] for run in (parted, eager)]
    assert steps[0] == steps[1]


class WithAdam(MNIST):
    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-4)


def test_a_run_moves_from_a_cpu_to_a_gpu_and_back_with_its_optimizer(digits, tmp_path, cpu, emulated):
    gpu = EmulatedRuntime()
    task = WithAdam(dataset_dir=digits, epochs=3, **SMALL)
    wanted = checkpoint(train_in(tmp_path / "straight", task, cpu))
    for epochs, runtime in ((1, cpu), (2, gpu), (3, cpu)):
        state = checkpoint(train_in(tmp_path / "moved", dataclasses.replace(task, epochs=epochs), runtime))
        assert {float(one["step"]) for one in state["optimizer"]["state"].values()} == {25.0 * epochs}
        assert bool(state["optimizer"]["param_groups"][0]["fused"]) == (runtime is gpu)
    assert emulated.launches == 25 - cuda_graph.WARM_UP
    for name, value in wanted["model"].items():  # torch's fused update rounds differently
        torch.testing.assert_close(state["model"][name], value, atol=1e-4, rtol=1e-3)


# fp16


def test_in_fp16_a_capture_that_fails_within_the_update_leaves_a_scaler_that_goes_on(emulated):
    calls = []

    def wait_at_the_capture(optimizer, *_):
        calls.append(None)
        if len(calls) == cuda_graph.WARM_UP + 1:
            optimizer.param_groups[0]["params"][0].sum().item()

    def optimizer(parameters):
        made = adagrad(parameters)
        made.register_step_pre_hook(wait_at_the_capture)
        return made

    gpu = EmulatedRuntime("fp16")
    ours, _, _ = outcome(gpu, optimizer, True, steps=STEPS)
    (event,) = gpu.compile_events
    assert "not permitted" in event["why"][0] and len(calls) == STEPS + 1
    assert ours == outcome(EmulatedRuntime("fp16"), adagrad, False, steps=STEPS)[0]


@pytest.mark.parametrize("optimizer", [adagrad, momentum, adamw])
def test_captured_steps_in_fp16_skip_overflows_as_torchs_scaler_does(optimizer, emulated):
    """The oracle is GradScaler's own step, which reads on the host whether to skip. Four batches overflow:
    the first three, before there is a state, and one that is replayed."""

    def train_by(torchs):
        gpu = EmulatedRuntime("fp16")
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
        made = optimizer(model.parameters())
        if not torchs:
            gpu.init_optimizer_state(made)

        def step(batch, factor):
            with gpu.autocast():
                loss = torch.nn.functional.cross_entropy(model(batch["image"].float() / 255), batch["label"])
            take_step(gpu, loss * factor, made)
            return loss.detach()

        compiled = gpu.compile(step, mutates=None if torchs else (model, made))
        weights = []
        for number in range(STEPS):
            batch = MNIST().example(4)
            batch["image"] = batch["image"] // (number + 1)
            compiled(gpu.put(batch), torch.tensor(1e38 if number in (0, 1, 2, 8) else 1.0))
            weights.append([p.detach().clone() for p in model.parameters()])
        return weights, gpu.scaler.state_dict()

    (ours, scaler), (theirs, their_scaler) = train_by(torchs=False), train_by(torchs=True)
    assert emulated.launches == STEPS - 3 - cuda_graph.WARM_UP
    assert scaler == their_scaler and scaler["scale"] == 2.0**12  # 2 ** 16, halved four times
    assert torch.equal(ours[7][0], ours[8][0]) and not torch.equal(ours[8][0], ours[9][0])
    # torch's fused update rounds differently
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_the_rate_of_a_fused_optimizer_that_changes_needs_no_copy_of_the_weights(emulated):
    """The oracle is an optimizer whose settings have the rate of each step."""
    gpu, taken = EmulatedRuntime("fp16"), []
    for is_by_factor in (True, False):
        parameters = [torch.nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4)) for _ in range(3)]
        groups = [dict(params=parameters[:2], lr=0.1), dict(params=parameters[2:], lr=0.02, weight_decay=0.3)]
        made = torch.optim.AdamW(groups)
        gpu.init_optimizer_state(made)
        for number in range(4):
            factor = 1 - number / 5
            made.zero_grad()
            loss = sum((number + i - 1.5) * p.sum() for i, p in enumerate(parameters))
            gpu.scaler.scale(loss).backward()
            gpu.scaler.unscale_(made)
            for group, rate in zip(made.param_groups, (0.1, 0.02)):
                group["lr"] = rate if is_by_factor else rate * factor
            with Copies() as copies:
                gpu.optimizer_step(made, torch.tensor(factor) if is_by_factor else None)
            assert not copies.number and [type(group["lr"]) for group in made.param_groups] == [float, float]
        taken.append(parameters)
    torch.testing.assert_close(*taken, atol=1e-7, rtol=1e-6)


class Copies(TorchDispatchMode):
    """Counts the tensors of a parameter's size that are cloned."""

    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += function is torch.ops.aten.clone.default and args[0].numel() > 1
        return function(*args, **kwargs or {})


def test_an_overflow_undoes_the_update_of_tensors_of_every_layout_and_type(emulated):
    values = torch.arange(24.0)
    shapes = values.view(2, 3, 2, 2).to(memory_format=torch.channels_last), values.view(4, 6).T, values[5]
    ours, theirs = (
        [torch.nn.Parameter(value.clone()) for value in (*shapes, values.double())] for _ in range(2)
    )
    our_optimizer, their_optimizer = (torch.optim.SGD(p, 0.1, momentum=0.9) for p in (ours, theirs))
    gpu, emulated.is_capturing = EmulatedRuntime("fp16"), True
    for number in range(3):
        is_skipped = number == 1
        gpu.scaler._found_inf_per_device = lambda _: {"cuda": torch.tensor([float(is_skipped)])}  # noqa: B023
        for parameter in (*ours, *theirs):
            parameter.grad = (number + 1) * torch.ones_like(parameter)
        if number == 0:
            our_optimizer.step()  # a warm-up, which makes the state
        else:
            gpu._step_unless_overflow(our_optimizer)
        if not is_skipped:
            their_optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other) and mine.stride() == other.stride()
        assert same(our_optimizer.state[mine], their_optimizer.state[other])
