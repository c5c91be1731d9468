"""Checks of the masks of an infrared set, before a network learns from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tpukit.host.errors import TpukitError
from tpukit.tasks.mshnet.scores import regions
from tpukit.tasks.splits import some

if TYPE_CHECKING:
    from tpukit.tasks.mshnet.data import InfraredSet

# Of an image's area: the largest small target, 80 of 256 x 256 pixels by SPIE (Zhang et al., 2003)
SMALL = 0.0012
TINY = 3  # pixels at the network's size: fewer are lost when an image is scaled
WHITE = 0.5  # share of a mask: more is not targets on black


def require_targets(data: InfraredSet) -> None:
    """Raise TpukitError for a training set in which no mask labels a target on black."""
    share = data.targets[:, 1]
    if not ((share > 0) & (share <= WHITE)).any():
        problems = "; ".join(_count(data, text, indices) for text, indices in find_problems(data).items())
        raise TpukitError(f"no training image has a target, so there is nothing to learn: {problems}")


def notices(data: InfraredSet) -> list[str]:
    """Return what may be wrong with masks and images, a sentence each."""
    found = [_count(data, text, indices) for text, indices in find_problems(data).items()]
    if plain := np.flatnonzero(data.levels_used <= 2).tolist():
        found.append(
            f"{len(plain)} of {len(data)} {_kind(data)} images have at most two levels of grey"
            f" ({some([data.names[index] for index in plain])}): are they masks, or was their range lost?"
        )
    return found + _contradictions(data)


def _contradictions(data):
    """Return a sentence if equal images have different masks; else none."""
    first, found = {}, []
    for index, digest in enumerate(data.digests):
        other = first.setdefault(digest, index)
        if not np.array_equal(data.masks[other], data.masks[index]):
            found.append(data.names[index])
    equal = f"{len(found)} of {len(data)} {_kind(data)} images equal another one, and their masks differ"
    return [f"{equal} ({some(found)})"] if found else []


def find_problems(data: InfraredSet) -> dict[str, list[int]]:
    """Return what may be wrong with masks: the rest of a sentence -> their indices."""
    brightest, share, smallest, largest, dark = data.targets.T
    is_white = share > WHITE
    has_target = (share > 0) & ~is_white
    rules = {
        "hold no value of 128 or more and so label no target: multiply them, so that targets are 255": (
            (brightest > 0) & (brightest < 128)
        ),
        "are white for the most part: targets must be white on black": is_white,
        "are black: an image without a target teaches the network what is none": brightest == 0,
        "have regions darker than 128, which are no targets: make them 255 if they are": (
            (brightest >= 128) & (dark > 0)
        ),
        f"have a target of less than {TINY} pixels as the network sees it: a larger base_size keeps it": (
            has_target & (np.rint(smallest * data.base_size**2) < TINY)
        ),
        f"have a target of more than {SMALL:.2%} of the image: MSHNet is made for smaller ones": (
            has_target & (largest > SMALL)
        ),
    }
    return {text: np.flatnonzero(found).tolist() for text, found in rules.items() if found.any()}


def find_leaks(train: InfraredSet, test: InfraredSet) -> list[str]:
    """Return a sentence if test images are training images, by their pixels; else none."""
    learned = set(train.digests)
    found = [index for index, digest in enumerate(test.digests) if digest in learned]
    if not found:
        return []
    names = some([test.names[index] for index in found])
    return [
        f"{len(found)} of {len(test)} test images are training images, too ({names}): the scores say nothing"
        " of new images"
    ]


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


def _count(data, text, indices):
    names = some([data.names[index] for index in indices])
    return f"{len(indices)} of {len(data)} {_kind(data)} masks {text} ({names})"


def _kind(data):
    return "training" if data.split == "train" else data.split
