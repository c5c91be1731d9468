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
        while rows.shape[1] < 20:  # without a cache
            rows = torch.cat([rows, plain(rows).logits[:, -1:].argmax(-1)], 1)
        assert row.tolist() == rows[0].tolist()


def test_prompts_of_any_length_are_one_graph_on_xla_and_give_what_the_cpu_gives(pair, cpu, xla):
    _, ours = pair
    tokens, lengths = prompts_of([3, 1, 12, 8])
    expected = write(ours, cpu, tokens, lengths)
    for some in (lengths, torch.tensor([1, 1, 2, 5]), lengths):
        found = write(ours, xla, tokens, some)
    assert torch.equal(found, expected)
    events = [event for event in xla.compile_events if event["what"] == "write_token"]
    assert sum(event["programs"] for event in events) <= 1 and not xla.counters()["fallbacks"]
