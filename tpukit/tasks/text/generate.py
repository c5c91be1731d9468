"""Writing text with a cache of a fixed size: every token is one run of the same graph.

Shapes: B batch, L tokens that a row may have, prompt included, H heads of keys, D numbers of a head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tpukit.tasks.text.network import Network, Seen, head_width

if TYPE_CHECKING:
    from tpukit.devices.runtime import Runtime


class Cache:
    """Keys and values of every layer, (B, H, L, D) each, of which a step writes one place.

    layers: [(keys, values)]. is_new: (1, 1, L, 1) bool, True at that place."""

    def __init__(self, layers: list[tuple[Tensor, Tensor]], is_new: Tensor) -> None:
        self.layers, self.is_new = list(layers), is_new

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values with those of a layer at the new place, (B, H, 1, D) each."""
        keys, values = (
            torch.where(self.is_new, new.to(old.dtype), old)
            for old, new in zip(self.layers[layer], (key, value))
        )
        self.layers[layer] = keys, values
        return keys, values


def write(
    model: Network,
    runtime: Runtime,
    tokens: Tensor,
    lengths: Tensor,
    steps: int,
    temperature: float,
    seed: Any,
) -> Tensor:
    """(B, L): prompts on the device, and what the model writes after them.

    tokens: (B, L), each row's prompt first. lengths: (B,) of the prompts, 1 or more. steps: how many tokens
    are read or written, at most L - 1. temperature: 0 takes the most probable token, 1 draws by the model's
    probabilities. seed: of the numbers to draw by, as for `np.random.SeedSequence`."""
    rows, size = tokens.shape
    numbers = np.random.default_rng(np.random.SeedSequence(seed)).random((rows, size), np.float32)
    fixed = runtime.put(dict(numbers=numbers, temperature=np.array([temperature], np.float32)))
    state: dict[str, Any] = dict(tokens=tokens, place=runtime.put(dict(place=np.zeros(1, np.int32)))["place"])
    state["layers"] = _empty_layers(model, runtime, rows, size)
    step = runtime.inference(_Step(model, is_greedy=temperature == 0))
    for _ in range(min(steps, size - 1)):
        state = step(state, dict(fixed, lengths=lengths))
    return state["tokens"]


class _Step:
    """One step for all rows, as a function with a name for `Runtime.compile`."""

    __name__ = "write"

    def __init__(self, model: Network, is_greedy: bool) -> None:
        self.model, self.is_greedy = model, is_greedy

    def __call__(self, state: dict[str, Any], fixed: dict[str, Tensor]) -> dict[str, Any]:
        tokens, place = state["tokens"], state["place"]  # (B, L), (1,)
        there = torch.arange(tokens.shape[1], device=tokens.device)
        is_here, is_next = there == place, there == place + 1
        cache = Cache(state["layers"], is_here[:, None])
        seen = Seen((there <= place)[None, None, None], place, cache)
        token = torch.where(is_here, tokens, 0).sum(1, keepdim=True)  # (B, 1)
        hidden = self.model.run(token, place[None].expand(len(tokens), 1), seen)[:, 0]
        logits = (hidden @ self.model.head.t()).float()  # (B, V)
        if self.is_greedy:
            written = logits.argmax(-1)
        else:
            shares = (logits / fixed["temperature"]).softmax(-1).cumsum(-1)
            number = torch.where(is_next, fixed["numbers"], 0.0).sum(1, keepdim=True)
            written = (shares < number * shares[:, -1:]).sum(-1)
        is_written = is_next & (place + 1 >= fixed["lengths"][:, None])  # not within a prompt
        tokens = torch.where(is_written, written[:, None].to(tokens.dtype), tokens)
        return dict(tokens=tokens, place=place + 1, layers=cache.layers)


def _empty_layers(model: Network, runtime: Runtime, rows: int, size: int) -> list[tuple[Tensor, Tensor]]:
    config = model.causal.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    empty = torch.zeros(rows, heads, size, head_width(config), dtype=model.head.dtype)
    # From the host: made on an XLA device, they would be a graph of their own.
    made = [runtime.put(dict(keys=empty, values=empty)) for _ in range(config.num_hidden_layers)]
    return [(layer["keys"], layer["values"]) for layer in made]
