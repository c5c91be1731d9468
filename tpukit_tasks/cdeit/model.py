"""The conditional diffusion transformer of Shi et al., "A Conditional Diffusion Model for Electrical
Impedance Tomography Image Reconstruction", IEEE TIM 2025, arXiv 2412.16979, with the published parameter
names, so that published weights load.

Shapes: B batch, S side of the image, P side of a patch, G = S / P side of the token grid, T tokens, C width,
H heads, W side of a window."""

import collections
import functools
import math
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tpukit_tasks.cdeit.diffusion import alphas_cumprod

if TYPE_CHECKING:
    from tpukit.devices.xla import XLARuntime

# Sizes of the network: arguments of `CDEITModel`, whose defaults are the published ones
NETWORKS: dict[str, dict[str, int]] = {
    "published": {},
    "small": dict(patch=8, width=128, heads=4, window=8, levels=3),
}
TIME_FEATURES = 256
MLP_RATIO = 4


class Norm(nn.Module):
    """Scales every token to length sqrt(C), then channel by channel by g * (1 + scale), and adds shift.

    Under autocast everything is in half precision except the sum of squares, which would lose what tells wide
    tokens apart."""

    def __init__(self, width):
        super().__init__()
        self.g = nn.Parameter(torch.ones(1, 1, width))

    def forward(self, x, shift, scale):  # (B, T, C), (B, 1, C), (B, 1, C)
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        x = F.rms_norm(x.to(dtype), x.shape[-1:], eps=1e-24)  # torch takes its sums in float32
        return torch.addcmul(shift.to(dtype), x, (self.g * (1 + scale)).to(dtype))


class Attention(nn.Module):
    """Attention of all tokens with all; of those within a W x W window with a learned bias for every offset
    between two tokens (Swin, Liu et al., ICCV 2021)."""

    relative_position_index: Tensor

    def __init__(self, width, heads, window=None):
        super().__init__()
        self.heads, self.window = heads, window
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        if window:
            axis = torch.arange(window)
            position = torch.stack(torch.meshgrid(axis, axis, indexing="ij")).flatten(1)  # (2, T)
            row, column = position[:, :, None] - position[:, None, :] + window - 1  # (T, T), in 0 .. 2 W - 2
            self.register_buffer("relative_position_index", row * (2 * window - 1) + column)
            self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
            nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)

    def forward(self, x):  # (B, T, C)
        batch, tokens, width = x.shape
        bias = None
        if self.window:
            bias = self.relative_position_bias_table[self.relative_position_index.flatten()]  # (T * T, H)
            bias = bias.view(tokens, tokens, self.heads).permute(2, 0, 1)[None]
        qkv = self.qkv(x)
        if qkv.device.type == "xla":
            from tpukit_tasks.cdeit.tpu.attention import attention

            return self.proj(attention(qkv, self.heads, bias))
        query, key, value = qkv.view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        # Contiguous, because torch's kernels for GPUs refuse any other mask.
        bias = None if bias is None else bias.to(query.dtype).contiguous()
        x = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return self.proj(x.transpose(1, 2).reshape(batch, tokens, width))


class WindowAttention(nn.Module):
    """Attention inside each W x W window of the token grid."""

    def __init__(self, width, heads, window):
        super().__init__()
        self.window = window
        self.attn = Attention(width, heads, window)

    def forward(self, x):  # (B, G * G, C)
        batch, tokens, width = x.shape
        window, count = self.window, math.isqrt(tokens) // self.window
        x = x.view(batch, count, window, count, window, width).transpose(2, 3)
        x = self.attn(x.reshape(batch * count**2, window**2, width))
        x = x.view(batch, count, count, window, window, width).transpose(2, 3)
        return x.reshape(batch, tokens, width)


