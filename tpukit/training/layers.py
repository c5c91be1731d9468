"""Parts of a model that do not train: `freeze`. Optimizers skip a parameter without a gradient."""

import difflib
from collections.abc import Callable, Sequence

from torch import nn

from tpukit.host.errors import TpukitError
from tpukit.training import batch_norm

BACKBONE = "backbone"  # all but the task's head, unless the model has a part of this name


def freeze(model: nn.Module, parts: Sequence[str], head: Callable[[nn.Module], list[str]]) -> None:
    """Keep some parts of a model as they are: no gradients, and the running statistics of batch norms are
    used in training too. Raises TpukitError for a name that the model does not have, and if nothing is left
    to train.

    parts: as in `Task.freeze`. head: returns the names of the parameters that BACKBONE leaves to train."""
    if not parts:
        return
    names = [name for name, _ in model.named_parameters()]
    known: set[str] = set()  # of 0.conv.weight: 0, 0.conv and 0.conv.weight
    for name in names:
        words = name.split(".")
        known.update(".".join(words[: depth + 1]) for depth in range(len(words)))
    frozen = set()
    for part in parts:
        if part == BACKBONE and part not in known:
            frozen.update(set(names) - set(head(model)))
        elif part in known:
            frozen.update(name for name in names if f"{name}.".startswith(f"{part}."))
        else:
            near = difflib.get_close_matches(part, sorted(known), 5)
            near = near or dict.fromkeys(name.split(".")[0] for name in names)
            raise TpukitError(f"freeze={part!r}: the model has no such part; it has {', '.join(near)}")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name not in frozen)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TpukitError(f"freeze={', '.join(parts)} leaves nothing to train: leave out a part")
    for module in model.modules():
        parameters = list(module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            batch_norm.freeze(module)
