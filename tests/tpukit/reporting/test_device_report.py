"""`metrics_report`: what the device did in a loop that knows nothing of tpukit."""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import tpukit
from tpukit.reporting import device_report

# In a fresh process, without a run or a task.
LOOP = """
import re
import sys
import tpukit
nothing = tpukit.metrics_report()
with tpukit.metrics_report():
    import torch_xla
    from tpukit.devices import xla_private
    assert not xla_private.is_open() and not nothing.counters and not tpukit.metrics_report().counters
with tpukit.metrics_report() as report:
    import torch
    total = torch.zeros(3, device=torch_xla.device())
    torch_xla.sync()
    for _ in range(8):
        total = total * 2 + torch.ones(3).to(total.device)
        torch_xla.sync()
whole = tpukit.metrics_report()
assert report.counters["executions"] == whole.counters["executions"] == 9 == report.counters["syncs"]
assert report.compilations == whole.compilations == 2 and sum(report.causes.values()) == 2
assert report.counters["sent"] >= 8 and report.counters["compile_s"] > 0 and not report.problems()
ours = {name: module for name, module in sys.modules.items() if name.startswith("tpukit")}
assert not [name for name in ours if re.match(r"tpukit(\\.(runs|data|training|launching|inference)|_)", name)]
from pathlib import Path
from release.size import lines_of_code
print("lines:", lines_of_code(Path(module.__file__) for module in ours.values()))
"""


def test_a_report_opens_no_device_and_needs_few_lines_and_no_run():
    pytest.importorskip("torch_xla")
    ran = subprocess.run([sys.executable, "-c", LOOP], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "has not opened an XLA device" in ran.stdout and "graphs compiled: 2, executed: 9" in ran.stdout
    assert int(re.search(r"lines: (\d+)", ran.stdout)[1]) <= 850


def loop(xla, tensors, power=lambda number: 1.5):
    """One step per tensor; what it computes is compiled for each shape and each power."""
    import torch_xla

    for number, tensor in enumerate(tensors):
        result = tensor.to(xla.device).pow(power(number)).sum()
        torch_xla.sync()
    return result


def test_a_constant_loop_is_one_graph_and_changing_shapes_and_numbers_are_counted_with_their_cause(
    xla, capsys
):
    from tpukit.devices import xla_counters

    with tpukit.metrics_report() as constant:
        loop(xla, [torch.ones(13, 19)] * 8)
    assert constant.compilations == 1 and constant.problems() == []
    with tpukit.metrics_report() as again:
        loop(xla, [torch.ones(13, 19)] * 8)
    assert again.compilations == 0 and again.counters["executions"] == 8 and not again.causes
    with tpukit.metrics_report() as ragged:
        loop(xla, [torch.ones(13 + number, 19) for number in range(8)])
    assert ragged.compilations == 7 and ragged.causes == {xla_counters.NEW_SIZE: 7}
    [problem] = ragged.problems()
    assert "7 graphs in 8 executions" in problem and "Keep every batch the same shape" in problem
    with tpukit.metrics_report() as numbers:
        loop(xla, [torch.ones(13, 19)] * 5, lambda number: 2.25 + number)
    assert numbers.compilations == 5 and numbers.causes == {xla_counters.SAME_SIZES: 5}
    shown = capsys.readouterr().out
    assert shown.count(", in this block: ") == 4 and shown.count("of them: data of a new size") == 1


def test_what_runs_on_the_cpu_is_named_and_a_block_counts_only_its_own(xla, capsys):
    result = loop(xla, [torch.ones(13, 17)])
    with tpukit.metrics_report() as first:
        for _ in range(5):
            torch.nonzero(result)
            result.item()
    with tpukit.metrics_report() as second:
        loop(xla, [torch.ones(13, 17)])
    assert first.fallbacks["aten::nonzero"] == 5 and not second.fallbacks and not second.counters["read"]
    assert first.counters["read"] >= 5
    problems = " ".join(first.problems())
    assert "aten::nonzero (5 times)" in problems and "5 of them by `.item()`" in problems
    assert "_local_scalar_dense" not in problems
    shown = capsys.readouterr().out
    assert shown.count("No operation fell back to the CPU") == 1 and "aten::nonzero on the CPU" in shown


def test_a_block_that_raises_is_shown_too_in_a_notebook_as_html(xla, shown):
    from tpukit.devices import xla_counters

    with pytest.raises(ZeroDivisionError), tpukit.metrics_report() as report:
        loop(xla, [torch.ones(13, 17)])
        xla_counters.wait()  # the report of an error does not
        raise ZeroDivisionError
    assert shown == [report] and report.counters["executions"] == 1
    assert "<table>" in report._repr_html_()


def test_a_loop_without_the_end_of_a_step_is_told_so(xla, capsys):
    with tpukit.metrics_report() as report:
        for number in range(5):
            float(torch.ones(13, 17).to(xla.device).sum() + number)
    assert report.counters["syncs"] == 0 and "torch_xla.sync()" in report.problems()[-1]


def test_a_gpu_tells_its_name_and_its_memory(monkeypatch, capsys):
    monkeypatch.setattr(device_report, "_open_xla", lambda: None)
    card = SimpleNamespace(name="NVIDIA H100", total_memory=80 * 2**30)
    answers = dict(is_initialized=True, device_count=1, get_device_properties=card)
    answers |= dict(max_memory_allocated=20 * 2**30, memory_allocated=2**30)
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    with tpukit.metrics_report() as report:
        pass
    assert report.memory == [(20 * 2**30, 80 * 2**30)]
    shown = capsys.readouterr().out
    assert "NVIDIA H100, 1.00 GiB allocated" in shown and "25%" in shown