class Block(nn.Module):
    """Attention and an MLP, each shifted, scaled and gated by the timestep (adaLN-zero: Peebles and Xie, ICCV
    2023)."""

    def __init__(self, width, heads, window=None):
        super().__init__()
        self.norm1 = Norm(width)
        self.attn = WindowAttention(width, heads, window) if window else Attention(width, heads)
        self.norm2 = Norm(width)
        wide, narrow = nn.Linear(width, MLP_RATIO * width), nn.Linear(MLP_RATIO * width, width)
        self.mlp = nn.Sequential(collections.OrderedDict(fc1=wide, silu=nn.SiLU(), fc2=narrow))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x, time):  # (B, T, C), (B, C)
        modulation = self.adaLN_modulation(time)[:, None]  # (B, 1, 6 C)
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation.chunk(6, -1)
        x = torch.addcmul(x, gate1, self.attn(self.norm1(x, shift1, scale1)))
        return torch.addcmul(x, gate2, self.mlp(self.norm2(x, shift2, scale2)))


class Merge(nn.Module):
    """Four neighbouring tokens become one: (B, G * G, C) -> (B, G * G / 4, C)."""

    def __init__(self, width):
        super().__init__()
        self.reduction = nn.Linear(4 * width, width, bias=False)
        self.norm = nn.LayerNorm(4 * width)

    def forward(self, x):
        batch, tokens, width = x.shape
        half = math.isqrt(tokens) // 2
        x = x.view(batch, half, 2, half, 2, width)
        # Even row and column, odd row, odd column, both odd, as in Swin.
        x = torch.cat([x[:, :, 0, :, 0], x[:, :, 1, :, 0], x[:, :, 0, :, 1], x[:, :, 1, :, 1]], -1)
        return self.reduction(self.norm(x.reshape(batch, half * half, 4 * width)))


class Split(nn.Sequential):
    """One token becomes four: nearest upsampling and a 1x1 convolution. (B, G * G, C) -> (B, 4 G * G, C)."""

    def __init__(self, width):
        # Published as the third of a sequence.
        super().__init__(nn.Identity(), nn.Identity(), nn.Conv2d(width, width, 1))

    def forward(self, x):
        batch, tokens, width = x.shape
        grid = math.isqrt(tokens)
        # A 1x1 convolution works on one token at a time: before the copies it is a quarter of the work.
        convolution = cast(nn.Conv2d, self[2])
        x = F.linear(x, convolution.weight[:, :, 0, 0], convolution.bias)
        x = x.view(batch, grid, 1, grid, 1, width).expand(batch, grid, 2, grid, 2, width)
        return x.reshape(batch, 4 * tokens, width)


class Final(nn.Module):
    """Tokens to patches: (B, T, C) -> (B, T, P * P)."""

    def __init__(self, width, patch):
        super().__init__()
        self.norm_final = Norm(width)
        self.linear = nn.Linear(width, patch * patch)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x, time):
        shift, scale = self.adaLN_modulation(time)[:, None].chunk(2, -1)
        return self.linear(self.norm_final(x, shift, scale))


class TimeEmbedder(nn.Module):
    """(B,) timesteps -> (B, C)."""

    def __init__(self, width):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(TIME_FEATURES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t):
        half = TIME_FEATURES // 2
        place = torch.arange(half, dtype=torch.float32, device=t.device)
        angle = t.float()[:, None] * torch.exp(-math.log(10_000) / half * place)
        return self.mlp(torch.cat([angle.cos(), angle.sin()], -1))


