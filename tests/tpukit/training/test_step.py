"""One training step: precision, clipping, and gradient accumulation."""

import contextlib
import dataclasses
import functools
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.conftest import SMALL, checkpoint, exact, refuses, same
from tests.tasks.cdeit.small import task_of
from tests.tasks.mshnet.small import Narrow
from tests.tpukit.training.conftest import DIGITS, train_in
from tpukit import MNIST, LanguageModel, MSHNet
from tpukit.devices.runtime import Runtime, check_batch
from tpukit.host import environment
from tpukit.training.step import TrainingStep, add_gradients, clip_gradients
from tpukit.training.task import Task


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
        (weight * direction * size).sum().backward()
        norm = clip_gradients(optimizer, 1.0)
        cpu.optimizer_step(optimizer)
        assert float(norm) == pytest.approx(size) and torch.allclose(weight, -wanted * direction)


# Compilation


@pytest.mark.parametrize("choice, compiled", [("auto", []), ("no", []), ("yes", ["loss"])])
def test_torch_compile_gets_the_loss_with_the_model_as_its_argument_only_if_it_is_asked_for(
    choice, compiled, digits, tmp_path, cpu, monkeypatch
):
    monkeypatch.setenv("TPUKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    seen, whole = [], functools.partial(torch.compile, backend="eager", fullgraph=True)
    monkeypatch.setattr(torch, "compile", lambda function: seen.append(function.__name__) or whole(function))
    task = MNIST(dataset_dir=digits, epochs=1, compile=choice, **DIGITS)
    found = train_in(tmp_path / "found", task, cpu)
    assert seen == compiled
    wanted = train_in(tmp_path / "wanted", dataclasses.replace(task, compile="auto"), cpu)
    assert exact(found) == exact(wanted) and same(checkpoint(found)["model"], checkpoint(wanted)["model"])
    kept = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    assert kept == (str(tmp_path / "cache" / "inductor") if compiled else None)
    assert ("step 1 took" in (found.path / "log.txt").read_text()) == bool(compiled)


def test_on_xla_too_python_runs_every_step_if_compile_is_no(digits, tmp_path, xla, monkeypatch):
    calls, loss = [], MNIST.loss
    monkeypatch.setattr(MNIST, "loss", lambda *arguments: calls.append(1) or loss(*arguments))
    train_in(tmp_path, MNIST(dataset_dir=digits, epochs=1, compile="no", **DIGITS), xla)
    assert len(calls) == 25


@pytest.mark.slow
@pytest.mark.parametrize("kind", [MNIST, Narrow, LanguageModel])
def test_the_whole_loss_is_one_graph_of_torch_compile_in_both_phases(kind, cpu):
    sizes = {Narrow: dict(base_size=32, crop_size=32), LanguageModel: dict(sequence_length=64)}
    task = kind(compile="yes", **sizes.get(kind, {}))
    step, graphs = TrainingStep(task, cpu, task.model().train()), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(task.loss, backend=backend, fullgraph=True)
    for epoch in (0, 1, 9):
        batch, number, *_ = step.arguments(cpu.put(task.example(2)), epoch)
        found, wanted = (loss(step.model, batch, number) for loss in (compiled, task.loss))
        torch.testing.assert_close(found, wanted)
    assert len(graphs) == 1


# Gradient accumulation


def outcome(task, folder, runtime):
    """(losses and gradient norms of the steps, final weights)."""
    run = train_in(folder, task, runtime)
    return [(r["loss"], r["grad_norm"]) for r in run.records("train")], checkpoint(run)["model"]


@pytest.mark.parametrize("clip_norm", [None, 0.1])
@pytest.mark.parametrize(
    "name, device", [("mnist", "cpu"), ("cdeit", "cpu"), pytest.param("mnist", "xla", marks=pytest.mark.slow)]
)
def test_micro_batches_give_the_losses_gradients_and_weights_of_the_whole_batch(
    name, device, clip_norm, digits, tank, tmp_path, request, monkeypatch
):
    """With CDEIT, also its noise: the numbers of each sample are the same."""
    small = dict(SMALL, log_every=1, clip_norm=clip_norm)
    task = task_of(tank, epochs=4, eval_every=4, sampling_steps=1, **small)
    if name == "mnist":
        task = MNIST(dataset_dir=digits, epochs=1, channels=4, **small)
    found, sizes, loss = {}, set(), type(task).loss

    def seen_loss(task, model, batch, epoch):
        sizes.update(len(values) for values in batch.values())
        return loss(task, model, batch, epoch)

    monkeypatch.setattr(type(task), "loss", seen_loss)
    for count in (1, 2, 8):
        sizes.clear()
        part = dataclasses.replace(task, micro_batches=count)
        found[count] = outcome(part, tmp_path / str(count), request.getfixturevalue(device))
        assert sizes == {SMALL["batch_size"] // count}
    for count in (2, 8):
        np.testing.assert_allclose(found[count][0], found[1][0], atol=1e-5, rtol=1e-5)
        for name, value in found[1][1].items():
            # Adam turns a gradient of nothing but rounding into up to a step of lr: a hundredth of one.
            torch.testing.assert_close(found[count][1][name], value, atol=1e-4, rtol=1e-4)
    assert len(found[1][0]) >= 8


class TwoBiases(Task):
    """Two biases of one pixel. `view` makes both gradients views of one tensor if there is one sample."""

    def model(self):
        return torch.nn.ParameterList([torch.zeros(4), torch.zeros(4)])

    def loss(self, model, batch, epoch):
        sums = batch["x"] + model[0].view(1, 4, 1, 1) + model[1].view(1, 4, 1, 1)
        return (batch["x"] * sums).sum()


def two_gradients(runtime, micro_batches, clip_norm=None, kind=TwoBiases):
    """The gradients of both biases, for a batch of 1, of 1 and 2, or of 1 to 3."""
    task = kind(micro_batches=micro_batches)
    model = runtime.to_device(task.model())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = dict(x=torch.arange(1.0, micro_batches + 1)[:, None, None, None].repeat(1, 4, 1, 1))
    add_gradients(task, task.loss, model, optimizer, runtime, runtime.put(batch), 0)
    clip_gradients(optimizer, clip_norm)
    return [gradient.tolist() for gradient in runtime.to_cpu([one.grad for one in model])]


@pytest.mark.parametrize("kind", ["cpu", "xla"])
def test_gradients_that_are_views_of_one_tensor_are_added_and_clipped_once(kind, request):
    runtime = request.getfixturevalue(kind)
    assert two_gradients(runtime, micro_batches=2) == [[1.5] * 4] * 2  # the mean of both
    clipped = two_gradients(runtime, micro_batches=1, clip_norm=2**0.5)  # half of their norm
    torch.testing.assert_close(clipped, [[0.5] * 4] * 2, atol=1e-5, rtol=0)


class LateBiases(TwoBiases):
    """Biases that the first micro-batch does not use."""

    def loss(self, model, batch, epoch):
        loss = super().loss(model, batch, epoch)
        return loss if batch["x"].max() > 1 else loss.detach().requires_grad_()


def test_views_of_one_tensor_that_come_with_a_later_micro_batch_are_added_once(cpu):
    assert two_gradients(cpu, micro_batches=3, kind=LateBiases) == [[pytest.approx(5 / 3)] * 4] * 2


def test_in_fp16_gradients_that_are_views_of_one_tensor_are_scaled_back_once():
    assert two_gradients(Runtime("cpu", "fp16"), micro_batches=1) == [[1.0] * 4] * 2


def test_in_fp16_the_gradients_of_micro_batches_are_scaled_back_once():
    gradients = []
    for count in (1, 4):
        runtime = Runtime("cpu", "fp16")  # its scaler knows an optimizer by its id, which another may get
        torch.manual_seed(0)
        task = MNIST(channels=4, micro_batches=count)
        model, batch = task.model(), runtime.put(task.example(8))
        loss = add_gradients(task, task.loss, model, task.optimizer(model), runtime, batch, 0)
        gradients.append(torch.cat([loss.reshape(1), *(p.grad.flatten() for p in model.parameters())]))
    torch.testing.assert_close(*gradients, atol=2e-3, rtol=1e-2)
    assert float(gradients[0].abs().max()) > 0.1


def test_every_sample_is_in_one_micro_batch_and_those_of_each_core_stay_on_it(cpu):
    parts = []

    class Seen(MNIST):
        def loss(self, model, batch, epoch):
            parts.append(batch["x"].tolist())
            return model(batch["x"][:, None].float()).sum()

    model = torch.nn.Linear(1, 1)
    batch = dict(x=torch.arange(12))  # of two cores: 0 to 5, and 6 to 11
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    task = Seen(micro_batches=3)
    add_gradients(task, task.loss, model, optimizer, cpu, batch, 0)
    assert parts == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]


@pytest.mark.parametrize(
    "size, cores, micro_batches, sizes",
    [
        *((32, 8, 8, (64,)), (100, 4, 8, (96, 128)), (6, 1, 4, (4, 8))),
        *((60, 8, 1, (56, 64)), (3, 8, 1, (8,)), (9, 2, 1, (8, 10))),
    ],
)
def test_a_batch_that_cannot_be_split_is_refused_with_sizes_that_can(
    size, cores, micro_batches, sizes, digits, tmp_path, cpu
):
    with refuses(size, f"{micro_batches} micro-batches" if micro_batches > 1 else f"{cores} cores", *sizes):
        check_batch(size, cores, micro_batches=micro_batches)
    for fits in sizes:
        check_batch(fits, cores, micro_batches=micro_batches)
    if cores == 1:
        with refuses(size, micro_batches, *sizes):
            task = MNIST(dataset_dir=digits, batch_size=size, micro_batches=micro_batches, num_workers=1)
            train_in(tmp_path, task, cpu)


@pytest.mark.parametrize(
    "kind, count, backend, refused",
    [
        ("v6e-1", 2, "torch_xla", True),
        ("v6e-1", 1, "torch_xla", False),
        ("v5e-1", 2, "torch_xla", False),
        ("v6e-8", 4, "torch_tpu", False),
    ],
)
def test_micro_batches_are_refused_where_a_graph_that_accumulates_them_was_wrong(
    kind, count, backend, refused, digits, tmp_path, cpu, monkeypatch
):
    env = SimpleNamespace(
        accelerator="tpu", host="local", device_name=kind, backend=backend, versions={}, inputs=None
    )
    monkeypatch.setattr(environment, "detect", lambda: env)
    task = MNIST(dataset_dir=digits, epochs=1, micro_batches=count, channels=4, **SMALL)
    data = ("TPU v6e", f"micro_batches={count}", "micro_batches=1")
    with refuses(*data) if refused else contextlib.nullcontext():
        train_in(tmp_path, task, cpu)
