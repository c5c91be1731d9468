"""Language models of transformers, with adapters of peft: built, and run on packed documents.

Shapes: B batch, T positions, L positions of a cache, H heads, G
queries to a key, D numbers of a head, W width of the model, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from tpukit.devices.tensors import is_on_xla, with_optimization_barrier
from tpukit.host.errors import TpukitError, first_line
from tpukit.tasks.text import hub

if TYPE_CHECKING:
    from tpukit.tasks.text.generate import Cache

ATTENTION = "tpukit"  # name of `_attention` in transformers


def build(config: Any, folder: Path | None, *, lora: tuple[int, float] | None) -> Network:
    """The `Network` of a config, on the CPU. folder: of the weights; None: random ones. lora: (rank, alpha):
    low-rank adapters train, and all else is frozen, in bfloat16; None: all trains, in float32."""
    transformers = hub.imported("transformers")
    transformers.AttentionInterface.register(ATTENTION, _attention)
    kind, options = transformers.AutoModelForCausalLM, dict(attn_implementation=ATTENTION)
    options |= dict(dtype=torch.bfloat16 if lora else torch.float32, trust_remote_code=False)
    try:
        if folder is None:
            model, problems = kind.from_config(config, **options), {}
        else:
            hub.weight_files(folder)
            options |= dict(use_safetensors=True, local_files_only=True, output_loading_info=True)
            model, problems = kind.from_pretrained(folder, config=config, **options)
    except TpukitError:
        raise
    except Exception as error:  # transformers and safetensors raise many types
        raise TpukitError(
            f"the model of {folder or config.model_type} cannot be made: {first_line(error)}"
        ) from error
    if wrong := [
        str(name) for key in ("missing_keys", "mismatched_keys") for name in problems.get(key) or ()
    ]:
        raise TpukitError(f"{folder}: the weights do not fit its config.json, {wrong[0]} first")
    if lora:
        peft, (rank, alpha) = hub.imported("peft"), lora
        settings = peft.LoraConfig(
            r=rank,
            lora_alpha=alpha,
            target_modules=list(hub.FAMILIES[config.model_type]),
            task_type="CAUSAL_LM",
            fan_in_fan_out=config.model_type == "gpt2",
        )
        model = peft.get_peft_model(model, settings)
    return Network(model)


def head_width(config: Any) -> int:
    """D, the numbers of a head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


class Seen(NamedTuple):
    """What the tokens of a row see."""

    mask: Tensor
    """(B, 1, T, L) bool; L is T without a cache"""
    places: Tensor
    """(T,) of the tokens in the row"""
    cache: Cache | None = None


