"""Sessions on Colab, against a stand-in of Google's command that runs the notebooks (colab_command.py)."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import pytest

from tpukit import Run
from tpukit.host.errors import TpukitError
from tpukit.tools.send import State, Unreachable, follow
from tpukit.tools.send import chain as chains
from tpukit.tools.send.colab import Colab

FAKE = Path(__file__).with_name("colab_command.py")
TOKEN = "ya29.not-a-real-token"


@pytest.fixture
def colab(tmp_path, monkeypatch):
    """The folder of the stand-in, which is on PATH as `colab`, logged in with a token of its own."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "--net", "--mount", "true"]).returncode:
        pytest.skip("a machine of Colab is a namespace here, which this machine refuses")
    # Short: the path of a kernel's socket has at most 107 bytes.
    home, commands = Path(tempfile.mkdtemp(prefix="colab")), tmp_path / "bin"
    commands.mkdir()
    (home / "config").mkdir(parents=True)
    (home / "config/token.json").write_text(json.dumps({"token": TOKEN}))
    command = commands / "colab"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("COLAB_COMMAND", str(home))
    monkeypatch.setattr(follow, "POLL_S", 0.2)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    yield home
    for machine in (home / "machines").glob("*"):
        subprocess.run([command, "stop", "-s", machine.name], capture_output=True)
    shutil.rmtree(home)


def calls(home):
    """The commands that were given, without the options that do not matter here."""
    lines = (home / "calls.jsonl").read_text().splitlines()
    return [tuple(json.loads(line)[0:3:2]) for line in lines]


def mnist_chain(folder, *, epochs, **options):
    settings = dict(epochs=epochs, batch_size=64, log_every=20, save_every_s=0.0)
    options = dict(accelerator="none", until_epochs=epochs, hours=0.2) | options
    return chains.Chain(
        name=folder.name, service="colab", kind="task", task="mnist", settings=[settings], **options
    )


def notebook_chain(folder, source, **options):
    """A chain that runs one cell, in a folder with its notebook."""
    cell = dict(cell_type="code", execution_count=None, metadata={}, outputs=[], source=source)
    folder.mkdir(parents=True)
    (folder / "notebook.ipynb").write_text(
        json.dumps(dict(cells=[cell], metadata={}, nbformat=4, nbformat_minor=4))
    )
    options = dict(accelerator="none", hours=0.2) | options
    return chains.Chain(name=folder.name, service="colab", kind="notebook", settings=[{}], **options)


@pytest.mark.slow
def test_three_sessions_one_taken_away_train_what_one_training_does_and_leave_no_machine_and_no_token(
    colab, tmp_path, monkeypatch
):
    folder, service, said = tmp_path / "sent/digits", Colab(), []
    chain = mnist_chain(folder, epochs=2, sessions=3)
    # The first machine ends after its first epoch as at its limit, the second is taken away while it trains.
    (colab / "end.json").write_text(json.dumps({"tpukit-digits-1": "epoch 1: loss"}))
    (colab / "take.json").write_text(json.dumps({"tpukit-digits-2": "resum"}))
    assert follow.send(folder, chain, service, {}, said.append) == "sent"
    ended = follow.follow(folder, service, said.append)
    assert ended == "done", "\n".join([*said, ended])
    sessions = chains.read(folder).sent
    assert [session.state for session in sessions] == ["stopped", "lost", "done"]
    run = Run.find(folder / "runs/digits")
    assert [record["epoch"] for record in run.records("epoch")] == [0, 1]
    assert [call for call in calls(colab) if call[0] in ("new", "upload", "stop")] == [
        ("new", "tpukit-digits-1"), ("stop", "tpukit-digits-1"),
        ("new", "tpukit-digits-2"), ("upload", "tpukit-digits-2"),
        ("new", "tpukit-digits-3"), ("upload", "tpukit-digits-3"), ("stop", "tpukit-digits-3"),
    ]  # fmt: skip
    assert not list((colab / "machines").glob("*"))
    written = [path for path in (tmp_path / "sent").rglob("*") if path.is_file()]
    assert written and not [path for path in written if TOKEN.encode() in path.read_bytes()]
    assert TOKEN not in (colab / "calls.jsonl").read_text() and TOKEN not in "\n".join(said)


@pytest.mark.slow
def test_cells_after_one_that_failed_do_nothing_though_the_command_sends_them_and_it_is_not_sent_again(
    colab, tmp_path
):
    folder, service, said = tmp_path / "sent/broken", Colab(), []
    chain = notebook_chain(folder, "1 / 0", sessions=3)
    follow.send(folder, chain, service, {}, said.append)
    ended = follow.follow(folder, service, said.append)
    assert "needs you (failed: ZeroDivisionError" in ended
    assert [session.kernel for session in chains.read(folder).sent] == ["tpukit-broken-1"]


