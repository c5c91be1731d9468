"""Checks of the masks of an infrared set, before a network learns from them."""

from tpukit.tasks.mshnet.data import InfraredSet
from tpukit.tasks.mshnet.scores import regions

# Of an image's area: the largest small target, 80 of 256 x 256 pixels by SPIE (Zhang et al., 2003)
SMALL = 0.0012
TINY = 3  # pixels at the network's size: fewer are lost when an image is scaled


def check(data: InfraredSet) -> tuple[list[str], list[int]]:
    """(sentences, indices) as of `Task.check_labels`."""
    pixels = data.base_size**2
    areas, largest = [], []  # of targets, in pixels of the file; of images: (in the network's pixels, index)
    where = {}  # problem -> indices
    for index, mask in enumerate(data.masks):
        found = [area for area, _ in regions(mask >= 128)]
        scaled = [area * pixels / mask.size for area in found]
        for text in _problems(mask, scaled, pixels):
            where.setdefault(text, []).append(index)
        areas += found
        largest += [(max(scaled), index)] if scaled else []
    sizes = sorted({(mask.size, *mask.shape[::-1]) for mask in data.masks})
    shown = " to ".join(f"{width}x{height}" for _, width, height in dict.fromkeys((sizes[0], sizes[-1])))
    text = f"{len(data)} training images of {shown} pixels, {len(areas)} targets"
    if areas:
        text += f" of {min(areas)} to {max(areas)} pixels, median {sorted(areas)[len(areas) // 2]}"
    sentences, indices = [f"{text}; the network sees {data.base_size}x{data.base_size}"], []
    for text, found in where.items():
        names = ", ".join(data.names[index] for index in found[:3])
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        sentences.append(f"{len(found)} of {len(data)} masks {text} ({names}{more})")
        indices += found[:2]
    by_size = [index for _, index in sorted(largest)]
    indices += by_size[-1:] + by_size[:1] + by_size[len(by_size) // 2 :][:1]
    return sentences, list(dict.fromkeys(indices)) or [0]


def _problems(mask, areas, pixels):
    """Yield what may be wrong with a mask. areas: of its targets, in an image scaled to so many pixels."""
    if mask.max() == 0:
        yield "are black: an image without a target teaches the network what is none"
    elif mask.max() < 128:
        yield "hold no value of 128 or more and so label no target: multiply them, so that targets are 255"
    if (mask >= 128).mean() > 0.5:
        yield "are white for the most part: targets must be white on black"
    elif max(areas, default=0) > SMALL * pixels:
        yield f"have a target of more than {SMALL:.2%} of the image: MSHNet is made for smaller ones"
    if min(areas, default=TINY) < TINY:
        yield f"have a target of less than {TINY} pixels as the network sees it: a larger base_size keeps it"
