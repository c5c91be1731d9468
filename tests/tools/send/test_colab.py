"""Sessions on Colab, against a stand-in of Google's command that runs the notebooks (colab_command.py)."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tpukit import MNIST, Run
from tpukit.host.errors import TpukitError
from tpukit.runs.run import settings_dict
from tpukit.tools.send import State
from tpukit.tools.send import chain as chains
from tpukit.tools.send import follow
from tpukit.tools.send.colab import Colab

FAKE = Path(__file__).with_name("colab_command.py")
TOKEN = "ya29.not-a-real-token"


@pytest.fixture
def colab(tmp_path, monkeypatch):
    """The folder of the stand-in, which is on PATH as `colab`, logged in with a token of its own."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "--net", "--mount", "true"]).returncode:
        pytest.skip("a machine of Colab is a namespace here, which this machine refuses")
    home, commands = tmp_path / "colab", tmp_path / "bin"
    commands.mkdir()
    (home / "config").mkdir(parents=True)
    (home / "config/token.json").write_text(json.dumps({"token": TOKEN}))
    command = commands / "colab"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("COLAB_COMMAND", str(home))
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    yield home
    for machine in (home / "machines").glob("*"):
        subprocess.run([command, "stop", "-s", machine.name], capture_output=True)


def calls(home):
    return [json.loads(line) for line in (home / "calls.jsonl").read_text().splitlines()]


def mnist_chain(folder, *, epochs, **options):
    settings = dict(epochs=epochs, batch_size=16, log_every=3, checkpoint_every_s=0.0)
    settings = {name: value for name, value in settings.items() if name in settings_dict(MNIST())}
    options = dict(accelerator="none", until_epochs=epochs, hours=0.2) | options
    return chains.Chain(
        name=folder.name, service="colab", kind="task", task="mnist", settings=[settings], **options
    )


@pytest.mark.slow
def test_a_session_trains_a_task_on_colab_and_gives_the_machine_back(colab, tmp_path):
    folder, service, said = tmp_path / "sent/digits", Colab(), []
    chain = mnist_chain(folder, epochs=1)
    assert follow.send(folder, chain, service, {}, said.append) is None
    ended = follow.follow(folder, service, said.append)
    print("\n".join(said))
    assert ended.is_done
    assert follow.progress(folder / "runs/digits")[1] == 1
    assert any("epoch 1: loss" in line for line in said)
    assert service.state("tpukit-digits-1") == State("unknown")
