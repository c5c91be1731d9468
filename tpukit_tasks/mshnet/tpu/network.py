"""`model.MSHNetModel` and its loss for XLA, with the same weights and numbers: the layers work on tiles of
the images (`tiling.py`), and a block takes fewer passes over its maps (`block.py`).

Shapes: B batch, T tiles of an image, H and W the image size."""

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from tpukit_tasks.mshnet.loss import loss_of_sums, sums_of_scales
from tpukit_tasks.mshnet.model import MSHNetModel, normalise
from tpukit_tasks.mshnet.tpu import block, tiling
from tpukit_tasks.mshnet.tpu.tiling import conv2d_of_pixels, conv2d_rows_as_channels
from tpukit_tasks.mshnet.tpu.upsampling import upsample


def loss(model: MSHNetModel, image: Tensor, mask: Tensor, warm_up: bool | Tensor) -> Tensor:
    """As of `model.loss`."""
    tiles = tiling.num_tiles(image)
    image, mask = tiling.split(image, tiles), tiling.split(mask, tiles)
    logits, masks = forward(model, normalise(image), warm_up, tiles)
    return loss_of_sums(sums_of_tiles(logits, masks, mask.float() / 255, tiles), warm_up)


def predict(model: MSHNetModel, image: Tensor, warm_up: bool | Tensor) -> Tensor:
    """As of `model.predict`."""
    tiles = tiling.num_tiles(image)
    logits, _ = forward(model, normalise(tiling.split(image, tiles)), warm_up, tiles)
    return tiling.merge(logits, tiles).float()


def forward(
    model: MSHNetModel, image: Tensor, warm_up: bool | Tensor, tiles: int
) -> tuple[Tensor, list[Tensor]]:
    """As of `MSHNetModel.forward`; image, logits and masks are tiles, (T*B, C, H/T, W)."""
    e0 = _stage(model.encoder_0, tiles, conv2d_of_pixels(model.conv_init, image))  # (T*B, 16, H/T, W)
    e1 = _stage(model.encoder_1, tiles, F.max_pool2d(e0, 2))  # (T*B, 32, H/T/2, W/2)
    e2 = _stage(model.encoder_2, tiles, F.max_pool2d(e1, 2))  # (T*B, 64, H/T/4, W/4)
    # From here on the channels are many and the rows few: whole images.
    e3 = _stage(model.encoder_3, 1, tiling.merge(F.max_pool2d(e2, 2), tiles))  # (B, 128, H/8, W/8)
    middle = _stage(model.middle_layer, 1, F.max_pool2d(e3, 2))  # (B, 256, H/16, W/16)
    d3 = _stage(model.decoder_3, 1, e3, upsample(middle, 2, 1))  # (B, 128, H/8, W/8)
    up3 = upsample(tiling.split(d3, tiles), 2, tiles)
    d2 = _stage(model.decoder_2, tiles, e2, up3)  # (T*B, 64, H/T/4, W/4)
    d1 = _stage(model.decoder_1, tiles, e1, upsample(d2, 2, tiles))  # (T*B, 32, H/T/2, W/2)
    d0 = _stage(model.decoder_0, tiles, e0, upsample(d1, 2, tiles))  # (T*B, 16, H/T, W)
    mask0 = conv2d_of_pixels(model.output_0, d0)
    if warm_up is True:
        return mask0, []
    mask1, mask2 = conv2d_of_pixels(model.output_1, d1), conv2d_of_pixels(model.output_2, d2)
    mask3 = tiling.split(conv2d_of_pixels(model.output_3, d3), tiles)
    larger = [upsample(mask, 2**scale, tiles) for scale, mask in enumerate((mask1, mask2, mask3), 1)]
    logits = conv2d_rows_as_channels(model.final, torch.cat([mask0, *larger], 1), tiles)
    if torch.is_tensor(warm_up):
        logits = torch.where(warm_up, mask0, logits)
    return logits, [mask0, mask1, mask2, mask3]


def _stage(blocks, tiles, *maps) -> Tensor:
    """The blocks of `model.stage`. maps: the convolutions take one after another, so that nothing copies
    them."""
    for layers in blocks:
        maps = [block.forward(layers, maps, tiles)]
    return maps[0]


def sums_of_tiles(logits: Tensor, masks: list[Tensor], target: Tensor, tiles: int) -> Tensor:
    """As of `loss.sums_of_scales`, from tiles."""
    rows = functools.partial(tiling.rows, tiles=tiles)
    sums = sums_of_scales(logits, masks, target, rows=rows, tiles=tiles)  # (7, S, T*B)
    return tiling.by_image(sums.movedim(2, 0), tiles).sum(0).movedim(0, 2)  # (7, S, B)
