"""Pictures of small targets: where they are, which were found, and a window large enough to see their
pixels."""

import numpy as np

from tpukit_tasks.mshnet.scores import match, regions

Panels = list[tuple[str, np.ndarray]]  # (title, picture) of one sample

# Okabe and Ito's colours: told apart with every common colour blindness, and on grey.
HIT, MISSED, FALSE = (86, 180, 233), (240, 228, 66), (213, 94, 0)
FRAME = (255, 255, 255)
RING = 6  # pixels around a region, at least
IN_A_PANEL = 256  # pixels of an image's side that a panel shows; marks grow with larger images
WINDOW = 32  # pixels: side of the window, at least


def row(image: np.ndarray, targets: np.ndarray, predicted: np.ndarray | None = None) -> Panels:
    """Panels of an image (1 or 3, H, W) uint8, the pixels (H, W) bool of its targets, and those predicted to
    be such; None if the targets are all that is known: labels without a prediction, or the reverse."""
    found = targets if predicted is None else predicted
    wanted, false = regions(targets), regions(found)
    hits, missed = [], []
    for target in wanted:
        matched, false = match([target], false)  # the rule of Pd: a prediction serves one target
        (hits if matched else missed).append(target)
    window = _window(wanted or false, targets.shape)
    marked = np.asarray(image, np.uint8).repeat(3 // len(image), 0).transpose(1, 2, 0)  # (H, W, 3)
    plain, pixels = marked[window].copy(), marked.copy()
    _dot_edge(marked, window)
    rows, columns = np.ogrid[: image.shape[1], : image.shape[2]]
    stroke = _stroke(marked)
    radius = RING * max(stroke, 1.5 * max(marked.shape) / IN_A_PANEL)
    for circled, coloured, colour in (
        (hits, targets & found, HIT),
        (missed, targets & ~found, MISSED),
        (false, found & ~targets, FALSE),
    ):
        pixels[coloured] = colour
        for _, centre in circled:
            distance = np.hypot(rows - centre[0], columns - centre[1])
            marked[abs(distance - radius) < 0.7 * stroke] = colour
    title, legend = f"{len(wanted)} target{'s' * (len(wanted) != 1)}", "blue: target"
    if predicted is not None:
        union = np.count_nonzero(targets | found)
        iou = np.count_nonzero(targets & found) / union if union else 1.0
        title = f"IoU {iou:.2f}: {len(hits)} of {len(wanted)} hit, {len(false)} false"
        legend = "blue hit, yellow missed, orange false"
    return [(title, marked), ("the dotted window", plain), (legend, pixels[window])]


def _window(found, shape):
    """A square around the largest of some regions, or the middle, as a pair of slices within an image of a
    shape (H, W)."""
    area, centre = max(found, default=(0, np.array(shape) / 2))
    side = min(max(WINDOW, 4 * int(area**0.5)), *shape)
    top, left = np.clip(np.round(centre).astype(int) - side // 2, 0, np.array(shape) - side)
    return slice(top, top + side), slice(left, left + side)


def _stroke(picture):
    """Return the width of a line, in pixels of a picture, that a panel shows as one pixel or more."""
    return max(1, round(max(picture.shape) / IN_A_PANEL))


def _dot_edge(picture, window):
    """Draw dots around a window, on its outermost pixels."""
    stroke, inside = _stroke(picture), picture[window]
    side = len(inside)
    rows, columns = np.ogrid[:side, :side]
    is_edge = np.minimum(np.minimum(rows, side - 1 - rows), np.minimum(columns, side - 1 - columns)) < stroke
    is_dot = (rows // stroke + columns // stroke) % 3 == 0
    inside[is_edge & is_dot] = FRAME
