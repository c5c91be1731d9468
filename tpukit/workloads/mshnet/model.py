"""The multi-scale head network of Liu et al., "Infrared Small Target Detection with Scale and Location Sensitivity",
CVPR 2024, with the published parameter names, so that published weights load.

Letters: B batch, C channels, H and W the image size (multiples of 16), T tiles (see `tiling.py`; 1 but on XLA).
"""

import torch
from torch import nn
from torch.nn import functional as F

from tpukit.workloads.mshnet import tiling
from tpukit.workloads.mshnet.tiling import conv2d, upsample, upsample2x

CHANNELS = (16, 32, 64, 128, 256)
BLOCKS = (1, 2, 2, 2, 2)


class ChannelAttention(nn.Module):
    def __init__(self, channels, reduction=16):
        super().__init__()
        self.fc1 = nn.Conv2d(channels, channels // reduction, 1, bias=False)
        self.fc2 = nn.Conv2d(channels // reduction, channels, 1, bias=False)

    def forward(self, x, tiles=1):  # (T*B, C, H/T, W) -> (T*B, C, 1, 1) in (0, 1)
        mean = self.fc2(F.relu(self.fc1(tiling.global_mean(x, tiles))))  # (B, C, 1, 1)
        largest = self.fc2(F.relu(self.fc1(tiling.global_max(x, tiles))))
        return torch.sigmoid(mean + largest).repeat(tiles, 1, 1, 1)


class SpatialAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(2, 1, 7, padding=3, bias=False)

    def forward(self, x, tiles=1):  # (T*B, C, H/T, W) -> (T*B, 1, H/T, W) in (0, 1)
        x = torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)  # (T*B, 2, H/T, W)
        return torch.sigmoid(tiling.conv2d_to_one_channel(self.conv1, x, tiles))


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

    def forward(self, x, tiles=1):  # (T*B, channels_in, H/T, W) -> (T*B, channels, H/T, W)
        residual = x
        if self.shortcut is not None:
            layer, norm = self.shortcut
            residual = norm(conv2d(layer, x, tiles))
        x = F.relu(self.bn1(conv2d(self.conv1, x, tiles)))
        x = self.bn2(conv2d(self.conv2, x, tiles))
        x = self.ca(x, tiles) * x
        x = self.sa(x, tiles) * x
        return F.relu(x + residual)


class Stage(nn.Sequential):
    """Blocks one after another."""

    def __init__(self, channels_in, channels, blocks):
        super().__init__(Block(channels_in, channels), *(Block(channels, channels) for _ in range(blocks - 1)))

    def forward(self, x, tiles=1):
        for block in self:
            x = block(x, tiles)
        return x


class MSHNetModel(nn.Module):
    """A residual U-Net with attention and one prediction head on each of its four decoder levels; 4,065,513 parameters."""

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

    def forward(self, image, warm_up=False):
        """image: (B, 3, H, W), normalised. Returns (logits, masks).

        logits: (B, 1, H, W), unbounded. masks: logits at full, half, quarter and eighth size, which the training loss
        supervises too. In the warm-up phase the logits are mask 0 alone and there are no masks.
        """
        tiles = tiling.num_tiles(image)
        # (B, C, H, W) below stands for (T*B, C, H/T, W) where the layer is given the tiles.
        e0 = self.encoder_0(self.conv_init(tiling.split(image, tiles)), tiles)  # (B, 16, H, W)
        e1 = self.encoder_1(F.max_pool2d(e0, 2), tiles)  # (B, 32, H/2, W/2)
        e2 = self.encoder_2(F.max_pool2d(e1, 2), tiles)  # (B, 64, H/4, W/4)
        # From here on the channels are many and the rows few: whole images.
        e3 = self.encoder_3(tiling.merge(F.max_pool2d(e2, 2), tiles))  # (B, 128, H/8, W/8)
        middle = self.middle_layer(F.max_pool2d(e3, 2))  # (B, 256, H/16, W/16)
        d3 = self.decoder_3(torch.cat([e3, upsample2x(middle)], 1))  # (B, 128, H/8, W/8)
        up3 = upsample2x(tiling.split(d3, tiles), tiles)
        d2 = self.decoder_2(tiling.concat_channels(e2, up3, tiles=tiles), tiles)  # (B, 64, H/4, W/4)
        d1 = self.decoder_1(tiling.concat_channels(e1, upsample2x(d2, tiles), tiles=tiles), tiles)  # (B, 32, H/2, W/2)
        d0 = self.decoder_0(tiling.concat_channels(e0, upsample2x(d1, tiles), tiles=tiles), tiles)  # (B, 16, H, W)
        mask0 = tiling.merge(self.output_0(d0), tiles)
        if warm_up:
            return mask0, []
        mask1, mask2 = tiling.merge(self.output_1(d1), tiles), tiling.merge(self.output_2(d2), tiles)
        mask3 = self.output_3(d3)
        full_size = torch.cat([mask0, upsample(mask1, 2), upsample(mask2, 4), upsample(mask3, 8)], 1)  # (B, 4, H, W)
        logits = tiling.merge(conv2d(self.final, tiling.split(full_size, tiles), tiles), tiles)
        return logits, [mask0, mask1, mask2, mask3]
