"""A trained model in the files of transformers and of peft, for use without tpukit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tpukit.tasks.text import hub
from tpukit.tasks.text.network import Network

TOKENS = 32  # of the rows that are compared


def write(model: Network, tokenizer: Any, to: str, folder: Path, base: str) -> float:
    """Write a model with its tokenizer to a folder. to: "peft", the adapter alone, or "transformers", the
    whole model with the adapter merged into it, in float32. base: the name of the model that the adapter is
    for. Returns the largest difference of the logits once it is loaded from there, relative to the largest
    logit, or to 1 if that is smaller."""
    transformers, net = hub.imported("transformers"), model.net
    model.to_float32()
    config = model.causal.config
    numbers = torch.arange(2 * TOKENS).view(2, TOKENS) * 7 % config.vocab_size
    rows = numbers[:, : config.max_position_embeddings]
    with torch.no_grad():
        expected = model(rows, torch.ones_like(rows)) @ model.head.t()
    config.eos_token_id = model.causal.generation_config.eos_token_id = tokenizer.eos_token_id
    if to == "peft":
        net.peft_config["default"].base_model_name_or_path = base  # not a folder of this machine
        net.save_pretrained(folder)
        plain = hub.imported("peft").PeftModel.from_pretrained(net.unload(), folder)
    else:
        whole = net.merge_and_unload() if hasattr(net, "merge_and_unload") else net
        whole.save_pretrained(folder)
        plain = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    tokenizer.save_pretrained(folder)
    plain.set_attn_implementation("sdpa")
    with torch.no_grad():
        found = plain.eval()(rows).logits.float()
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0))
