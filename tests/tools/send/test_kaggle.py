"""`tpukit send kaggle` from one end to the other: the real `kaggle` package, a server that is Kaggle to it,
and sessions that run, fail, run out of time and are killed.

Where a session trains, it is the pushed notebook in a process like Kaggle's. Where only its end matters, a
script leaves the files of a run that was trained here (`stages`)."""

import base64
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, best_weights, checkpoint, exact, flip, same
from tests.tools.send import kaggle_server as loopback
from tests.tools.send.kaggle_server import KEY, TOKEN, USER, needs_sessions
from tpukit import MNIST, Run, TpukitError, cli, train
from tpukit.host import files

pytest.importorskip("kaggle", reason="kaggle is not installed: pip install kaggle")
pytestmark = pytest.mark.slow

SMALL = "--batch-size 16 --channels 4 --accelerator none".split()
HOSTILE = "\x1b[2J\u202egpj.exe\r<script>"
SECRETS = (KEY, TOKEN, base64.b64encode(f"{USER}:{KEY}".encode()).decode())


@pytest.fixture
def server(tmp_path):
    with loopback.Server(tmp_path / "kaggle") as server:
        yield server


@pytest.fixture
def here(server, tmp_path, monkeypatch):
    """The current folder of a user who is logged in to Kaggle; pauses are short."""
    from tpukit.tools.send import follow

    for name, value in server.environ_of(tmp_path / "home").items():
        monkeypatch.setenv(name, value)
    for name in [name for name in os.environ if name.startswith("KAGGLE_") and name != "KAGGLE_CONFIG_DIR"]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(follow, "PAUSES_S", (0.05,) * len(follow.PAUSES_S))
    monkeypatch.setattr(follow, "POLL_S", 0.2)
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def send(here, capfd):
    """Run `tpukit send ...`."""

    def run(*words):
        code = cli.main(["send", *map(str, words)])
        out, err = capfd.readouterr()
        assert "Traceback" not in err, err
        return loopback.Ran(code, out, err)

    return run


@pytest.fixture(scope="module")
def stages(digits, tmp_path_factory):
    """The folders of one run of MNIST after 1, 2, 3 and 4 epochs."""
    from tpukit.devices.runtime import Runtime

    folder, made = tmp_path_factory.mktemp("stages"), []
    for epochs in range(1, 5):
        task = MNIST(dataset_dir=digits, epochs=epochs, batch_size=16, channels=4, log_every=6)
        train(task, Run.open(folder / "run", task), runtime=Runtime("cpu"), progress=False)
        made.append(shutil.copytree(folder / "run", folder / str(epochs)))
    return made


def leaves(stage, ending="done", *, error="", then=None):
    """A script of a session: it leaves this run and says that it ended like this."""

    def script(session):
        session.say("trains\n")
        if stage is not None:
            shutil.copytree(stage, session.working / "outputs/mnist")
        if ending:
            (session.working / "outputs").mkdir(exist_ok=True)
            (session.working / "outputs/session.json").write_text(
                json.dumps(dict(ending=ending, error=error))
            )
        if then:
            then(session)

    return script


def plays(server, *scripts):
    """Let the sessions that follow do these, one each."""
    scripts = iter(scripts)
    server.script = lambda session: next(scripts)(session)


def sent(here, name="mnist"):
    return json.loads((here / "outputs/sent" / name / "chain.json").read_text())["sent"]


def epochs_of(run):
    return len(Run.find(run).records("epoch"))


# Trained there


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


# What follows what


