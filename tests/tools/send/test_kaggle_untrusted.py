"""What comes back from Kaggle is not trusted, and what goes there holds no token."""

import contextlib
import json
import shutil
import threading
import time
from pathlib import Path

import pytest

from tests.conftest import flip
from tests.tools.send.conftest import HOSTILE, SECRETS, SMALL, epochs_of, leaves, plays
from tests.tools.send.kaggle_server import USER
from tpukit import TpukitError
from tpukit.host import files

pytest.importorskip("kaggle", reason="kaggle is not installed: pip install kaggle")
pytestmark = pytest.mark.slow


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
