"""Language models of transformers, with adapters of peft: built, run on packed documents, writing text.

Shapes: B batch, T positions, L positions of a cache, H heads, G queries to a key, D numbers of a head, W
width of the model, V vocabulary."""

from __future__ import annotations

import functools
import math
import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from tpukit.devices.tensors import is_on_xla, recomputed
from tpukit.host.errors import TpukitError, explained
from tpukit_tasks.text import dropout, hub

if TYPE_CHECKING:
    from tpukit.devices.runtime import Runtime

ATTENTION = "tpukit"  # name of `_attention` in transformers
PART = 128  # queries at a time on a TPU, whose weights then fit into the memory on its chip
STEPS = 16  # tokens that are written before the host looks whether all rows have ended


def build(
    config: Any,
    folder: Path | None,
    *,
    lora: int | dict[str, Any] | None,
    recompute: bool = False,
    dtype: torch.dtype | None = None,
) -> Network:
    """Return the `Network` of a config, on the CPU.

    folder: of the weights; None: random ones. lora: settings of peft's LoRA, or only the rank of adapters of
    all matrices of the layers, which train, and all else is frozen; None: all trains. recompute: keep only
    the input of each layer for the backward pass, which computes the layer once more. dtype: of all but
    adapters; None: bfloat16 for what is frozen, else float32."""
    transformers = hub.imported("transformers")
    transformers.AttentionInterface.register(ATTENTION, _attention)
    kind, dtype = transformers.AutoModelForCausalLM, dtype or (torch.bfloat16 if lora else torch.float32)
    options: Any = dict(attn_implementation=ATTENTION, dtype=dtype, trust_remote_code=False)
    with explained(f"the model of {folder or config.model_type} cannot be made"):
        if folder is None:
            model = kind.from_config(config, **options)
        else:
            safely = dict(use_safetensors=True, local_files_only=True, output_loading_info=True)
            model, found = kind.from_pretrained(folder, config=config, **options, **safely)
            for wrong in (*found["missing_keys"], *found["mismatched_keys"]):
                raise TpukitError(f"{folder}: the weights do not fit its config.json, {wrong} first")
    for module in model.modules():
        if getattr(module, "rope_type", None) == "longrope":
            module.rope_type = "short"  # chosen once, rather than by the positions, see `hub.most_positions`
    if lora:
        peft = hub.imported("peft")
        given = lora if isinstance(lora, dict) else dict(r=lora, lora_alpha=2 * lora)
        settings: Any = dict(target_modules="all-linear", task_type="CAUSAL_LM") | given
        settings["fan_in_fan_out"] = config.model_type == "gpt2"  # its matrices are transposed
        named = explained("lora_targets fit no layer of the model")
        with named, warnings.catch_warnings():  # it reads a name that transformers will drop
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
            model = peft.get_peft_model(model, peft.LoraConfig(**settings))
            for module in model.modules():
                if isinstance(module, peft.tuners.lora.LoraLayer):
                    module.forward = types.MethodType(_with_adapter, module)
    network = Network(model)
    if recompute:
        for module in network.causal.modules():
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing, module._gradient_checkpointing_func = True, recomputed
    return network


