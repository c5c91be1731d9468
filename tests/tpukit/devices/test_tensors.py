"""What a model asks of its device: a part that is computed once more for the backward pass, and an order."""

import pytest
import torch
from torch import nn

from tpukit.devices.optimizers import adamw
from tpukit.devices.tensors import after_gradients, recomputed


def gradients(device, compute):
    """Gradients of a loss in an input and in the weights of a part, on the CPU."""
    torch.manual_seed(0)
    part, x = nn.Linear(5, 5).to(device), torch.randn(3, 5).to(device).requires_grad_()
    compute(lambda x, factor: (part(x) * factor).tanh(), x, 2.0).sum().backward()
    return [tensor.grad for tensor in (x, part.weight, part.bias)]


def test_what_is_computed_once_more_has_the_same_gradients(cpu):
    found = gradients("cpu", recomputed)
    torch.testing.assert_close(found, gradients("cpu", lambda function, *all: function(*all)))
    assert found[0].abs().sum() > 0


def test_on_xla_the_second_computation_is_no_copy_of_the_first(xla):
    torch_xla = pytest.importorskip("torch_xla")
    found = gradients(xla.device, recomputed)
    graph = torch_xla._XLAC._get_xla_tensors_hlo(found)
    assert "opt-barrier" in graph, "XLA would keep what the first computation made"
    expected = gradients("cpu", recomputed)
    torch.testing.assert_close([tensor.cpu() for tensor in found], expected, rtol=1e-5, atol=1e-6)


def test_on_xla_a_micro_batch_is_read_after_the_gradients_of_the_one_before(xla):
    torch_xla = pytest.importorskip("torch_xla")
    given = xla.put({"x": torch.arange(3.0), "gradient": torch.ones(2)})
    [x] = after_gradients({"x": given["x"]}, [given["gradient"]]).values()
    assert "opt-barrier" in torch_xla._XLAC._get_xla_tensors_hlo([x]) and x.cpu().tolist() == [0, 1, 2]
    batch = {"x": torch.ones(2)}
    assert after_gradients(batch, [torch.ones(2)]) is batch


def test_biases_and_norms_do_not_decay_and_what_is_frozen_is_not_updated():
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2))
    model[2].requires_grad_(False)
    groups = adamw(model, 0.1, 0.5, betas=(0.8, 0.9)).param_groups
    assert [(group["weight_decay"], len(group["params"])) for group in groups] == [(0.5, 1), (0.0, 3)]
    assert all(group["betas"] == (0.8, 0.9) and group["lr"] == 0.1 for group in groups)