@pytest.fixture
def background(here, server, tmp_path):
    """Start `tpukit send ...` in a process of its own."""
    started = []

    def start(*words):
        environ = server.environ_of(tmp_path / "home") | dict(PYTHONPATH=str(ROOT))
        process = subprocess.Popen(
            [sys.executable, "-m", "tpukit", "send", *words],
            cwd=here,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # Tests that run in the background of a shell ignore Ctrl-C, and so would this.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def until(condition, limit_s=120):
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < limit_s
        time.sleep(0.02)


@pytest.mark.parametrize(
    "call, what, number",
    [
        ("SaveKernel", "hang", 2),  # the push has not arrived
        ("SaveKernel", "hang after", 2),  # it has, and the answer has not
        ("GetKernelSessionStatus", "hang", 2),  # before or while it waits
        ("file", "hang", 3),  # it brings the files
    ],
)
def test_a_follow_that_is_killed_goes_on_and_sends_nothing_twice(
    server, send, here, stages, background, call, what, number
):
    plays(server, leaves(stages[0], "stopped"), leaves(stages[1]))
    send("kaggle", "mnist", *SMALL, "--epochs", 2, "--sessions", 2)
    server.fail(call, what, after=number - 1 - len(server.calls(call)))
    process = background("follow", "mnist")
    until(lambda: len(server.calls(call)) >= number)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    ran = send("follow", "mnist")
    assert ran.code == 0 and server.pushed() == ["tpukit-mnist-1", "tpukit-mnist-2"], ran
    assert epochs_of(here / "outputs/sent/mnist/runs/mnist") == 2
    assert server.sessions[1].request["kernelDataSources"] == [f"{USER}/tpukit-mnist-1"]
    assert not list((here / "outputs/sent/mnist/sessions").glob("*.part"))


@pytest.mark.parametrize("json_body", [False, True])
def test_what_may_pass_is_tried_again(server, send, here, stages, json_body):
    server.errors_are_json = json_body
    plays(server, leaves(stages[0], "stopped"), leaves(stages[1]))
    send("kaggle", "mnist", *SMALL, "--epochs", 2, "--sessions", 2)
    for call, *faults in (
        ("SaveKernel", 429, "lost after"),
        ("GetKernelSessionStatus", 503, "lost"),
        ("ListKernelSessionOutput", 500, "garbage"),
        ("log", 503),
        ("file", "half", "lost"),
    ):
        for what in faults:
            server.fail(call, what)
    ran = send("follow", "mnist")
    assert ran.code == 0 and server.pushed() == ["tpukit-mnist-1", "tpukit-mnist-2"], ran
    assert epochs_of(here / "outputs/sent/mnist/runs/mnist") == 2


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_push_is_said_at_once_and_sent_when_the_user_may(server, send, here, stages, status):
    plays(server, leaves(stages[0]))
    server.fail("SaveKernel", status)
    ran = send("kaggle", "mnist", *SMALL, "--epochs", 1)
    assert ran.code == 1 and len(server.calls("SaveKernel")) == 1, ran
    assert ("kaggle auth login" in ran.err) == (status == 401)
    assert send("follow", "mnist").code == 0 and server.pushed() == ["tpukit-mnist-1"]


@pytest.mark.parametrize("status", [401, 403])
def test_a_session_is_not_given_up_because_the_token_has_expired(server, send, here, stages, status):
    plays(server, leaves(stages[0]))
    send("kaggle", "mnist", *SMALL, "--epochs", 1, "--sessions", 2)
    server.wait()
    for call in ("GetKernelSessionStatus", "GetAcceleratorQuotaStatistics", "ListKernelSessionOutput", "log"):
        server.fail(call, status, times=100)
    server.fail("SaveKernel", status, times=100)
    ran = send("follow", "mnist")
    assert ran.code == 1 and sent(here)[0]["state"] == "sent", ran
    server.faults.clear()
    assert send("follow", "mnist").code == 0 and server.pushed() == ["tpukit-mnist-1"]
    assert epochs_of(here / "outputs/sent/mnist/runs/mnist") == 1


def test_without_a_token_one_sentence_says_how_to_get_one(server, send, here, tmp_path):
    (tmp_path / "home/.kaggle/kaggle.json").unlink()
    ran = send("kaggle", "mnist", *SMALL)
    assert ran.code == 1 and "kaggle auth login" in ran.err.splitlines()[-1] and KEY not in ran.err
    assert not server.sessions and not (here / "outputs/sent/mnist").exists()


def test_the_quota_decides_when_and_how_long_a_session_runs(server, send, here, stages):
    plays(server, leaves(stages[0], "stopped"), leaves(stages[1]))
    server.hours["tpuQuota"] = (14.0, 20.0)
    task = ["mnist", "--epochs", 2, "--sessions", 2]
    send("kaggle", *task)
    assert server.sessions[0].request["sessionTimeoutSeconds"] == 6 * 3600  # all that is left
    server.hours["tpuQuota"] = (19.7, 20.0)
    ran = send("follow", "mnist")
    assert ran.code == 1 and "waiting for quota until 2026-12-01" in ran.out and len(server.sessions) == 1
    server.hours["tpuQuota"] = (0.0, 20.0)
    assert send("follow", "mnist").code == 0
    assert server.sessions[1].request["sessionTimeoutSeconds"] == 8.5 * 3600


def test_a_notebook_of_the_same_name_that_is_not_the_chains_stays_as_it_is(server, send, here, tmp_path):
    server.script = leaves(None)
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "session.ipynb").write_text(loopback.notebook("1"))
    metadata = dict(id=f"{USER}/tpukit-mnist-1", title="tpukit-mnist-1", code_file="session.ipynb")
    metadata |= dict(language="python", kernel_type="notebook")
    (folder / "kernel-metadata.json").write_text(json.dumps(metadata))
    subprocess.run([sys.executable, "-m", "kaggle", "kernels", "push", "-p", folder], check=True)
    ran = send("kaggle", "mnist", *SMALL)
    assert ran.code == 1 and "tpukit-mnist-1" in ran.err and "--name" in ran.err and len(server.sessions) == 1


