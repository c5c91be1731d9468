"""One XLA device: its precisions, memory and counters, and the state of optimizers."""

import dataclasses
import subprocess
import sys

import pytest
import torch

pytest.importorskip("torch_xla")

from tests.devices.conftest import take_step
from tpukit import Run, TpukitError, train
from tpukit.devices import xla_private
from tpukit.devices.xla import XLARuntime
from tpukit.tasks.mnist import MNIST


@pytest.mark.parametrize(
    "accelerator, precision, wanted",
    [("tpu", "fp32", ["highest"]), ("tpu", "auto", ["highest"]), ("xla", "fp32", [])],
)
def test_what_is_fp32_is_multiplied_in_fp32_on_a_tpu_in_a_bf16_training_too(
    accelerator, precision, wanted, monkeypatch, xla
):
    precisions = []
    monkeypatch.setattr(xla_private, "set_matmul_precision", precisions.append)
    type(xla)(accelerator, precision)
    assert precisions == wanted


SPMD = """
import sys, tempfile

class Recorder:
    asked = []

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "torchax"):
            self.asked.append(name)

sys.meta_path.insert(0, Recorder())
import torch
from tpukit import MNIST, Run, train
from tpukit.devices.xla import XLARuntime
from tpukit.training.data import BatchLoader
from tpukit.training.prediction import predict_set

runtime = XLARuntime("xla", spmd_cores=8)
task = MNIST(dataset_dir=sys.argv[1], channels=4, epochs=1, batch_size=8, eval_every=9)
before = runtime.counters()["executions"]
train(task, Run.open(tempfile.mkdtemp(), task), runtime=runtime, progress=False)
print(Recorder.asked, runtime.counters()["executions"] - before > 25)
for where in ("device", "host"):
    task, compiled = MNIST(dataset_dir=sys.argv[1], channels=4, batch_size=8), []
    model, loader = runtime.to_device(task.model()), BatchLoader(task.test_set(), runtime, on=where)
    runtime.heartbeat = lambda step: compiled.append(runtime.compilations()[0])  # after each batch
    list(predict_set(task, model, loader, runtime, epoch=None))
    print("compiled in later batches:", compiled[-1] - compiled[0], "of", len(compiled) - 1)
batch = dict(number=torch.arange(16), pixels=torch.rand(16, 3), valid=torch.arange(16) > 3)
found = runtime.to_cpu_async([runtime.put_batch(batch), "text"])()
print("the same:", all(torch.equal(found[0][name], value) for name, value in batch.items()), found[1])
"""


