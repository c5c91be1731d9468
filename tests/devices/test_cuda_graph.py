"""A step that is captured as a CUDA graph gives what an eager one gives. There is no GPU here: see
`emulated_gpu`."""

import dataclasses
import random
import re
import threading
import warnings

import numpy as np
import pytest
import torch

from tests.conftest import SMALL, checkpoint, exact, same
from tests.devices.emulated_gpu import Dispatched, EmulatedGpu
from tests.tasks.mshnet.small import Narrow
from tpukit import MNIST, Run, train
from tpukit.devices import cuda_graph
from tpukit.devices.runtime import Runtime
from tpukit.training import metrics


@pytest.fixture
def emulated(monkeypatch):
    found = EmulatedGpu(monkeypatch)
    yield found
    found.hook.remove()


@pytest.fixture
def gpu(emulated):
    """An emulated GPU's runtime, in fp32."""
    return Runtime("cuda", "fp32")


# One step function


def outcome(runtime, optimizer, captured, dropout=False, batches=(4,) * 12, as_epoch=int):
    """(losses, final state, random numbers that come next) of steps of a small model, the last third with
    another loss.

    as_epoch: makes the argument by which the loss differs."""
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten()]
    model = torch.nn.Sequential(
        *layers, torch.nn.Dropout(0.5 if dropout else 0.0), torch.nn.Linear(4 * 26 * 26, 10)
    ).train()
    made = optimizer(model.parameters())
    runtime.init_optimizer_state(made)
    runtime.seed(5)

    def step(batch, epoch, total):
        made.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(model(batch["image"].float() / 255), batch["label"]) * (
            epoch + 1
        )
        runtime.backward(loss, made)
        norm = runtime.clip_gradients(made, 0.5)
        runtime.optimizer_step(made)
        return total + torch.stack([loss.detach(), norm])

    compiled = runtime.compile(step, name="step", changes=(model, made) if captured else None)
    totals = [torch.zeros(2)]
    for number, size in enumerate(batches):
        batch = MNIST().example(size)
        batch["image"] = batch["image"] // (number + 1)
        totals.append(compiled(runtime.put(batch), as_epoch(number >= 2 * len(batches) // 3), totals[-1]))
    gradients = [p.grad for p in model.parameters()]
    kept = [value for state in made.state.values() for value in state.values()]
    return totals, [*model.state_dict().values(), *gradients, *kept], torch.rand(3)


@pytest.mark.parametrize(
    "optimizer, dropout",
    [
        (lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, weight_decay=1e-3), False),
        (lambda p: torch.optim.Adagrad(p, 0.01), False),  # counts its steps on the host
        (lambda p: torch.optim.AdamW(p, 0.01), False),  # which the runtime lets count on the device
        (lambda p: torch.optim.SGD(p, 0.01), True),
    ],
    ids=["SGD", "Adagrad", "AdamW", "dropout"],
)
@pytest.mark.parametrize(
    "batches, graphs, eager",
    [((4,) * 12, 2, 6), ((4, 3) * 12 + (4,), 4, 12), ((4,) * 18 + (3, 4), 2, 7)],
    ids=["one shape", "two shapes", "a shape met once"],
)
def test_captured_steps_equal_eager_ones_bit_for_bit(
    optimizer, dropout, batches, graphs, eager, gpu, emulated
):
    found = outcome(gpu, optimizer, True, dropout, batches)
    # The number that changes in the last third makes another graph of each shape.
    assert len(emulated.graphs) == graphs and emulated.launches == len(batches) - eager
    wanted = outcome(gpu, optimizer, False, dropout, batches)
    for a, b in zip(found, wanted, strict=True):
        assert len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))
    assert [event["programs"] for event in gpu.pop_compile_events()] == [1] * graphs


