"""The scale- and location-sensitive (SLS) loss of Liu et al., CVPR 2024."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

TINY = 1e-12  # keeps 0/0 out of an image without a target whose prediction underflows; changes no other value


def multiscale_loss(
    logits: Tensor, masks: Sequence[Tensor], target: Tensor, *, warm_up: bool | Tensor
) -> Tensor:
    """Mean of the SLS losses of the output and of the masks of all scales, a float32 scalar. In the warm-up
    phase 1 - IoU, afterwards 1 - IoU weighted by the agreement of the sizes, plus the location term.

    logits: (B, 1, H, W), unbounded. target: (B, 1, H, W) in [0, 1]. masks: logits of scale 0..3, each half as
    large as the one before; the target is max-pooled to their size. warm_up: a bool, then without masks in
    that phase, or a 0-d bool tensor, then they have no part in its loss. Source: eq. 1-7."""
    return loss_of_sums(sums_of_scales(logits, masks, target), warm_up)


def loss_of_sums(sums: Tensor, warm_up: bool | Tensor) -> Tensor:
    """`multiscale_loss` from the sums of `sums_of_scales`, (7, S, B): a few numbers of each image, of all
    scales at once, as a GPU needs longer to start an operation than for them."""
    intersection, predicted, labelled, *centres = sums  # (S, B) each
    iou = intersection / (predicted + labelled - intersection).clamp(min=TINY)
    plain = 1 - iou.mean(1)  # (S,)
    if warm_up is True:
        return plain.mean()
    spread = ((predicted - labelled) / 2) ** 2
    smaller, larger = torch.minimum(predicted, labelled), torch.maximum(predicted, labelled)
    agreement = (smaller + spread) / (larger + spread).clamp(min=TINY)
    loss = (1 - (agreement * iou).mean(1) + location_loss(*centres).mean(1)).mean()
    return torch.where(warm_up, plain[0], loss) if torch.is_tensor(warm_up) else loss


def sums_of_scales(logits: Tensor, masks: Sequence[Tensor], target: Tensor, **tiles) -> Tensor:
    """(7, S, B): `sums_over_images` of the output and of each mask."""
    sums = [sums_over_images(logits, target, **tiles)]
    for scale, mask in enumerate(masks):
        if scale:
            target = F.max_pool2d(target, 2)
        sums.append(sums_over_images(mask, target, **tiles))
    return torch.stack(sums, 1)


def sums_over_images(
    logits: Tensor, target: Tensor, rows: Callable[[Tensor], Tensor] | None = None, tiles: int = 1
) -> Tensor:
    """(7, B) for each image: the sums of prediction times target, of the prediction and of the target, and
    the centres x and y of the prediction and of the target as shares of the image.

    Of tiles: how many an image has, and rows: (B, 1, H, W) -> (B, 1, H, 1), the numbers of their rows in the
    image, from 0."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    p, t = torch.sigmoid(logits.to(dtype)), target.to(dtype)
    height, width = p.shape[2] * tiles, p.shape[3]
    x = torch.arange(width, dtype=dtype, device=p.device) / width
    row = rows(p) if rows else torch.arange(p.shape[2], dtype=dtype, device=p.device)[:, None]
    y = row / height  # (H, 1) or (B, 1, H, 1)
    regions = torch.stack([values.sum((1, 2, 3)) for values in (p * t, p, t)])
    centres = torch.stack([values.sum((1, 2, 3)) for values in (x * p, y * p, x * t, y * t)])
    return torch.cat([regions, centres / (height * width)])


def location_loss(centre_x: Tensor, centre_y: Tensor, target_x: Tensor, target_y: Tensor) -> Tensor:
    """Distance between the centres of mass of prediction and target in polar coordinates.

    All: of one shape, in [0, 1]. Returns that shape, >= 0. Source: eq. 6-7."""
    turn = torch.atan(centre_y / (centre_x + 1e-8)) - torch.atan(target_y / (target_x + 1e-8))
    angle = 4 / math.pi**2 * turn**2
    radius = torch.sqrt(centre_x**2 + centre_y**2 + 1e-8)
    target_radius = torch.sqrt(target_x**2 + target_y**2 + 1e-8)
    length = 1 - torch.minimum(radius, target_radius) / (torch.maximum(radius, target_radius) + 1e-8)
    return angle + length
