"""What is worth knowing about the masks of an infrared set before a network learns from them."""

from tpukit.tasks.mshnet.scores import regions

# of an image's area: the largest small target, 80 of 256 x 256 pixels by SPIE (Zhang et al., 2003)
SMALL = 0.0012
TINY = 3  # pixels at the network's size: fewer are lost when an image is scaled


def check(data):
    """(sentences, indices) as of `Task.check_labels`. data: an `InfraredSet`."""
    pixels = data.base_size**2
    areas = [[area for area, _ in regions(mask >= 128)] for mask in data.masks]  # in pixels of the file
    scaled = [[area * pixels / mask.size for area in found] for found, mask in zip(areas, data.masks)]
    problems = [_problems(mask, found, pixels) for mask, found in zip(data.masks, scaled)]
    sentences, indices = [_describe_set(data, areas)], []
    for text in dict.fromkeys(text for found in problems for text in found):
        where = [index for index, found in enumerate(problems) if text in found]
        names = ", ".join(data.names[index] for index in where[:3])
        more = f" and {len(where) - 3} more" if len(where) > 3 else ""
        sentences.append(f"{len(where)} of {len(data)} masks {text} ({names}{more})")
        indices += where[:2]
    by_size = sorted(
        (index for index, found in enumerate(scaled) if found), key=lambda index: max(scaled[index])
    )
    if by_size:
        indices += by_size[-1], by_size[0], by_size[len(by_size) // 2]
    return sentences, list(dict.fromkeys(indices)) or [0]


def _problems(mask, areas, pixels):
    """What may be wrong with a mask. areas: of its targets, in an image scaled to so many pixels."""
    found = []
    if mask.max() == 0:
        found.append("are black: an image without a target teaches the network what is none")
    elif mask.max() < 128:
        found.append(
            "hold no value of 128 or more and so label no target: multiply them, so that targets are 255"
        )
    if (mask >= 128).mean() > 0.5:
        found.append("are white for the most part: targets must be white on black")
    elif max(areas, default=0) > SMALL * pixels:
        found.append(f"have a target of more than {SMALL:.2%} of the image: MSHNet is made for smaller ones")
    if min(areas, default=TINY) < TINY:
        found.append(
            f"have a target of less than {TINY} pixels as the network sees it: a larger base_size keeps it"
        )
    return found


def _describe_set(data, areas):
    sizes = sorted(
        {(mask.shape[1], mask.shape[0]) for mask in data.masks}, key=lambda size: size[0] * size[1]
    )
    shown = " to ".join("{}x{}".format(*size) for size in dict.fromkeys((sizes[0], sizes[-1])))
    areas = sorted(area for of_one in areas for area in of_one)
    text = f"{len(data)} training images of {shown} pixels, {len(areas)} targets"
    if areas:
        text += f" of {areas[0]} to {areas[-1]} pixels, median {areas[len(areas) // 2]}"
    return f"{text}; the network sees {data.base_size}x{data.base_size}"