def test_a_number_that_changes_in_a_tensor_needs_no_other_graph(gpu, emulated):
    found = outcome(gpu, lambda p: torch.optim.Adagrad(p, 0.01), True, as_epoch=torch.tensor)
    assert len(emulated.graphs) == 1 and emulated.launches == 12 - cuda_graph.WARM_UP
    wanted = outcome(gpu, lambda p: torch.optim.Adagrad(p, 0.01), False)
    for a, b in zip(found, wanted, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b))


def test_warm_ups_run_on_the_stream_of_the_capture_and_each_stream_waits_for_the_other(gpu, emulated):
    outcome(gpu, lambda p: torch.optim.SGD(p, 0.01), True, batches=(4,) * 4)
    assert (
        emulated.default_stream.waited_for == ["side"] * 4
        and emulated.current_stream is emulated.default_stream
    )


# Whole trainings


def trained(task, folder, runtime):
    run = Run.open(folder, task)
    train(task, run, runtime=runtime, progress=False)
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        dict(ema_decay=0.9, clip_norm=0.1),
        dict(
            schedule="step",
            warmup_epochs=2.5,
            decay_epochs=3,
            micro_batches=2,
            layer_decay=0.9,
            freeze=("conv_init",),
        ),
    ],
    ids=["plain", "EMA and clipping", "schedule, micro-batches, fine-tuning"],
)
def test_a_captured_training_equals_an_eager_one_over_both_phases_and_resumes_in_between(
    settings, infrared, tmp_path, gpu, emulated
):
    recipe = dict(batch_size=2, base_size=32, crop_size=32, num_workers=1, log_every=3, eval_every=2)
    task = Narrow(dataset_dir=infrared, epochs=4, warm_epoch=1, **recipe, **settings)
    eager = trained(dataclasses.replace(task, cuda_graph=False), tmp_path / "eager", gpu)
    assert not emulated.launches
    captured = trained(task, tmp_path / "captured", gpu)
    assert (
        len(emulated.graphs) == 1 and emulated.launches == 32 - cuda_graph.WARM_UP
    )  # one graph for both phases
    for epochs in (1, 3, 4):
        parted = trained(dataclasses.replace(task, epochs=epochs), tmp_path / "parted", gpu)
    wanted = checkpoint(eager)
    for run in (captured, parted):
        found = checkpoint(run)
        assert same(found["model"], wanted["model"]) and same(found["averaged"], wanted["averaged"])
        for mine, other in zip(
            found["optimizer"]["state"].values(), wanted["optimizer"]["state"].values(), strict=True
        ):
            assert same(mine, other)
    assert exact(captured) == exact(eager)
    assert [r for r in exact(parted) if r["kind"] == "train"] == [
        r for r in exact(eager) if r["kind"] == "train"
    ]


class WithAdam(MNIST):
    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-4)


def test_a_run_moves_from_a_cpu_to_a_gpu_and_back_with_its_optimizer(digits, tmp_path, gpu, cpu, emulated):
    task = WithAdam(dataset_dir=digits, epochs=3, **SMALL)
    wanted = checkpoint(trained(task, tmp_path / "straight", cpu))
    for epochs, runtime in ((1, cpu), (2, gpu), (3, cpu)):
        found = checkpoint(trained(dataclasses.replace(task, epochs=epochs), tmp_path / "moved", runtime))
        assert {float(state["step"]) for state in found["optimizer"]["state"].values()} == {25.0 * epochs}
        assert bool(found["optimizer"]["param_groups"][0]["fused"]) == (runtime is gpu)
    assert emulated.launches == 25 - cuda_graph.WARM_UP
    for name, value in wanted["model"].items():  # torch's fused update rounds differently
        torch.testing.assert_close(found["model"][name], value, atol=1e-4, rtol=1e-3)


class Growing(MNIST):
    """Its weights grow a hundredfold at each step."""

    def loss(self, model, batch, epoch):
        return super().loss(model, batch, epoch) - 1e3 * next(model.parameters()).square().sum()


