"""What follows what in a chain on Kaggle, and what is said of it. Where only the end of a session matters, a
script leaves the files of a run that was trained here (`stages`)."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from tests.tools.send import kaggle_server as loopback
from tests.tools.send.conftest import SMALL, epochs_of, leaves, plays, sent, until
from tests.tools.send.kaggle_server import KEY, USER
from tpukit.host import files

pytest.importorskip("kaggle", reason="kaggle is not installed: pip install kaggle")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "call, what, number",  # of the calls of the `follow` that is killed
    [
        ("SaveKernel", "hang", 1),  # the push has not arrived
        ("SaveKernel", "hang after", 1),  # it has, and the answer has not
        ("GetKernelSessionStatus", "hang", 1),  # before or while it waits
        ("file", "hang", 3),  # it brings the files
    ],
)
def test_a_follow_that_is_killed_goes_on_and_sends_nothing_twice(
    server, send, here, stages, background, call, what, number
):
    plays(server, leaves(stages[0], "stopped"), leaves(stages[1]))
    send("kaggle", "mnist", *SMALL, "--epochs", 2, "--sessions", 2)
    before = len(server.calls(call))
    server.fail(call, what, after=number - 1)
    process = background("follow", "mnist")
    until(lambda: len(server.calls(call)) == before + number)
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
