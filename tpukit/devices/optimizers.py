"""The tensors of an optimizer, those that it updates and those that it keeps, and its settings."""

import torch


def parameters_with_gradient(optimizer):
    """The parameters that the next step of an optimizer updates."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def state_tensors(optimizer):
    """The tensors of an optimizer's state, wherever they lie."""
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]


def written_by_step(optimizer):
    """What a step may change on the device: (parameter, name) -> tensor, with name None for the parameter itself."""
    found = {}
    for parameter in parameters_with_gradient(optimizer):
        found[parameter, None] = parameter
        for name, value in optimizer.state[parameter].items():
            if isinstance(value, torch.Tensor) and _is_beside(value, parameter):
                found[parameter, name] = value
    return found


def _is_beside(value, parameter):
    return value.device == parameter.device  # counters may be on the host


OF_THE_DEVICE = ("params", "capturable", "fused", "foreach")  # in a group of parameters


def optimizer_signature(optimizer):
    """dict setting -> its value as text, of an optimizer that was just made: what the code of the task says of it."""
    found = {"optimizer": type(optimizer).__name__, "groups": str(len(optimizer.param_groups))}
    for number, group in enumerate(optimizer.param_groups):
        settings = {name: value for name, value in group.items() if name not in OF_THE_DEVICE}
        settings = {name: value for name, value in settings.items() if isinstance(value, (bool, int, float, tuple, str))}
        settings["parameters"] = len(group["params"])
        found |= {f"{name} of group {number}": str(value) for name, value in settings.items()}
    return found
