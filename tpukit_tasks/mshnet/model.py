"""The multi-scale head network of Liu et al., "Infrared Small Target Detection with Scale and Location
Sensitivity", CVPR 2024, with the published parameter names, so that published weights load. On XLA the same
weights are computed by `tpu/network.py`.

Shapes: B batch, C channels, H and W the image size (multiples of 16)."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tpukit_tasks.mshnet.loss import multiscale_loss

CHANNELS = {"published": (16, 32, 64, 128, 256), "small": (8, 12, 20, 32, 32)}  # in the five stages
BLOCKS = (1, 2, 2, 2, 2)
IMAGE_MEAN = (0.485, 0.456, 0.406)  # ImageNet's, as published
IMAGE_STD = (0.229, 0.224, 0.225)


def loss(model: nn.Module, image: Tensor, mask: Tensor, warm_up: bool | Tensor) -> Tensor:
    """The training loss, a float32 scalar. image: (B, 1 or 3, H, W), mask: (B, 1, H, W), in [0, 255].
    warm_up: see `MSHNetModel.forward`."""
    logits, masks = model(normalise(image), warm_up)
    # Grey mask values stay as they are in the loss, as published.
    return multiscale_loss(logits, masks, mask.float() / 255, warm_up=warm_up)


def predict(model: nn.Module, image: Tensor, warm_up: bool | Tensor) -> Tensor:
    """The logits, (B, 1, H, W) float32. image: (B, 1 or 3, H, W) in [0, 255]."""
    return model(normalise(image), warm_up)[0].float()


def normalise(image: Tensor) -> Tensor:
    """(B, 1 or 3, H, W) in [0, 255] -> (B, 3, H, W) float32 with ImageNet's mean and standard deviation."""

    def constants(values):  # (3, 1, 1), made on the device: a tensor from the host would be sent every step
        return torch.stack([torch.full((1, 1), value, device=image.device) for value in values])

    # (image / 255 - mean) / std, in fewer passes.
    factor = constants(1 / (255 * std) for std in IMAGE_STD)
    return (image.float() * factor).add_(constants(-mean / std for mean, std in zip(IMAGE_MEAN, IMAGE_STD)))


class MSHNetModel(nn.Module):
    """A residual U-Net with attention and one prediction head on each of its four decoder levels; 4,065,513
    parameters as published, 174,537 with the small channels."""

    def __init__(
        self, channels: tuple[int, ...] = CHANNELS["published"], blocks: tuple[int, ...] = BLOCKS
    ) -> None:
        super().__init__()
        c0, c1, c2, c3, c4 = channels
        self.conv_init = nn.Conv2d(3, c0, 1)
        self.encoder_0 = stage(c0, c0, blocks[0])
        self.encoder_1 = stage(c0, c1, blocks[1])
        self.encoder_2 = stage(c1, c2, blocks[2])
        self.encoder_3 = stage(c2, c3, blocks[3])
        self.middle_layer = stage(c3, c4, blocks[4])
        self.decoder_3 = stage(c3 + c4, c3, blocks[3])
        self.decoder_2 = stage(c2 + c3, c2, blocks[2])
        self.decoder_1 = stage(c1 + c2, c1, blocks[1])
        self.decoder_0 = stage(c0 + c1, c0, blocks[0])
        self.output_0 = nn.Conv2d(c0, 1, 1)
        self.output_1 = nn.Conv2d(c1, 1, 1)
        self.output_2 = nn.Conv2d(c2, 1, 1)
        self.output_3 = nn.Conv2d(c3, 1, 1)
        self.final = nn.Conv2d(4, 1, 3, padding=1)

    def forward(self, image: Tensor, warm_up: bool | Tensor = False) -> tuple[Tensor, list[Tensor]]:
        """image: (B, 3, H, W), normalised. Returns (logits, masks).

        logits: (B, 1, H, W), unbounded. masks: logits at full, half, quarter and eighth size, which the
        training loss supervises too. In the warm-up phase the logits are mask 0 alone and there are no masks.
        warm_up: a bool, or a 0-d bool tensor that chooses the logits and leaves the masks."""
        e0 = self.encoder_0(self.conv_init(image))  # (B, 16, H, W)
        e1 = self.encoder_1(F.max_pool2d(e0, 2))  # (B, 32, H/2, W/2)
        e2 = self.encoder_2(F.max_pool2d(e1, 2))  # (B, 64, H/4, W/4)
        e3 = self.encoder_3(F.max_pool2d(e2, 2))  # (B, 128, H/8, W/8)
        middle = self.middle_layer(F.max_pool2d(e3, 2))  # (B, 256, H/16, W/16)
        d3 = self.decoder_3(torch.cat([e3, upsample(middle, 2)], 1))  # (B, 128, H/8, W/8)
        d2 = self.decoder_2(torch.cat([e2, upsample(d3, 2)], 1))  # (B, 64, H/4, W/4)
        d1 = self.decoder_1(torch.cat([e1, upsample(d2, 2)], 1))  # (B, 32, H/2, W/2)
        d0 = self.decoder_0(torch.cat([e0, upsample(d1, 2)], 1))  # (B, 16, H, W)
        finish_statistics(self)
        mask0 = self.output_0(d0)
        if warm_up is True:
            return mask0, []
        mask1, mask2, mask3 = self.output_1(d1), self.output_2(d2), self.output_3(d3)
        larger = [upsample(mask, 2**scale) for scale, mask in enumerate((mask1, mask2, mask3), 1)]
        logits = self.final(torch.cat([mask0, *larger], 1))
        if torch.is_tensor(warm_up):
            logits = torch.where(warm_up, mask0, logits)
        return logits, [mask0, mask1, mask2, mask3]


