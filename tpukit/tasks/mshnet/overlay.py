"""Pictures of small targets: where they are, which were found, and a window large enough to see their
pixels."""

import numpy as np

from tpukit.tasks.mshnet.scores import match, regions

Panels = list[tuple[str, np.ndarray]]  # (title, picture) of one sample

# Of Okabe and Ito: told apart with every common colour blindness, and on grey.
HIT, MISSED, FALSE = (86, 180, 233), (240, 228, 66), (213, 94, 0)
COLOURS = "blue hit, yellow missed, red false"
RING = 6  # pixels around a region
WINDOW = 32  # pixels: side of the window, at least
FRAME = (255, 255, 255)


def row(image: np.ndarray, targets: np.ndarray, predicted: np.ndarray | None = None) -> Panels:
    """Panels of an image (1 or 3, H, W) uint8, the pixels (H, W) bool of its targets, and those predicted to
    be such; None if the targets are all that is known: labels without a prediction, or the reverse."""
    found = targets if predicted is None else predicted
    wanted, false = regions(targets), regions(found)
    hits, missed = [], []
    for target in wanted:
        matched, false = match([target], false)  # the rule of Pd: a prediction serves one target
        (hits if matched else missed).append(target)
    window = _window(targets if wanted else found)
    pixels = _rgb(image)
    pixels[targets & found] = HIT
    pixels[targets & ~found] = MISSED
    pixels[found & ~targets] = FALSE
    union = np.count_nonzero(targets | found)
    iou = np.count_nonzero(targets & found) / union if union else 1.0
    title, legend = f"IoU {iou:.2f}: {len(hits)} of {len(wanted)} hit, {len(false)} false", COLOURS
    if predicted is None:
        title, legend = f"{len(wanted)} targets", "blue: target"
    marked = _marked(image, window, [(hits, HIT), (missed, MISSED), (false, FALSE)])
    return [(title, marked), ("the dotted window", _rgb(image)[window]), (legend, pixels[window])]


def _rgb(image):
    """(1 or 3, H, W) -> (H, W, 3) uint8."""
    return np.broadcast_to(np.asarray(image, np.uint8), (3, *image.shape[1:])).transpose(1, 2, 0).copy()


def _window(mask):
    """A square around the largest region of a mask (H, W) bool, or the middle, as a pair of slices within the
    image."""
    size = np.array(mask.shape)
    area, centre = max(regions(mask), default=(0, size / 2))
    side = min(max(WINDOW, 4 * int(area**0.5)), *size)
    top, left = np.clip(np.round(centre).astype(int) - side // 2, 0, size - side)
    return slice(top, top + side), slice(left, left + side)


def _marked(image, window, regions_and_colours):
    """The image (H, W, 3) with the edge of a window (a pair of slices) dotted, and a ring around each
    region."""
    picture = _rgb(image)
    (top, bottom), (left, right) = ((part.start, part.stop - 1) for part in window)
    picture[top : bottom + 1 : 3, [left, right]] = FRAME
    picture[[top, bottom], left : right + 1 : 3] = FRAME
    rows, columns = np.ogrid[: picture.shape[0], : picture.shape[1]]
    for found, colour in regions_and_colours:
        for _, (row, column) in found:
            picture[abs(np.hypot(rows - row, columns - column) - RING) < 0.7] = colour
    return picture
