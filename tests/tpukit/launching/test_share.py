"""A core's part of a dataset, its means, and the loop of the pages that uses them."""

import re
import textwrap

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

import tpukit
from tests.conftest import ROOT, refuses
from tests.tpukit.launching.conftest import CPU, needs_torch_xla, python, xla_environ
from tests.tpukit.launching.test_core import printed
from tpukit.devices.distributed import World
from tpukit.launching.share import Share

NUMBERS = TensorDataset(torch.arange(22))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(22))


def share_of(rank, size, dataset=NUMBERS, batch_size=4, shuffle=True, seed=0):
    return Share(dataset, batch_size, World(rank, size), shuffle, seed)


def batches(loader, epoch):
    return [batch.tolist() for [batch] in loader.epoch(epoch)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_cores_together_take_the_batches_that_one_core_would_in_an_order_of_their_epoch(shuffle):
    whole = share_of(0, 1, shuffle=shuffle)
    parts = [share_of(rank, 2, shuffle=shuffle) for rank in range(2)]
    for epoch in (0, 3):
        of_one, of_two = batches(whole, epoch), [batches(part, epoch) for part in parts]
        assert [sorted(a + b) for a, b in zip(*of_two, strict=True)] == [sorted(each) for each in of_one]
        assert [len(each) for each in of_one] == [4] * 5 == [4] * len(whole.epoch(epoch))
        assert batches(whole, epoch) == of_one  # as in a resumed loop
    assert (batches(whole, 0) == batches(whole, 1)) == (not shuffle)
    assert (batches(whole, 0) == batches(share_of(0, 1, shuffle=shuffle, seed=1), 0)) == (not shuffle)


def test_samples_that_are_left_out_of_each_epoch_are_counted(capsys):
    core = tpukit.core()
    core.share(NUMBERS, batch_size=11)
    assert capsys.readouterr().out == ""
    loader = core.share(NUMBERS, batch_size=4, num_workers=0)
    assert "2 samples do not fill a batch of 4" in capsys.readouterr().out
    assert sum(len(batch) for [batch] in loader.epoch(1)) == 20


def test_the_mean_of_one_core_is_its_own_number():
    assert tpukit.core().mean(torch.tensor([2.5])) == 2.5


def test_what_cores_cannot_share_is_one_sentence():
    for batch_size in (3, 0, 24):
        with refuses(f"batch_size={batch_size}: ", "a multiple of 2, and at most 22"):
            share_of(0, 2, batch_size=batch_size)
    with refuses("a dataset with a length, not Stream"):
        share_of(0, 2, dataset=Stream())


def side_of(diff, sign):
    """The program before (-) or after (+) a diff."""
    return "\n".join(line[1:] for line in diff.splitlines() if line[:1] in (sign, " ", ""))


def loop_of(page, sign="+"):
    """The code of a page that calls core.share, or in a diff what it takes the place of, with a network and
    data for it."""
    text = (ROOT / page).read_text()
    [(kind, code)] = [
        block for block in re.findall(r"```(py|diff)\n(.*?)```", text, re.S) if "core.share" in block[1]
    ]
    code = side_of(code, sign) if kind == "diff" else code
    code = code.replace("tpukit.detect()", "# ")
    return (
        textwrap.dedent("""
        import torch
        import tpukit

        def Net():
            torch.manual_seed(0)
            return torch.nn.Linear(2, 1)

        def loss_of(model, x, y):
            return (model(x) - y).square().mean()

        torch.manual_seed(1)
        dataset = torch.utils.data.TensorDataset(torch.randn(256, 2), torch.randn(256, 1))
    """)
        + re.split(r"^(?:tpukit.launch|train)\(", code, flags=re.M)[0]
    )


RUN = """
import sys
for epochs in (2, 3):
    tpukit.launch(train, epochs, cores=int(sys.argv[1]))
state = tpukit.Checkpoints("outputs/mine").restore()
print("RESULT", [value.flatten().tolist() for value in state["model"].values()])
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cpu", "xla"])
def test_the_readmes_loop_on_two_cores_stopped_and_resumed_equals_one_core(kind, tmp_path):
    if kind == "xla":
        needs_torch_xla()
    found, environ = {}, CPU if kind == "cpu" else xla_environ()
    for cores in (1, 2):
        program = (loop_of("README.md") + RUN).replace("outputs/mine", str(tmp_path / str(cores)))
        found[cores] = printed(python(program, cores, env=environ, timeout=200))
    assert found[2] == [pytest.approx(values, abs=1e-6) for values in found[1]]
    assert found[1] != [values.tolist() for values in torch.nn.Linear(2, 1).state_dict().values()]


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_the_readmes_diff_is_of_a_plain_loop_that_learns_and_of_which_tpukit_keeps_the_rest(page):
    parts = {"DataLoader": torch.utils.data.DataLoader}
    exec(loop_of(page, "-").replace("cuda", "cpu"), parts)
    nets, make = [], parts["Net"]
    parts["Net"] = lambda: nets.append(make()) or nets[-1]
    for epochs in (0, 3):
        parts["train"](epochs)
    x, y = parts["dataset"].tensors
    before, after = (parts["loss_of"](net, x, y).item() for net in nets)
    assert after < before
    plain, ours = (loop_of(page, sign).splitlines() for sign in "-+")
    for kept in ("backward()", "clip_grad_norm_", "optimizer.step()", "optimizer.zero_grad()"):
        assert any(kept in line for line in plain) and any(kept in line for line in ours)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["docs/TRAINING.md", "docs/TRAINING.zh-CN.md"])
def test_the_training_pages_loop_learns_on_two_cores_and_prints_its_mean_loss(page, tmp_path):
    program = loop_of(page).replace("outputs/mine", str(tmp_path / "mine"))
    ran = python(program + "tpukit.launch(train, 3, cores=2)", env=CPU, timeout=100)
    losses = [float(line.split(": ")[1]) for line in ran.stdout.splitlines() if line.startswith("epoch ")]
    assert len(losses) == 3 and losses[2] < losses[0], ran.stdout + ran.stderr
