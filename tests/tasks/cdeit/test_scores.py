"""Scores against their definitions."""

import numpy as np
import pytest

from tpukit.tasks.cdeit import simulator
from tpukit.tasks.cdeit.scores import image_scores, similarity


def test_scores_equal_their_definitions_inside_the_disk():
    metrics = pytest.importorskip("skimage.metrics")
    rng = np.random.default_rng(0)
    truth, inside = simulator.scene(rng), simulator.disk()
    image = (truth + rng.normal(0, 0.2, truth.shape)).astype(np.float32) * inside
    found = image_scores(image, truth, inside)
    a, b = image[inside], truth[inside]
    assert found["rmse"] == pytest.approx(np.sqrt(np.mean((a - b) ** 2)), rel=1e-5)
    assert found["psnr"] == pytest.approx(metrics.peak_signal_noise_ratio(b, a, data_range=2), rel=1e-5)
    assert found["cc"] == pytest.approx(np.corrcoef(a, b)[0, 1], rel=1e-5)
    assert image_scores(truth, truth, inside) == dict(
        rmse=0, psnr=pytest.approx(126, abs=1), ssim=1, cc=pytest.approx(1)
    )
    assert image_scores(0 * truth, truth, inside)["cc"] == 0
    y, x = 64, 64
    weight = np.exp(-((np.mgrid[-5:6, -5:6] ** 2).sum(0)) / (2 * 1.5**2))
    weight /= weight.sum()
    p, t = (v[y - 5 : y + 6, x - 5 : x + 6].astype(float) for v in (image, truth))
    mp, mt = (weight * p).sum(), (weight * t).sum()
    vp, vt, cov = (
        (weight * p * p).sum() - mp**2,
        (weight * t * t).sum() - mt**2,
        (weight * p * t).sum() - mp * mt,
    )
    c1, c2 = (0.01 * 2) ** 2, (0.03 * 2) ** 2
    similarity = (2 * mp * mt + c1) * (2 * cov + c2) / ((mp**2 + mt**2 + c1) * (vp + vt + c2))
    one = np.zeros_like(inside)
    one[y, x] = True
    assert image_scores(image, truth, one)["ssim"] == pytest.approx(similarity, abs=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_the_similarity_of_every_pixel_equals_that_of_scikit_image(seed):
    metrics = pytest.importorskip("skimage.metrics")
    rng = np.random.default_rng(seed)
    truth = simulator.scene(rng)
    image = (truth + rng.normal(0, 0.3, truth.shape)).astype(np.float32)
    _, wanted = metrics.structural_similarity(
        truth.astype(float),
        image.astype(float),
        data_range=2,
        gaussian_weights=True,
        use_sample_covariance=False,
        full=True,
    )
    assert np.abs(similarity(image, truth) - wanted).max() < 1e-7
