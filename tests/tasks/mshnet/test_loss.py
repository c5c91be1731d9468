"""The SLS loss against a plain loop, and where it could be NaN."""

import pytest
import torch
from torch.nn import functional as F

from tpukit_tasks.mshnet.loss import multiscale_loss


@pytest.fixture
def outputs_and_target():
    """Logits of the output and of the masks, of two images: one has no target, and a prediction that
    underflows."""
    generator = torch.Generator().manual_seed(4)
    target = (torch.rand(2, 1, 32, 32, generator=generator) > 0.9).float()
    target[0] = 0
    far_below = torch.tensor([-200.0, 0.0]).view(2, 1, 1, 1)
    outputs = [torch.randn(2, 1, size, size, generator=generator) + far_below for size in (32, 32, 16, 8, 4)]
    return [output.requires_grad_() for output in outputs], target


def check_same(found, wanted, outputs):
    """That two losses and their gradients are finite, and equal bit for bit."""
    both = []
    for loss in (found, wanted):
        both.append([loss, *torch.autograd.grad(loss, outputs, allow_unused=True, materialize_grads=True)])
    assert all(torch.isfinite(a).all() and torch.equal(a, b) for a, b in zip(*both, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("warm_up", [True, False])
def test_all_scales_at_once_have_the_loss_and_the_gradients_of_one_after_another(
    warm_up, dtype, outputs_and_target
):
    outputs, target = outputs_and_target
    outputs = [output.detach().to(dtype).requires_grad_() for output in outputs]
    targets = [target, target, *(F.max_pool2d(target, 2**scale) for scale in (1, 2, 3))]
    alone = [multiscale_loss(output, [], small, warm_up=warm_up) for output, small in zip(outputs, targets)]
    together = multiscale_loss(outputs[0], outputs[1:], target, warm_up=warm_up)
    check_same(together, torch.stack(alone).mean(), outputs)
    of_images = [
        multiscale_loss(outputs[0][[i]], [], target[[i]], warm_up=warm_up) for i in range(len(target))
    ]
    torch.testing.assert_close(alone[0], torch.stack(of_images).mean())


@pytest.mark.parametrize("warm_up", [True, False])
def test_a_phase_that_is_a_tensor_gives_the_loss_and_the_gradient_of_one_that_is_a_bool(
    warm_up, outputs_and_target
):
    outputs, target = outputs_and_target
    found = multiscale_loss(outputs[0], outputs[1:], target, warm_up=torch.tensor(warm_up))
    masks = [] if warm_up else outputs[1:]
    check_same(found, multiscale_loss(outputs[0], masks, target, warm_up=warm_up), outputs)
