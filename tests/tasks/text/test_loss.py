"""The loss in parts: torch's own, and never all logits at a time."""

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tpukit_tasks.text import loss

B, T, W, V = 3, 14, 4, 97


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(B, T, W, generator=generator, requires_grad=True)
    head = torch.randn(V, W, generator=generator, requires_grad=True)
    labels = torch.randint(V, (B, T), generator=generator)
    labels[0, 3:9] = labels[2] = -1
    return hidden, head, labels


@pytest.mark.parametrize("most", [1, B * V * 4, B * V * T])
def test_loss_and_gradients_are_torchs_own(inputs, most, monkeypatch):
    monkeypatch.setattr(loss, "MAX_LOGITS", most)
    hidden, head, labels = inputs
    logits = (hidden @ head.t()).flatten(0, 1)
    each = functional.cross_entropy(logits, labels.flatten(), ignore_index=-1, reduction="none").view(B, T)
    expected = torch.autograd.grad(0.3 * each.sum(), (hidden, head))
    found, rows = loss.cross_entropy(hidden, head, labels)
    torch.testing.assert_close(found, each.sum(), rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(0.3 * found, (hidden, head))
    torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rows, each.sum(1), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        alone = loss.cross_entropy(hidden.detach(), head, labels)[1]
    assert torch.equal(alone, rows) and not rows.requires_grad


class Largest(TorchDispatchMode):
    """The most elements that a tensor had."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_all_logits_are_never_there_at_a_time(inputs, monkeypatch):
    monkeypatch.setattr(loss, "MAX_LOGITS", 2 * B * V)
    with Largest() as largest:
        loss.cross_entropy(*inputs)[0].backward()
    assert largest.elements == 2 * B * V


def test_in_fp16_the_gradient_of_the_head_is_right_where_it_is_larger_than_fp16_holds(inputs):
    hidden, head, labels = inputs
    labels[:] = 5
    many, large = 40, 3000.0  # 42 positions of each, of which one entry is right
    expected = None
    for dtype in (torch.float32, torch.float16):
        taken = (large + hidden.detach()).repeat(1, many, 1).requires_grad_()
        weight = (1e-4 * head.detach()).requires_grad_()
        with torch.autocast("cpu", torch.float16, enabled=dtype == torch.float16):
            loss.cross_entropy(taken, weight, labels.repeat(1, many))[0].backward()
        expected = weight.grad if expected is None else expected
    assert expected.abs().max() > torch.finfo(torch.float16).max
    torch.testing.assert_close(weight.grad, expected, rtol=2e-2, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("used_gib, is_one_part", [(0, True), (30, True), (31, False)])
def test_a_gpu_has_all_logits_at_a_time_only_if_half_of_its_memory_stays_free(
    used_gib, is_one_part, monkeypatch
):
    class Properties:
        total_memory = 80 * 2**30

    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: used_gib * 2**30)
    logits = 16 * 1024 * 50304  # of GPT-2
    assert loss._most_logits(True) >= logits if is_one_part else loss._most_logits(True) == loss.MAX_LOGITS
