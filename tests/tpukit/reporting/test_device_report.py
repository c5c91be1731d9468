"""`metrics_report`: what the device did in a loop that knows nothing of tpukit."""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tpukit
from tests import warm
from tpukit.host import language
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
    assert int(re.search(r"lines: (\d+)", ran.stdout)[1]) <= 970


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
    assert "aten::nonzero (5 times)" in problems and "read from the device 5 times" in problems
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


STEPS = 12


def train(xla, step=None, loss=None, batch=None, optimizer=None, hidden=16, move_late=False, syncs=(2,)):
    """Take twelve steps, as their author may have written them. syncs: after which parts of a step it ends:
    0, the forward pass; 1, the backward pass; 2, the optimizer."""

    def end(part):
        for _ in range(syncs.count(part)):
            torch_xla.sync()

    import torch_xla

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, 1))
    model = model if move_late else model.to(xla.device)
    made = (optimizer or (lambda p: torch.optim.SGD(p, lr=0.1)))(model.parameters())
    model.to(xla.device)
    for number in range(STEPS):
        x, y = (value.to(xla.device) for value in (batch(number) if batch else batch_of(4)))
        made.zero_grad()
        output = model(x)
        end(0)
        value = loss(output, y, number) if loss else (output - y).square().mean()
        value.backward()
        end(1)
        if step:
            step(value, model)
        made.step()
        end(2)


def batch_of(size, xla=None):
    values = torch.rand(size, 8), torch.rand(size, 1)
    return [value.to(xla.device) for value in values] if xla else values


def branch(output, y, number):
    value = (output - y).square().mean()
    return value.exp() * 2 + 1 if value > 0.01 else value


def long_or_short(output, y, number):
    for _ in range(number * 7 % 11):
        output = output.tanh()
    return (output - y).square().mean()


READ, ENDED = "The host read from the device", "Steps ended: 0."
SINS = {
    "item": (dict(step=lambda value, model: value.item()), [f"{READ} 12 .* by `.item.*`if x > 0`, and"]),
    "item, no sync": (dict(step=lambda value, model: value.item(), syncs=()), [ENDED, READ]),
    "print": (dict(step=lambda value, model: str(value)), [f"{READ} 12 times .* by `print"]),
    "shapes": (dict(batch=lambda number: batch_of(4 + number)), ["Compiled .* data of a new size"]),
    "number": (
        dict(loss=lambda output, y, number: (output - y).abs().pow(1.5 + number).mean()),
        ["Compiled .* a Python number"],
    ),
    "length": (dict(loss=long_or_short), ["Compiled .* a branch or a loop"]),
    "mask": (
        dict(batch=lambda _: batch_of(64), loss=lambda output, y, _: output[y > 0.5].square().mean()),
        ["Compiled .* what aten::nonzero finds has another size", "Ran on the CPU.*aten::nonzero"],
    ),
    "nonzero": (
        dict(loss=lambda output, y, _: output[(y[:, 0] > 0.5).nonzero()].square().mean()),
        ["Ran on the CPU.*aten::nonzero"],
    ),
    "if": (dict(loss=branch), [f"{READ} 12 .*`if x > 0`[^)]*, and"]),
    "unique": (
        dict(loss=lambda output, y, _: (output - y).square().mean() + 0 * (y * 9).long().unique()[0]),
        ["Ran on the CPU.*unique"],
    ),
    "sends": (
        dict(step=lambda value, model: [torch.rand(3).to(value.device) for _ in range(16)]),
        [r"Sent in each step: 0.3 kB \(tensors: 18\). Send one for many"],
    ),
    "weights": (dict(step=lambda value, model: [p.cpu() for p in model.parameters()]), [f"{READ} 48 .*cpu"]),
    "optimizer before .to": (
        dict(move_late=True),
        [r"Optimizer steps without a gradient: 12. Make it after `.to"],
    ),
    "clip": (
        dict(
            step=lambda _, model: nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        ),
        [f"{READ} .*`if x > 0`[^)]*, and"],
    ),
    "three syncs": (dict(syncs=(0, 1, 2)), ["Each step ended 3 times"]),
    "no sync": (dict(syncs=()), [ENDED]),
    "Adam": (dict(optimizer=torch.optim.Adam), []),
    "a float rate": (dict(optimizer=lambda p: torch.optim.SGD(p, lr=0.123, momentum=0.7)), []),
    "a factor": (dict(loss=lambda output, y, number: (output - y).square().mean() * (number + 0.5)), []),
    "good": (dict(), []),
    "two syncs at the end": (dict(syncs=(2, 2)), []),
}


