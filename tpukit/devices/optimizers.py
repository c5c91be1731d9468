"""The tensors of an optimizer: those that it updates, and those that it keeps."""

import torch


def parameters_with_gradient(optimizer):
    """The parameters that the next step of an optimizer updates."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def trainable_parameters(optimizer):
    """The parameters that can have a gradient."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def in_memory_order(tensor):
    """The elements of a dense tensor as a vector on the same memory, without gradient."""
    tensor = tensor.detach()
    return tensor.flatten() if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


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