def test_a_session_that_lost_its_input_is_told_and_does_not_train_from_the_start(server, send, here, stages):
    server.error_is_source = False

    def fails(session):
        session.status = "ERROR"

    plays(server, leaves(stages[0], "", then=fails), leaves(stages[1]))
    send("kaggle", "mnist", *SMALL, "--epochs", 2, "--sessions", 2)
    ran = send("follow", "mnist")
    assert ran.code == 1 and "not valid kernel sources" in ran.err, ran


def test_two_cannot_follow_one_chain(server, send, here, background):
    release = threading.Event()
    server.script = lambda session: (session.say("begins\n"), release.wait(60))
    send("kaggle", "mnist", *SMALL)
    process = background("follow", "mnist")
    until(lambda: server.calls("log"))
    ran = send("follow", "mnist")
    assert ran.code == 1 and "is at work in" in ran.err
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert "goes on" in process.communicate()[0] and server.sessions[0].status == "RUNNING"
    release.set()


def test_a_stopped_chain_sends_nothing_more_and_deletes_nothing(server, send, here, stages):
    plays(server, leaves(stages[0], "stopped"))
    send("kaggle", "mnist", *SMALL, "--epochs", 2, "--sessions", 5)
    ran = send("stop", "mnist")
    assert f"kaggle.com/code/{USER}/tpukit-mnist-1" in ran.out
    assert "stopped" in send("follow", "mnist").out and len(server.sessions) == 1
    assert epochs_of(here / "outputs/sent/mnist/runs/mnist") == 1
    assert not [request.call for request in server.requests if "Delete" in request.call]


