"""What the masks of an infrared set hold: measured once, when they are decoded."""

import numpy as np
from scipy import ndimage

from tpukit_tasks.mshnet.scores import brightest, regions


def measure_targets(mask: np.ndarray) -> tuple[float, ...]:
    """Return of a mask (H, W) uint8: its brightest value; the shares of the image that all its targets, the
    smallest and the largest one cover; how many regions are darker than a target; how many pixels
    `_find_bordered` finds. The last five are 0 without any."""
    areas = [area / mask.size for area, _ in regions(mask >= 128)]
    dark, bordered = float((brightest(mask) < 128).sum()), float(_find_bordered(mask).sum())
    return float(mask.max()), sum(areas), min(areas, default=0.0), max(areas, default=0.0), dark, bordered


def _find_bordered(mask):
    """Return (H, W) bool: the labelled pixels beside those of one bright value, and not beside black, as a
    soft edge is: VOC's 255 is a border that is to be ignored."""
    is_border, is_black = mask >= 128, mask == 0
    is_label = ~is_border & ~is_black
    if not is_label.any() or len(np.unique(mask[is_border])) != 1:
        return np.zeros_like(is_label)
    by_border, by_black = (ndimage.binary_dilation(each).astype(bool) for each in (is_border, is_black))
    return is_label & by_border & ~by_black


def has_flat_regions(values: np.ndarray) -> bool:
    """Return whether each region of what is not 0 has one value."""
    above = values.max().astype(np.float64) + 1
    least = above - brightest(np.where(values > 0, above - values, 0))
    return np.array_equal(brightest(values), least)
