"""The multi-scale head network of Liu et al., "Infrared Small Target Detection with Scale and Location
Sensitivity", CVPR 2024, with the published parameter names, so that published weights load.

Letters: B batch, C channels, H and W the image size (multiples of 16). On XLA the layers work on tiles of the
images, see `tiling.py`, and a block in fewer passes, see `fused.py`; tiles=None, elsewhere, is the plain
network."""

import torch
from torch import nn
from torch.nn import functional as F

from tpukit.tasks.mshnet import fused, tiling
from tpukit.tasks.mshnet.tiling import concat_channels, conv2d_of_pixels, conv2d_rows_as_channels
from tpukit.tasks.mshnet.upsampling import upsample

CHANNELS = (16, 32, 64, 128, 256)
BLOCKS = (1, 2, 2, 2, 2)


class ChannelAttention(nn.Module):
    def __init__(self, channels, reduction=16):
        super().__init__()
        self.fc1 = nn.Conv2d(channels, channels // reduction, 1, bias=False)
        self.fc2 = nn.Conv2d(channels // reduction, channels, 1, bias=False)

    def forward(self, x):  # (B, C, H, W) -> (B, C, 1, 1) in (0, 1)
        return self.from_pooled(
            x.mean((2, 3), keepdim=True), max_over_image(x, by_reduction=x.device.type == "cuda")
        )

    def from_pooled(self, mean, largest):  # (B, C, 1, 1) each
        # As products of matrices: of convolutions a GPU would copy inputs and gradients into other layouts.
        both = torch.stack([mean, largest], 1).flatten(2)  # (B, 2, C)
        both = F.relu(F.linear(both, self.fc1.weight.flatten(1)))
        both = F.linear(both, self.fc2.weight.flatten(1))  # (B, 2, C)
        # dtype: autocast on a GPU adds up in float32, which all maps that this multiplies would become.
        return torch.sigmoid(both.sum(1, dtype=both.dtype))[..., None, None]


def max_over_image(x, *, by_reduction):
    """(B, C, H, W) -> (B, C, 1, 1). by_reduction: not by pooling, which on a GPU reads a whole channel by one
    thread."""
    if by_reduction:
        return x.flatten(2).max(2, keepdim=True).values[..., None]
    return F.adaptive_max_pool2d(x, 1)


def conv_and_norm(conv, norm, x):
    """norm(conv(x)). Batch statistics take the bias away again: there no pass over the maps adds it, it gets
    no gradient, and `finish_statistics` does the rest."""
    if not takes_batch_statistics(norm):
        return norm(conv(x))
    x = F.conv2d(x, conv.weight, padding=conv.padding)
    return F.batch_norm(
        x, norm.running_mean, norm.running_var, norm.weight, norm.bias, True, norm.momentum, norm.eps
    )


def takes_batch_statistics(norm):
    return norm.training and type(norm) is nn.BatchNorm2d  # neither frozen nor synced


def finish_statistics(model):
    """What `conv_and_norm` leaves of all batch norms, together: a GPU would need longer to start an operation
    for each."""
    pairs = [pair for block in model.modules() if isinstance(block, Block) for pair in block.convolutions()]
    pairs = [(conv, norm) for conv, norm in pairs if takes_batch_statistics(norm)]
    if not pairs:
        return
    # data: autograd would take a mean for an input of the batch norm that changed.
    means, biases = [norm.running_mean.data for _, norm in pairs], [conv.bias.data for conv, _ in pairs]
    torch._foreach_add_(means, biases, alpha=pairs[0][1].momentum)
    torch._foreach_add_([norm.num_batches_tracked for _, norm in pairs], 1)


class SpatialAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(2, 1, 7, padding=3, bias=False)

    def forward(self, x):  # (B, C, H, W) -> (B, 1, H, W) in (0, 1)
        x = torch.cat([x.mean(1, keepdim=True), x.max(1, keepdim=True).values], 1)  # (B, 2, H, W)
        return torch.sigmoid(self.conv1(x))


class Block(nn.Module):
    """Two convolutions, channel and spatial attention, and a shortcut."""

    def __init__(self, channels_in, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = None
        if channels_in != channels:
            self.shortcut = nn.Sequential(nn.Conv2d(channels_in, channels, 1), nn.BatchNorm2d(channels))
        self.ca = ChannelAttention(channels)
        self.sa = SpatialAttention()

    def forward(self, x, tiles=None):  # (B, channels_in, H, W) -> (B, channels, H, W)
        if tiles is not None:
            return fused.block(self, x, tiles)
        residual = x if self.shortcut is None else conv_and_norm(*self.shortcut, x)
        x = F.relu(conv_and_norm(self.conv1, self.bn1, x))
        x = conv_and_norm(self.conv2, self.bn2, x)
        x = self.ca(x) * x
        x = self.sa(x) * x
        return F.relu(x + residual)

    def convolutions(self):
        """[(convolution, its batch norm)]"""
        shortcut = [] if self.shortcut is None else [tuple(self.shortcut)]
        return [(self.conv1, self.bn1), (self.conv2, self.bn2), *shortcut]


class Stage(nn.Sequential):
    """Blocks one after another."""

    def __init__(self, channels_in, channels, blocks):
        super().__init__(
            Block(channels_in, channels), *(Block(channels, channels) for _ in range(blocks - 1))
        )

    def forward(self, x, tiles=None):
        for block in self:
            x = block(x, tiles)
        return x


class MSHNetModel(nn.Module):
    """A residual U-Net with attention and one prediction head on each of its four decoder levels; 4,065,513
    parameters."""

    def __init__(self, channels=CHANNELS, blocks=BLOCKS):
        super().__init__()
        c0, c1, c2, c3, c4 = channels
        self.conv_init = nn.Conv2d(3, c0, 1)
        self.encoder_0 = Stage(c0, c0, blocks[0])
        self.encoder_1 = Stage(c0, c1, blocks[1])
        self.encoder_2 = Stage(c1, c2, blocks[2])
        self.encoder_3 = Stage(c2, c3, blocks[3])
        self.middle_layer = Stage(c3, c4, blocks[4])
        self.decoder_3 = Stage(c3 + c4, c3, blocks[3])
        self.decoder_2 = Stage(c2 + c3, c2, blocks[2])
        self.decoder_1 = Stage(c1 + c2, c1, blocks[1])
        self.decoder_0 = Stage(c0 + c1, c0, blocks[0])
        self.output_0 = nn.Conv2d(c0, 1, 1)
        self.output_1 = nn.Conv2d(c1, 1, 1)
        self.output_2 = nn.Conv2d(c2, 1, 1)
        self.output_3 = nn.Conv2d(c3, 1, 1)
        self.final = nn.Conv2d(4, 1, 3, padding=1)

    def forward(self, image, warm_up=False, tiles=None):
        """image: (B, 3, H, W), normalised. Returns (logits, masks).

        logits: (B, 1, H, W), unbounded. masks: logits at full, half, quarter and eighth size, which the
        training loss supervises too. In the warm-up phase the logits are mask 0 alone and there are no masks.
        warm_up: a bool, or a 0-d bool tensor that chooses the logits and leaves the masks. tiles: image and
        results are tiles, (T*B, C, H/T, W)."""
        e0 = self.encoder_0(conv2d_of_pixels(self.conv_init, image, tiles), tiles)  # (B, 16, H, W)
        e1 = self.encoder_1(F.max_pool2d(e0, 2), tiles)  # (B, 32, H/2, W/2)
        e2 = self.encoder_2(F.max_pool2d(e1, 2), tiles)  # (B, 64, H/4, W/4)
        # From here on the channels are many and the rows few: whole images.
        whole = tiles and 1
        e3 = self.encoder_3(tiling.merge(F.max_pool2d(e2, 2), tiles), whole)  # (B, 128, H/8, W/8)
        middle = self.middle_layer(F.max_pool2d(e3, 2), whole)  # (B, 256, H/16, W/16)
        d3 = self.decoder_3(
            concat_channels(e3, upsample(middle, 2, whole), tiles=whole), whole
        )  # (B, 128, H/8, W/8)
        up3 = upsample(tiling.split(d3, tiles), 2, tiles)
        d2 = self.decoder_2(concat_channels(e2, up3, tiles=tiles), tiles)  # (B, 64, H/4, W/4)
        d1 = self.decoder_1(
            concat_channels(e1, upsample(d2, 2, tiles), tiles=tiles), tiles
        )  # (B, 32, H/2, W/2)
        d0 = self.decoder_0(concat_channels(e0, upsample(d1, 2, tiles), tiles=tiles), tiles)  # (B, 16, H, W)
        if tiles is None:
            finish_statistics(self)
        mask0 = conv2d_of_pixels(self.output_0, d0, tiles)
        if not torch.is_tensor(warm_up) and warm_up:
            return mask0, []
        mask1, mask2 = conv2d_of_pixels(self.output_1, d1, tiles), conv2d_of_pixels(self.output_2, d2, tiles)
        mask3 = tiling.split(conv2d_of_pixels(self.output_3, d3, whole), tiles)
        full_size = [
            mask0,
            *(upsample(mask, 2**scale, tiles) for scale, mask in enumerate((mask1, mask2, mask3), 1)),
        ]
        logits = conv2d_rows_as_channels(self.final, torch.cat(full_size, 1), tiles)
        if torch.is_tensor(warm_up):
            logits = torch.where(warm_up, mask0, logits)
        return logits, [mask0, mask1, mask2, mask3]