def test_a_sweep_trains_one_setting_after_the_other_and_ends_in_a_table(server, send, here, stages):
    def done(number):
        def script(session):
            leaves(stages[number])(session)
            records = session.working / "outputs/mnist/records.jsonl"
            score = [0.5, 0.75][number]  # of the second one more
            lines = [files.parse_with_crc32(line) for line in records.read_text().splitlines()]
            for line in lines:
                if line["kind"] == "evaluation":
                    line["scores"]["accuracy"] = score
            records.write_text("".join(json.dumps(files.with_crc32(line)) + "\n" for line in lines))

        return script

    plays(server, done(0), done(1))
    send("kaggle", "mnist", *SMALL, "--epochs", 1, "--vary", "lr", "0.01", "0.05")
    ran = send("follow", "mnist")
    table = ran.out[ran.out.index("Sweep") :]
    assert ran.code == 0 and table.index("0.05") < table.index("0.01"), ran
    texts = [session.request["text"] for session in server.sessions]
    assert ["'lr': 0.01" in texts[0], len(texts)] == [True, 2]
    ran = send("kaggle", "mnist", *SMALL, "--name", "wrong", "--vary", "lr", "__import__('os')")
    assert ran.code in (1, 2) and len(server.sessions) == 2


def test_the_state_is_in_words(server, send, here, stages):
    release = threading.Event()
    plays(server, leaves(stages[0], "stopped"), lambda session: release.wait(60))
    server.queue_s = 0.0
    send("kaggle", "mnist", *SMALL, "--epochs", 4, "--sessions", 3)
    server.wait()
    assert "ended there" in send("status", "mnist").out
    ran = send("fetch", "mnist")
    assert ran.code == 0 and len(server.sessions) == 1
    assert "epoch 1 of 4" in send("status").out.replace("\n", " ")
    release.set()


# What comes back


def test_hostile_words_of_a_log_and_a_failure_reach_no_terminal(server, send, here):
    def script(session):
        session.say(HOSTILE + "\n")
        session.log.append(dict(stream_name="stdout", time=1, data=HOSTILE))
        session.status, session.message = "ERROR", HOSTILE

    server.script = script
    send("kaggle", "mnist", *SMALL)
    for words in (["follow", "mnist"], ["status", "mnist"], ["status"]):
        ran = send(*words)
        assert not set("\x1b\u202e\r") & set(ran.out + ran.err), ran


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "[" * 100_000,
        '{"ending": "done"}',
        '{"ending": ["done"], "error": {}}',
        '{"ending": "uploaded", "error": ""}',
        " " * 70_000,
        json.dumps(dict(ending="failed", error=HOSTILE * 1000)),
    ],
)
def test_a_hostile_session_json_says_nothing(tmp_path, text):
    from tpukit.tools.send import State, follow

    (tmp_path / "session.json").write_text(text)
    ending, error = follow.ending_of(tmp_path / "session.json", State("error"))
    assert ending in ("lost", "failed") and len(error) <= 500 and not set("\x1b\u202e\r") & set(error)


def test_a_file_name_that_leads_outside_is_refused_and_nothing_is_lost(server, send, here, stages, tmp_path):
    server.script = leaves(stages[0])
    send("kaggle", "mnist", *SMALL)
    server.wait()
    before = (here / "outputs/sent/mnist/chain.json").read_bytes()
    for name in ("../../chain.json", str(tmp_path / "outside"), "outputs/../../../chain.json"):
        server.sessions[0].hostile = {name: b"hostile"}
        ran = send("follow", "mnist")
        assert ran.code == 1 and (here / "outputs/sent/mnist/chain.json").read_bytes() == before, ran
    assert not (tmp_path / "outside").exists()
    server.sessions[0].hostile = {}
    assert send("follow", "mnist").code == 0


def harmed(stages, folder, harm):
    """The run after 3 epochs, or, for "earlier", after 1, with something wrong."""
    bad = shutil.copytree(stages[0 if harm == "earlier" else 2], folder / harm / "mnist")
    if harm == "checkpoint":
        for path in (bad / "checkpoints").glob("*.pt"):
            flip(path)
    elif harm == "config":
        (bad / "config.json").write_text('{"task": "mnist"')
    elif harm == "another":
        config = files.parse_with_crc32((bad / "config.json").read_bytes()) | dict(id="0" * 32)
        (bad / "config.json").write_text(json.dumps(files.with_crc32(config)))
    elif harm == "empty":
        shutil.rmtree(bad / "checkpoints")
    return bad


