"""What the tests of `tpukit send kaggle` share: a server that is Kaggle to the real `kaggle` package, a user
who is logged in, and a run that was trained here, whose files scripts of sessions leave."""

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import ROOT
from tests.tools.send import kaggle_server as loopback
from tests.tools.send.kaggle_server import KEY, TOKEN, USER
from tpukit import MNIST, Run, cli, train

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