@pytest.mark.slow
@pytest.mark.parametrize("sin", SINS)
def test_a_sin_is_named_with_its_cause_and_nothing_else_and_a_good_loop_has_no_problem(
    sin, xla, capsys, monkeypatch
):
    loop, subjects = SINS[sin]
    with tpukit.metrics_report() as report:
        train(xla, hidden=16 + list(SINS).index(sin), **loop)  # a graph that no other has compiled
    problems = report.problems()
    assert len(problems) == len(subjects), problems
    for problem, subject in zip(problems, subjects):
        assert re.match(subject, problem)
    monkeypatch.setenv("TPUKIT_LANGUAGE", "zh")
    for sentence in (*problems, *report.facts()):
        assert re.search("[\u4e00-\u9fff]", language.translate(sentence)), sentence


def test_what_each_step_sends_is_told_in_bytes(xla, capsys):
    with tpukit.metrics_report() as report:
        train(xla, batch=lambda number: batch_of(2**18))
    assert report.problems() == [] and "Sent in each step: 9,437.2 kB (tensors: 2)." in report.facts()


def test_gradients_of_three_batches_two_optimizers_and_an_evaluation_are_no_steps_that_end_too_often(xla):
    import torch_xla

    model = nn.Linear(8, 5).to(xla.device)
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    with tpukit.metrics_report() as accumulating:
        for number in range(18):
            model(batch_of(4, xla)[0]).square().mean().backward()
            if number % 3 == 2:
                optimizers[0].step()
                optimizers[0].zero_grad()
            torch_xla.sync()
    with tpukit.metrics_report() as two:
        for _ in range(8):
            for optimizer in optimizers:
                optimizer.zero_grad()
                model(batch_of(4, xla)[0]).square().mean().backward()
                optimizer.step()
                torch_xla.sync()
        for _ in range(20):
            model(batch_of(4, xla)[0]).argmax(1).float().mean()
            torch_xla.sync()
    assert accumulating.problems() == two.problems() == []


def test_a_loop_that_is_not_a_training_and_never_ends_a_step_is_told_so(xla, capsys):
    with tpukit.metrics_report() as report:
        model = nn.Linear(8, 5).to(xla.device)
        for _ in range(40):
            model(batch_of(4, xla)[0]).square().mean()
    assert report.problems() == [f"{ENDED} Call `torch_xla.sync()` after each, or the graph grows."]
    assert "executed: 0" in report.facts()[0] and "No operation" not in " ".join(report.facts())
    xla.sync()


def test_what_a_checkpoint_reads_is_not_charged_to_the_loop(xla, tmp_path, capsys):
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)]).to(xla.device)
    xla.sync()
    with tpukit.metrics_report() as report:
        tpukit.Checkpoints(tmp_path).save(model.state_dict(), 1)
    assert report.counters["read"] == report.counters["saved"] == 8 and report.problems() == []
    with tpukit.metrics_report() as both:
        tpukit.Checkpoints(tmp_path).save(model.state_dict(), 2)
        for value in model.parameters():
            value.cpu()
    assert "read from the device 8 times" in both.problems()[0]


LAUNCH = """
import tpukit
def train():
    with tpukit.metrics_report():
        tpukit.core()
with tpukit.metrics_report():
    tpukit.launch(train, cores=2)
"""


@pytest.mark.slow
def test_a_report_around_a_launch_says_that_the_function_makes_its_own_which_it_can():
    pytest.importorskip("torch_xla")
    ran = subprocess.run([*warm.python(), "-c", LAUNCH], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    own, _, around = ran.stdout.partition("This process has not opened")
    assert "in this block: graphs compiled: 0" in own
    assert "Each core of `tpukit.launch`" in around and "write it into the function" in around


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
