"""What the masks of an infrared set hold: measured once, when they are decoded."""

import collections
from collections.abc import Iterable, Sequence

import numpy as np
from scipy import ndimage

from tpukit.host.errors import TpukitError
from tpukit_tasks.mshnet.scores import brightest, regions

FEW = 3  # different values of a set: as many may be kinds, such as a target and what is to be ignored
NEAR = 16  # levels between two values that are one for a program that rounds
EIGHT = np.ones((3, 3))  # neighbours
MEND = "make targets 255 and all else 0"


def measure_targets(mask: np.ndarray) -> tuple[float, ...]:
    """Return of a mask (H, W) uint8: its brightest value; the shares of the image that all its targets, the
    smallest and the largest one cover; how many regions are darker than a target; how many pixels
    `_find_bordered` finds. The last five are 0 without any."""
    areas = [area / mask.size for area, _ in regions(mask >= 128)]
    dark, bordered = float((brightest(mask) < 128).sum()), float(_find_bordered(mask).sum())
    return float(mask.max()), sum(areas), min(areas, default=0.0), max(areas, default=0.0), dark, bordered


def _find_bordered(mask):
    """Return (H, W) bool: the labelled pixels beside those of one bright value, and not beside black, as a
    soft edge is: VOC's 255 is a border that is to be ignored. If a mask has two values, the label may be
    bright, too."""
    values = np.unique(mask[mask > 0])
    is_border, is_black = mask >= (values[-1] if len(values) == 2 else 128), mask == 0
    is_label = ~is_border & ~is_black
    if not is_label.any() or len(np.unique(mask[is_border])) != 1 or mask.max() < 128:
        return np.zeros_like(is_label)
    by_border, by_black = (ndimage.binary_dilation(each).astype(bool) for each in (is_border, is_black))
    return is_label & by_border & ~by_black


def has_flat_regions(values: np.ndarray) -> bool:
    """Return whether each region of what is not 0 has one value."""
    above = values.max().astype(np.float64) + 1
    least = above - brightest(np.where(values > 0, above - values, 0))
    return np.array_equal(brightest(values), least)


def require_instances(masks: Iterable[tuple[str, np.ndarray]]) -> None:
    """Raise TpukitError for a set's values that may not number its targets, so that one of them may be a
    border or an area to be ignored: a value that lies around or along others; or, of few in the whole set,
    one that has several regions in a mask, or comes without the lower ones.

    masks: (name, values (H, W)) of each."""
    pixels, touching, whole = collections.Counter(), collections.Counter(), collections.Counter()
    several, values_of, size = {}, {}, 0
    for name, mask in masks:
        size, is_black = size + mask.size, mask == 0
        values_of[name] = {*np.unique(mask[~is_black]).tolist()}
        for value in values_of[name]:
            is_value = mask == value
            pixels[value] += int(is_value.sum())
            labels = np.zeros(mask.shape, np.int32)
            ndimage.label(is_value, EIGHT, labels)
            if (count := int(labels.max())) > 1:
                several.setdefault(value, name)
            others = ndimage.binary_dilation(~is_value & ~is_black, EIGHT)
            touching[value] += len(np.unique(labels[is_value & others]))
            whole[value] += count
    known = sorted(pixels)
    why = [f"{value:g} mostly lies beside another" for value in known if touching[value] > whole[value] / 2]
    if len(known) <= FEW:
        why += [f"{value:g} has several regions in {name}" for value, name in several.items()]
        why += [
            f"{name} has {max(values):g} without {lower:g}"
            for name, values in values_of.items()
            for lower in known
            if values and lower < max(values) and lower not in values
        ]
    if len(known) > 1 and why:
        raise TpukitError(
            f"masks hold {_shares(pixels, size)}, which may not all be targets ({why[0]}): {MEND}"
        )


def require_one_bright(masks: Sequence[np.ndarray], names: Sequence[str]) -> None:
    """Raise TpukitError if all masks (H, W) uint8 together hold two values, and both mean a target: one may
    be a border or an area to be ignored."""
    pixels = sum((np.bincount(mask.ravel(), minlength=256) for mask in masks), np.zeros(256, np.int64))
    found = np.flatnonzero(pixels[1:]) + 1
    if len(found) == 2 and found[0] >= 128 and found[1] - found[0] > NEAR:
        which = next(name for name, mask in zip(names, masks) if (mask == found[0]).any())
        shares = _shares({value: pixels[value] for value in found}, pixels.sum())
        raise TpukitError(f"masks hold {shares}, which may not both be targets ({which}): {MEND}")


def _shares(pixels, size):
    listed = [f"{value:g} ({pixels[value] / size:.2%} of all pixels)" for value in sorted(pixels)[:4]]
    return f"the values {', '.join(listed)}{', ...' if len(pixels) > 4 else ''}"