def test_a_captured_training_that_diverges_ends_at_the_step_where_an_eager_one_does(
    digits, tmp_path, gpu, emulated
):
    messages = []
    for captured in (False, True):
        task = Growing(dataset_dir=digits, epochs=1, cuda_graph=captured, **SMALL | dict(log_every=25))
        with pytest.raises(metrics.Diverged) as error:
            trained(task, tmp_path / str(captured), gpu)
        messages.append(str(error.value).split(";")[0])
    step = int(messages[0].split()[-1])
    assert (
        cuda_graph.WARM_UP + 1 < step < 25
        and messages[0] == messages[1]
        and emulated.launches == 25 - cuda_graph.WARM_UP
    )


# What cannot be captured


class Waiting(MNIST):
    """Reads its loss on the host in every step."""

    def loss(self, model, batch, epoch):
        loss = super().loss(model, batch, epoch)
        loss.item()
        return loss


class WaitingLate(MNIST):
    """Reads its loss on the host in one step, the one that would be captured. Its optimizer counts its steps
    there."""

    def optimizer(self, model):
        return torch.optim.Adagrad(model.parameters(), self.lr)

    def loss(self, model, batch, epoch):
        loss = super().loss(model, batch, epoch)
        self.calls.append(loss)
        if len(self.calls) == cuda_graph.WARM_UP + 1:
            loss.item()
        return loss


class Decaying(MNIST):
    """Its optimizer computes the step's length on the host."""

    def optimizer(self, model):
        return torch.optim.Adagrad(model.parameters(), self.lr, lr_decay=0.1)


class Replacing(MNIST):
    """Its model makes a new buffer at each step."""

    def model(self):
        class Counting(torch.nn.Sequential):
            def forward(self, x):
                self.count = self.count + 1
                return super().forward(x)

        model = Counting(*super().model())
        model.register_buffer("count", torch.zeros(()))
        return model


class Drawing(MNIST):
    """Skips a layer by a random number of Python."""

    def loss(self, model, batch, epoch):
        return super().loss(model, batch, epoch) * random.choice((1, 1))


class Counting(MNIST):
    """Its optimizer has another setting at each step."""

    def loss(self, model, batch, epoch):
        self.calls.append(None)
        return super().loss(model, batch, epoch)

    def optimizer(self, model):
        optimizer = super().optimizer(model)
        optimizer.register_step_pre_hook(lambda made, *_: made.param_groups[0].update(seen=len(self.calls)))
        return optimizer