def stage(channels_in: int, channels: int, blocks: int) -> nn.Sequential:
    """Blocks one after another; the first changes the number of channels."""
    return nn.Sequential(*(Block(channels if i else channels_in, channels) for i in range(blocks)))


class Block(nn.Module):
    """Two convolutions, channel and spatial attention, and a shortcut."""

    def __init__(self, channels_in: int, channels: int) -> None:
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

    def forward(self, x: Tensor) -> Tensor:  # (B, channels_in, H, W) -> (B, channels, H, W)
        residual = x if self.shortcut is None else _conv_and_norm(x, *self.shortcut)
        x = F.relu(_conv_and_norm(x, self.conv1, self.bn1))
        x = _conv_and_norm(x, self.conv2, self.bn2)
        x = self.ca(x) * x
        x = self.sa(x) * x
        return F.relu(x + residual)


class ChannelAttention(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = max(channels // 16, 1)
        self.fc1 = nn.Conv2d(channels, hidden, 1, bias=False)
        self.fc2 = nn.Conv2d(hidden, channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W) -> (B, C, 1, 1) in (0, 1)
        pixels, axis = as_in_memory(x)
        largest = pixels.max(axis).values  # by pooling, one thread of a GPU would read a whole channel
        return self.from_pooled(pixels.mean(axis)[..., None, None], largest[..., None, None])

    def from_pooled(self, mean: Tensor, largest: Tensor) -> Tensor:  # (B, C, 1, 1) each
        # As products of matrices: of convolutions a GPU would copy inputs and gradients into other layouts.
        both = torch.stack([mean, largest], 1).flatten(2)  # (B, 2, C)
        both = F.relu(F.linear(both, self.fc1.weight.flatten(1)))
        both = F.linear(both, self.fc2.weight.flatten(1))  # (B, 2, C)
        # dtype: autocast on a GPU adds up in float32, which all maps that this multiplies would become.
        return torch.sigmoid(both.sum(1, dtype=both.dtype))[..., None, None]


class SpatialAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 1, 7, padding=3, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W) -> (B, 1, H, W) in (0, 1)
        pixels, axis = as_in_memory(x)
        channels = 3 - axis
        pooled = torch.stack([pixels.mean(channels), pixels.max(channels).values], channels)
        pooled = pooled.movedim(channels, 1).unflatten(2, x.shape[2:])  # (B, 2, H, W)
        return torch.sigmoid(self.conv1(pooled))


def as_in_memory(x: Tensor) -> tuple[Tensor, int]:
    """(B, C, H, W) -> (the same numbers as (B, H * W, C) or (B, C, H * W), as they lie in memory; the axis of
    the pixels). What is reduced in this order has its gradient in it: in another one, each addition of two
    gradients would transpose one of them."""
    if x.is_contiguous(memory_format=torch.channels_last):
        return x.permute(0, 2, 3, 1).flatten(1, 2), 1
    return x.flatten(2), 2


def upsample(x: Tensor, factor: int) -> Tensor:
    """Bilinear upsampling with aligned corners: (B, C, H, W) -> (B, C, factor * H, factor * W)."""
    larger = F.interpolate(x, scale_factor=factor, mode="bilinear", align_corners=True)
    # Autocast computes it in float32, which the maps that it is concatenated with would become, too.
    return larger.to(x.dtype)


# For GPUs: the same numbers in fewer operations


def _conv_and_norm(x, conv, norm):
    """norm(conv(x)). Batch statistics take the bias away again: there no pass over the maps adds it, it gets
    no gradient, and `finish_statistics` does the rest."""
    if not takes_batch_statistics(norm):
        return norm(conv(x))
    x = F.conv2d(x, conv.weight, padding=conv.padding)
    mean, variance = norm.running_mean, norm.running_var
    return F.batch_norm(x, mean, variance, norm.weight, norm.bias, True, norm.momentum, norm.eps)


def takes_batch_statistics(norm: nn.Module) -> bool:
    return norm.training and type(norm) is nn.BatchNorm2d  # neither frozen nor synced


def finish_statistics(model: nn.Module) -> None:
    """Update the statistics of all batch norms, which `_conv_and_norm` leaves, at once: a GPU would need
    longer to start an operation for each."""
    modules: list[Any] = list(model.modules())  # each batch norm follows its convolution
    pairs = [(conv, norm) for conv, norm in zip(modules, modules[1:]) if takes_batch_statistics(norm)]
    if not pairs:
        return
    # data: autograd would take a mean for an input of the batch norm that changed.
    means, biases = [norm.running_mean.data for _, norm in pairs], [conv.bias.data for conv, _ in pairs]
    torch._foreach_add_(means, biases, alpha=pairs[0][1].momentum)
    torch._foreach_add_([norm.num_batches_tracked for _, norm in pairs], 1)
