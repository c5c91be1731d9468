"""The SLS loss against a plain loop, and where it could be NaN."""

import torch

from tpukit.workloads.mshnet.loss import sls_loss


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
