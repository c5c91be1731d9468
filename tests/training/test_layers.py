"""Fine-tuning: frozen parts, and learning rates that are smaller nearer to the input."""

import dataclasses

import pytest
import torch
from torch import nn

from tests.conftest import SMALL, best_weights, checkpoint, exact, refuses, same
from tests.tasks.cdeit.small import TINY
from tpukit import CDEIT, MNIST, MSHNet, Run, train
from tpukit.training import layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deep(MNIST):
    """A network with named parts, batch norms, a list of blocks, and a parameter of its own."""

    def model(self):
        return Net()


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


BLOCK = ("conv.weight", "conv.bias", "norm.weight", "norm.bias")
LAYERS = [
    ["scale", "stem.0.weight", "stem.0.bias"],
    ["stem.1.weight", "stem.1.bias"],
    [f"blocks.0.{name}" for name in BLOCK],
    [f"blocks.1.{name}" for name in BLOCK],
    ["head.weight", "head.bias"],
]


def trained(folder, runtime, digits, **settings):
    task = Deep(dataset_dir=digits, **SMALL | dict(epochs=2) | settings)
    run = Run.open(folder, task)
    train(task, run, runtime=runtime, progress=False)
    return run


def test_layers_are_the_children_in_order_with_lists_expanded():
    assert layers.find_layers(Net()) == LAYERS
    assert layers.find_layers(nn.Linear(2, 2)) == [["weight", "bias"]]
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    assert layers.find_layers(tied) == [["0.weight", "0.bias"], ["1.bias"]]


@pytest.mark.parametrize("task", [MNIST(), MSHNet(), CDEIT(**TINY)], ids=lambda task: task.name)
def test_every_task_has_layers_that_hold_each_parameter_once(task):
    model = task.model()
    assert len(layers.checked_layers(task, model)) > 3
    optimizer = layers.make_optimizer(dataclasses.replace(task, layer_decay=0.5), model)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert (
        len(rates) == len([p for p in model.parameters() if p.requires_grad])
        and max(rates.values()) == task.lr
    )


@pytest.mark.parametrize("wrong, name", [([], "head.bias"), ([["nose"]], "nose"), ([["scale"]], "scale")])
def test_layers_with_a_parameter_too_few_or_too_many_are_refused_by_its_name(wrong, name):
    class Wrong(Deep):
        def layers(self, model):
            return (LAYERS if wrong else [*LAYERS[:-1], ["head.weight"]]) + wrong

    with refuses("Wrong", f"wrong: {name}"):
        layers.make_optimizer(Wrong(layer_decay=0.5), Net())


@pytest.mark.parametrize("device", ["cpu", pytest.param("xla", marks=pytest.mark.slow)])
def test_each_layers_update_is_the_plain_one_times_the_decay_of_its_depth(device, digits, tmp_path, request):
    """One step of plain SGD: twice the rate, twice the way."""

    class Descending(Deep):
        def optimizer(self, model):
            return torch.optim.SGD(model.parameters(), self.lr)

    moved = {}
    for decay in (1.0, 0.5):
        task = Descending(dataset_dir=digits, layer_decay=decay, **SMALL | dict(epochs=1, batch_size=200))
        run = Run.open(tmp_path / str(decay), task)
        train(task, run, runtime=request.getfixturevalue(device), progress=False)
        torch.manual_seed(task.seed)
        start = task.model().state_dict()
        moved[decay] = {name: value - start[name] for name, value in checkpoint(run)["model"].items()}
    for depth, layer in enumerate(reversed(LAYERS)):
        for name in layer:
            torch.testing.assert_close(moved[0.5][name], moved[1.0][name] * 0.5**depth, atol=1e-6, rtol=1e-3)
    assert run.records("train")[-1]["lr"] == task.lr


class WithAdagrad(Deep):
    """Whose optimizer makes its state before the first step."""

    def optimizer(self, model):
        return torch.optim.Adagrad(model.parameters(), self.lr)


