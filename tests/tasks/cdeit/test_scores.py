"""Scores against their definitions."""

import numpy as np
import pytest

from tpukit_tasks.cdeit import simulator
from tpukit_tasks.cdeit.scores import image_scores


@pytest.mark.parametrize("seed", range(3))
def test_scores_equal_those_of_scikit_image_and_numpy_inside_the_disk(seed):
    metrics = pytest.importorskip("skimage.metrics")
    rng = np.random.default_rng(seed)
    truth, inside = simulator.scene(rng), simulator.disk()
    image = (truth + rng.normal(0, 0.3, truth.shape)).astype(np.float32)
    found = image_scores(image, truth, inside)
    a, b = image[inside], truth[inside]
    assert found["rmse"] == pytest.approx(np.sqrt(np.mean((a - b) ** 2)), rel=1e-5)
    assert found["psnr"] == pytest.approx(metrics.peak_signal_noise_ratio(b, a, data_range=2), rel=1e-5)
    assert found["cc"] == pytest.approx(np.corrcoef(a, b)[0, 1], rel=1e-5)
    # Wang et al., 2004: a Gaussian window, and variances that are means.
    published = dict(data_range=2, gaussian_weights=True, use_sample_covariance=False, full=True)
    _, similarity = metrics.structural_similarity(truth.astype(float), image.astype(float), **published)
    assert found["ssim"] == pytest.approx(similarity[inside].mean(), abs=1e-7)


def test_an_image_equals_itself_and_correlates_with_no_constant_one():
    truth, inside = simulator.scene(np.random.default_rng(0)), simulator.disk()
    perfect = dict(rmse=0, psnr=pytest.approx(126, abs=1), ssim=1, cc=pytest.approx(1))
    assert image_scores(truth, truth, inside) == perfect
    assert image_scores(0 * truth, truth, inside)["cc"] == 0
