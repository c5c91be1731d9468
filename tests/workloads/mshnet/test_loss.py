"""The SLS loss against a plain loop, and where it could be NaN."""

import pytest
import torch

from tpukit.workloads.mshnet.loss import multiscale_loss, sls_loss


def test_loss_is_the_mean_over_samples_of_a_plain_loop():
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(3, 1, 16, 24, generator=generator)
    target = (torch.rand(3, 1, 16, 24, generator=generator) > 0.9).float()
    for warm_up in (True, False):
        alone = [sls_loss(logits[i : i + 1], target[i : i + 1], warm_up=warm_up) for i in range(3)]
        assert abs(sls_loss(logits, target, warm_up=warm_up) - sum(alone) / 3) < 1e-6


def test_loss_of_an_image_without_target_is_finite_and_so_is_its_gradient():
    logits = torch.full((2, 1, 16, 16), -200.0, requires_grad=True)
    for warm_up in (True, False):
        loss = sls_loss(logits, torch.zeros(2, 1, 16, 16), warm_up=warm_up)
        loss.backward()
        assert torch.isfinite(loss) and torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("warm_up", [True, False])
def test_a_phase_that_is_a_tensor_gives_the_loss_and_the_gradient_of_one_that_is_a_bool(warm_up):
    generator = torch.Generator().manual_seed(4)
    sizes = (32, 32, 16, 8, 4)  # of the output and the masks
    target = (torch.rand(2, 1, 32, 32, generator=generator) > 0.9).float()
    target[0] = 0  # an image without a target, whose prediction below underflows
    far_below = torch.tensor([-200.0, 0.0]).view(2, 1, 1, 1)
    outputs = [torch.randn(2, 1, size, size, generator=generator) + far_below for size in sizes]
    for output in outputs:
        output.requires_grad_()

    def loss_and_gradients(phase):
        masks = [] if phase is True else outputs[1:]
        loss = multiscale_loss(outputs[0], masks, target, warm_up=phase)
        gradients = torch.autograd.grad(loss, outputs, allow_unused=True, materialize_grads=True)
        return [loss, *gradients]

    for found, wanted in zip(loss_and_gradients(torch.tensor(warm_up)), loss_and_gradients(warm_up), strict=True):
        assert torch.isfinite(found).all() and torch.equal(found, wanted)
