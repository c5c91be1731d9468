"""`tpukit report --trace`: the lines that interrupt a step."""

import dataclasses

import torch

from tpukit import MNIST
from tpukit_tools import cli
from tpukit_tools.trace import Interruptions, trace


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peeking(MNIST):
    """Reads the loss back in the middle of the step."""

    def loss(self, model, batch, epoch):
        loss = super().loss(model, batch, epoch)
        return loss * 2 if loss.item() > 100 else loss  # this line


def line_of(comment):
    return next(n for n, text in enumerate(open(__file__), 1) if text.endswith(f"# {comment}\n"))


def files(run):
    return {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


def test_a_cpu_has_nothing_to_wait_for_and_the_run_stays_as_it_is(trained, monkeypatch, capsys):
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    _, run = trained
    before = files(run)
    assert cli.main(["report", str(run.path), "--trace"]) == 0
    assert "On a CPU nothing waits" in capsys.readouterr().out
    assert files(run) == before


def test_the_lines_that_interrupt_a_step_are_named_on_xla_and_mnist_has_none(trained, xla, monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    task, _ = trained
    (sentence,) = trace(task)
    assert sentence.startswith("No operation")
    (sentence,) = trace(Peeking(**vars(task)))
    line = line_of("this line")
    assert sentence == f"aten::_local_scalar_dense, 1 times per step, at {__file__}:{line}."


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