@pytest.mark.slow
def test_a_machine_without_the_accelerator_runs_nothing_of_the_notebook(colab, tmp_path):
    folder, service, said = tmp_path / "sent/no-tpu", Colab(), []
    chain = notebook_chain(folder, "open('/content/outputs/ran', 'w')", accelerator="tpu")
    follow.send(folder, chain, service, {}, said.append)
    ended = follow.follow(folder, service, said.append)
    assert ended.startswith("needs you (no accelerator")
    assert not list(folder.rglob("ran"))


@pytest.mark.slow
def test_where_the_command_was_killed_the_next_one_waits_for_what_runs_and_brings_it(colab, tmp_path):
    folder, said = tmp_path / "sent/slow", []
    source = """import os, time
os.makedirs('/content/outputs/note')
open('/content/outputs/began', 'w').close()
while not os.path.exists('/content/go'):
    time.sleep(0.1)
open('/content/outputs/note/a', 'w').close()"""
    content = colab / "machines/tpukit-slow-1/root/content"
    first = Colab()
    follow.send(folder, notebook_chain(folder, source), first, {}, said.append)
    while not (content / "outputs/began").exists():
        time.sleep(0.1)
    first._running["tpukit-slow-1"].kill()
    second = Colab()
    assert second.state("tpukit-slow-1") == State("running")
    (content / "go").touch()
    ended = follow.follow(folder, second, said.append, push=True)
    assert "done" not in said and "sessions used up" in ended
    assert (folder / "sessions/1/outputs/note/a").exists()  # its cell ended; the one after it never began
    assert not (folder / "sessions/1/outputs/session.json").exists()


@pytest.mark.slow
def test_what_a_machine_sends_is_not_trusted(colab, tmp_path):
    service, machines = Colab(), colab / "machines"
    subprocess.run([*service.command, "new", "-s", "tpukit-a-1"], check=True)
    # The packing cannot be trusted either, as the machine runs it: here it fails, and leaves nothing.
    (machines / "tpukit-a-1/root/content/left.zip").mkdir()
    with pytest.raises(TpukitError, match="tpukit-a-1 failed: IsADirectoryError"):
        service.fetch("tpukit-a-1", tmp_path / "new")
    with zipfile.ZipFile(tmp_path / "hostile.zip", "w") as packed:
        packed.writestr("outputs/../../outside", "x")
    service._exec = lambda kernel, lines: None  # type: ignore
    (machines / "tpukit-a-1/root/content/left.zip").rmdir()
    shutil.copy(tmp_path / "hostile.zip", machines / "tpukit-a-1/root/content/left.zip")
    with pytest.raises(TpukitError, match="leads outside"):
        service.fetch("tpukit-a-1", tmp_path / "new")
    assert not list(tmp_path.rglob("outside")) and (machines / "tpukit-a-1").exists()


def command(folder, monkeypatch, text):
    """Put a `colab` that does what some lines of shell say on an otherwise empty PATH."""
    path = folder / "colab"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return Colab()


def test_a_missing_command_is_one_sentence_that_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TpukitError, match="pip install google-colab-cli"):
        Colab()


@pytest.mark.parametrize(
    "printed, kind, words",
    [
        ("https://accounts.google.com/o/oauth2/auth?x=1\nEOFError", TpukitError, "colab sessions"),
        ("requests.exceptions.ConnectionError: Max retries exceeded", Unreachable, "Max retries"),
        ("[colab] Backend rejected accelerator 'V5E1'.", TpukitError, "Backend rejected accelerator"),
        ("", TpukitError, "printed nothing"),
    ],
)
def test_what_fails_there_is_said_in_one_line(printed, kind, words, tmp_path, monkeypatch):
    says = f"printf '\\033[2J'; echo \"{printed}\"" if printed else ""
    service = command(tmp_path, monkeypatch, f"{says}\nexit 1")
    with pytest.raises(TpukitError, match=words) as caught:
        service.state("tpukit-a-1")
    assert type(caught.value) is kind
    assert "\x1b" not in str(caught.value)


def test_a_machine_is_there_only_where_its_own_name_is_listed(tmp_path, monkeypatch):
    service = command(tmp_path, monkeypatch, "echo '[tpukit-a-12] m-s-1 | Hardware: CPU'")
    assert service.state("tpukit-a-1") == State("unknown")


def test_lines_that_fail_on_a_machine_are_an_error_though_the_command_ends_well(tmp_path, monkeypatch):
    service = command(tmp_path, monkeypatch, "echo 'Traceback'; echo 'ReadError: not a zip file'")
    with pytest.raises(TpukitError, match="tpukit-a-1 failed: ReadError: not a zip file"):
        service._exec("tpukit-a-1", "unpack()")
