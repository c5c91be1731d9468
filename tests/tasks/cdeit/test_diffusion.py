"""Noise and samplers against their definitions."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from tpukit_tasks.cdeit import diffusion


def test_noise_is_normal_and_depends_on_its_key_alone():
    keys = torch.tensor([0, 1, 2, 1 << 39, 77])
    noise = diffusion.normal(keys, (1, 128, 128))
    assert torch.equal(noise[3:], diffusion.normal(keys[3:], (1, 128, 128)))
    assert all(stats.kstest(image.numpy().ravel(), "norm").pvalue > 1e-3 for image in noise)
    flat = noise.flatten(1).numpy()
    assert np.abs(np.corrcoef(flat) - np.eye(5)).max() < 0.03
    assert abs(np.corrcoef(flat[:, 1:].ravel(), flat[:, :-1].ravel())[0, 1]) < 0.02


@pytest.mark.parametrize(
    "rows", [diffusion.ddim_schedule(1), diffusion.ddim_schedule(7), diffusion.ddim_schedule(1000)]
)
def test_a_sampler_with_a_perfect_network_ends_at_the_clean_image_and_visits_the_right_noise_on_its_way(rows):
    clean, left = 0.7, diffusion.alphas_cumprod()
    assert rows[0, 0] == 999 and (np.diff(rows[:, 0]) < 0).all() and rows[-1, 3] == 0
    # x_t = sqrt(left) clean + noise of variance 1 - left: mean and variance of x carried through the updates
    # by hand
    mean, variance = math.sqrt(left[999]) * clean, 1 - left[999]
    for (t, a, b, c), after in zip(rows, [*rows[1:, 0], None]):
        mean, variance = a * clean + b * mean, b**2 * variance + c**2
        if after is not None:
            assert mean == pytest.approx(math.sqrt(left[int(after)]) * clean, abs=1e-6)
            assert variance == pytest.approx(1 - left[int(after)], abs=1e-6)
    assert mean == pytest.approx(clean) and variance == pytest.approx(0, abs=1e-9)


def test_1000_ddim_steps_are_ancestral_sampling():
    beta, left = diffusion.betas(), diffusion.alphas_cumprod()
    before = np.append(1.0, left[:-1])
    # Ho et al., eq. 7
    mean = np.sqrt(before) * beta / (1 - left), np.sqrt(1 - beta) * (1 - before) / (1 - left)
    ancestral = np.stack([np.arange(1000), *mean, np.sqrt(beta * (1 - before) / (1 - left))], 1)[::-1]
    assert np.allclose(diffusion.ddim_schedule(1000), ancestral, atol=1e-6)
