"""Scores of reconstructed conductivity images, computed inside the disk of the tank."""

import math

import numpy as np
from scipy import ndimage

RANGE = 2.0  # of values in an image: -1 to 1


def image_scores(image: np.ndarray, truth: np.ndarray, inside: np.ndarray) -> dict[str, float]:
    """Return rmse, psnr (dB, for a range of 2), ssim and cc, the correlation coefficient.

    image, truth: (S, S) float. inside: (S, S) bool, the pixels that count; SSIM is the mean of its map there.
    The correlation with a constant image is 0. All are NaN for an image that is not finite."""
    a, b = image[inside].astype(np.float64), truth[inside].astype(np.float64)
    if not np.isfinite(a).all():
        return dict.fromkeys(("rmse", "psnr", "ssim", "cc"), math.nan)
    error = np.mean((a - b) ** 2)
    spread = a.std() * b.std()
    return dict(
        rmse=float(np.sqrt(error)),
        psnr=float(10 * np.log10(RANGE**2 / max(error, 1e-12))),
        ssim=float(_similarity(image, truth)[inside].mean()),
        cc=0.0 if spread <= 1e-12 else float(np.mean((a - a.mean()) * (b - b.mean())) / spread),
    )


def _similarity(a, b):
    """SSIM of every pixel's neighbourhood: (S, S) float. a, b: (S, S) float. Source: Wang et al., 2004,
    equation 13."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    stabilise_means, stabilise_variances = (0.01 * RANGE) ** 2, (0.03 * RANGE) ** 2
    mean_a, mean_b = _window(a), _window(b)
    variance_a, variance_b = _window(a * a) - mean_a**2, _window(b * b) - mean_b**2
    covariance = _window(a * b) - mean_a * mean_b
    luminance = (2 * mean_a * mean_b + stabilise_means) / (mean_a**2 + mean_b**2 + stabilise_means)
    structure = (2 * covariance + stabilise_variances) / (variance_a + variance_b + stabilise_variances)
    return luminance * structure


def _window(image):
    """The mean around every pixel, with Gaussian weights in a window of 11 x 11 pixels."""
    return ndimage.gaussian_filter(image, sigma=1.5, radius=5)