REFUSED = {
    Waiting: r"the host waits for the GPU in test_cuda_graph\.py line \d+",
    WaitingLate: "CUDA error: operation not permitted when stream is capturing",
    Decaying: "Adagrad computes with numbers on the host",
    Replacing: "replaces parameters or buffers",
    Drawing: "random numbers were drawn on the host",
    Counting: "have had 9 different values",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_captured_is_said_once_and_trains_on_as_if_nothing_had_been_tried(
    kind, digits, tmp_path, gpu, emulated
):
    finals = []
    for captured in (True, False):
        task = kind(dataset_dir=digits, epochs=2, cuda_graph=captured, **SMALL)
        object.__setattr__(task, "calls", [])
        run = trained(task, tmp_path / str(captured), gpu)
        finals.append((exact(run), checkpoint(run)))
        events = run.records("compile")
        assert [event["programs"] for event in events] == [0] * captured
        if captured:
            assert re.search(REFUSED[kind], events[0]["why"][0]), events[0]["why"]
            assert (run.path / "log.txt").read_text().count("not captured as a CUDA graph, because") == 1
    (records, state), (wanted_records, wanted_state) = finals
    assert records == wanted_records and same(state["model"], wanted_state["model"])
    for mine, other in zip(
        state["optimizer"]["state"].values(), wanted_state["optimizer"]["state"].values(), strict=True
    ):
        assert same(mine, other)
    assert not emulated.launches
    # torch's allocator, generator and current stream are as before.
    assert not emulated.open_pools and not emulated.held_pools and not emulated.generator_captures
    assert emulated.current_stream is emulated.default_stream


def test_in_fp16_a_capture_that_fails_within_the_update_leaves_a_scaler_that_goes_on(emulated):
    calls = []

    def wait_at_the_capture(optimizer, *_):
        calls.append(None)
        if len(calls) == cuda_graph.WARM_UP + 1:
            optimizer.param_groups[0]["params"][0].sum().item()

    def optimizer(parameters):
        made = torch.optim.Adagrad(parameters, 0.01)
        made.register_step_pre_hook(wait_at_the_capture)
        return made

    runtime = Runtime("cuda", "fp16")
    found = outcome(runtime, optimizer, True, batches=(4,) * 6)
    (event,) = runtime.pop_compile_events()
    assert "not permitted" in event["why"][0] and len(calls) == 7 and runtime.allow_sync
    wanted = outcome(Runtime("cuda", "fp16"), lambda p: torch.optim.Adagrad(p, 0.01), False, batches=(4,) * 6)
    assert all(torch.equal(a, b) for a, b in zip(found[1], wanted[1], strict=True))


def test_only_the_waits_of_the_steps_own_thread_count(emulated):
    def wait():
        warnings.warn("called a synchronizing CUDA operation")

    with cuda_graph._waits_recorded() as waits:
        other = threading.Thread(target=wait)
        other.start()
        other.join()
        assert waits == []
        wait()
    assert len(waits) == 1 and re.fullmatch(r"test_cuda_graph\.py line \d+", waits[0])


def test_the_random_generators_of_the_host_are_those_of_torch_python_and_numpy():
    for draw in (lambda: torch.rand(1), random.random, np.random.random):
        before = cuda_graph.host_random_state()
        assert before == cuda_graph.host_random_state()
        draw()
        assert before != cuda_graph.host_random_state()


def test_a_capture_that_runs_out_of_memory_falls_back_to_eager_steps(gpu, emulated):
    emulated.fail_with = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    found = outcome(gpu, lambda p: torch.optim.Adagrad(p, 0.01), True)
    wanted = outcome(gpu, lambda p: torch.optim.Adagrad(p, 0.01), False)
    for a, b in zip(found, wanted, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b))
    (event,) = gpu.pop_compile_events()
    assert "out of memory" in event["why"][0] and not emulated.launches


@pytest.mark.parametrize("ends_broken_captures", [False, True])
def test_the_memory_of_a_broken_capture_is_given_back_whether_torch_has_ended_it_or_not(
    ends_broken_captures, digits, tmp_path, gpu, emulated
):
    emulated.ends_broken_captures = ends_broken_captures
    task = WaitingLate(dataset_dir=digits, epochs=1, **SMALL)
    object.__setattr__(task, "calls", [])
    trained(task, tmp_path, gpu)
    assert not emulated.open_pools and not emulated.held_pools


@pytest.mark.parametrize("peak, launches", [(30, 1), (50, 0)])
def test_a_step_that_takes_more_than_half_of_the_memory_is_not_captured(
    peak, launches, gpu, emulated, monkeypatch
):
    monkeypatch.setattr(Runtime, "memory", lambda self: [(peak * 2**30, 80 * 2**30)])
    outcome(gpu, lambda p: torch.optim.SGD(p, 0.01), True, batches=(4,) * 6)
    (event,) = gpu.pop_compile_events()
    assert emulated.launches == launches and (event["why"] == []) == (launches > 0)


