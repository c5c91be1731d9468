"""`tpukit report --trace`: a few steps of a run under a profiler, and the lines that interrupt a step."""

import dataclasses
import json
import re

import pytest
import torch

from tests.conftest import exact
from tpukit import MNIST, Run, TpukitError
from tpukit.tools.trace import _copies_to_host, _Interruptions, trace


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stepping(MNIST):
    """Its optimizer counts its steps on the host."""

    def optimizer(self, model):
        return torch.optim.Adagrad(model.parameters(), lr=0.01)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peeking(MNIST):
    """Reads the loss back in the middle of the step."""

    def loss(self, model, batch, epoch):
        loss = super().loss(model, batch, epoch)
        return loss * 2 if loss.item() > 100 else loss  # this line


LINE = next(n for n, text in enumerate(open(__file__), 1) if text.endswith("# this line\n"))
READ_BACK = f"aten::_local_scalar_dense, 1 times per step, at {__file__}:{LINE}."
NOTHING = "No operation of the step ran on the host instead, and none waited for the device."


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_what_an_optimizer_counts_on_the_host_is_no_wait_for_the_device(
    device, digits, tmp_path, request, monkeypatch
):
    request.getfixturevalue(device)
    monkeypatch.setenv("PJRT_DEVICE", "CPU") if device == "xla" else monkeypatch.delenv("PJRT_DEVICE", False)
    task = Stepping(dataset_dir=digits, epochs=1, batch_size=16)
    run = Run.open(tmp_path, task)
    assert NOTHING in trace(task, run, steps=1)
    if device == "xla":  # the profile and the graph, with its lines
        assert next((run.path / "trace").rglob("*.xplane.pb")).stat().st_size > 1000
        text = (run.path / "step.hlo").read_text()
        assert text.startswith("HloModule") and "convolution(" in text and text.count("ROOT") > 1
        assert re.search(r'source_file="[^"]*mnist\.py" source_line=\d+', text)


def test_a_trace_of_a_cpu_run_names_what_waits_and_leaves_the_run_as_it_was(trained, monkeypatch, capfd):
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    task, run = trained
    before = {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()}
    traced, read_back = trace(Peeking(**vars(task)), run, steps=2)
    assert f"fp32 is in {run.path / 'trace'}" in traced and read_back == READ_BACK
    events = json.loads(next((run.path / "trace").glob("*.pt.trace.json")).read_text())["traceEvents"]
    assert sum(e.get("name") == "ProfilerStep#0" or "aten::conv2d" == e.get("name") for e in events) >= 2
    assert {p: p.read_bytes() for p in before} == before and exact(run)
    assert "ERROR" not in capfd.readouterr().err  # of a GPU that the profiler did not find
    with pytest.raises(TpukitError, match="--trace 0"):
        trace(task, run, steps=0)


def test_an_operation_without_an_xla_form_is_named_with_its_line(xla):
    interruptions, values = _Interruptions(xla), xla.put({"x": torch.arange(6.0)})["x"]
    with interruptions:
        torch.histc(values, bins=3)
    ((operation, line),) = interruptions.lines
    assert operation.startswith("aten::histc") and re.fullmatch(rf"{re.escape(__file__)}:\d+", line)


def test_a_copy_to_the_host_waits_also_where_it_is_asked_not_to():
    # meta stands for a device other than the host
    device, host = (torch.empty(2, device="meta"), torch.empty(2))
    for arguments in ((host, device), (host, device, True)):
        assert _copies_to_host("aten::copy_", arguments, host)
    assert _copies_to_host("aten::_to_copy", (device,), host)
    assert not _copies_to_host("aten::copy_", (device, host, True), device)
    assert not _copies_to_host("aten::copy_", (host, 1.0), host)
    assert not _copies_to_host("aten::add", (device, 1), host)


def refuse(*_):
    raise ValueError("Ran out of memory in memory space hbm. Used 18.2G of 15.75G hbm.")


@pytest.mark.parametrize("is_refused, told", [(False, r".*\.item\(\)"), (True, ".*batch")])
def test_of_a_step_that_is_not_one_graph_or_that_the_compiler_refuses_the_fix_and_the_line_are_named(
    is_refused, told, trained, xla, monkeypatch
):
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    if is_refused:
        monkeypatch.setattr("tpukit.devices.xla_graph.ReplayedStep._call", refuse)
    task, run = trained
    failed, *rest = trace(Peeking(**vars(task)), run, steps=2)
    assert re.match("No trace, because " + told, failed) and READ_BACK in rest
