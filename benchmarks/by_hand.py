"""MSHNet and its loss as one would write them by hand, with torch's layers and a loop over the images: what
`steps` compares with. The parameters have the published names, so that both networks can have the same
weights."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from tpukit_tasks.mshnet.model import IMAGE_MEAN, IMAGE_STD


class Block(nn.Module):
    def __init__(self, channels_in, channels):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels_in, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.shortcut = nn.Identity()
        if channels_in != channels:
            self.shortcut = nn.Sequential(nn.Conv2d(channels_in, channels, 1), nn.BatchNorm2d(channels))
        self.ca = nn.ModuleDict(dict(
            fc1=nn.Conv2d(channels, channels // 16, 1, bias=False),
            fc2=nn.Conv2d(channels // 16, channels, 1, bias=False),
        ))  # fmt: skip
        self.sa = nn.ModuleDict(dict(conv1=nn.Conv2d(2, 1, 7, padding=3, bias=False)))

    def forward(self, x):
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        pooled = F.adaptive_avg_pool2d(out, 1), F.adaptive_max_pool2d(out, 1)
        out = out * torch.sigmoid(sum(self.ca["fc2"](F.relu(self.ca["fc1"](each))) for each in pooled))
        pooled = torch.cat([out.mean(1, keepdim=True), out.max(1, keepdim=True).values], 1)
        out = out * torch.sigmoid(self.sa["conv1"](pooled))
        return F.relu(out + self.shortcut(x))


def stage(channels_in, channels, blocks=2):
    return nn.Sequential(*(Block(channels if number else channels_in, channels) for number in range(blocks)))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_init = nn.Conv2d(3, 16, 1)
        self.encoder_0, self.encoder_1 = stage(16, 16, blocks=1), stage(16, 32)
        self.encoder_2, self.encoder_3, self.middle_layer = stage(32, 64), stage(64, 128), stage(128, 256)
        self.decoder_3, self.decoder_2 = stage(256 + 128, 128), stage(128 + 64, 64)
        self.decoder_1, self.decoder_0 = stage(64 + 32, 32), stage(32 + 16, 16, blocks=1)
        self.output_0, self.output_1 = nn.Conv2d(16, 1, 1), nn.Conv2d(32, 1, 1)
        self.output_2, self.output_3 = nn.Conv2d(64, 1, 1), nn.Conv2d(128, 1, 1)
        self.final = nn.Conv2d(4, 1, 3, padding=1)

    def forward(self, image):
        """Return the logits and those of the four heads, at full to eighth size. image: (B, 3, H, W)."""
        e0 = self.encoder_0(self.conv_init(image))
        e1 = self.encoder_1(F.max_pool2d(e0, 2))
        e2 = self.encoder_2(F.max_pool2d(e1, 2))
        e3 = self.encoder_3(F.max_pool2d(e2, 2))
        d3 = self.decoder_3(torch.cat([e3, larger(self.middle_layer(F.max_pool2d(e3, 2)), 2)], 1))
        d2 = self.decoder_2(torch.cat([e2, larger(d3, 2)], 1))
        d1 = self.decoder_1(torch.cat([e1, larger(d2, 2)], 1))
        d0 = self.decoder_0(torch.cat([e0, larger(d1, 2)], 1))
        masks = self.output_0(d0), self.output_1(d1), self.output_2(d2), self.output_3(d3)
        return self.final(torch.cat([larger(mask, 2**scale) for scale, mask in enumerate(masks)], 1)), masks


def larger(x, factor):
    return nn.Upsample(scale_factor=factor, mode="bilinear", align_corners=True)(x) if factor > 1 else x


def sls_loss(logits, target):
    """Return the loss of eq. 1-7 of MSHNet's paper, after its warm-up."""
    p = torch.sigmoid(logits)
    intersection, predicted, labelled = (x.sum((1, 2, 3)) for x in (p * target, p, target))
    spread = ((predicted - labelled) / 2) ** 2
    scale = (torch.minimum(predicted, labelled) + spread) / (torch.maximum(predicted, labelled) + spread)
    iou = intersection / (predicted + labelled - intersection)
    return 1 - (scale * iou).mean() + location_loss(p, target)


def location_loss(p, target):
    height, width = p.shape[2:]
    x = torch.arange(width, device=p.device).expand(1, height, width) / width
    y = torch.arange(height, device=p.device)[:, None].expand(1, height, width) / height
    loss = 0.0
    for one, label in zip(p, target):
        (x1, y1), (x2, y2) = (((x * each).mean(), (y * each).mean()) for each in (one, label))
        turn = torch.atan(y1 / (x1 + 1e-8)) - torch.atan(y2 / (x2 + 1e-8))
        radius1, radius2 = (torch.sqrt(a**2 + b**2 + 1e-8) for a, b in ((x1, y1), (x2, y2)))
        length = 1 - torch.minimum(radius1, radius2) / (torch.maximum(radius1, radius2) + 1e-8)
        loss = loss + 4 / math.pi**2 * turn**2 + length
    return loss / len(p)


class Loss(nn.Module):
    """The network and its loss: image and mask of a batch, (B, 1 or 3, H, W) and (B, 1, H, W) in [0, 255], to
    a scalar."""

    def __init__(self):
        super().__init__()
        self.network = Network()
        for name, values in dict(mean=IMAGE_MEAN, std=IMAGE_STD).items():
            self.register_buffer(name, torch.tensor(values)[:, None, None])

    def forward(self, image, mask):
        target = mask / 255
        logits, masks = self.network((image / 255 - self.mean) / self.std)
        losses = [sls_loss(logits, target)]
        for scale, mask in enumerate(masks):
            losses.append(sls_loss(mask, F.max_pool2d(target, 2**scale) if scale else target))
        return sum(losses) / len(losses)
