"""`tpukit report --trace`: the lines that interrupt a step, and a few steps of a run under XLA's profiler."""

import dataclasses

import pytest
import torch

from tests.conftest import exact
from tpukit import MNIST, TpukitError
from tpukit.tools.trace import Interruptions, trace


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peeking(MNIST):
    """Reads the loss back in the middle of the step."""

    def loss(self, model, batch, epoch):
        loss = super().loss(model, batch, epoch)
        return loss * 2 if loss.item() > 100 else loss  # this line


def line_of(comment):
    return next(n for n, text in enumerate(open(__file__), 1) if text.endswith(f"# {comment}\n"))


def test_off_xla_there_is_no_trace_and_what_makes_one_is_named(trained, monkeypatch):
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    task, run = trained
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    refused, interruptions = trace(task, run, steps=2)
    assert "torch.profiler.profile()" in refused and interruptions.startswith("On a CPU")
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    with pytest.raises(TpukitError, match="--trace -1"):
        trace(task, run, steps=-1)


def test_on_xla_the_trace_is_kept_and_no_line_of_mnist_interrupts_a_step(trained, xla, monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    task, run = trained
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    traced, interruptions = trace(task, run, steps=1)
    assert str(run.path / "trace") in traced and interruptions.startswith("No operation")
    assert next((run.path / "trace").rglob("*.xplane.pb")).stat().st_size > 1000
    assert {path: path.read_bytes() for path in before} == before and exact(run)


def test_of_a_step_that_is_not_one_graph_the_line_is_named_though_it_has_no_trace(trained, xla, monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    task, run = trained
    failed, *lines = trace(Peeking(**vars(task)), run, steps=2)
    assert failed.startswith("No trace") and ".item()" in failed
    assert f"aten::_local_scalar_dense, 1 times per step, at {__file__}:{line_of('this line')}." in lines


def test_what_falls_back_to_the_cpu_or_waits_for_the_device_is_named_with_its_line(xla):
    values = xla.put(torch.arange(6.0))
    with Interruptions(xla) as interruptions:
        values.add(1).copy_(torch.ones(6))
        assert torch.ones(1).item() == 1  # as optimizers count their steps: on the host
        torch.histc(values, bins=3)  # has no XLA form
        values.cpu()
        torch.empty(6).copy_(values, non_blocking=True)
        values.nonzero()
    first = line_of("has no XLA form")
    expected = ["aten::histc", "aten::_to_copy", "aten::copy_", "aten::nonzero"]
    for number, (operation, (name, line)) in enumerate(zip(expected, interruptions.lines, strict=True)):
        assert name.startswith(operation) and line == f"{__file__}:{first + number}"
