"""A stand-in for gcloud on PATH, with an empty cloud, and what the tests of `tpukit cloud` ask of it."""

import datetime
import signal

import pytest

from tests.tools.cloud import stand_in
from tpukit import cli
from tpukit.tools.cloud import rented, renting

OURS = {"made-by": "tpukit", "tpukit-minutes": "240", "tpukit-capacity": "on-demand", "tpukit-request": "0123abcd"}
PLACE = ["--zone=us-central1-a", "--project=mine"]


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Google's time is this computer's, as in the stand-in; processes that are started find nothing where they ask for it."""
    monkeypatch.setattr(rented, "google_now", lambda: datetime.datetime.now(datetime.timezone.utc))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")


@pytest.fixture
def google(tmp_path, monkeypatch):
    """The stand-in's folder, on PATH, with an empty cloud. Waiting takes no time."""
    monkeypatch.chdir(tmp_path)
    for name, value in stand_in.install(tmp_path / "google").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(renting, "POLL_S", 0)
    return tmp_path / "google"


def rent(google, *requests_and_nodes):
    """Put machines into the stand-in's cloud."""
    kinds = {"requests": [], "nodes": []}
    for part in requests_and_nodes:
        kinds["requests" if "queuedResources" in part["name"] else "nodes"].append(part)
    stand_in.write(google, **kinds)


def ours(name, zone="us-central1-a", **more):
    """A machine of tpukit's, with its request."""
    more = {"labels": OURS, **more}
    return stand_in.request(name, zone, **more), stand_in.node(name, zone, **more)


def verbs(google):
    return [" ".join(call[2:4]) for call in stand_in.calls(google) if call[0] == "compute"]


def refused(capsys, *argv):
    assert cli.main(["cloud", *argv]) == 1
    return capsys.readouterr().err


@pytest.fixture
def hosts(google):
    """A machine `mine` of two hosts that can install tpukit; their `tpukit` says what it was told, and writes a run."""
    rent(google, *ours("mine", accelerator="v5litepod-16"))
    stand_in.write(google, hosts=2)
    write_program(google / "host-bin/pip", 'mkdir -p ~/.local/bin; cp "$0" ~/.local/bin/uv; echo "pip $*" >> ~/installed')
    train = "{ mkdir -p outputs/mnist; echo 1 > outputs/mnist/config.json; sleep ${NAP:-0}; }"
    program = f'echo "tpukit $*"; [ "$1" = train ] && {train}; true'
    for host in (0, 1):
        write_program(google / f"host-{host}/tpukit-python/bin/tpukit", program)
    return google


def write_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def as_in_a_terminal():
    """Signals do what they do there, also where these tests were started with nohup or in the background."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
