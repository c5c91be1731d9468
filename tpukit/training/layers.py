"""For fine-tuning: parts of a model that do not train, and smaller learning rates nearer to its input."""

import collections
import difflib
import itertools
from collections.abc import Container

from torch import nn
from torch.optim import Optimizer

from tpukit.host.errors import TpukitError
from tpukit.training import batch_norm
from tpukit.training.task import Task

BACKBONE = "backbone"  # all layers but the last, unless the model has a part of this name


def find_layers(model: nn.Module) -> list[list[str]]:
    """[[parameter names]] of the model's layers from input to output: its children, in the order in which
    they were assigned.

    A Sequential or ModuleList is one layer for each of its own children, a ModuleDict a single one, because
    it need not be in the order of the computation. Parameters of the model itself join the first layer."""
    own = [name for name, _ in model.named_parameters(recurse=False)]
    first, *others = _layers_below(model, "", dict(model.named_parameters())) or [[]]
    return [own + first, *others]


def _layers_below(module: nn.Module, prefix: str, names: Container[str]) -> list[list[str]]:
    """names: of all parameters; a shared one has only the first of its names."""
    layers = []
    for name, child in module.named_children():
        if isinstance(child, (nn.Sequential, nn.ModuleList)):
            layers += _layers_below(child, f"{prefix}{name}.", names)
        else:
            inner = (f"{prefix}{name}.{parameter}" for parameter, _ in child.named_parameters())
            layers.append([parameter for parameter in inner if parameter in names])
    return [layer for layer in layers if layer]


def checked_layers(task: Task, model: nn.Module) -> list[list[str]]:
    """`task.layers(model)`. Raises TpukitError unless it has each parameter once."""
    layers = task.layers(model)
    listed = collections.Counter(name for layer in layers for name in layer)
    listed.subtract(name for name, _ in model.named_parameters())
    if wrong := sorted(name for name, count in listed.items() if count):
        raise TpukitError(
            f"{type(task).__name__}.layers() must have each parameter of the model once; wrong:"
            f" {', '.join(wrong[:5])}"
        )
    return layers


def freeze(task: Task, model: nn.Module) -> None:
    """Keep the parts of the model that `task.freeze` names as they are: no gradients, and the running
    statistics of batch norms are used in training too. Raises TpukitError for a name that the model does not
    have."""
    if not task.freeze:
        return
    names = [name for name, _ in model.named_parameters()]
    parts = {part for name in names for part in itertools.accumulate(name.split("."), "{}.{}".format)}
    frozen = set()
    for part in task.freeze:
        if part == BACKBONE and part not in parts:
            frozen.update(name for layer in checked_layers(task, model)[:-1] for name in layer)
        elif part in parts:
            frozen.update(name for name in names if f"{name}.".startswith(f"{part}."))
        else:
            near = difflib.get_close_matches(part, sorted(parts), 5)
            near = near or dict.fromkeys(name.split(".")[0] for name in names)
            raise TpukitError(
                f"freeze={part!r}: the model has no such part; it has {', '.join(near)}; or use {BACKBONE!r}"
            )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name not in frozen)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TpukitError(f"freeze={', '.join(task.freeze)} leaves nothing to train: leave out a part")
    for module in model.modules():
        parameters = list(module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            batch_norm.freeze(module)


def make_optimizer(task: Task, model: nn.Module) -> Optimizer:
    """`task.optimizer(model)` without what is frozen, and with each layer's learning rate by
    `task.layer_decay`."""
    optimizer = task.optimizer(model)
    if not task.freeze and task.layer_decay == 1:
        return optimizer
    parameters = dict(model.named_parameters())
    layers = reversed(checked_layers(task, model))
    height = {parameters[name]: number for number, layer in enumerate(layers) for name in layer}
    groups = []
    for group in optimizer.param_groups:
        at_height = collections.defaultdict(list)
        for parameter in group["params"]:
            if parameter.requires_grad:
                at_height[height.get(parameter, 0)].append(parameter)
            else:
                optimizer.state.pop(parameter, None)  # Adagrad has made it already
        for number, members in at_height.items():
            groups.append(group | dict(params=members, lr=group["lr"] * task.layer_decay**number))
    optimizer.param_groups[:] = groups
    return optimizer
