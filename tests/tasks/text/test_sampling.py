"""Tokens that are drawn: by softmax, from the smallest set that has top_p, the same ones for a seed."""

import copy
import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import refuses
from tests.tasks.text.small import CHAT, plain_model, task_of, write_lines, write_model
from tests.tpukit.training.conftest import train_in
from tpukit import predict
from tpukit.devices.runtime import Runtime
from tpukit.inference.trained import task_of as task_of_run
from tpukit_tasks.text import network, sampling
from tpukit_tasks.text.sampling import draw
from tpukit_tools import cli

transformers = pytest.importorskip("transformers")
MANY = 2**17


def wanted_shares(logits, temperature, top_p):
    """(V,) in float64, by numpy: one token after another, the most probable first, until they have top_p."""
    scaled = np.asarray(logits, np.float64) / temperature
    shares = np.exp(scaled - scaled.max())
    shares /= shares.sum()
    kept, total = np.zeros(len(shares)), 0.0
    for token in np.argsort(-shares, kind="stable"):
        if total >= top_p:
            break
        kept[token], total = shares[token], total + shares[token]
    return kept / kept.sum()


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.7, 1.0), (1.5, 0.9), (1.0, 0.5), (1.0, 0.05)])
def test_many_draws_are_spread_as_softmax_says(temperature, top_p):
    logits = 2 * torch.randn(12, generator=torch.Generator().manual_seed(1))
    draws = torch.from_numpy(sampling.draws_of(["a prompt"], MANY, seed=3)[0])
    found = draw(logits.expand(MANY, -1), draws[:, None], temperature, top_p)[:, 0]
    counts = torch.bincount(found, minlength=12).numpy() / MANY
    wanted = wanted_shares(logits, temperature, top_p)
    assert np.all(counts[wanted == 0] == 0), "none outside of the set"
    deviation = np.sqrt(wanted * (1 - wanted) / MANY)
    np.testing.assert_array_less(abs(counts - wanted), 5 * deviation + 1e-6)


def test_the_set_of_top_p_is_that_of_transformers_and_exact_at_its_border():
    halves = torch.tensor([0.125, 0.5, 0.125, 0.25]).log()
    steps = torch.linspace(0, 1, 257)[:-1, None]

    def drawn(logits, top_p):
        return {*draw(logits.expand(len(steps), -1), steps, 1.0, top_p)[:, 0].tolist()}

    assert drawn(halves, 0.5) == {1} and drawn(halves, 0.501) == {1, 3}
    assert drawn(halves, 0.75) == {1, 3} and drawn(halves, 0.76) == {1, 3, 0}, "of two alike the first"
    assert drawn(halves, 1.0) == {0, 1, 2, 3} and drawn(halves, 1e-9) == {1}
    rng = torch.Generator().manual_seed(0)
    for top_p in (0.1, 0.4, 0.8, 0.95):
        logits = torch.randn(9, generator=rng)
        theirs = transformers.TopPLogitsWarper(top_p)(None, logits[None])[0]
        assert drawn(logits, top_p) == {*torch.nonzero(theirs.isfinite())[:, 0].tolist()}


def test_draws_at_the_ends_and_tiny_temperatures_give_tokens_that_may_be_drawn():
    logits = torch.tensor([[-1e4, 60.0, 59.0, -1e4]])
    last = torch.tensor([[1 - 2**-24]])
    assert draw(logits, torch.zeros(1, 1), 1.0, 1.0) == 1 and draw(logits, last, 1.0, 1.0) == 2
    for temperature in (1e-3, 1e-30):
        assert draw(logits, last, temperature, 1.0) == logits.argmax()
    wide = torch.randn(1, 200_000, generator=torch.Generator().manual_seed(0))
    place = wide[0].argsort(descending=True).tolist().index(int(draw(wide, last, 1.0, 1.0)))
    assert place > 199_000, "the sums of many reach the last ones"


@pytest.fixture
def pair(tmp_path):
    """(a plain model, the network with its weights)"""
    plain = plain_model("qwen3", tmp_path).eval()
    ours = network.build(copy.deepcopy(plain.config), None, lora=None).eval()
    ours.causal.load_state_dict(plain.state_dict())
    return plain, ours


OPTIONS: Any = dict(new=9, draw=lambda logits, draws: draw(logits, draws, 0.8, 0.9))


def prompts():
    tokens = torch.randint(300, (4, 20), generator=torch.Generator().manual_seed(0)).int()
    draws = torch.from_numpy(sampling.draws_of(list("abcd"), 20, seed=1))
    return tokens, torch.tensor([3, 1, 8, 10]), draws


