"""Writing with a cache of a fixed size: what plain transformers writes, by one graph."""

import copy

import pytest
import torch

from tests.tasks.text.small import CONFIGS, plain_model
from tpukit_tasks.text import network

pytest.importorskip("transformers")


@pytest.fixture
def pair(request, tmp_path):
    """(a plain model, the network with its weights)"""
    family = getattr(request, "param", "gpt2")
    plain = plain_model(family, tmp_path).eval()
    ours = network.build(copy.deepcopy(plain.config), None, lora=None).eval()
    ours.causal.load_state_dict(plain.state_dict())
    return plain, ours


def prompts_of(lengths, size=20):
    numbers = torch.randint(300, (len(lengths), size), generator=torch.Generator().manual_seed(0))
    return numbers.int(), torch.tensor(lengths)


def write(ours, runtime, tokens, lengths):
    on_device = runtime.put(dict(tokens=tokens, lengths=lengths)).values()
    return runtime.to_cpu(network.write(runtime.to_device(ours), runtime, *on_device, new=19))


@pytest.mark.parametrize("pair", CONFIGS, indirect=True)
def test_the_most_probable_tokens_are_those_of_plain_transformers(pair, cpu):
    plain, ours = pair
    tokens, lengths = prompts_of([3, 1, 12, 8])
    written = write(ours, cpu, tokens, lengths)
    for row, prompt, length in zip(written, tokens, lengths.tolist()):
        rows = prompt[None, :length].long()
        while rows.shape[1] < min(20, length + 19):  # without a cache
            rows = torch.cat([rows, plain(rows).logits[:, -1:].argmax(-1)], 1)
        assert row.tolist() == rows[0].tolist()


def test_prompts_of_any_length_are_one_graph_on_xla_and_give_what_the_cpu_gives(pair, cpu, xla):
    _, ours = pair
    tokens, lengths = prompts_of([3, 1, 12, 8])
    expected = write(ours, cpu, tokens, lengths)
    for some in (lengths, torch.tensor([1, 1, 2, 5]), lengths):
        found = write(ours, xla, tokens, some)
    assert torch.equal(found, expected)
    for name in ("read_prompts", "write_token"):
        events = [event for event in xla.compile_events if event["what"] == name]
        assert sum(event["programs"] for event in events) <= 1 and not xla.counters()["fallbacks"]


def test_a_prompt_is_read_at_once_and_writing_stops_when_all_have_ended(pair, cpu, monkeypatch):
    _, ours = pair
    tokens, lengths = prompts_of([3, 30, 12, 8], size=64)
    steps, reads = [], []
    for name, calls in (("write_token", steps), ("read_prompts", reads)):
        counted = getattr(network, name)
        monkeypatch.setattr(
            network,
            name,
            lambda *all, calls=calls, counted=counted, **options: calls.append(1) or counted(*all, **options),
        )
        getattr(network, name).__name__ = name
    free = network.write(ours, cpu, tokens, lengths, new=32)
    assert (len(steps), len(reads)) == (32, 1)
    late = int(free[1, 41])  # a row's twelfth token
    ends = [late, *(int(free[row, length + 2]) for row, length in enumerate(lengths))]
    found = network.write(ours, cpu, tokens, lengths, new=32, ends=ends)
    assert len(steps) == 32 + network.STEPS and len(reads) == 2
    for row, length in enumerate(lengths.tolist()):
        assert found[row, : length + 16].tolist() == free[row, : length + 16].tolist()


def test_a_row_that_is_full_has_ended(pair, cpu):
    _, ours = pair
    tokens, lengths = prompts_of([20, 19, 18])
    found = network.write(ours, cpu, tokens, lengths, new=40)
    for row, length in enumerate(lengths.tolist()):
        assert found[row, :length].tolist() == tokens[row, :length].tolist()