class WithAdam(Deep):
    def optimizer(self, model):
        return torch.optim.AdamW(
            model.parameters(), 1e-3, weight_decay=0.1, capturable=next(model.parameters()).is_xla
        )


@pytest.mark.parametrize("kind", [Deep, WithAdagrad, WithAdam])
@pytest.mark.parametrize("device", ["cpu", pytest.param("xla", marks=pytest.mark.slow)])
def test_frozen_parts_do_not_move_have_no_gradient_and_no_state_and_the_others_train(
    kind, device, digits, tmp_path, request
):
    settings = dict(SMALL, epochs=2, freeze=("stem", "scale", "blocks.0"), ema_decay=0.9, clip_norm=1.0)
    task = kind(dataset_dir=digits, **settings)
    run = Run.open(tmp_path, task)
    train(task, run, runtime=request.getfixturevalue(device), progress=False)
    torch.manual_seed(task.seed)
    start, saved = task.model().state_dict(), checkpoint(run)
    frozen = [n for n in start if n.split(".")[0] in ("stem", "scale") or n.startswith("blocks.0.")]
    assert any("running_mean" in name for name in frozen)
    for name in frozen:
        assert torch.equal(saved["model"][name], start[name]) and torch.equal(
            saved["averaged"][name], start[name]
        ), name
    others = [name for name in start if name not in frozen]
    assert all(not torch.equal(saved["model"][name], start[name]) for name in others)
    parameters = [name for name in others if name in dict(task.model().named_parameters())]
    assert sum(len(group["params"]) for group in saved["optimizer"]["param_groups"]) == len(parameters)
    assert len(saved["optimizer"]["state"]) == len(parameters)


def test_the_norm_of_the_gradient_is_that_of_the_parts_that_train(digits, tmp_path, cpu):
    from tpukit.training.loop import Trainer

    task = Deep(dataset_dir=digits, freeze=("backbone",), **SMALL | dict(epochs=1, batch_size=200))
    run = Run.open(tmp_path, task)
    trainer = Trainer(task, run, cpu, None)
    batch = next(trainer.batches())
    trainer.model.train()
    loss = task.loss(trainer.model, batch, 0)
    head = torch.autograd.grad(loss, list(trainer.model.head.parameters()))
    trainer.take_step(batch, 0)
    assert {n for n, p in trainer.model.named_parameters() if p.grad is not None} == {
        "head.weight",
        "head.bias",
    }
    assert float(cpu.gradient_norm(trainer.model)) == pytest.approx(
        float(torch.nn.utils.get_total_norm(head)), rel=1e-5
    )


def test_backbone_is_all_but_the_last_layer(digits):
    task, model = Deep(freeze=("backbone",)), Net()
    layers.freeze(task, model)
    assert [n for n, p in model.named_parameters() if p.requires_grad] == LAYERS[-1]
    assert (
        type(model.blocks[1].norm).__name__ == "FrozenBatchNorm" and type(model.plain_norm) is nn.BatchNorm2d
    )

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone, self.neck, self.head = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

    model = Own()
    layers.freeze(task, model)
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == [
        "backbone.weight",
        "backbone.bias",
    ]


def test_a_name_freezes_its_own_part_and_none_whose_name_only_begins_so():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(12)))
    layers.freeze(Deep(freeze=("1", "3.bias")), model)
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["1.weight", "1.bias", "3.bias"]


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
        layers.freeze(Deep(freeze=freeze), Net())


def test_a_fine_tuning_resumes_exactly(digits, tmp_path, cpu):
    settings = dict(layer_decay=0.7, freeze=("stem", "scale"))
    straight = trained(tmp_path / "straight", cpu, digits, **settings)
    for epochs in (1, 2):
        parted = trained(tmp_path / "parted", cpu, digits, epochs=epochs, **settings)
    assert exact(parted) == exact(straight) and same(best_weights(parted), best_weights(straight))
