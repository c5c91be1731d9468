"""What follows what in a chain, without any service, and what chain.json may hold."""

import dataclasses
import json
import os

import pytest

from tests.conftest import flip, refuses
from tpukit.tools.send import Session
from tpukit.tools.send import chain as chains
from tpukit.tools.send.chain import Chain, decide

TASK = dict(name="mnist", service="kaggle", accelerator="tpu", kind="task", task="mnist", settings=[{}])


def chain(*endings, **values):
    """A chain of sessions that ended so; each brings ten steps, an epoch, unless it says otherwise."""
    made = Chain(**{**TASK, **dict(sessions=9, until_epochs=20), **values})
    for number, ending in enumerate(endings, 1):
        ended = dict(setting=0, step=10 * number, epochs=number, state=ending)
        more = ending if isinstance(ending, dict) else {}
        made.sent.append(Session(f"me/tpukit-mnist-{number}", 8.5, **ended | more))
    chains.check(made)
    return made


FAILED = dict(state="failed", error="ValueError: no")
LOST = dict(state="lost", step=0)


@pytest.mark.parametrize(
    "made, follows",
    [
        (chain(), 0),
        (chain("stopped"), 0),
        (chain("lost"), 0),
        (chain("done"), "done"),  # a task that ends before its epochs has stopped early
        (chain("stopped", dict(state="stopped", epochs=20)), "done"),
        (chain(FAILED), "ValueError: no"),
        (chain("no accelerator"), "phone"),
        (chain("cancelled"), "cancelled"),
        (chain(LOST), 0),  # the first one may have met anything
        (chain(LOST, LOST), "no step further"),
        (chain("stopped", dict(state="lost", step=10), LOST), "no step further"),
        (chain("stopped", LOST, "stopped"), 0),
        (chain("stopped", "stopped", sessions=2), "18 more (`tpukit send follow mnist --sessions 20`)"),
        (chain("no accelerator", "stopped", sessions=2), 0),  # that one trained nothing
        (chain("done", kind="notebook", task="", until_epochs=None), "done"),
        (chain("done", kind="notebook", task=""), 0),  # it trains a part of the epochs
        (chain("done", settings=[{}, {}]), 1),
        (chain(FAILED, settings=[{}, {}]), 1),  # a sweep goes on without it
        (chain("stopped", settings=[{}, {}], sessions=1), 1),
        (chain("stopped", settings=[{}, {}]), 0),
        (chain("done", dict(setting=1, state="done"), settings=[{}, {}]), "done"),
    ],
)
def test_what_follows(made, follows):
    following = decide(made)
    assert following == follows or (isinstance(follows, str) and follows != "done" and follows in following)


@pytest.mark.parametrize("endings", [["no accelerator"], ["cancelled"], [LOST, LOST]])
def test_a_user_who_follows_again_has_another_session(endings):
    assert decide(chain(*endings), again=True) == 0


def test_an_error_that_repeats_is_not_sent_again_even_then():
    assert "it would fail again" in decide(chain(FAILED), again=True)


def test_a_chain_comes_back_as_it_was_written(tmp_path):
    made = chain(
        "stopped", FAILED, settings=[dict(lr=0.1, freeze=["a"], weights=None)], datasets=["me/my-set"]
    )
    chains.write(tmp_path / "mnist", made)
    assert chains.read(tmp_path / "mnist") == made


@pytest.mark.parametrize(
    "change",
    [
        dict(name="../x"),
        dict(name="a" * 37),
        dict(name="A"),
        dict(service="other"),
        dict(accelerator="--help"),
        dict(kind="shell"),
        dict(sessions=0),
        dict(sessions=True),
        dict(sessions="1"),
        dict(hours=25.0),
        dict(until_epochs=0),
        dict(settings=[]),
        dict(settings=["x"]),
        dict(datasets=["-p"]),
        dict(datasets=["me/../x"]),
        dict(internet=1),
        dict(more=1),
    ],
)
def test_a_chain_with_a_wrong_value_is_refused(tmp_path, change):
    values = dataclasses.asdict(chain("stopped")) | change
    (tmp_path / "chain.json").write_text(json.dumps(values))
    with refuses(tmp_path / "chain.json"):
        chains.read(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        dict(kernel="-p"),
        dict(kernel="me/tpukit-mnist-1/../x"),
        dict(kernel="me/tpukit-mnist-1\n"),
        dict(source="--help"),
        dict(state="x"),
        dict(state=["done"]),
        dict(setting=1),
        dict(setting=-1),
        dict(step="1"),
        dict(more=1),
    ],
)
def test_a_session_with_a_wrong_value_is_refused(tmp_path, change):
    values = dataclasses.asdict(chain("stopped"))
    values["sent"][0] |= change
    (tmp_path / "chain.json").write_text(json.dumps(values))
    with refuses(tmp_path / "chain.json"):
        chains.read(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 100_000, '{"sent": 1}', '{"sent": [1]}'])
def test_what_is_no_chain_is_refused(tmp_path, text):
    (tmp_path / "chain.json").write_text(text)
    with refuses(tmp_path / "chain.json"):
        chains.read(tmp_path)


def test_a_named_pipe_is_no_chain_and_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "chain.json")
    with refuses(tmp_path / "chain.json"):
        chains.read(tmp_path)


def test_a_flipped_bit_is_noticed_and_a_missing_chain_lists_those_there_are(tmp_path):
    chains.write(tmp_path / "mnist", chain("stopped"))
    with refuses("mnist"):
        chains.read(tmp_path / "other")
    flip(tmp_path / "mnist/chain.json")
    with refuses(tmp_path / "mnist/chain.json"):
        chains.read(tmp_path / "mnist")
