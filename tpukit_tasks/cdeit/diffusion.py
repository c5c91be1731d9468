"""Diffusion with a linear schedule and a model that predicts the clean image: noise, loss, and sampling by
DDIM.

Sources: Ho et al., "Denoising Diffusion Probabilistic Models", NeurIPS 2020; Song et al., "Denoising
Diffusion Implicit Models", ICLR 2021. Nothing is clipped. Shapes: B batch, S side of the image."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tpukit.host.errors import TpukitError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

STEPS = 1000
FIRST_BETA, LAST_BETA = 1e-4, 0.02


def betas() -> np.ndarray:
    """(STEPS,) float64 numpy: the variance of the noise that every step adds."""
    return np.linspace(FIRST_BETA, LAST_BETA, STEPS)


def alphas_cumprod() -> np.ndarray:
    """(STEPS,) float64 numpy: the part of the clean image's variance that is left after every step."""
    return np.cumprod(1 - betas())


def add_noise(image: Tensor, t: Tensor, noise: Tensor, alphas: Tensor) -> Tensor:
    """Return the image after t + 1 steps of noise. image, noise: (B, 1, S, S). t: (B,) int64. alphas:
    (STEPS,) on the device."""
    left = alphas[t].view(-1, 1, 1, 1)
    return left.sqrt() * image + (1 - left).sqrt() * noise


def loss(
    model: Module, image: Tensor, voltages: Tensor, t: Tensor, noise: Tensor, alphas: Tensor, *, squared=False
) -> Tensor:
    """Return the mean of |image - model(noisy image)|, or of its square, a float32 scalar."""
    error = image - model(add_noise(image, t, noise, alphas), t, voltages).float()
    return error.square().mean() if squared else error.abs().mean()


def ddim_schedule(steps: int) -> np.ndarray:
    """Return the steps of DDIM, (steps, 4) float64 numpy: for each its time t and the weights a, b, c of
    `sampling_step`.

    Each adds as much noise as in training, and the last returns the model's image; 1000 steps are ancestral
    sampling (Ho et al., eq. 7). Source: Song et al., eq. 12 and 16 with eta 1. Raises TpukitError for other
    numbers of steps than 1 to 1000."""
    if not 1 <= steps <= STEPS:
        raise TpukitError(f"sampling_steps={steps}: choose 1 to {STEPS}")
    times = np.linspace(-1, STEPS - 1, steps + 1).astype(int)[::-1]
    left = alphas_cumprod()
    schedule = []
    for time, next_time in zip(times[:-2], times[1:-1]):
        now, then = left[time], left[next_time]
        sigma = np.sqrt((1 - now / then) * (1 - then) / (1 - now))
        # The noise that x holds is (x - sqrt(now) * image) / sqrt(1 - now).
        of_x = np.sqrt((1 - then - sigma**2) / (1 - now))
        schedule.append((time, np.sqrt(then) - of_x * np.sqrt(now), of_x, sigma))
    schedule.append((times[-2], 1.0, 0.0, 0.0))
    return np.array(schedule)


def sampling_step(model: Module, x: Tensor, voltages: Tensor, row: Tensor, noise: Tensor) -> Tensor:
    """x <- a * image + b * x + c * noise, where image is the model's prediction at time t.

    row: (4,) float32 tensor on the device, (t, a, b, c) of a schedule. x, noise: (B, 1, S, S) float32."""
    time, of_image, of_x, of_noise = row[0], row[1], row[2], row[3]
    return of_image * model(x, time.expand(x.shape[0]), voltages).float() + of_x * x + of_noise * noise


# Noise that is the same on every device


def normal(keys: Tensor, shape: tuple[int, ...]) -> Tensor:
    """(B, *shape) standard normal numbers from (B,) int64 keys, whatever the batch, the device or the number
    of cores.

    Every number is a hash of its key and its place (the integer hash "lowbias32" of Chris Wellons, twice, on
    two streams), and two of them make a normal one (Box and Muller, 1958)."""
    import torch

    count = int(np.prod(shape))
    place = torch.arange(count, dtype=torch.int64, device=keys.device)
    start = _hash(keys)[:, None]  # (B, 1)
    first, second = _uniform(start, 2 * place), _uniform(start, 2 * place + 1)  # (B, count)
    radius = torch.sqrt(-2 * torch.log(first / 2**24))
    return (radius * torch.cos(second * (2 * np.pi / 2**24))).view(-1, *shape)


def _uniform(start, place):
    """Numbers in (0, 2^24), never 0: 24 bits, which float32 holds exactly, and a half, which keeps the
    logarithm finite."""
    bits = _hash(_hash(start ^ place) + start & _LOW_32_BITS)
    return (bits >> 8).float() + 0.5


_LOW_32_BITS = 0xFFFFFFFF


def _hash(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D & _LOW_32_BITS
    x = (x ^ (x >> 15)) * 0x846CA68B & _LOW_32_BITS
    return x ^ (x >> 16)
