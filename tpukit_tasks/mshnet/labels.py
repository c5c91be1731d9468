"""Checks of the masks of an infrared set, before a network learns from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tpukit.host.errors import TpukitError
from tpukit_tasks.mshnet.scores import regions
from tpukit_tasks.splits import some

if TYPE_CHECKING:
    from tpukit_tasks.mshnet.data import InfraredSet

# Share of an image's area: the largest small target, 80 of 256 x 256 pixels by SPIE (Zhang et al., 2003)
SMALL = 0.0012
TINY = 3  # pixels at the network's size: fewer are lost when an image is scaled
WHITE = 0.5  # share of a mask: more is not targets on black


def require_no_borders(data: InfraredSet) -> None:
    """Raise TpukitError for masks with a border of another value around their targets, as VOC's."""
    if data.targets[:, 5].any():
        raise TpukitError("; ".join(notices(data)))


def require_targets(data: InfraredSet) -> None:
    """Raise TpukitError for a training set in which no mask labels a target on black."""
    share = data.targets[:, 1]
    if not ((share > 0) & (share <= WHITE)).any():
        problems = "; ".join(notices(data))
        raise TpukitError(f"no training image has a target, so there is nothing to learn: {problems}")


def notices(data: InfraredSet) -> list[str]:
    """Return what may be wrong with images and masks, a sentence each."""
    kind = "training" if data.split == "train" else data.split
    return [
        f"{len(indices)} of {len(data)} {kind} {text} ({some([data.names[index] for index in indices])})"
        for text, indices in find_problems(data).items()
    ]


def find_problems(data: InfraredSet) -> dict[str, list[int]]:
    """Return what may be wrong with images and masks: the rest of a sentence -> their indices."""
    brightest, share, smallest, largest, dark, bordered = data.targets.T
    is_dim = (brightest > 0) & (brightest < 128)
    has_dark = (brightest >= 128) & (dark > 0)
    is_white = share > WHITE
    has_target = (share > 0) & ~is_white
    is_tiny = has_target & (np.rint(smallest * data.base_size**2) < TINY)
    is_large = has_target & (largest > SMALL)
    images_and_masks = list(zip(data.digests, data.mask_digests))
    first = dict(reversed(images_and_masks))  # an image -> the mask of the first one that equals it
    contradicts = np.array([first[image] != mask for image, mask in images_and_masks])
    rules = {
        "masks have labels within a border of 128 or more, as VOC's 255 is one that is to be ignored: make"
        " labels 255 and borders 0": bordered > 0,
        "masks hold no value of 128 or more and so label no target: make their targets 255": is_dim,
        "masks are mostly white: targets must be white on black": is_white,
        "masks are black: an image without a target teaches the network what is not one": brightest == 0,
        "masks have regions darker than 128, which are not targets: make them 255 if they are": has_dark,
        f"masks have a target of fewer than {TINY} pixels as the network sees it: a larger base_size keeps"
        " it": is_tiny,
        f"masks have a target of over {SMALL:.2%} of the image: MSHNet is made for smaller ones": is_large,
        "images equal another one, and their masks differ": contradicts,
    }
    return {text: np.flatnonzero(found).tolist() for text, found in rules.items() if found.any()}


def check(data: InfraredSet) -> tuple[list[str], list[int]]:
    """(sentences, indices) as of `reporting.display.Displayed.check_labels`."""
    areas, largest = [], data.targets[:, 3]
    for mask in data.masks:
        areas += [area for area, _ in regions(mask >= 128)]
    sizes = sorted({(mask.size, *mask.shape[::-1]) for mask in data.masks})
    shown = " to ".join(f"{width}x{height}" for _, width, height in dict.fromkeys((sizes[0], sizes[-1])))
    text = f"{len(data)} training images of {shown} pixels, {len(areas)} targets"
    if areas:
        text += f" of {min(areas)} to {max(areas)} pixels, median {sorted(areas)[len(areas) // 2]}"
    sentences, indices = [f"{text}; the network sees {data.base_size}x{data.base_size}"], []
    for found in find_problems(data).values():
        indices += found[:2]
    by_size = [index for index in np.argsort(largest, kind="stable").tolist() if largest[index]]
    indices += by_size[-1:] + by_size[:1] + by_size[len(by_size) // 2 :][:1]
    return sentences, list(dict.fromkeys(indices)) or [0]
