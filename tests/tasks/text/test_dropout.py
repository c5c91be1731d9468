"""Dropout of LoRA: peft's, with one mask where a layer is computed twice, and exact under resume."""

import copy
from typing import Any

import pytest
import torch

from tests.conftest import checkpoint, exact, refuses, same
from tests.tasks.text.small import CHAT, plain_model, task_of, write_config, write_lines, write_model
from tests.tasks.text.test_network import ONE, TOKENS, assert_same_as_plain, assert_same_gradients
from tests.tpukit.training.conftest import train_in
from tests.tpukit.training.test_saver import interrupt_at
from tpukit_tasks.text import network
from tpukit_tasks.text.dropout import Dropout

peft = pytest.importorskip("peft")
LORA: Any = dict(r=3, lora_alpha=6, lora_dropout=0.4)


def dropouts_of(model):
    return [one for layer in model.modules() for one in getattr(layer, "lora_dropout", {}).values()]


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_with_the_same_masks_logits_and_gradients_are_those_of_peft(family, tmp_path):
    """Of layers that are computed again; peft's are not."""
    plain = plain_model(family, tmp_path)
    settings = peft.LoraConfig(**LORA, target_modules="all-linear", task_type="CAUSAL_LM")
    settings.fan_in_fan_out = family == "gpt2"
    theirs = peft.get_peft_model(copy.deepcopy(plain), settings).train()
    ours = network.build(copy.deepcopy(plain.config), None, lora=LORA, recompute=True, dtype=torch.float32)
    ours.train()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    ours.net.load_state_dict(theirs.state_dict())
    pairs = list(zip(dropouts_of(theirs), dropouts_of(ours), strict=True))
    assert len(pairs) == len(ours.dropouts) > 7
    for one, other in pairs:
        assert type(one) is torch.nn.Dropout and one.p == other.p == 0.4

        def drop(x, other=other):
            masks = Dropout(other.p, other.number)
            masks.seed = drawn
            return x * (masks(torch.ones_like(x)) > 0) / 0.6

        one.forward = drop
    torch.manual_seed(3)
    drawn = (2**24 * torch.rand(())).int()
    torch.manual_seed(3)
    assert_same_as_plain(ours, theirs)
    assert_same_gradients(dict(ours.net.named_parameters()), dict(theirs.named_parameters()))
    assert not torch.allclose(ours(TOKENS, ONE), ours(TOKENS, ONE)), "each has its own masks"
    ours.eval()
    assert torch.equal(ours(TOKENS, ONE), ours(TOKENS, ONE)), "nothing is dropped where it predicts"


def correlation(a, b):
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


def test_masks_drop_their_share_and_no_two_modules_steps_or_neighbours_have_to_do_with_each_other():
    """Bounds of 5 standard deviations of 2^20 independent draws."""
    x, masks = torch.ones(8, 256, 512), {}
    for seed in (0, 1, 2**23):
        for number in (0, 1, 2):
            module = Dropout(0.3, number)
            module.seed = torch.tensor(seed, dtype=torch.int32)
            found = module(x)
            assert set(found.unique().tolist()) == {0.0, float(torch.tensor(1 / 0.7))}
            masks[seed, number] = (found > 0).float()
            assert torch.equal(found, module(x)), "a layer that is computed again"
    limit = 5 / 2**10
    assert all(abs(float(mask.mean()) - 0.7) < limit * 0.46 for mask in masks.values())
    first = masks[0, 0]
    assert all(abs(correlation(first, other)) < limit for at, other in masks.items() if at != (0, 0))
    for along in (0, 1, 2):
        assert abs(correlation(first, first.roll(1, along))) < limit


def test_a_mask_is_the_same_on_xla_without_a_fallback(xla):
    module, x = Dropout(0.3, 5), torch.randn(4, 6, 32)
    module.seed = torch.tensor(2**23 + 5, dtype=torch.int32)
    expected = module(x)
    module.seed, x = xla.put((module.seed, x))
    torch.testing.assert_close(xla.to_cpu(module(x)), expected, rtol=1e-6, atol=0)
    assert not xla.counters()["fallbacks"]


@pytest.fixture
def task(tmp_path):
    rows = [dict(prompt=f"{n}" * (1 + n % 5), completion="abc" * (1 + n % 4)) for n in range(60)]
    path = write_lines(tmp_path / "chats.jsonl", *rows)
    folder = write_model(tmp_path / "model", chat=CHAT)
    options = dict(pretrained="yes", lora_rank=2, lora_dropout=0.5, lr=1e-2)
    return task_of(folder, path, **options, epochs=2, sequence_length=32)


@pytest.mark.parametrize("device", ["cpu", pytest.param("xla", marks=pytest.mark.slow)])
def test_a_run_that_is_interrupted_drops_what_the_straight_one_drops(
    device, task, tmp_path, request, monkeypatch
):
    runtime = request.getfixturevalue(device)
    straight = train_in(tmp_path / "straight", task, runtime)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_at(patch, 3)
        train_in(tmp_path / "run", task, runtime)
    run = train_in(tmp_path / "run", task, runtime)
    assert exact(run) == exact(straight) and same(checkpoint(run)["model"], checkpoint(straight)["model"])
    steps = [event for event in straight.records("compile") if event["what"] == "step"]
    assert sum(event["programs"] for event in steps) <= 1


def test_settings_of_lora_without_lora_are_refused_and_a_dropout_of_everything():
    for setting in (dict(lora_dropout=0.1), dict(lora_alpha=4.0), dict(lora_targets=("q_proj",))):
        with refuses(*setting, "all weights train", "adapter='lora'"):
            task_of("tiny", **setting)
    with refuses("lora_dropout=1.0", "less than 1"):
        task_of("tiny", adapter="lora", lora_dropout=1.0)


def test_an_adapter_of_random_weights_predicts_nothing_because_no_file_has_these(tmp_path):
    task = task_of(write_config(tmp_path), adapter="lora", weights=tmp_path / "best.safetensors")
    with refuses("best.safetensors", "adapter='lora'", "random weights", "no file keeps"):
        task.model()