class Network(nn.Module):
    """A causal language model with packed documents. `net`: a model of transformers, or of peft around one.

    Its state is what trains: frozen weights are read from their own files again."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net
        self.trained = [name for name, value in self.named_parameters() if value.requires_grad]
        self.adapters: list[Any] = [m for m in self.modules() if hasattr(m, "cast_input_dtype_enabled")]
        self.dropouts = dropout.replace_torchs(net)

    @property
    def causal(self) -> Any:
        """The model of transformers, with its adapters in it."""
        return self.net.get_base_model() if hasattr(self.net, "get_base_model") else self.net

    @property
    def head(self) -> Tensor:
        """(V, W)"""
        return self.causal.get_output_embeddings().weight

    def forward(self, tokens: Tensor, documents: Tensor) -> Tensor:
        """Return (B, T, W), the hidden states before the head. tokens: (B, T). documents: (B, T) the number
        of each token's document in its row; a token sees itself and what came before it in its own."""
        is_same = documents[:, :, None] == documents[:, None, :]
        places = torch.arange(tokens.shape[1], device=tokens.device)
        mask = is_same & (places[:, None] >= places)  # (B, T, T)
        return self.run(tokens, mask.sum(-1) - 1, mask[:, None], places)

    def run(self, tokens: Tensor, positions: Tensor, mask: Tensor, places: Tensor, *cache: Any) -> Tensor:
        """Return what `forward` does. tokens: (B, T). positions: (B, T) of each in its document. mask: (B, 1,
        T, L) bool, what each sees; L is T without a cache. places: (T,) or (B, 1, T), in the row. cache: a
        list of (keys, values), (B, H / G, L, D) each, to which each layer adds its own; and (L, 1) or (B, 1,
        L, 1) bool, where."""
        embedded = self.causal.get_input_embeddings()(tokens)
        if self.training and not embedded.requires_grad:
            embedded.requires_grad_()  # else a layer that is computed again has nothing to differentiate by
        # Autocast casts the input of a product. peft would first make a copy of it in float32.
        peft_casts = not torch.is_autocast_enabled(embedded.device.type)
        for adapter in self.adapters:
            adapter.cast_input_dtype_enabled = peft_casts
        if self.training and self.dropouts:  # drawn here, since layers that are computed again may not
            seed = (2**24 * torch.rand((), device=tokens.device)).int()
            for module in self.dropouts:
                module.seed = seed
        options = dict(position_ids=positions, use_cache=False, seen=(mask, places, *cache))
        return self.causal.base_model(inputs_embeds=embedded, **options).last_hidden_state

    def export(self, tokenizer: Any, ends: list[int], to: str, folder: Path, base: str) -> float:
        """Write the model and its tokenizer to a folder. to: "peft", the adapter alone, which is for the
        model `base`; or "transformers", the whole model with the adapter in it. ends: the tokens after which
        it is to stop. Return the largest difference of the logits once that is loaded, relative to the
        largest logit, or to 1 if that is smaller."""
        net, config = self.net, self.causal.config
        rows = (torch.arange(64) % config.vocab_size).view(2, 32)[:, : config.max_position_embeddings]
        with torch.no_grad():
            expected = self(rows, torch.ones_like(rows)) @ self.head.t()
        config.eos_token_id = self.causal.generation_config.eos_token_id = ends
        self.causal.generation_config.save_pretrained(folder)
        hub.save_tokenizer(tokenizer, folder)
        if to == "peft":
            net.peft_config["default"].base_model_name_or_path = base  # not a folder of this machine
            net.save_pretrained(folder)
            plain = hub.imported("peft").PeftModel.from_pretrained(net.unload(), folder)
        else:
            whole = net.merge_and_unload() if hasattr(net, "merge_and_unload") else net
            whole.save_pretrained(folder)
            kind = hub.imported("transformers").AutoModelForCausalLM
            plain = kind.from_pretrained(folder, local_files_only=True)
        plain.set_attn_implementation("sdpa")
        with torch.no_grad():
            difference = (plain.eval()(rows).logits.float() - expected).abs().max()
        return float(difference / expected.abs().max().clamp(min=1.0))

    def adapt_to(self, dtype: torch.dtype) -> None:
        """Keep what is frozen in a dtype that the device computes in: a T4 has no bfloat16. dtype: in which
        products are computed."""
        if dtype != torch.float16:
            return
        embedding = self.causal.get_input_embeddings().weight
        for parameter in self.parameters():
            if parameter.dtype == torch.bfloat16:
                # Matrices as autocast would make them for each product. The rest is added to and normalised
                # in float32, in which nothing overflows.
                is_matrix = parameter.dim() >= 2 and parameter is not embedding
                parameter.data = parameter.data.to(dtype if is_matrix else torch.float32)

    def state_dict(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        state = super().state_dict(*arguments, **options)
        return {name: state[name] for name in self.trained}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        if strict and (different := state_dict.keys() ^ set(self.trained)):
            raise RuntimeError(f"missing or unknown: {', '.join(sorted(different)[:3])}")
        return super().load_state_dict(state_dict, strict=False, assign=assign)


def _with_adapter(module: Any, x: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """Return what peft's forward does of a layer with an adapter. That scales and adds by passes of their own
    over the layer's output; here the small matrix is scaled, and its product added in place."""
    is_plain = not (module.disable_adapters or module.merged or arguments or options)
    if not is_plain or is_on_xla(x) or torch.compiler.is_compiling():  # a compiler fuses the passes
        return type(module).forward(module, x, *arguments, **options)
    first, second = module.lora_A["default"], module.lora_B["default"]
    out = module.base_layer(x)
    low = first(module.lora_dropout["default"](module._cast_input_dtype(x, first.weight.dtype)))
    if low.dtype != out.dtype:  # frozen in bf16, and computed without autocast
        return (out + second(low) * module.scaling["default"]).to(out.dtype)
    scaled = (second.weight * module.scaling["default"]).to(out.dtype)
    out.flatten(0, -2).addmm_(low.flatten(0, -2), scaled.t())
    return out


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, *, seen: tuple, **options: Any
) -> tuple[Tensor, None]:
    """Return ((B, T, H, D), None), for transformers. query: (B, H, T, D). key, value: (B, H / G, T, D). seen:
    mask, places and cache of `Network.run`."""
    allowed, places, *cache = seen
    if cache:
        layers, is_new = cache
        keys, values = layers[module.layer_idx]
        key = torch.where(is_new, key.to(keys.dtype), keys)
        value = torch.where(is_new, value.to(values.dtype), values)
        layers[module.layer_idx] = key, value
    if window := options.get("sliding_window"):
        # A row's documents lie one after another, so that places differ as positions do.
        there = torch.arange(key.shape[2], device=key.device)
        allowed = allowed & (places[..., None] - there < window)
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    if not is_on_xla(query):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, allowed, scaling=scale)
    if cache:  # a few queries, or prompts that nothing differentiates
        out = _written_out(query, key, value, allowed, scale)
    else:
        part = functools.partial(_written_out, scale=scale)
        if torch.is_grad_enabled() and query.requires_grad:
            part = functools.partial(recomputed, part)  # rather than write the weights of all parts to memory
        outs, ends = [], range(PART, query.shape[2] + PART, PART)
        for q, rows, end in zip(query.split(PART, 2), allowed.split(PART, 2), ends):
            # None of these queries sees what follows `end`.
            outs.append(part(q, key[:, :, :end], value[:, :, :end], rows[..., :end]))
        out = torch.cat(outs, 2)
    return out.transpose(1, 2), None


