"""Tokens that are drawn, rather than the most probable ones. What is drawn depends on a seed and on the name
of the prompt alone, on any device and beside any other prompts.

Shapes: B batch, V vocabulary."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


def draws_of(names: Sequence[str], count: int, seed: int) -> np.ndarray:
    """Return (len(names), count) float32, uniform in [0, 1), by the seed and each name."""
    generators = (np.random.default_rng([seed, zlib.crc32(name.encode())]) for name in names)
    return np.stack([generator.random(count, np.float32) for generator in generators])


def draw(logits: Tensor, draws: Tensor, temperature: float, top_p: float) -> Tensor:
    """Return (B, 1), tokens drawn from the softmax of logits / temperature; only from its most probable ones,
    as few as have a probability of top_p together.

    logits: (B, V) float32. draws: (B, 1), uniform in [0, 1). temperature: above 0. top_p: above 0, 1 for all
    tokens."""
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # the largest 0, so that none is infinite
    shares, tokens = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
    sums = shares.cumsum(-1)
    if top_p < 1:
        shares = shares.where(sums - shares < top_p, 0.0)
        sums = shares.cumsum(-1)
    last = (shares > 0).sum(-1, keepdim=True) - 1  # of those that may be drawn
    place = (sums <= draws * sums[:, -1:]).sum(-1, keepdim=True)
    return tokens.gather(-1, place.minimum(last))
