"""Diffusion with a linear schedule that predicts the clean image: noise in, loss, DDIM and ancestral sampling.

Sources: Ho et al., "Denoising Diffusion Probabilistic Models", NeurIPS 2020; Song et al., "Denoising Diffusion Implicit
Models", ICLR 2021. Nothing is clipped. Letters: B batch, S side of the image.
"""

import numpy as np

STEPS = 1000
FIRST_BETA, LAST_BETA = 1e-4, 0.02


def betas():
    """(STEPS,) float64 numpy: the variance of the noise that every step adds."""
    return np.linspace(FIRST_BETA, LAST_BETA, STEPS)


def alphas_cumprod():
    """(STEPS,) float64 numpy: how much of the clean image's variance is left after every step."""
    return np.cumprod(1 - betas())


def noisy(x_start, t, noise, alphas):
    """x_start after t + 1 steps of noise. x_start, noise: (B, 1, S, S). t: (B,) int64. alphas: (STEPS,) table on the device."""
    kept = alphas[t].view(-1, 1, 1, 1)
    return kept.sqrt() * x_start + (1 - kept).sqrt() * noise


def loss(model, x_start, voltages, t, noise, alphas, *, squared=False):
    """Mean |x_start - model(noisy image)|, or its square, a float32 scalar."""
    error = x_start - model(noisy(x_start, t, noise, alphas), t, voltages).float()
    return error.square().mean() if squared else error.abs().mean()


def ddim_schedule(steps, eta=1.0):
    """The rows (t, a, b, c) of `steps` DDIM updates x <- a * x_start + b * x + c * noise, as float64 numpy (steps, 4).

    x_start is the model's prediction at time t. The last update is x = x_start. Source: Song et al., eq. 12 and 16.
    """
    if not 1 <= steps <= STEPS:
        raise ValueError(f"sampling_steps={steps}: choose 1 to {STEPS}")
    if not 0 <= eta <= 1:
        raise ValueError(f"eta={eta}: choose 0, no noise, to 1, as much as the training added")
    times = np.linspace(-1, STEPS - 1, steps + 1).astype(int)[::-1]
    left = alphas_cumprod()
    rows = []
    for now, after in zip(times[:-1], times[1:]):
        if after < 0:
            rows.append((now, 1.0, 0.0, 0.0))
            continue
        here, there = left[now], left[after]
        sigma = eta * np.sqrt((1 - here / there) * (1 - there) / (1 - here))
        # The noise that x holds is (x - sqrt(here) x_start) / sqrt(1 - here).
        kept = np.sqrt((1 - there - sigma**2) / (1 - here))
        rows.append((now, np.sqrt(there) - kept * np.sqrt(here), kept, sigma))
    return np.array(rows)


def ancestral_schedule():
    """The rows of the STEPS updates of plain ancestral sampling, as `ddim_schedule` gives them. Source: Ho et al., eq. 7."""
    beta, left = betas(), alphas_cumprod()
    before = np.append(1.0, left[:-1])
    clean = np.sqrt(before) * beta / (1 - left)
    kept = np.sqrt(1 - beta) * (1 - before) / (1 - left)
    sigma = np.sqrt(beta * (1 - before) / (1 - left))  # 0 at the last update
    return np.stack([np.arange(STEPS), clean, kept, sigma], 1)[::-1]


def update(model, x, voltages, row, noise):
    """One update of a sampler. row: (4,) float32 tensor on the device, of a schedule. x, noise: (B, 1, S, S), float32."""
    t = row[0].expand(len(x))
    return row[1] * model(x, t, voltages).float() + row[2] * x + row[3] * noise


# Noise that is the same on every device


def normal(keys, shape):
    """(B, *shape) standard normal numbers from (B,) int64 keys: the same on every device, in every batch, on any number of
    cores.

    Each number is a hash of its key and its place (the integer hash "lowbias32" of Chris Wellons, twice, on two streams), and
    two make a normal one (Box and Muller, 1958).
    """
    import torch

    count = int(np.prod(shape))
    place = torch.arange(count, dtype=torch.int64, device=keys.device)
    start = _hash(keys)[:, None]  # (B, 1)
    first, second = (_hash(_hash(start ^ (2 * place + stream)) + start & _MASK) for stream in (0, 1))  # (B, count)
    # 24 bits each, which float32 holds exactly; the half keeps the logarithm finite.
    first, second = ((bits >> 8).float() + 0.5 for bits in (first, second))
    radius = torch.sqrt(-2 * torch.log(first / 2**24))
    return (radius * torch.cos(second * (2 * np.pi / 2**24))).view(-1, *shape)


_MASK = 0xFFFFFFFF


def _hash(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D & _MASK
    x = (x ^ (x >> 15)) * 0x846CA68B & _MASK
    return x ^ (x >> 16)
