"""Writing text with a cache of a fixed size: every token is one run of the same graph.

Shapes: B batch, L tokens that a row may have, prompt included, V vocabulary."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tpukit.tasks.text.network import Network, Seen

if TYPE_CHECKING:
    from tpukit.devices.runtime import Runtime

COLDEST = 1e-6  # a temperature at which the most probable token is drawn


def write(
    model: Network, runtime: Runtime, tokens: Tensor, prompt: Tensor, new: int, temperature: float, seed: Any
) -> Tensor:
    """(B, L): prompts on the device, and at least `new` tokens that the model writes after them, if there is
    room.

    tokens: (B, L), each row's prompt first. prompt: (B,) their lengths, 1 or more. temperature: 0 takes the
    most probable token, 1 draws by the model's probabilities. seed: for `np.random.SeedSequence`."""
    rows, size = tokens.shape
    config, drawn = model.causal.config, np.random.default_rng(np.random.SeedSequence(seed))
    numbers = 1 - drawn.random((rows, size), np.float32)  # in (0, 1]
    cold = np.array([max(temperature, COLDEST)], np.float32)
    fixed = dict(runtime.put(dict(numbers=numbers, temperature=cold)), prompt=prompt)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    empty = torch.zeros(rows, heads, size, model.head_width, dtype=model.head.dtype)
    # From the host: made on an XLA device, they would be a graph of their own.
    made = [runtime.put(dict(keys=empty, values=empty)) for _ in range(config.num_hidden_layers)]
    state: dict[str, Any] = dict(tokens=tokens, layers=[(one["keys"], one["values"]) for one in made])
    state |= runtime.put(dict(place=np.zeros(1, np.int32)))
    step = runtime.inference(functools.partial(write_token, model))
    for _ in range(min(int(runtime.to_cpu(prompt).max()) + new, size) - 1):
        state = step(state, fixed)
    return state["tokens"]


def write_token(model: Network, state: dict[str, Any], fixed: dict[str, Tensor]) -> dict[str, Any]:
    """The state after one more place: `tokens` (B, L), in which the next one is written unless it is of a
    prompt; `place` (1,); `layers`, the cache of `Seen`."""
    tokens, place, layers = state["tokens"], state["place"], list(state["layers"])
    there = torch.arange(tokens.shape[1], device=tokens.device)
    is_here, is_next = there == place, there == place + 1  # (L,)
    seen = Seen((there <= place)[None, None, None], place, layers, is_here[:, None])
    token = torch.where(is_here, tokens, 0).sum(1, keepdim=True)  # (B, 1)
    hidden = model.run(token, place[None].expand(len(tokens), 1), seen)[:, 0]
    logits = (hidden @ model.head.t()).float()  # (B, V)
    shares = (logits / fixed["temperature"]).softmax(-1).cumsum(-1)
    number = torch.where(is_next, fixed["numbers"], 0.0).sum(1, keepdim=True)
    drawn = (shares < number * shares[:, -1:]).sum(-1, keepdim=True)
    is_written = is_next & (place + 1 >= fixed["prompt"][:, None])
    tokens = torch.where(is_written, drawn.to(tokens.dtype), tokens)
    return dict(tokens=tokens, place=place + 1, layers=layers)
