"""The tensors of an optimizer, those that it updates and those that it keeps, and its settings."""

import torch


def parameters_with_gradient(optimizer):
    """The parameters that the next step of an optimizer updates."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def trainable_parameters(optimizer):
    """The parameters that can have a gradient."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def state_tensors(optimizer):
    """The tensors of an optimizer's state, wherever they lie."""
    return [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]


def written_by_step(optimizer):
    """What a step may change on the device: (parameter, name) -> tensor, with name None for the parameter
    itself."""
    found = {}
    for parameter in parameters_with_gradient(optimizer):
        found[parameter, None] = parameter
        for name, value in optimizer.state[parameter].items():
            if isinstance(value, torch.Tensor) and _is_beside(value, parameter):
                found[parameter, name] = value
    return found


def _is_beside(value, parameter):
    return value.device == parameter.device  # counters may be on the host


# Many tensors as one: an operation of each would be hundreds of kernels


def flattened(tensors):
    """dtype -> (N,): copies of the tensors of that type, one after another, each in the order in which its
    memory lies."""
    by_dtype = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(_in_memory_order(tensor).flatten())
    return {dtype: torch.cat(parts) for dtype, parts in by_dtype.items()}


def copy_flattened(tensors, flat):
    """Write to tensors of one type what `flattened` would make `flat` of."""
    with torch.no_grad():
        targets = [_in_memory_order(tensor) for tensor in tensors]
        parts = flat.split([target.numel() for target in targets])
        torch._foreach_copy_(targets, [part.view(target.shape) for part, target in zip(parts, targets)])


def _in_memory_order(tensor):
    """A view with the axis of the largest stride first."""
    return tensor.detach().permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


OF_THE_DEVICE = ("params", "capturable", "fused", "foreach")  # in a group of parameters


def optimizer_signature(optimizer):
    """dict setting -> its value as text, of an optimizer that was just made: what the code of the task says
    of it."""
    found = {"optimizer": type(optimizer).__name__, "groups": str(len(optimizer.param_groups))}
    for number, group in enumerate(optimizer.param_groups):
        settings = {name: value for name, value in group.items() if name not in OF_THE_DEVICE}
        settings = {
            name: value
            for name, value in settings.items()
            if isinstance(value, (bool, int, float, tuple, str))
        }
        settings["parameters"] = len(group["params"])
        found |= {f"{name} of group {number}": str(value) for name, value in settings.items()}
    return found