class CDEITModel(nn.Module):
    """A U-shaped transformer that predicts the clean image from a noisy one and the voltages; 109,719,108
    parameters as published, 5,542,096 in the small sizes.

    image_size: S. patch: P. width: C. heads: H. window: W, of the first two and last two blocks, at most G.
    levels: how often the token grid is halved."""

    alphas_cumprod: Tensor

    def __init__(self, *, image_size=128, patch=2, width=512, heads=16, window=16, levels=4):
        super().__init__()
        grid = image_size // patch
        self.patch, self.grid = patch, grid

        self.pos_embed = nn.Parameter(positions(grid, width), requires_grad=False)
        embedder = nn.Conv2d(2, width, patch, stride=patch)
        self.x_embedder = nn.ModuleDict(dict(proj=embedder))
        self.t_embedder = TimeEmbedder(width)
        # A buffer, so that it moves to the device with the model; not one of the weights.
        alphas = torch.tensor(alphas_cumprod(), dtype=torch.float32)
        self.register_buffer("alphas_cumprod", alphas, persistent=False)
        block = functools.partial(Block, width, heads)
        windowed = ("swinIn1", "swinIn2", "swinOut1", "swinOut2")
        self.blocks = nn.ModuleDict({name: block(window) for name in windowed})
        downs = [[Merge(width), block(), block()] for _ in range(levels)]
        ups = [[Split(width), nn.Linear(2 * width, width), block(), block()] for _ in range(levels)]
        self.blocks["downs"] = nn.ModuleList(map(nn.ModuleList, downs))
        self.blocks["ups"] = nn.ModuleList(map(nn.ModuleList, ups))
        self.blocks["mid"] = block()
        self.final_layer = Final(width, patch)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.xavier_uniform_(embedder.weight.flatten(1))
        nn.init.zeros_(cast(Tensor, embedder.bias))
        for layer in (self.t_embedder.mlp[0], self.t_embedder.mlp[2]):
            nn.init.normal_(cast(nn.Linear, layer).weight, std=0.02)
        # Every block starts as the identity, and the image as zero.
        for module in self.modules():
            if isinstance(module, (Block, Final)):
                nn.init.zeros_(cast(nn.Linear, module.adaLN_modulation[1]).weight)
        nn.init.zeros_(self.final_layer.linear.weight)

    def prepare_for_xla(self, runtime: "XLARuntime") -> str:
        """Try the TPU's attention kernels, before the first graph. Returns a sentence for the log."""
        from tpukit_tasks.cdeit.tpu import attention

        return attention.choose(runtime)

    def forward(self, image: Tensor, t: Tensor, voltages: Tensor) -> Tensor:
        """The clean image. image: (B, 1, S, S), noisy. t: (B,) timesteps. voltages: (B, 1, N, N) map, N a
        divisor of S. -> (B, 1, S, S)"""
        b: Any = self.blocks
        batch, _, rows, columns = voltages.shape
        factor = image.shape[-1] // columns
        copies = voltages.view(batch, 1, rows, 1, columns, 1).expand(batch, 1, rows, factor, columns, factor)
        x = torch.cat([image, copies.reshape(image.shape)], 1)  # (B, 2, S, S)
        x = self.x_embedder["proj"](x).flatten(2).transpose(1, 2)  # (B, T, C)
        # In its own type: a float32 table would take the first blocks out of autocast's.
        x = x + self.pos_embed.to(x.dtype)
        time = self.t_embedder(t)  # (B, C)
        x = b["swinIn2"](b["swinIn1"](x, time), time)
        skips = []
        for merge, first, second in b["downs"]:
            skips.append(x)
            x = second(first(merge(x), time), time)
        x = b["mid"](x, time)
        for split, join, first, second in b["ups"]:
            x = join(torch.cat([split(x), skips.pop()], -1))
            x = second(first(x, time), time)
        x = b["swinOut2"](b["swinOut1"](x, time), time)
        x = self.final_layer(x, time)  # (B, T, P * P)
        x = x.view(-1, self.grid, self.grid, self.patch, self.patch).transpose(2, 3)
        return x.reshape(image.shape)


def positions(grid, width):
    """(1, grid * grid, width) fixed sine-cosine table: the first half encodes the column, the second the
    row."""
    frequency = 10_000.0 ** -(torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    angle = torch.arange(grid, dtype=torch.float64)[:, None] * frequency  # (grid, C / 4)
    line = torch.cat([angle.sin(), angle.cos()], 1)  # (grid, C / 2)
    column, row = line[None].expand(grid, -1, -1), line[:, None].expand(-1, grid, -1)
    return torch.cat([column, row], 2).reshape(1, grid * grid, width).float()