class Network(nn.Module):
    """A causal language model with packed documents. `net` is of transformers, or of peft around it.

    Its state is what trains: frozen weights come from their own files again."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net
        self.trained = [name for name, value in self.named_parameters() if value.requires_grad]

    @property
    def causal(self) -> Any:
        """The model of transformers, with its adapters in it."""
        return self.net.get_base_model() if hasattr(self.net, "get_base_model") else self.net

    @property
    def head(self) -> Tensor:
        """(V, W)"""
        return self.causal.get_output_embeddings().weight

    def forward(self, tokens: Tensor, documents: Tensor) -> Tensor:
        """(B, T, W), the hidden states before the head. tokens: (B, T). documents: (B, T) the number of each
        token's document in its row; a token sees itself and what came before it in its own."""
        is_same = documents[:, :, None] == documents[:, None, :]
        places = torch.arange(tokens.shape[1], device=tokens.device)
        mask = is_same & (places[:, None] >= places)  # (B, T, T)
        return self.run(tokens, mask.sum(-1) - 1, Seen(mask[:, None], places))

    def run(self, tokens: Tensor, positions: Tensor, seen: Seen) -> Tensor:
        """(B, T, W). tokens: (B, T). positions: (B, T) of each in its document."""
        causal = self.causal
        embedded = causal.get_input_embeddings()(tokens)
        if self.training and not embedded.requires_grad:
            embedded.requires_grad_()  # else a layer that is computed twice has nothing to differentiate by
        return causal.base_model(
            inputs_embeds=embedded, position_ids=positions, use_cache=False, seen=seen
        ).last_hidden_state

    def to_float32(self) -> None:
        """Compute in float32 from here on, as `transformers` does that loads such weights."""
        self.float()
        embedding: Any = self.causal.get_input_embeddings()
        if hasattr(embedding, "scalar_embed_scale"):  # which Gemma rounds with the weights
            embedding.embed_scale.fill_(embedding.scalar_embed_scale)

    def flops(self, length: int) -> float:
        """FLOP of a training step for each token of rows of this length, as `LanguageModel.rates` counts."""
        config, head = self.causal.config, self.head
        lookups = [m.weight for m in self.modules() if isinstance(m, nn.Embedding) and m.weight is not head]
        matrices = [p for p in self.parameters() if p.ndim == 2 and all(p is not one for one in lookups)]
        both = 4 * sum(p.numel() for p in matrices)  # forward, and backward to the inputs
        trained = 2 * sum(p.numel() for p in matrices if p.requires_grad)
        width = config.num_attention_heads * head_width(config)
        return both + trained + 3 * 4 * config.num_hidden_layers * length * width

    def recompute_layers(self) -> None:
        """Keep only the input of each layer for the backward pass, which computes the layer once more."""
        self.causal._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=_recomputed)

    def state_dict(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        state = super().state_dict(*arguments, **options)
        return {name: state[name] for name in self.trained}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        if strict and (different := state_dict.keys() ^ set(self.trained)):
            raise RuntimeError(f"missing or unknown: {', '.join(sorted(different)[:3])}")
        return super().load_state_dict(state_dict, strict=False, assign=assign)

    def _apply(self, fn: Any, recurse: bool = True) -> Network:
        is_tied = self.head is self.causal.get_input_embeddings().weight
        super()._apply(fn, recurse)
        if is_tied:  # on XLA moving makes new parameters, here two of one
            self.causal.get_output_embeddings().weight = self.causal.get_input_embeddings().weight
        return self


# Attention, and layers that are computed twice


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, *, seen: Seen, **options: Any
) -> tuple[Tensor, None]:
    """What transformers calls in each layer. query: (B, H, T, D); key, value: (B, H / G, T, D). Returns
    ((B, T, H, D), None)."""
    if seen.cache is not None:
        key, value = seen.cache.update(module.layer_idx, key, value)
    allowed = seen.mask
    if window := options.get("sliding_window"):
        # A row's documents lie one after another, so that places differ as positions do.
        there = torch.arange(key.shape[2], device=key.device)
        allowed = allowed & (seen.places[:, None] - there < window)
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    if not is_on_xla(query):
        group = query.shape[1] // key.shape[1]
        key, value = (
            part.repeat_interleave(group, 1) for part in (key, value)
        )  # else no fast kernel takes it
        out = nn.functional.scaled_dot_product_attention(query, key, value, allowed, scale=scale)
        return out.transpose(1, 2), None
    # Written out, because torch would multiply in float32 there, in six passes of a TPU.
    grouped = query.unflatten(1, (key.shape[1], -1))  # (B, H / G, G, T, D)
    logits = (grouped * scale) @ key[:, :, None].mT
    weights = logits.float().masked_fill(~allowed[:, :, None], float("-inf")).softmax(-1)
    out = weights.to(value.dtype) @ value[:, :, None]
    return out.flatten(1, 2).transpose(1, 2), None


def _recomputed(function: Callable, hidden: Tensor, *others: Any) -> Tensor:
    """function(hidden, *others), of which nothing but `hidden` is kept for the backward pass. `others` get no
    gradients."""
    return _Recomputed.apply(hidden, function, others)  # pyright: ignore[reportReturnType]


class _Recomputed(torch.autograd.Function):
    """torch's own checkpoint would be optimised away by XLA, which sees the same computation twice."""

    @staticmethod
    def forward(ctx, hidden, function, others):
        ctx.save_for_backward(hidden)
        ctx.function, ctx.others = function, others
        device = hidden.device.type
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        return function(hidden, *others)

    @staticmethod
    def backward(ctx, *gradients):
        [hidden], [gradient] = ctx.saved_tensors, gradients
        hidden = with_optimization_barrier(hidden.detach(), gradient).requires_grad_()
        with torch.enable_grad(), torch.autocast(*ctx.autocast):
            out = ctx.function(hidden, *ctx.others)
        torch.autograd.backward(out, gradient)  # which adds to the gradients of the layer's weights
        return hidden.grad, None, None