# fp16


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.Adagrad(p, 0.01),
        lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
        lambda p: torch.optim.AdamW(p, 0.01),
    ],
    ids=["Adagrad", "SGD", "AdamW"],
)
@pytest.mark.parametrize("captured", [False, True])
def test_steps_in_fp16_skip_overflows_as_torchs_scaler_does_and_are_captured(optimizer, captured, emulated):
    """The oracle is GradScaler's own step, which reads on the host whether to skip. Two batches overflow: the
    first, before there is a state, and one that is replayed."""

    def trained(by_torch):
        runtime = Runtime("cuda", "fp16")
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
        made = optimizer(model.parameters())
        if not by_torch:
            runtime.init_optimizer_state(made)
            runtime.allow_sync = False

        def step(batch, factor):
            made.zero_grad(set_to_none=True)
            with runtime.autocast():
                loss = torch.nn.functional.cross_entropy(model(batch["image"].float() / 255), batch["label"])
            runtime.backward(loss * factor, made)
            runtime.optimizer_step(made)
            return loss.detach()

        compiled = runtime.compile(
            step, name="step", changes=(model, made) if captured and not by_torch else None
        )
        weights = []
        for number in range(12):
            batch = MNIST().example(4)
            batch["image"] = batch["image"] // (number + 1)
            compiled(runtime.put(batch), torch.tensor(1e38 if number in (0, 7) else 1.0))
            weights.append([p.detach().clone() for p in model.parameters()])
        return weights, runtime.scaler.state_dict()

    (found, scaler), (wanted, wanted_scaler) = trained(False), trained(True)
    assert emulated.launches == (12 - cuda_graph.WARM_UP) * captured
    assert scaler == wanted_scaler and scaler["scale"] == 2.0**14  # 2 ** 16, halved twice
    assert all(torch.equal(x, y) for x, y in zip(found[6], found[7])) and not torch.equal(
        found[7][0], found[8][0]
    )
    for mine, theirs in zip(found, wanted, strict=True):
        for x, y in zip(mine, theirs, strict=True):  # torch's fused update rounds differently
            torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-5)


def overflow_is(overflows):
    """A runtime in fp16 within a step that is to be captured, whose gradients overflowed or did not."""
    runtime = Runtime("cuda", "fp16")
    runtime.allow_sync = False
    runtime.scaler._found_inf_per_device = lambda optimizer: {"cuda": torch.tensor([float(overflows)])}
    return runtime


@pytest.mark.parametrize("overflows", [False, True])
def test_an_overflow_undoes_the_update_of_tensors_of_every_layout_and_type(overflows, emulated):
    def weights():
        values = torch.arange(24.0)
        shapes = (
            values.view(2, 3, 2, 2).to(memory_format=torch.channels_last),
            values.view(4, 6).T,
            values[5],
            values.double(),
        )
        return [torch.nn.Parameter(value.clone()) for value in shapes]

    def step(parameters, optimizer, update, number):
        for parameter in parameters:
            parameter.grad = (number + 1) * torch.ones_like(parameter)
        update(optimizer)

    found, wanted = weights(), weights()
    ours, theirs = (torch.optim.SGD(parameters, 0.1, momentum=0.9) for parameters in (found, wanted))
    for number in range(3):
        step(found, ours, overflow_is(overflows and number != 1)._step_unless_overflow, number)
        if not overflows or number == 1:
            step(wanted, theirs, torch.optim.SGD.step, number)
    for mine, other in zip(found, wanted, strict=True):
        assert torch.equal(mine, other) and mine.stride() == other.stride()
        assert torch.equal(ours.state[mine]["momentum_buffer"], theirs.state[other]["momentum_buffer"])


def test_undoing_an_overflow_takes_as_many_operations_for_many_tensors_as_for_few(emulated):
    def operations(count):
        parameters = [torch.nn.Parameter(torch.ones(2, 3)) for _ in range(count)]
        optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9, foreach=True)
        for _ in range(2):  # the first step makes the state
            for parameter in parameters:
                parameter.grad = torch.ones(2, 3)
            with Dispatched() as dispatched:
                overflow_is(False)._step_unless_overflow(optimizer)
        return len(dispatched.names)

    assert operations(40) == operations(2)
