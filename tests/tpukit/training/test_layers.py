"""Fine-tuning: parts of a model that are frozen, and its head, which trains alone."""

import dataclasses

import pytest
import torch
from torch import nn

from tests.conftest import SMALL, checkpoint, refuses
from tests.tpukit.training.conftest import train_in
from tpukit import MNIST, Run
from tpukit.host.signals import StopSignal
from tpukit.training import layers, metrics
from tpukit.training.setup import Trainer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deep(MNIST):
    """A network with named parts, batch norms, a list of blocks, and a parameter of its own."""

    def model(self):
        return Net()

    def head(self, model):
        return HEAD


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4))
        self.blocks = nn.ModuleList([Block(4), Block(4)])
        self.plain_norm = nn.BatchNorm2d(4, affine=False)
        self.head = nn.Linear(4, 10)

    def forward(self, x):
        x = self.stem(x * self.scale)
        for block in self.blocks:
            x = block(x)
        return self.head(self.plain_norm(x).mean((2, 3)))


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x):
        return x + self.norm(self.conv(x)).relu()


HEAD = ["head.weight", "head.bias"]


class Own(nn.Module):
    """With a part that is called backbone."""

    def __init__(self):
        super().__init__()
        self.backbone, self.head = nn.Linear(2, 2), nn.Linear(2, 2)


class WithAdam(Deep):
    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.1)


@pytest.mark.parametrize(
    "kind, device",
    [
        (Deep, "cpu"),
        (WithAdam, "cpu"),
        pytest.param(WithAdam, "xla", marks=pytest.mark.slow),
    ],
)
def test_frozen_parts_do_not_move_have_no_gradient_and_no_state_and_the_others_train(
    kind, device, digits, tmp_path, request
):
    settings = dict(SMALL, epochs=2, freeze=("stem", "scale", "blocks.0"), ema_decay=0.9, clip_norm=1.0)
    task = kind(dataset_dir=digits, **settings)
    run = train_in(tmp_path, task, request.getfixturevalue(device))
    torch.manual_seed(task.seed)
    start, saved = task.model().state_dict(), checkpoint(run)
    frozen = [n for n in start if n.split(".")[0] in ("stem", "scale") or n.startswith("blocks.0.")]
    assert any("running_mean" in name for name in frozen)
    for name in frozen:
        assert torch.equal(saved["model"][name], start[name]), name
        assert torch.equal(saved["averaged"][name], start[name]), name
    others = [name for name in start if name not in frozen]
    assert all(not torch.equal(saved["model"][name], start[name]) for name in others)
    if kind is WithAdam:
        parameters = [name for name in others if name in dict(task.model().named_parameters())]
        assert len(saved["optimizer"]["state"]) == len(parameters)


def test_the_norm_of_the_gradient_is_that_of_the_parts_that_train(digits, tmp_path, cpu):
    task = Deep(dataset_dir=digits, freeze=("backbone",), **SMALL | dict(epochs=1, batch_size=200))
    trainer = Trainer(task, Run.open(tmp_path, task), cpu, StopSignal())
    batch = next(trainer.batches())
    trainer.model.train()
    loss = task.loss(trainer.model, batch, 0)
    head = torch.autograd.grad(loss, list(trainer.model.head.parameters()))
    trainer.take_step(batch, 0)
    assert [n for n, p in trainer.model.named_parameters() if p.grad is not None] == HEAD
    wanted = float(torch.nn.utils.get_total_norm(head))
    assert float(metrics.gradient_norm(trainer.model)) == pytest.approx(wanted, rel=1e-5)


def test_a_name_freezes_its_own_part_and_backbone_all_but_the_head():
    def frozen(model, *names):
        layers.freeze(model, names, Deep().head)
        return [n for n, p in model.named_parameters() if not p.requires_grad]

    model = Net()
    assert frozen(model, "backbone") == [name for name, _ in model.named_parameters() if name not in HEAD]
    assert type(model.blocks[1].norm).__name__ == "FrozenBatchNorm"
    assert type(model.plain_norm) is nn.BatchNorm2d
    assert frozen(Own(), "backbone") == ["backbone.weight", "backbone.bias"]
    twelve = nn.Sequential(*(nn.Linear(2, 2) for _ in range(12)))
    assert frozen(twelve, "1", "3.bias") == ["1.weight", "1.bias", "3.bias"]


@pytest.mark.parametrize(
    "freeze, data",
    [
        (("blocks.0.cnov",), ("blocks.0.cnov", "blocks.0.conv")),
        (("xyz",), ("xyz", "stem", "head")),
        (("block",), ("'block'", "blocks")),
        (("stem", "blocks", "head", "scale"), ("scale",)),
    ],
)
def test_a_part_that_is_not_there_or_nothing_left_to_train_is_refused_with_names_that_are_near(freeze, data):
    with refuses(*data):
        layers.freeze(Net(), freeze, Deep().head)


def test_a_task_that_does_not_say_what_its_head_is_has_its_parts_frozen_by_name():
    with refuses("MNIST must implement head()", "name the parts"):
        layers.freeze(MNIST().model(), ("backbone",), MNIST().head)
