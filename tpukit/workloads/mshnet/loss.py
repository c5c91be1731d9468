"""The scale- and location-sensitive (SLS) loss of Liu et al., CVPR 2024."""

import math

import torch
from torch.nn import functional as F

from tpukit.workloads.mshnet import tiling

TINY = 1e-12  # keeps 0/0 out of an image without a target whose prediction underflows; changes no other value


def sls_loss(logits, target, *, warm_up, tiles=None):
    """Scale- and location-sensitive loss, without a loop over the samples.

    logits: (B, 1, H, W), unbounded. target: (B, 1, H, W) in [0, 1]. tiles: both are tiles of images, see `tiling.py`.
    warm_up: a bool, or a 0-d bool tensor. Returns a float32 scalar: in the warm-up phase 1 - IoU, afterwards 1 - IoU weighted
    by the agreement of the sizes, plus the location term. Source: eq. 1-7.
    """
    dtype = tiling.compute_dtype(logits)
    p, t = torch.sigmoid(logits.to(dtype)), target.to(dtype)
    intersection, predicted, labelled = (_sum(x, tiles) for x in (p * t, p, t))  # (B,) each
    iou = intersection / (predicted + labelled - intersection).clamp(min=TINY)
    plain = 1 - iou.mean()
    if not torch.is_tensor(warm_up) and warm_up:
        return plain
    spread = ((predicted - labelled) / 2) ** 2
    smaller, larger = torch.minimum(predicted, labelled), torch.maximum(predicted, labelled)
    scale = (smaller + spread) / (larger + spread).clamp(min=TINY)
    loss = 1 - (scale * iou).mean() + location_loss(p, t, tiles)
    return torch.where(warm_up, plain, loss) if torch.is_tensor(warm_up) else loss


def location_loss(p, t, tiles=None):
    """Distance between the centres of mass of prediction and target in polar coordinates.

    p, t: (B, 1, H, W) in [0, 1]. Returns a scalar >= 0. Source: eq. 6-7.
    """
    height, width = p.shape[2] * (tiles or 1), p.shape[3]
    x = torch.arange(width, dtype=p.dtype, device=p.device) / width
    y = tiling.rows(p, tiles) / height
    centres = (_sum(v, tiles) / (height * width) for v in (x * p, y * p, x * t, y * t))
    centre_x, centre_y, target_x, target_y = centres  # (B,) each
    turn = torch.atan(centre_y / (centre_x + 1e-8)) - torch.atan(target_y / (target_x + 1e-8))
    angle = 4 / math.pi**2 * turn**2
    radius = torch.sqrt(centre_x**2 + centre_y**2 + 1e-8)
    target_radius = torch.sqrt(target_x**2 + target_y**2 + 1e-8)
    length = 1 - torch.minimum(radius, target_radius) / (torch.maximum(radius, target_radius) + 1e-8)
    return (angle + length).mean()


def _sum(x, tiles):
    """(B,), of whole images."""
    return tiling.by_image(x.sum((1, 2, 3)), tiles).sum(0)


def multiscale_loss(logits, masks, target, *, warm_up, tiles=None):
    """Mean of the SLS losses of the output and of the masks of all scales.

    logits, target: (B, 1, H, W). masks: logits of scale 0..3, each half as large as the one before; the target is
    max-pooled to their size. In the warm-up phase there are no masks, or, where it is a tensor, they have no part in the loss.
    """
    losses = [sls_loss(logits, target, warm_up=warm_up, tiles=tiles)]
    for scale, mask in enumerate(masks):
        if scale:
            target = F.max_pool2d(target, 2)
        losses.append(sls_loss(mask, target, warm_up=warm_up, tiles=tiles))
    mean = torch.stack(losses).mean()
    return torch.where(warm_up, losses[0], mean) if torch.is_tensor(warm_up) else mean
