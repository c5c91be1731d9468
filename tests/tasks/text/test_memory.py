"""Whether layers are computed again: by a count of what a step keeps, and the memory of the device."""

import dataclasses
import subprocess

import pytest
import torch

from tests.tasks.text.small import write_config
from tpukit import LanguageModel
from tpukit.devices.chips import V5E, V6E
from tpukit.host.environment import detect
from tpukit_tasks.text import hub, memory, network

QWEN = dict(model_name="Qwen/Qwen3-0.6B", sequence_length=1024)


def environment(accelerator, cores=1, device_name=""):
    return dataclasses.replace(detect(), accelerator=accelerator, cores=cores, device_name=device_name)


@pytest.fixture
def t4(monkeypatch):
    monkeypatch.setattr(subprocess, "check_output", lambda command, **options: b"15360\n15360\n")
    return environment("cuda", device_name="Tesla T4")


@pytest.mark.parametrize("lora", [None, dict(r=4, lora_alpha=8, target_modules="all-linear")])
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "gemma3_text"])
def test_the_count_is_that_of_the_whole_model(family, lora, tmp_path):
    """Of all layers and of a row, where the count has two layers and a few tokens."""
    config = hub.read_config(write_config(tmp_path, family))
    config.num_hidden_layers = 5
    if getattr(config, "layer_types", None):
        config.layer_types = (config.layer_types * 5)[:5]
    fixed, row = memory.step_bytes(config, lora, 40, True)
    net = network.build(config, None, lora=lora).train()
    weights = {p.untyped_storage().data_ptr() for p in net.parameters()}
    shapes = {shape for p in net.parameters() for shape in (p.shape, p.shape[::-1])}
    kept = {}

    def keep(tensor):
        is_new = tensor.untyped_storage().data_ptr() not in weights
        if is_new and tensor.shape not in shapes:  # nor a weight's cast
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.zeros(3, 40, dtype=torch.long)
    half = torch.autocast("cpu", torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), half:
        net(tokens, torch.ones_like(tokens))
    whole = sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / 3
    assert row == pytest.approx(
        whole, rel=0.25
    )  # masks, and small matrices' products, are counted differently
    trained = sum(p.numel() for p in net.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in net.parameters()) - trained
    own = fixed - 8 * memory.MAX_LOGITS
    assert own == pytest.approx(memory.TRAINED_BYTES * trained + memory.FROZEN_BYTES * frozen, rel=0.01)


def test_a_tpu_keeps_what_fits_and_computes_the_rest_again():
    chosen = [
        LanguageModel(**QWEN, batch_size=rows).choose_settings(environment("tpu", 1, name))
        for rows, name in ((4, "v5litepod-1"), (8, "v5litepod-1"), (8, "v6e-1"))
    ]
    assert [task.gradient_checkpointing for task in chosen] == ["no", "yes", "no"]
    assert {task.micro_batches for task in chosen} == {1}
    assert memory.device_bytes(environment("tpu", 1, "v6e-1")) == V6E.hbm_bytes > V5E.hbm_bytes


def test_a_gpu_takes_micro_batches_first(t4):
    chosen = [LanguageModel(**QWEN, batch_size=rows).choose_settings(t4) for rows in (4, 8, 16)]
    assert [task.gradient_checkpointing for task in chosen] == ["no"] * 3
    assert [task.micro_batches for task in chosen] == [1, 2, 4]
    given = LanguageModel(**QWEN, batch_size=16, gradient_checkpointing="yes").choose_settings(t4)
    assert (given.gradient_checkpointing, given.micro_batches) == ("yes", 1)


def test_a_row_that_does_not_fit_is_computed_again_on_a_gpu_as_well(t4):
    long = dict(QWEN, sequence_length=32768)
    assert LanguageModel(**long, batch_size=2).choose_settings(t4).gradient_checkpointing == "yes"


def test_a_gpu_of_unknown_memory_is_taken_for_a_t4(monkeypatch):
    def fail(command, **options):
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "check_output", fail)
    assert memory.device_bytes(environment("cuda")) == memory.SMALLEST