def _written_out(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, scale: float) -> Tensor:
    """Return (B, H, t, D), the attention of t queries to L keys. query: (B, H, t, D). key, value: (B, H / G,
    L, D). allowed: (B, 1, t, L). Written out, because torch would multiply in float32 on a TPU, in six
    passes."""
    grouped = query.unflatten(1, (key.shape[1], -1))  # (B, H / G, G, t, D)
    logits = (grouped * scale) @ key[:, :, None].mT
    weights = logits.float().masked_fill(~allowed[:, :, None], float("-inf")).softmax(-1)
    return (weights.to(value.dtype) @ value[:, :, None]).flatten(1, 2)


def write(
    model: Network,
    runtime: Runtime,
    tokens: Tensor,
    prompt: Tensor,
    new: int,
    ends: Sequence[int] = (),
    draws: Tensor | None = None,
    draw: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Return (B, L): prompts on the device, and up to `new` tokens that the model writes after each, if there
    is room: the most probable ones, or what `draw` makes of their logits (B, V) and of (B, 1) of the `draws`.

    tokens: (B, L), each row's prompt first. prompt: (B,) their lengths, 1 or more. ends: tokens after which
    nothing counts: it stops once each row has one. draws: (B, L), for the token that follows each."""
    rows, size = tokens.shape
    whole, config = tokens, model.causal.config
    if not runtime.compiles:  # where another shape is not another graph
        needed = STEPS * math.ceil((int(runtime.to_cpu(prompt).max()) + new) / STEPS)
        size = min(size, needed)
        tokens, draws = tokens[:, :size], None if draws is None else draws[:, :size]
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    empty = torch.zeros(rows, heads, size, config.head_dim, dtype=model.head.dtype)
    # From the host: made on an XLA device, they would be a graph of their own.
    layers = runtime.put([(empty, empty)] * config.num_hidden_layers)
    ended, stops = runtime.put([np.zeros((rows, 1), bool), np.array([*ends, -1], np.int32)])
    state = runtime.inference(functools.partial(read_prompts, model))(tokens, prompt, layers, ended)
    step = runtime.inference(functools.partial(write_token, model, draw=draw))
    for number in range(1, new + 1):
        state = step(state, stops, draws)
        if number % STEPS == 0 and bool(runtime.to_cpu(state["ended"]).all()):
            break
    return torch.cat([state["tokens"], whole[:, size:]], 1) if size < whole.shape[1] else state["tokens"]


def read_prompts(model: Network, tokens: Tensor, prompt: Tensor, layers: Any, ended: Tensor) -> dict:
    """Return the state before the first token is written, with the keys and values of all places: those of
    prompts stay, the others are written over before they are seen. For the arguments see `write_token`."""
    there, layers = torch.arange(tokens.shape[1], device=tokens.device), list(layers)
    seen = (there[:, None] >= there)[None, None]  # (1, 1, L, L)
    model.run(tokens, there.expand(tokens.shape), seen, there, layers, torch.ones_like(there).bool()[:, None])
    return dict(tokens=tokens, place=(prompt[:, None] - 1).clamp(min=0), layers=layers, ended=ended)


def write_token(
    model: Network, state: dict, ends: Tensor, draws: Tensor | None = None, *, draw: Callable | None = None
) -> dict:
    """Return the state after one more token of each row: `tokens` (B, L); `place` (B, 1), of the last one;
    `layers`, the cache of `Network.run`; `ended` (B, 1), whether one of `ends` (E,) was written or the row is
    full. draws, draw: see `write`."""
    tokens, place, layers = state["tokens"], state["place"], list(state["layers"])
    there = torch.arange(tokens.shape[1], device=tokens.device)
    is_here, is_next = there == place, there == place + 1  # (B, L)
    token = torch.where(is_here, tokens, 0).sum(1, keepdim=True)  # (B, 1)
    seen, is_new = (there <= place)[:, None, None], is_here[:, None, :, None]  # (B, 1, 1, L), (B, 1, L, 1)
    hidden = model.run(token, place.clamp(max=len(there) - 1), seen, place[:, None], layers, is_new)[:, 0]
    logits = (hidden @ model.head.t()).float()  # (B, V)
    if draw is None or draws is None:
        found = logits.argmax(-1, keepdim=True)
    else:
        found = draw(logits, torch.where(is_here, draws, 0.0).sum(1, keepdim=True))
    found = found.to(tokens.dtype)
    tokens = torch.where(is_next, found, tokens)
    ended = state["ended"] | (found == ends).any(1, keepdim=True) | (place + 2 >= len(there))
    return dict(tokens=tokens, place=place + 1, layers=layers, ended=ended)
