"""`tpukit send kaggle` from one end to the other: the real `kaggle` package, a server that is Kaggle to it
(kaggle_server.py), and sessions that run the pushed notebook in a process like Kaggle's."""

import json
import random
import time

import pytest

from tests.conftest import best_weights, checkpoint, exact, same
from tests.tools.send import kaggle_server as loopback
from tests.tools.send.conftest import SECRETS, SMALL, epochs_of, leaves, sent
from tests.tools.send.kaggle_session import needs_sessions
from tpukit import Run

pytest.importorskip("kaggle", reason="kaggle is not installed: pip install kaggle")
pytestmark = pytest.mark.slow


def chain_and_reference(server, send, here, digits, *, epochs, lives, sessions):
    """Train in a chain of sessions with these lives, and in one that lives; in the same image, and with the
    same settings. Returns both runs."""
    server.datasets["tester/mnist"] = digits
    task = ["mnist", "--epochs", epochs, *SMALL, "--log-every", 5, "--save-every-s", 0.2]
    task += ["--dataset", "tester/mnist"]
    assert send("kaggle", *task, "--name", "whole").code == 0
    assert send("follow", "whole").code == 0
    server.lives = iter(lives)
    assert send("kaggle", *task, "--name", "parts", "--sessions", sessions).code == 0
    for _ in range(sessions):  # two kills without a step between them, and the user is asked
        ran = send("follow", "parts")
        if ran.code == 0:
            break
        assert "came no step further" in ran.out, ran
    folder = here / "outputs/sent"
    return Run.find(folder / "parts/runs/parts"), Run.find(folder / "whole/runs/whole")


def killed_after(rng):
    """A life that ends when the records have grown by some epochs, or, one in eight, earlier in the start."""
    if rng.random() < 0.125:
        limit_s = rng.uniform(0, 5)
        return lambda session, passed_s: passed_s > limit_s
    growth, pause_s = rng.uniform(200, 3500), rng.uniform(0, 0.2)  # bytes: up to three epochs

    def size(folder):
        return sum(path.stat().st_size for path in folder.glob("**/parts/records.jsonl"))

    def is_over(session, passed_s):
        before = size(session.folder / "input")
        if (now := size(session.working)) and now - before > growth:
            time.sleep(pause_s)
            return True
        return False

    return is_over


def assert_equal_runs(parts, whole):
    assert exact(parts) == exact(whole)
    assert same(best_weights(parts), best_weights(whole))
    ours, theirs = checkpoint(parts), checkpoint(whole)
    assert same(ours["model"], theirs["model"]) and ours["state"]["step"] == theirs["state"]["step"]
    starts = [record for record in parts.records() if record["kind"] == "start"]
    assert len(starts) > 1  # it was resumed


@needs_sessions
@pytest.mark.timeout(900)
def test_a_chain_whose_sessions_are_killed_ends_as_the_run_that_was_not(server, send, here, digits):
    lives = [killed_after(random.Random(seed)) for seed in (3, 4)]
    parts, whole = chain_and_reference(server, send, here, digits, epochs=8, lives=lives, sessions=9)
    assert_equal_runs(parts, whole)
    assert [s.status for s in server.sessions[1:3]] == ["ERROR"] * 2
    # What the sessions could hold, and what the user has, knows no token of either.
    text = [path.read_bytes() for path in here.rglob("*") if path.is_file()]
    text += [json.dumps(request.body).encode() for request in server.requests]
    assert not [part for secret in (*SECRETS, server.secret) for part in text if secret.encode() in part]
    assert all(session.request["isPrivate"] for session in server.sessions)
    assert len(set(server.pushed())) == len(server.pushed())  # nothing is overwritten


@needs_sessions
@pytest.mark.nightly
@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_chain_of_20_killed_sessions_ends_as_the_run_that_was_not(server, send, here, digits):
    rng = random.Random(36)  # 150 epochs: a fast machine trains four in a session
    lives = [killed_after(rng) for _ in range(20)]
    parts, whole = chain_and_reference(server, send, here, digits, epochs=150, lives=lives, sessions=60)
    assert_equal_runs(parts, whole)
    assert len(sent(here, "parts")) > 20


