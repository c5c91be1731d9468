"""Scores of reconstructed conductivity images, each taken inside the disk of the tank."""

import numpy as np

from tpukit.host.errors import TpukitError

try:
    from skimage import metrics
except ImportError as error:
    raise TpukitError("the SSIM of CDEIT's images needs scikit-image: pip install scikit-image") from error

RANGE = 2.0  # of the images: -1 to 1


def image_scores(image, truth, inside):
    """dict of rmse, psnr (dB, for a range of 2), ssim and cc, the correlation coefficient.

    image, truth: (S, S) float. inside: (S, S) bool, the pixels that count; SSIM is the mean of its map there, with the
    windows of Wang et al., 2004. Zero correlation where an image is constant.
    """
    a, b = image[inside].astype(np.float64), truth[inside].astype(np.float64)
    error = np.mean((a - b) ** 2)
    _, similarity = metrics.structural_similarity(
        truth.astype(np.float64), image.astype(np.float64), data_range=RANGE, gaussian_weights=True, sigma=1.5,
        use_sample_covariance=False, full=True,
    )  # fmt: skip
    spread = a.std() * b.std()
    return dict(
        rmse=float(np.sqrt(error)),
        psnr=float(10 * np.log10(RANGE**2 / max(error, 1e-12))),
        ssim=float(similarity[inside].mean()),
        cc=float(np.mean((a - a.mean()) * (b - b.mean())) / spread) if spread > 1e-12 else 0.0,
    )


def mean_scores(rows):
    """dict of the means over rows of `image_scores`; None where an image holds NaN, because its method was not run."""
    means = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
    return means if np.isfinite(means["rmse"]) else None
