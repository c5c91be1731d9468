"""Whether a step of a language model fits into the memory of a device if no layer is computed again."""

from __future__ import annotations

import copy
import os
import subprocess
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tpukit.devices.chips import V5E, find_chip
from tpukit.host.text import GIB
from tpukit_tasks.text import network
from tpukit_tasks.text.loss import MAX_LOGITS

if TYPE_CHECKING:
    from tpukit.host.environment import Environment

SHARE = 0.75  # of a device's memory, for what is counted here; the rest for what is not
SMALLEST = 14.5 * GIB  # of a GPU whose memory nobody says: that of a T4
TRAINED_BYTES = 18  # of a weight: itself, its gradient, two averages of AdamW, each in fp32; a copy in half
FROZEN_BYTES = 2


def step_bytes(config: Any, lora: dict[str, Any] | None, length: int, is_half: bool) -> tuple[float, float]:
    """Return (bytes that a step takes whatever its batch, bytes for each row): weights and what belongs to
    them, and what the layers keep for the backward pass. On a TPU attention keeps nothing, see
    `network._attention`; elsewhere PyTorch's keeps nothing that grows with the square of the length.

    Counted on the CPU for a model of one layer and one of two. config: of transformers. lora: of
    `network.build`. length: T. is_half: whether it computes in half precision."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a process that has computed with more cannot be forked for a launch
    try:
        (one, one_kept), (two, two_kept) = (_count(config, lora, layers, is_half) for layers in (1, 2))
    finally:
        torch.set_num_threads(threads)
    more = config.num_hidden_layers - 1
    logits = 2 * 4 * MAX_LOGITS
    return one + more * (two - one) + logits, length * (one_kept + more * (two_kept - one_kept))


def _count(config: Any, lora: dict[str, Any] | None, layers: int, is_half: bool) -> tuple[float, float]:
    """Return (bytes of the weights and what belongs to them, bytes that each token keeps)."""
    small = copy.deepcopy(config)
    vocabulary, small.vocab_size, small.num_hidden_layers = config.vocab_size, 1, layers
    small.pad_token_id = small.bos_token_id = small.eos_token_id = None
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[:layers]
    tokens = torch.zeros(1, 13, dtype=torch.long)
    with torch.random.fork_rng(devices=()):
        net = network.build(small, None, lora=lora).train()
        parameters, kept = list(net.parameters()), {}
        weights = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        shapes = {shape for p in parameters for shape in (p.shape, p.shape[::-1])}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights and tensor.shape not in shapes:  # nor a weight's cast
                kept[storage.data_ptr()] = tensor  # held, so that no other gets its memory
            return tensor

        half = torch.autocast("cpu", torch.bfloat16, enabled=is_half)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), half:
            net(tokens, torch.ones_like(tokens))
    fixed = sum(p.numel() * (TRAINED_BYTES if p.requires_grad else FROZEN_BYTES) for p in parameters)
    table = (
        net.causal.get_input_embeddings().weight
    )  # of which all but one entry are left out, and of the head
    entry = table.numel() * (TRAINED_BYTES if table.requires_grad else FROZEN_BYTES)
    entries = 1 if config.tie_word_embeddings else 2
    fixed += (vocabulary - 1) * entries * entry
    return fixed, sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / tokens.numel()


def device_bytes(env: Environment) -> float:
    """Return the memory of one TPU chip or GPU of this machine; of a processor, half of the machine's."""
    if env.accelerator == "tpu":
        return (find_chip(env.device_name) or V5E).hbm_bytes
    if env.accelerator == "cuda":
        command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        try:
            listed = subprocess.check_output(command, stderr=subprocess.DEVNULL, timeout=30)
            return min(float(line) for line in listed.decode().split()) * 2**20
        except (OSError, ValueError, subprocess.SubprocessError):
            return SMALLEST
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2
    except (AttributeError, ValueError, OSError):  # Windows
        return SMALLEST