@pytest.mark.parametrize("harm", ["config", "another", "earlier", "empty", "checkpoint"])
def test_a_run_that_is_broken_takes_no_ones_place(stages, tmp_path, harm):
    from tpukit.tools.send import follow

    good = shutil.copytree(stages[1], tmp_path / "runs/mnist")
    before = {path: path.read_bytes() for path in good.rglob("*") if path.is_file()}
    with pytest.raises(TpukitError):
        follow.take(harmed(stages, tmp_path, harm), good.parent)
    assert {path: path.read_bytes() for path in good.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", [".hidden", "a\x1b[2Jb"])
def test_a_run_with_a_name_that_cannot_be_shown_is_refused_and_not_left_out_without_a_word(
    stages, tmp_path, name
):
    from tpukit.tools.send import follow

    with pytest.raises(TpukitError, match="a name that cannot be printed"):
        follow.take(shutil.copytree(stages[1], tmp_path / name), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_an_output_that_is_broken_is_not_resumed(server, send, here, stages, tmp_path):
    bad = harmed(stages, tmp_path, "checkpoint")
    plays(server, leaves(stages[1], "stopped"), leaves(bad, "stopped"), leaves(stages[3]))
    send("kaggle", "mnist", *SMALL, "--epochs", 4, "--sessions", 3)
    ran = send("follow", "mnist")
    assert "is not taken" in ran.out, ran
    assert server.sessions[2].request["kernelDataSources"] == [f"{USER}/tpukit-mnist-1"]
    assert ran.code == 0 and epochs_of(here / "outputs/sent/mnist/runs/mnist") == 4


def test_a_hostile_chain_json_is_refused_before_anything_is_run(server, send, here):
    server.script = leaves(None)
    send("kaggle", "mnist", *SMALL)
    path, asked = here / "outputs/sent/mnist/chain.json", len(server.requests)
    text = path.read_bytes()
    for changes in (
        dict(name="../../x"),
        dict(accelerator="--help"),
        dict(hours="8.5"),
        dict(hours=float("nan")),
        dict(datasets=["--path=/etc"]),
        dict(surprise=1),
        dict(sent=5),
        dict(kernel="tester/../../x"),
        dict(kernel="--help"),
    ):
        values = files.parse_with_crc32(text)
        (values["sent"][0] if "kernel" in changes else values).update(changes)
        path.write_text(json.dumps(files.with_crc32(values)))
        for words in (["follow", "mnist"], ["fetch", "mnist"], ["stop", "mnist"], ["status", "mnist"]):
            ran = send(*words)
            assert ran.code == 1 and "chain.json" in ran.err, (changes, ran)
    path.write_bytes(text.replace(b'"mnist', b'"mnisT', 1))  # its checksum is of another text
    assert send("follow", "mnist").code == 1
    assert len(server.requests) == asked


def test_the_token_is_on_no_command_line_and_in_no_file(server, send, here, stages):
    seen = set()
    done = threading.Event()

    def watch():
        while not done.is_set():
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    seen.add(path.read_bytes())
            time.sleep(0.01)

    watcher = threading.Thread(target=watch)
    watcher.start()
    plays(server, leaves(stages[0], "stopped"), leaves(stages[1]))
    try:
        send("kaggle", "mnist", *SMALL, "--epochs", 2, "--sessions", 2)
        server.fail("SaveKernel", 500)
        ran = send("follow", "mnist")
    finally:
        done.set()
        watcher.join()
    assert any(b"\0kernels\0push\0" in line for line in seen)
    text = [*seen, ran.out.encode(), ran.err.encode()]
    text += [path.read_bytes() for path in here.rglob("*") if path.is_file()]
    text += [json.dumps(request.body).encode() for request in server.requests]
    assert not [part for secret in SECRETS for part in text if secret.encode() in part]
