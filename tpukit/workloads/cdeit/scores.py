"""Scores of reconstructed conductivity images, each taken inside the disk of the tank."""

import numpy as np
from skimage import metrics

from tpukit.workloads.cdeit.simulator import disk

RANGE = 2.0  # of the images: -1 to 1
NAMES = ("rmse", "psnr", "ssim", "cc")


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


class Scores:
    """The scores of one method, image by image, in `rows`."""

    def __init__(self):
        self.rows = []

    def add(self, images, truth):
        """images, truth: (B, S, S) float. An image with NaN (its method was not run) has no scores."""
        inside = disk()
        for image, wanted in zip(images, truth):
            image = np.where(inside, image, 0)  # nothing outside the tank counts
            finite = np.isfinite(image).all()
            self.rows.append(image_scores(image, wanted, inside) if finite else dict.fromkeys(NAMES))

    def mean(self):
        """dict of the means over the images, or None where an image has no scores."""
        if not self.rows or any(row["rmse"] is None for row in self.rows):
            return None
        return {name: float(np.mean([row[name] for row in self.rows])) for name in NAMES}