@pytest.mark.slow
def test_spmd_looks_for_no_jax_counts_its_programs_and_compiles_nothing_after_the_first_batch_evaluated(
    digits, tmp_path, xla
):
    command = [sys.executable, "-c", SPMD, str(digits)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    wanted = ["[] True", *2 * ["compiled in later batches: 0 of 4"], "the same: True text"]
    assert ran.stdout.splitlines()[-4:] == wanted, ran.stdout + ran.stderr


def test_an_spmd_process_takes_the_chips_known_memory_and_not_the_hosts(xla, monkeypatch):
    monkeypatch.setattr(xla, "accelerator", "tpu")
    for kind, gib in (("v5litepod-8", 15.75), ("v6e-1", 31.25), ("something new", 15.75)):
        monkeypatch.setenv("TPU_ACCELERATOR_TYPE", kind)
        assert xla.memory_size() == gib * 2**30


def test_a_model_and_its_optimizers_state_are_made_in_one_graph_before_the_first_step(xla):
    layers = [torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)]
    before = xla.counters()["executions"]  # another test may have compiled it already
    model = xla.to_device(torch.nn.Sequential(*layers))
    assert xla.init_optimizer_state(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    assert xla.counters()["executions"] - before == 1


def test_xla_refuses_fp16_and_says_what_to_use():
    with pytest.raises(TpukitError, match="use 'bf16' or 'auto'"):
        XLARuntime("xla", "fp16")


def test_bf16_autocast_runs_on_the_xla_device(digits, tmp_path):
    runtime = XLARuntime("xla", "bf16")
    task = MNIST(dataset_dir=digits, channels=4, epochs=1, batch_size=40)
    train(task, Run.open(tmp_path, task), runtime=runtime, progress=False)
    with runtime.autocast():
        assert (
            torch.ones(2, 2, device=runtime.device) @ torch.ones(2, 2, device=runtime.device)
        ).dtype == torch.bfloat16


def test_a_run_moves_between_devices(digits, tmp_path, xla, cpu):
    task = MNIST(dataset_dir=digits, channels=4, epochs=1, batch_size=40)
    for epochs, runtime in ((1, xla), (2, cpu), (3, xla)):
        part = dataclasses.replace(task, epochs=epochs)
        train(part, Run.open(tmp_path, part), runtime=runtime, progress=False)
    run = Run.find(tmp_path)
    assert [r["accelerator"] for r in run.records("start")] == ["xla", "cpu", "xla"]
    assert run.records("epoch")[-1]["loss"] < run.records("epoch")[0]["loss"]


def test_memory_and_counters_are_absent_where_they_cannot_be_read(xla, cpu):
    assert xla.memory() == cpu.memory() == [] and cpu.counters() == {}
    assert set(xla.counters()) >= {"compilations", "compile_s", "to_device_s", "fallbacks"}


def test_adams_bias_correction_that_rounds_to_one_late_in_a_training_compiles_nothing_anew(xla):
    """From step 36,314 on the square root of 1 - 0.999^step is exactly 1, and some operations fold that
    number."""
    model = xla.to_device(torch.nn.Linear(3, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    assert xla.init_optimizer_state(optimizer)
    for state in optimizer.state.values():
        state["step"].fill_(36_307)
    step = xla.compile(lambda x: take_step(xla, model(x).square().mean(), optimizer))
    batch = xla.put({"x": torch.ones(2, 3)})["x"]
    for _ in range(10):
        step(batch)
    assert (1 - 0.999 ** int(state["step"])) ** 0.5 == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda p: torch.optim.Adam(p, lr=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
        lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
        lambda p: torch.optim.Adadelta(p),
        lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    ],
)
def test_priming_an_optimizer_changes_no_step_of_it(make, cpu):
    def trajectory(primed):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        optimizer = make(model.parameters())
        if primed:
            assert XLARuntime.init_optimizer_state(cpu, optimizer)
            assert all(optimizer.state[p] for p in model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
        return model.weight.detach()

    torch.testing.assert_close(trajectory(True), trajectory(False))


@pytest.mark.parametrize(
    "make", [torch.optim.NAdam, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5)]
)
def test_an_optimizer_whose_state_does_not_start_at_zero_is_left_alone(make, cpu):
    optimizer = make(torch.nn.Linear(2, 2).parameters())
    assert XLARuntime.init_optimizer_state(cpu, optimizer) is False and not optimizer.state


def test_a_nest_of_tensors_comes_to_the_host_in_one_transfer_each_at_its_place(xla, monkeypatch):
    transfer, calls = xla_private.to_cpu, []
    monkeypatch.setattr(
        xla_private, "to_cpu", lambda tensors: (calls.append(len(tensors)), transfer(tensors))[1]
    )
    values = [
        torch.arange(5),
        torch.randn(2, 3).bfloat16(),
        torch.tensor([True, False]),
        torch.tensor(2.5, requires_grad=True),
    ]
    wanted = dict(a=values[0], nest=[values[1], "text", (values[2], 7)], there=values[3].detach(), none=None)
    kept = torch.ones(3)
    there = [value.to(xla.device) for value in values]
    found = xla.to_cpu(
        dict(a=there[0], nest=[there[1], "text", (there[2], 7)], there=there[3], none=None) | dict(kept=kept)
    )
    kept.zero_()
    assert torch.equal(found.pop("kept"), torch.ones(3)) and calls == [4] and not found["there"].requires_grad
    assert str(found) == str(wanted)
    assert xla.to_cpu(dict(text="alone")) == dict(text="alone")


def test_equal_counts_of_loaded_batch_norms_have_a_buffer_each(xla):
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2))
    saved = {
        name: torch.tensor(10) if value.dim() == 0 else value for name, value in model.state_dict().items()
    }

    def counts_with_buffers():
        xla.sync()
        counts = [norm.num_batches_tracked for norm in placed]
        assert len(set(xla_private.handles(counts))) == 2
        return [int(count) for count in counts]

    model.load_state_dict(saved)
    placed = xla.to_device(model)
    assert counts_with_buffers() == [10, 10]
    placed.load_state_dict({name: value + 1 if value.dim() == 0 else value for name, value in saved.items()})
    xla.unalias(placed.buffers())
    assert counts_with_buffers() == [11, 11]