def test_each_token_is_drawn_by_the_logits_of_plain_transformers(pair, cpu):
    plain, ours = pair
    tokens, lengths, draws = prompts()
    written = network.write(ours, cpu, tokens, lengths, draws=draws, **OPTIONS)
    greedy = network.write(ours, cpu, tokens, lengths, new=9)
    assert not torch.equal(written, greedy)
    for row, length, uniform in zip(written, lengths.tolist(), draws):
        for place in range(length, length + 9):  # the draw of the token before decides
            logits = plain(row[None, :place].long()).logits[0, -1].detach()
            wanted = wanted_shares(logits, 0.8, 0.9)
            order = np.argsort(-wanted, kind="stable")
            found = order[np.searchsorted(np.cumsum(wanted[order]), float(uniform[place - 1]), "right")]
            assert int(row[place]) == found


def test_on_xla_other_draws_are_the_same_graph_and_the_tokens_are_those_of_the_cpu(pair, cpu, xla):
    _, ours = pair
    tokens, lengths, draws = prompts()
    expected = network.write(ours, cpu, tokens, lengths, draws=draws, **OPTIONS)
    ours = xla.to_device(ours)
    for some in (1 - draws, draws):
        on_device = xla.put((tokens, lengths, some))
        found = network.write(ours, xla, *on_device[:2], draws=on_device[2], **OPTIONS)
    assert torch.equal(xla.to_cpu(found), expected)
    events = [event for event in xla.compile_events if event["what"] == "write_token"]
    assert sum(event["programs"] for event in events) == 1 and not xla.counters()["fallbacks"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):

    folder = tmp_path_factory.mktemp("drawn")
    rows = [dict(prompt=f"{n}" * (1 + n % 5), completion="abc" * (1 + n % 4)) for n in range(20)]
    path = write_lines(folder / "chats.jsonl", *rows)
    task = task_of(write_model(folder / "model", chat=CHAT), path, pretrained="yes", adapter="none", epochs=1)
    return train_in(folder / "run", task, Runtime("cpu"))


def test_a_seed_gives_the_same_texts_beside_any_others_and_temperature_0_is_greedy(run, tmp_path, capsys):
    path = write_lines(tmp_path / "ask.jsonl", *[dict(prompt="12")] * 5)

    def written(*files, **settings):
        return [
            one["written"] for one in predict(run, [str(one) for one in files], progress=False, **settings)
        ]

    greedy, drawn = written(path), written(path, temperature=1.0, seed=1)
    assert len({*greedy}) == 1 and greedy == written(path, temperature=0.0, top_p=0.5, seed=9)
    assert len({*drawn}) > 1, "each prompt has its own draws"
    write_lines(tmp_path / "before.jsonl", *[dict(prompt="7")] * 3)
    again = written(tmp_path / "before.jsonl", path, temperature=1.0, seed=1, batch_size=3)
    assert again[3:] == drawn and again == written(tmp_path / "before.jsonl", path, temperature=1.0, seed=1)
    assert drawn != written(path, temperature=1.0, seed=2)
    assert written(path, temperature=1e-6) == greedy and written(path, temperature=1.0, top_p=1e-6) == greedy
    out = tmp_path / "out"
    words = (
        f"predict {run.path} {path} --temperature 1 --seed 1 --device cpu --out {out} --new-tokens 2".split()
    )
    assert cli.main(words) == 0
    found = [one["written"] for one in json.loads((out / "predictions.json").read_text())]
    assert all(whole.startswith(part) for part, whole in zip(found, drawn, strict=True)) and found != drawn
    assert "pictures" not in capsys.readouterr().out
    with refuses("text", "temprature"):
        written(path, temprature=1.0)
    with refuses("top_p=0", "more than 0"):
        written(path, temperature=1.0, top_p=0.0)


def test_a_task_without_a_temperature_refuses_one(tmp_path, capsys):
    assert cli.main(["predict", "demo", "demo", "--temperature", "1", "--out", str(tmp_path / "out")]) == 1
    assert "mshnet has no setting temperature" in capsys.readouterr().err


def test_the_samples_of_a_training_are_drawn_alike_in_each_evaluation(run, tmp_path, cpu):

    task = task_of_run(run.config, run.path)
    options: Any = dict(weights=run.best(), samples=2, temperature=1.0)
    batch, texts = None, []

    for seed in (0, 0, 1):
        one = dataclasses.replace(task, seed=seed, **options)
        batch = cpu.put(one.test_set().batch(np.arange(2)))
        torch.manual_seed(len(texts))  # which decides nothing
        texts.append(one.results(batch, one.predictor(task.model().eval(), cpu)(batch)))
    assert texts[0] == texts[1] != texts[2]
