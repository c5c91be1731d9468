"""Pictures of small targets: where they are, which were found, and a window large enough to see their
pixels."""

import numpy as np

from tpukit.tasks.mshnet.scores import match, regions

# Of Okabe and Ito: told apart with every common colour blindness, and on grey.
HIT, MISSED, FALSE = (86, 180, 233), (240, 228, 66), (213, 94, 0)
COLOURS = "blue hit, yellow missed, red false"
RING = 6  # pixels around a region
WINDOW = 32  # pixels: side of the window, at least
FRAME = (255, 255, 255)


def sample_row(image, mask):
    """Panels of an image (1 or 3, H, W) uint8 and its mask (H, W) uint8: a list of (title, array)."""
    label = mask >= 128
    picture, window = _rgb(image), _window(label)
    marked = picture.copy()
    _frame(marked, window)
    for _, centre in regions(label):
        _ring(marked, centre, HIT)
    return [
        ("targets ringed", marked),
        ("the dotted window", picture[window]),
        ("its labelled pixels", label[window]),
    ]


def prediction_row(image, mask, predicted):
    """Panels of an image, its mask (None where there are no labels), and the pixels (H, W) bool predicted to
    be targets."""
    if mask is None:
        return _unlabelled_row(image, predicted)
    label = mask >= 128
    targets, false = regions(label), regions(predicted)
    window = _window(label if targets else predicted)
    marked, pixels = _rgb(image), _rgb(image)
    _frame(marked, window)
    hit = 0
    for target in targets:
        matched, false = match([target], false)  # the rule of Pd: a prediction serves one target
        _ring(marked, target[1], HIT if matched else MISSED)
        hit += len(matched)
    for _, centre in false:
        _ring(marked, centre, FALSE)
    for where, colour in (
        (label & predicted, HIT),
        (label & ~predicted, MISSED),
        (predicted & ~label, FALSE),
    ):
        pixels[where] = colour
    union = np.count_nonzero(label | predicted)
    iou = np.count_nonzero(label & predicted) / union if union else 1.0
    return [
        (f"IoU {iou:.2f}: {hit} of {len(targets)} hit, {len(false)} false", marked),
        ("the dotted window", _rgb(image)[window]),
        (COLOURS, pixels[window]),
    ]


def _unlabelled_row(image, predicted):
    found, window = regions(predicted), _window(predicted)
    marked, pixels = _rgb(image), _rgb(image)
    _frame(marked, window)
    for _, centre in found:
        _ring(marked, centre, HIT)
    pixels[predicted] = HIT
    return [
        (f"{len(found)} found", marked),
        ("the dotted window", _rgb(image)[window]),
        ("blue: found", pixels[window]),
    ]


def _rgb(image):
    """(1 or 3, H, W) -> (H, W, 3) uint8."""
    return np.broadcast_to(np.asarray(image, np.uint8), (3, *image.shape[1:])).transpose(1, 2, 0).copy()


def _window(mask):
    """A square around the largest region of a mask (H, W) bool, or the middle, as a pair of slices within the
    image."""
    found = regions(mask)
    size = np.array(mask.shape)
    area, centre = max(found, default=(0, size / 2))
    side = min(max(WINDOW, 4 * int(area**0.5)), *size)
    top, left = np.clip(np.round(centre).astype(int) - side // 2, 0, size - side)
    return slice(top, top + side), slice(left, left + side)


def _ring(picture, centre, colour):
    """BatchSpec a ring around (row, column)."""
    rows, columns = np.ogrid[: picture.shape[0], : picture.shape[1]]
    distance = np.hypot(rows - centre[0], columns - centre[1])
    picture[abs(distance - RING) < 0.7] = colour


def _frame(picture, window):
    """BatchSpec the edge of a window (a pair of slices), dotted."""
    (top, bottom), (left, right) = ((part.start, part.stop - 1) for part in window)
    picture[top : bottom + 1 : 3, [left, right]] = FRAME
    picture[[top, bottom], left : right + 1 : 3] = FRAME