@needs_sessions
def test_a_session_without_its_accelerator_ends_at_once_and_is_not_sent_again(server, send, here):
    server.has_accelerator = False
    send("kaggle", "mnist", "--sessions", 3)
    started = time.monotonic()
    ran = send("follow", "mnist")
    assert ran.code == 1 and "needs you" in ran.out and "phone" in ran.out
    assert sent(here)[0]["state"] == "no accelerator" and len(server.sessions) == 1
    assert server.sessions[0].shape == "TpuV5E8" and time.monotonic() - started < 120
    server.script = leaves(None, "no accelerator")
    send("follow", "mnist")  # asks again
    assert len(server.sessions) == 2


@needs_sessions
@pytest.mark.timeout(900)
def test_a_session_with_the_variables_of_a_tpu_trains_there(server, send, here, digits, xla):
    server.datasets["tester/mnist"] = digits
    options = ["--epochs", 1, "--batch-size", 16, "--channels", 4, "--dataset", "tester/mnist"]
    assert send("kaggle", "mnist", *options).code == 0
    ran = send("follow", "mnist")
    assert ran.code == 0 and server.sessions[0].shape == "TpuV5E8", ran
    run = Run.find(here / "outputs/sent/mnist/runs/mnist")
    assert epochs_of(run.path) == 1 and run.records("compile")  # by XLA, whose CPU stands in for the chips
    assert server.sessions[0].request["enableTpu"] and not server.sessions[0].request.get("enableInternet")


@needs_sessions
@pytest.mark.timeout(900)
def test_errors_of_the_users_code_are_not_sent_again_and_values_are_no_code(server, send, here):
    cells = ["KIND = ''\nTEXT = ''\nNUMBER = 0", "import os; print(repr((KIND, TEXT, NUMBER)))"]
    cells += ["if KIND == 'code': 1 / 0\nif KIND == 'memory': bytearray(10**15)"]
    cells += ["if KIND == 'passes': raise ConnectionError('reset by peer')"]
    book = json.loads(loopback.notebook(*cells))
    book["cells"][0]["metadata"]["tags"] = ["parameters"]
    (here / "book.ipynb").write_text(json.dumps(book))
    attack = (
        '"""\'\'\')\nimport os; os.system("touch /kaggle/working/attacked")#$(touch attacked)`touch attacked`'
    )
    options = ["-p", "TEXT", attack, "-p", "NUMBER", 7, "--accelerator", "none"]
    options += ["--vary", "KIND", *"code memory fine passes".split()]
    assert send("kaggle", "book.ipynb", *options).code == 0
    ran = send("follow", "book")
    ends = [(s["setting"], s["state"]) for s in sent(here, "book")]
    assert ends == [(0, "failed"), (1, "failed"), (2, "done"), (3, "lost")]
    errors = [s["error"] for s in sent(here, "book")]
    assert "ZeroDivisionError" in errors[0] and "MemoryError" in errors[1] and "reset by peer" in errors[3]
    assert repr(("fine", attack, 7)) in "".join(event["data"] for event in server.sessions[2].log)
    assert not [path for path in (*here.rglob("attacked"), *server.folder.rglob("attacked"))]
    assert ran.code == 1


@needs_sessions
@pytest.mark.timeout(900)
def test_a_session_saves_and_ends_before_its_limit_and_the_next_one_goes_on(server, send, here, digits):
    server.datasets["tester/mnist"] = digits
    server.alive_from = "outputs/*/config.json"
    options = [*SMALL, "--epochs", 5000, "--hours", 0.03, "--sessions", 2, "--dataset", "tester/mnist"]
    send("kaggle", "mnist", *options)
    ran = send("follow", "mnist")
    assert [s["state"] for s in sent(here)] == ["stopped"] * 2
    assert [session.status for session in server.sessions] == ["COMPLETE"] * 2
    first, second = (s["epochs"] for s in sent(here))
    assert 0 < first < second and epochs_of(here / "outputs/sent/mnist/runs/mnist") >= second
    assert ran.code == 1 and "sessions used up" in ran.out and "more" in ran.out
    assert server.sessions[0].request["sessionTimeoutSeconds"] == 108


@needs_sessions
@pytest.mark.timeout(900)
def test_the_hardware_check_brings_its_report(server, send, here):
    assert send("kaggle", "--hardware-check", "--accelerator", "none").code == 0
    ran = send("follow", "hardware-check")
    report = here / "outputs/sent/hardware-check/hardware.json"
    assert ran.code == 0 and str(report.relative_to(here)) in ran.out
    assert json.loads(report.read_text())["checks"]
