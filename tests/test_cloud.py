"""Rented machines: every call of gcloud, with a recording stand-in on PATH; the scripts that run on a machine, run here."""

import http.server
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests import gcloud_stand_in as stand_in
from tests.conftest import ROOT
from tests.test_notebooks import outputs, run_notebook, text
from tpukit import TpukitError, cli
from tpukit.tools import prices
from tpukit.tools.cloud import gcloud, rented, renting, running, tpu_types

OURS = {"made-by": "tpukit", "tpukit-minutes": "240", "tpukit-capacity": "on-demand", "tpukit-request": "0123abcd"}
PLACE = ["--zone=us-central1-a", "--project=mine"]


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


# Create


def test_create_says_what_it_costs_then_asks_for_the_request_and_waits_until_it_is_there(google, capsys):
    stand_in.write(google, states=["ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"])
    options = ["--accelerator", "v5litepod-8", "--zone", "us-west4-a", "--hours", "2.5", "--spot", "--yes"]
    assert cli.main(["cloud", "create", "mine", *options]) == 0
    said = capsys.readouterr().out
    v5e = prices.find(prices.read(), "TPU v5e", "Google Cloud").spot_usd_per_hour
    assert said.startswith(
        f"v5litepod-8: 8 chips of TPU v5e, spot. About ${8 * v5e:.2f} an hour, ${8 * v5e * 2.5:.2f} for the 2.5 hours"
    )
    states = ["in the queue until chips are free; costs nothing yet", "the machine starts", "the machine is there"]
    assert [said.index(words) for words in states] == sorted(said.index(words) for words in states)
    assert "mine is there and costs money from now on. It deletes itself in 2.5 hours" in said
    assert "whether it deleted itself, `tpukit cloud list`" in said
    calls = stand_in.calls(google)
    at = ["--zone=us-west4-a", "--project=mine"]
    assert calls[:3] == [
        ["config", "list", "--format=json"],
        ["compute", "tpus", "queued-resources", "list", *at, "--format=json"],
        ["compute", "tpus", "tpu-vm", "list", *at, "--format=json"],
    ]
    create = calls[3]
    mark = re.search("tpukit-request=([0-9a-f]{8})", " ".join(create))[1]
    guard = next(word for word in create if word.startswith("--metadata="))
    assert create == [
        *["compute", "tpus", "queued-resources", "create", "mine", *at, "--node-id=mine", "--accelerator-type=v5litepod-8"],
        "--runtime-version=v2-alpha-tpuv5-lite",
        f"--labels=made-by=tpukit,tpukit-minutes=150,tpukit-request={mark},tpukit-capacity=spot",
        "--scopes=https://www.googleapis.com/auth/cloud-platform",
        "--valid-until-duration=3600s",
        guard,
        "--spot",
        "--quiet",
    ]
    assert guard.startswith("--metadata=^~^startup-script=#!/bin/bash\n") and guard.count("~") == 1
    describe = ["compute", "tpus", "queued-resources", "describe", "mine", *at, "--format=json"]
    assert calls[4:] == [describe] * 3


def test_create_takes_one_chip_on_demand_unless_told_otherwise_and_an_account_where_one_is_given(google):
    account = "guard@mine.iam.gserviceaccount.com"
    assert cli.main(["cloud", "create", "--yes", "--service-account", account, "--project", "other"]) == 0
    (create,) = [call for call in stand_in.calls(google) if "create" in call]
    assert {"tpukit", "--accelerator-type=v5litepod-1", "--project=other", f"--service-account={account}"} <= set(create)
    assert "--spot" not in create and any("tpukit-capacity=on-demand" in word for word in create)


@pytest.mark.parametrize(
    "accelerator, chips, hardware",
    [
        ("v5litepod-1", 1, "TPU v5e"),
        ("v5litepod-16", 16, "TPU v5e"),
        ("v6e-4", 4, "TPU v6e"),
        ("v4-8", 4, "TPU v4"),
        ("v3-8", 4, "TPU v3"),
    ],
)
def test_the_cost_counts_chips_and_the_hours_until_the_machine_deletes_itself(accelerator, chips, hardware):
    each = prices.find(prices.read(), hardware, "Google Cloud").usd_per_hour
    words = tpu_types.cost_in_words(accelerator, False, 3)
    assert f"{chips} chip" in words and f"${chips * each:.2f} an hour, ${3 * chips * each:.2f} for the 3 hours" in words


def test_without_a_price_the_cost_is_said_to_be_unknown(monkeypatch):
    table = [prices.Price("TPU v5e", "Google Cloud", None, None, None, None, None, "2026-03", "")]
    monkeypatch.setattr(prices, "read", lambda: table)
    assert "is not in tpukit's table of prices: https://" in tpu_types.cost_in_words("v5litepod-1", True, 1)


@pytest.mark.parametrize("answer, made", [("y", True), ("yes ", True), ("", False), ("n", False), ("nah", False)])
def test_create_goes_on_after_a_yes_alone(answer, made, google, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or answer)
    assert cli.main(["cloud", "create", "mine"]) == (0 if made else 1)
    assert (
        asked == ["Rent mine in us-central1-a of project mine? [y/N] "] and ("queued-resources create" in verbs(google)) == made
    )
    assert made or "nothing was done" in capsys.readouterr().err


def test_where_nobody_can_be_asked_yes_is_needed_beforehand(google):
    for argv in (["create", "mine"], ["delete", "mine"]):
        rent(google, *(ours("mine") if argv[0] == "delete" else ()))
        ran = subprocess.run(
            [sys.executable, "-m", "tpukit", "cloud", *argv], stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        assert ran.returncode == 1 and "nobody can be asked here, and nothing was done" in ran.stderr and "--yes" in ran.stderr
    assert not {"queued-resources create", "queued-resources delete"} & set(verbs(google))


def test_a_name_that_is_there_already_is_not_asked_for_again(google, capsys):
    for labels in (OURS, {}):
        rent(google, *ours("mine", labels=labels))
        assert "mine is there already, in us-central1-a, READY" in refused(capsys, "create", "mine", "--yes")
    assert "queued-resources create" not in verbs(google)


# What gcloud says in public reports -> what to do about it.
REFUSALS = {
    "Quota limit 'TPUV5sLitepodPerProjectPerZoneForTPUAPI' has been exceeded. Limit: 0 in zone us-central1-a. [EID: 0x1]": (
        "quota",
        [
            "TPUV5sLitepodPerProjectPerZoneForTPUAPI",
            "Ask for more at https://console.cloud.google.com/iam-admin/quotas",
            "us-west4-a",
        ],
    ),
    "Quota 'TPUV5sLitepodServingPerProjectPerZoneForTPUAPI' exhausted. Limit 4 in zone us-central1-a": (
        "quota",
        ["Ask for more at"],
    ),
    'There is no more capacity in the zone "us-central1-a"; you can try in another zone where Cloud TPU Nodes are offered': (
        "no capacity",
        ["Try again later", "--spot or", "Zones with v5litepod-1, as far as known here: us-central1-a, us-south1-a"],
    ),
    "RESOURCE_EXHAUSTED: no resources": ("no capacity", ["are taken now"]),
    "INVALID_ARGUMENT: Cloud TPU received a bad request. The requested accelerator configuration for accelerator type, "
    '"v5litepod-1", could not be found in the zonal accelerator configurations for "us-central1-a".; the accelerator '
    "v5litepod-1 was not found in zone us-central1-a [EID: 0x5]": (
        "wrong zone",
        [
            "us-central1-a has no v5litepod-1 for this project",
            "us-west4-a",
            "accelerator-types list --zone=- --filter=type=v5litepod-1",
        ],
    ),
    "PERMISSION_DENIED: Permission denied on 'locations/us-central1-a' (or it may not exist).": (
        "wrong zone",
        ["us-central1-a has no"],
    ),
    "PERMISSION_DENIED: Cloud TPU API has not been used in project mine before or it is disabled. Enable it by visiting": (
        "api",
        ["gcloud services enable tpu.googleapis.com --project=mine"],
    ),
    "PERMISSION_DENIED: Permission 'tpu.queuedResources.create' denied on 'projects/mine/locations/us-central1-a'": (
        "permission",
        ["roles/tpu.admin", "roles/iam.serviceAccountUser"],
    ),
    "You do not currently have an active account selected.\nPlease run:\n\n  $ gcloud auth login": (
        "login",
        ["log in: gcloud auth login"],
    ),
    "Reauthentication failed. cannot prompt during non-interactive execution.": ("login", ["log in: gcloud auth login"]),
    "FAILED_PRECONDITION: Billing must be enabled for activation of service": ("billing", ["console.cloud.google.com/billing"]),
    "The project property is set to mine, project not found": ("project", ["gcloud config set project"]),
    "ALREADY_EXISTS: Resource 'projects/mine/locations/us-central1-a/queuedResources/mine' already exists": (
        "taken",
        ["take another"],
    ),
    "UNAVAILABLE: The service is currently unavailable.": ("network", ["try again"]),
    "HTTPSConnectionPool: Failed to establish a new connection: [Errno 110] Connection timed out": ("network", ["try again"]),
    "HTTPSConnectionPool: Failed to establish a new connection: [Errno 111] Connection refused": ("network", ["try again"]),
    "ssh: connect to host 10.0.0.1 port 22: Connection timed out": ("ssh", ["not reached over ssh"]),
    "NOT_FOUND: Resource 'projects/mine/locations/us-central1-a' was not found.": (
        "wrong zone",
        ["us-central1-a has no v5litepod-1"],
    ),
    "something new": ("", []),
}


@pytest.mark.parametrize("said", REFUSALS, ids=lambda said: said[:30])
def test_what_gcloud_refuses_is_shown_with_its_mend_and_nothing_is_left(said, google, capsys):
    kind, mends = REFUSALS[said]
    stand_in.write(google, refuse={"queued-resources create": said})
    told = refused(capsys, "create", "mine", "--yes")
    assert gcloud.GcloudError(["x"], said).kind == kind
    for words in (*said.splitlines(), *mends):
        assert words in told, told
    assert "time is up" not in told and "Traceback" not in told  # the whole script of the machine is no part of an error
    assert stand_in.read(google)["requests"] == []


@pytest.mark.parametrize(
    "verb, said, mend",
    [
        ("create", "", "gcloud is not installed: https://cloud.google.com/sdk/docs/install"),
        ("list", "", "gcloud is not installed"),
        ("create", {}, "gcloud is not logged in: gcloud auth login"),
        ("create", {"core": {"account": "me@example.com"}}, "gcloud has no project: gcloud config set project PROJECT"),
        ("list", {"core": {"project": "mine"}}, "not logged in"),
    ],
)
def test_without_gcloud_a_login_or_a_project_the_mend_is_said(verb, said, mend, google, monkeypatch, capsys):
    if said == "":
        monkeypatch.setenv("PATH", str(google))
    else:
        stand_in.write(google, config=said)
    assert mend in refused(capsys, verb, *["--yes"] * (verb == "create"))
    assert "queued-resources create" not in verbs(google)


@pytest.mark.parametrize(
    "argv, words",
    [
        (["create", "Mine"], "name 'Mine': small letters"),
        (["create", "mine; rm -rf /"], "small letters"),
        (["create", "m" * 51], "at most 50"),
        (["delete", "-"], "small letters"),
        (["create", "--accelerator", "v5e-8"], "'v5e-8' is no TPU type that is known here: v5litepod-NUMBER, v6e-NUMBER"),
        (["create", "--accelerator", "T4:2"], "no TPU type"),
        (["create", "--accelerator", "v5litepod-0"], "no TPU type"),
        (["create", "--accelerator", "v4-7"], "two a chip"),
        (["create", "--zone", "us-central1"], "zone 'us-central1': a zone is called like us-central1-a"),
        (["create", "--hours", "0"], "hours=0: more than 0, and at most 168"),
        (["create", "--hours", "nan"], "hours=nan"),
        (["create", "--wait-hours", "-1"], "wait_hours=-1"),
        (["create", "--project", "my project"], "no project id"),
        (["create", "--service-account", "me"], "no address like"),
        (["delete"], "needs a name, or --expired"),
        (["delete", "mine", "--expired"], "needs a name, or --expired"),
        (["run", "mine"], "what to run comes after `--`: train WORKLOAD"),
        (["run", "mine", "--", "test", "mnist"], "train WORKLOAD"),
        (["run", "mine", "--", "train", "mnist", "--run", "my runs/$(date)"], "has letters, digits"),
        (["skypilot", "--", "test", "mnist"], "train WORKLOAD"),
        (["skypilot", "--accelerator", "v5e-8"], "no TPU type"),
        (["skypilot", "--accelerator", "T4"], "A GPU comes with its number on each host, like T4:1"),
        (["skypilot", "--name", "a: b"], "name 'a: b': small letters"),
        (["delete", "mine", "--yes", "--", "--dry-run"], "`tpukit cloud delete` takes nothing after `--`; got: --dry-run"),
        (["rent"], "there are create, list, open, run, watch, fetch, delete, skypilot"),
        ([], "there are create, list"),
    ],
)
def test_impossible_wishes_are_refused_before_anything_is_asked_of_google(argv, words, google, capsys):
    assert words in refused(capsys, *argv)
    assert not {"create", "delete", "ssh"} & {verb.split()[-1] for verb in verbs(google)}


@pytest.mark.parametrize("state, failed", [("FAILED", next(iter(REFUSALS))), ("FAILED", ""), ("SUSPENDED", "")])
def test_a_request_that_ends_without_a_machine_says_why_and_is_deleted(state, failed, google, capsys):
    stand_in.write(google, states=["ACCEPTED", "PROVISIONING", state], failed=failed)
    told = refused(capsys, "create", "mine", "--yes")
    assert (failed or f"the request ended as {state}, without a reason") in told
    assert not failed or "Ask for more at" in told and "Zones with v5litepod-1" in told
    assert verbs(google)[-3:] == ["queued-resources delete", "queued-resources describe", "tpu-vm describe"]
    assert stand_in.read(google)["requests"] == []


def test_a_request_that_waits_too_long_is_deleted(google, capsys):
    stand_in.write(google, states=["WAITING_FOR_RESOURCES"])
    told = refused(capsys, "create", "mine", "--yes", "--wait-hours", "0.00001")
    assert "no free v5litepod-1 in us-central1-a within 1e-05 hours" in told and "us-west4-a" in told
    assert stand_in.read(google)["requests"] == []


def test_waiting_outlives_a_lost_network_for_a_while_then_says_that_the_request_stands(google, capsys):
    gone = "UNAVAILABLE: The service is currently unavailable."
    stand_in.write(google, states=["ACCEPTED", "ACTIVE"], refuse={"queued-resources describe": [gone] * 4})
    assert cli.main(["cloud", "create", "mine", "--yes"]) == 0
    assert capsys.readouterr().out.count("no answer, trying again") == 4
    stand_in.write(google, requests=[], nodes=[], states=["ACCEPTED"], refuse={"queued-resources describe": gone})
    told = refused(capsys, "create", "mine", "--yes")
    assert (
        "The request stands" in told and "gcloud compute tpus queued-resources delete mine --zone=us-central1-a --force" in told
    )


def as_in_a_terminal():
    """Signals do what they do there, also where these tests were started with nohup or in the background."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def start(google, *argv):
    """`tpukit cloud ...` in a process of its own, and a wait until it has called gcloud so."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tpukit", "cloud", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=as_in_a_terminal,
    )

    def until(verb):
        deadline = time.monotonic() + 60
        while verb not in verbs(google):
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
            time.sleep(0.02)

    return process, until


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("during", ["queued-resources create", "queued-resources describe"])
def test_an_interrupted_create_deletes_what_it_asked_for(during, number, google):
    stand_in.write(google, states=["WAITING_FOR_RESOURCES"], create_s=0.5)
    rent(google, *ours("other"))
    process, until = start(google, "create", "mine", "--yes")
    until(during)
    os.killpg(process.pid, number)  # as a terminal does: to gcloud too, were it in reach
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 130, said
    assert "interrupted: deleting the request" in said and "mine is gone" in said and "Traceback" not in said
    # Also where gcloud was still creating: it is left to end, so that it is known what there is to delete.
    (delete,) = [call for call in stand_in.calls(google) if "delete" in call]
    assert delete == ["compute", "tpus", "queued-resources", "delete", "mine", *PLACE, "--force", "--quiet"]
    assert [part["name"].split("/")[-1] for part in stand_in.read(google)["requests"]] == ["other"]


def test_a_create_whose_terminal_goes_away_deletes_what_it_asked_for(google):
    stand_in.write(google, states=["WAITING_FOR_RESOURCES"])
    process, until = start(google, "create", "mine", "--yes")
    until("queued-resources describe")
    process.stdout.close()
    process.send_signal(signal.SIGHUP)
    process.wait(60)
    assert stand_in.read(google)["requests"] == [] and "queued-resources delete" in verbs(google)


def test_where_the_network_goes_away_it_is_said_that_a_request_may_have_been_made(google, capsys):
    gone = "UNAVAILABLE: The service is currently unavailable."
    stand_in.write(google, refuse={"queued-resources create": gone, "queued-resources describe": gone})
    assert "Whether a request was made all the same is not known: tpukit cloud list" in refused(
        capsys, "create", "mine", "--yes"
    )


def test_an_interrupted_create_leaves_a_request_alone_that_is_not_its_own(google, monkeypatch, capsys):
    """Somebody else makes one of that name in the same moment."""

    def interrupted(self, *words, **more):
        rent(google, *ours("mine"))
        raise KeyboardInterrupt

    monkeypatch.setattr(gcloud.Gcloud, "ask", interrupted)
    assert cli.main(["cloud", "create", "mine", "--yes"]) == 130
    assert "is not what this command asked for: it is left alone" in capsys.readouterr().out
    assert "queued-resources delete" not in verbs(google) and len(stand_in.read(google)["requests"]) == 1


def test_an_interrupted_create_that_cannot_delete_says_what_still_costs(google, monkeypatch, capsys):
    stand_in.write(google, states=["WAITING_FOR_RESOURCES"], refuse={"queued-resources delete": "UNAVAILABLE: try later"})
    monkeypatch.setattr(renting.time, "sleep", lambda s: signal.raise_signal(signal.SIGTERM))
    told = refused(capsys, "create", "mine", "--yes")
    assert "may still become a machine that costs: gcloud compute tpus queued-resources delete mine" in told


@pytest.fixture
def stray_signals():
    """Those that reach the process outside of what tpukit handles."""
    seen, numbers = [], (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    old = {number: signal.signal(number, lambda number, frame: seen.append(number)) for number in numbers}
    yield seen
    for number, before in old.items():
        signal.signal(number, before)


@pytest.mark.parametrize("late", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_request_is_taken_back_does_not_stop_that(late, google, monkeypatch, stray_signals):
    stand_in.write(google, states=["WAITING_FOR_RESOURCES"])
    look = renting.look
    monkeypatch.setattr(renting.time, "sleep", lambda s: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr(renting, "look", lambda *words: signal.raise_signal(late) or look(*words))
    assert cli.main(["cloud", "create", "mine", "--yes"]) == 130
    assert stray_signals == [] and stand_in.read(google)["requests"] == []


def test_a_hang_up_that_nohup_ignores_does_not_interrupt(google, monkeypatch, stray_signals):
    stand_in.write(google, states=["WAITING_FOR_RESOURCES", "WAITING_FOR_RESOURCES", "ACTIVE"])
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.setattr(renting.time, "sleep", lambda s: signal.raise_signal(signal.SIGHUP))
    assert cli.main(["cloud", "create", "mine", "--yes"]) == 0
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN and "queued-resources delete" not in verbs(google)


def test_a_create_whose_reader_and_terminal_are_gone_takes_its_request_back(google, monkeypatch):
    stand_in.write(google, states=["WAITING_FOR_RESOURCES"], warn="WARNING: something")

    class Closed(io.StringIO):
        def write(self, words):
            if "queued-resources create" in verbs(google):
                raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    monkeypatch.setattr(sys, "stderr", Closed())
    with pytest.raises(BrokenPipeError):
        cli.main(["cloud", "create", "mine", "--yes"])
    assert stand_in.read(google)["requests"] == []


@pytest.mark.parametrize("times", [4, 5])
def test_waiting_outlives_answers_that_are_no_json_too(times, google, monkeypatch, capsys):
    call, answers = gcloud._call, ["Updates are available"] * times
    monkeypatch.setattr(gcloud, "_call", lambda w, **more: answers.pop() if answers and "describe" in w else call(w, **more))
    assert cli.main(["cloud", "create", "mine", "--yes"]) == (0 if times == 4 else 1)
    said = capsys.readouterr()
    assert said.out.count("no answer, trying again: gcloud was asked for JSON") == 4
    assert ("The request stands" in said.err) == (times == 5)


def test_a_machine_whose_chips_were_found_is_waited_for(google, monkeypatch, capsys):
    stand_in.write(google, states=["PROVISIONING", "PROVISIONING", "ACTIVE"])
    monkeypatch.setattr(renting, "POLL_S", 0.05)
    assert cli.main(["cloud", "create", "mine", "--yes", "--wait-hours", "0.00001"]) == 0
    assert "queued-resources delete" not in verbs(google)


def test_an_interrupted_create_leaves_a_request_without_labels_alone_and_says_how_to_delete_it(google, monkeypatch, capsys):
    def interrupted(s):
        rent(google, *ours("mine", labels={}))
        signal.raise_signal(signal.SIGTERM)

    stand_in.write(google, states=["WAITING_FOR_RESOURCES"])
    monkeypatch.setattr(renting.time, "sleep", interrupted)
    assert cli.main(["cloud", "create", "mine", "--yes"]) == 130
    assert "if it is yours: gcloud compute tpus queued-resources delete mine" in capsys.readouterr().out
    assert "queued-resources delete" not in verbs(google)


def test_whatever_was_refused_a_withdrawal_that_fails_is_said(google, capsys):
    stand_in.write(google, refuse={"queued-resources create": "QUOTA", "queued-resources describe": "something new"})
    told = refused(capsys, "create", "mine", "--yes")
    assert "Ask for more at" in told and "Whether a request was made all the same is not known" in told


# Delete


def test_delete_looks_whose_it_is_deletes_and_looks_that_it_is_gone(google, capsys):
    rent(google, *ours("mine"), *ours("other", "us-west4-a"))
    assert cli.main(["cloud", "delete", "mine", "--yes"]) == 0
    said = capsys.readouterr().out
    assert "mine: v5litepod-1 in us-central1-a, READY, about $1.20 so far" in said and "mine is gone" in said
    look = [["compute", "tpus", group, "describe", "mine", *PLACE, "--format=json"] for group in ("queued-resources", "tpu-vm")]
    everywhere = ["--zone=-", "--project=mine", "--format=json"]
    assert stand_in.calls(google)[1:] == [
        ["compute", "tpus", "queued-resources", "list", *everywhere],
        ["compute", "tpus", "tpu-vm", "list", *everywhere],
        *look,
        ["compute", "tpus", "queued-resources", "delete", "mine", *PLACE, "--force", "--quiet"],
        *look,
    ]
    assert [part["name"].split("/")[-1] for part in stand_in.read(google)["nodes"]] == ["other"]


STRANGE = [{}, {"made-by": "somebody"}, {"made-by": "tpukit2"}, {"madeby": "tpukit"}]


@pytest.mark.parametrize("labels", STRANGE, ids=str)
@pytest.mark.parametrize(
    "argv", [["delete", "mine"], ["delete", "--expired"], ["delete", "mine", "--zone", "us-central1-a"]], ids=str
)
def test_what_does_not_carry_the_label_is_never_deleted(argv, labels, google, capsys):
    old = {**labels, "tpukit-minutes": "1"} if labels else labels
    rent(google, *ours("mine", labels=old, hours_ago=9), stand_in.request("old", state="FAILED", labels=labels))
    cli.main(["cloud", *argv, "--yes"])
    said = capsys.readouterr()
    assert "does not carry the label made-by=tpukit" in said.err if "mine" in argv else "nothing was forgotten" in said.out
    assert not any("delete" in call for call in stand_in.calls(google)) and len(stand_in.read(google)["requests"]) == 2


def test_a_request_of_ours_with_a_machine_of_somebody_else_is_left_alone(google, capsys):
    rent(google, ours("mine")[0], stand_in.node("mine", labels={"made-by": "somebody"}))
    assert "tpukit did not make it" in refused(capsys, "delete", "mine", "--yes")
    assert not any("delete" in call for call in stand_in.calls(google))


def test_a_machine_that_changed_hands_since_it_was_listed_is_left_alone(google):
    rent(google, *ours("mine", labels={"made-by": "somebody"}))
    with pytest.raises(TpukitError, match="it is left alone"):
        renting.delete_checked(gcloud.Gcloud(), "mine", "us-central1-a")
    assert not any("delete" in call for call in stand_in.calls(google))


def test_a_machine_without_its_request_is_deleted_too(google):
    rent(google, ours("mine")[1])
    assert cli.main(["cloud", "delete", "mine", "--yes"]) == 0
    (delete,) = [call for call in stand_in.calls(google) if "delete" in call]
    assert delete == ["compute", "tpus", "tpu-vm", "delete", "mine", *PLACE, "--quiet"] and not stand_in.read(google)["nodes"]


def test_what_does_not_go_away_is_said_to_cost_still(google, capsys):
    rent(google, *ours("mine"))
    stand_in.write(google, stuck=True)
    told = refused(capsys, "delete", "mine", "--yes")
    assert (
        "mine is still there and may cost money: gcloud compute tpus queued-resources delete mine --zone=us-central1-a" in told
    )


def test_a_name_in_two_zones_or_none_is_asked_back(google, capsys):
    rent(google, *ours("mine"), *ours("mine", "us-west4-a"))
    assert "in several zones: us-central1-a, us-west4-a; choose with --zone" in refused(capsys, "delete", "mine", "--yes")
    assert "no machine 'yours' here; those that tpukit made: mine, mine" in refused(capsys, "delete", "yours", "--yes")
    assert cli.main(["cloud", "delete", "mine", "--yes", "--zone", "us-west4-a"]) == 0
    assert [part["name"].split("/")[3] for part in stand_in.read(google)["nodes"]] == ["us-central1-a"]


# List


def world(google):
    rent(
        google,
        *ours("fresh", hours_ago=1.5),
        *ours("forgotten", "europe-west4-b", hours_ago=9),
        *ours("cheap", accelerator="v5litepod-8", labels={**OURS, "tpukit-capacity": "spot"}, hours_ago=2),
        stand_in.request("waiting", state="WAITING_FOR_RESOURCES", labels=OURS),
        stand_in.request("failed", state="FAILED", labels=OURS),
        stand_in.request("theirs", "us-west4-a"),
        stand_in.node("theirs", "us-west4-a"),
        stand_in.node("strange", labels={"team": "tpukit"}),
    )


def test_list_shows_ours_with_cost_and_end_the_forgotten_first_and_counts_the_others(google, capsys):
    world(google)
    assert cli.main(["cloud", "list"]) == 0
    said = capsys.readouterr().out
    rows = {line.split()[0]: line for line in said.splitlines() if line.split()}
    order = [name for name in rows if name in ("fresh", "forgotten", "cheap", "waiting", "failed")]
    assert set(order[:2]) == {"forgotten", "failed"} and len(order) == 5
    assert (
        "1 h 30 min" in rows["fresh"]
        and "$1.80" in rows["fresh"]
        and re.search(r"\(in 2 h\s*30\s*min\)", " ".join(said.split()))
    )
    assert "$3.92" in rows["cheap"] and "spot" in rows["cheap"]
    assert (
        "FORGOTTEN: forgotten (should have deleted itself, and still costs): tpukit cloud delete forgotten --zone euro" in said
    )
    assert "FORGOTTEN: failed (over, or taken away: it costs nothing" in said
    assert "waiting" in rows["waiting"] and "4 h 0 min after it starts" in " ".join(said.split())
    assert said.rstrip().endswith("2 others without tpukit's label are left alone.") and "theirs" not in said
    assert [call[4:] for call in stand_in.calls(google)[1:]] == [["--zone=-", "--project=mine", "--format=json"]] * 2


def test_list_tells_machines_the_same(google, capsys):
    world(google)
    assert cli.main(["cloud", "list", "--json"]) == 0
    told = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(told) == {"fresh", "forgotten", "cheap", "waiting", "failed"}
    assert told["fresh"]["usd_so_far"] == pytest.approx(1.8, abs=0.02) and told["waiting"]["usd_so_far"] == 0
    assert told["forgotten"]["forgotten"] and not told["fresh"]["forgotten"] and told["cheap"]["capacity"] == "spot"
    assert told["waiting"]["deletes_itself_at"] is None and told["fresh"]["deletes_itself_at"] > told["fresh"]["running_since"]


def test_delete_expired_takes_what_was_forgotten_and_nothing_else(google, capsys):
    world(google)
    assert cli.main(["cloud", "delete", "--expired", "--yes"]) == 0
    left = {part["name"].split("/")[-1] for kind in ("requests", "nodes") for part in stand_in.read(google)[kind]}
    assert left == {"fresh", "cheap", "waiting", "theirs", "strange"}
    assert cli.main(["cloud", "delete", "--expired", "--yes"]) == 0 and "nothing was forgotten" in capsys.readouterr().out


def test_spot_capacity_that_was_taken_away_costs_nothing_and_is_not_worked_on(google, capsys):
    rent(google, *ours("mine", hours_ago=9))
    stand_in.write(google, nodes=[{**stand_in.read(google)["nodes"][0], "state": "PREEMPTED"}])
    assert cli.main(["cloud", "list"]) == 0
    said = capsys.readouterr().out
    assert "still costs" not in said and "unknown" in said and "tpukit cloud delete mine --zone us-central1-a" in said
    assert "mine was taken away (spot capacity)" in refused(capsys, "fetch", "mine")
    assert cli.main(["cloud", "delete", "--expired", "--yes"]) == 0 and stand_in.read(google)["nodes"] == []


def test_one_forgotten_machine_that_cannot_be_deleted_does_not_keep_the_others(google, capsys):
    world(google)
    stand_in.write(google, refuse={"queued-resources delete": ["PERMISSION_DENIED: no"]})
    assert "PERMISSION_DENIED" in refused(capsys, "delete", "--expired", "--yes")
    left = {part["name"].split("/")[-1] for part in stand_in.read(google)["requests"]}
    assert len(left & {"forgotten", "failed"}) == 1


def test_nothing_is_fetched_from_a_machine_that_was_taken_away(google, capsys):
    rent(google, stand_in.request("mine", labels=OURS), stand_in.node("mine", state="PREEMPTED", labels=OURS))
    assert cli.main(["cloud", "delete", "mine", "--fetch", "--yes"]) == 0
    assert "mine is PREEMPTED: there is nothing to fetch any more" in capsys.readouterr().out
    assert "tpu-vm ssh" not in verbs(google) and stand_in.read(google)["requests"] == []


def test_a_machine_that_went_while_the_question_stood_is_said_to_be_gone(google, monkeypatch, capsys):
    rent(google, *ours("mine"))
    monkeypatch.setattr(renting, "confirm", lambda *words: rent(google))
    assert cli.main(["cloud", "delete", "mine"]) == 0
    assert "mine is gone" in capsys.readouterr().out


def test_what_gcloud_warns_of_is_passed_on(google, capsys):
    stand_in.write(google, warn="WARNING: The following zones did not respond: us-west4-a. List results may be incomplete.")
    assert cli.main(["cloud", "list"]) == 0
    assert "did not respond: us-west4-a" in capsys.readouterr().err


def test_an_answer_that_is_no_json_is_explained(google, capsys):
    write_program(google / "bin/gcloud", "echo Updates are available")
    assert "asked for JSON and said something else: 'Updates are available" in refused(capsys, "list")


def test_list_of_nothing_and_of_one_zone(google, capsys):
    assert cli.main(["cloud", "list", "--zone", "us-west4-a"]) == 0
    assert capsys.readouterr().out == "tpukit has rented nothing in this project.\n"
    assert {call[4] for call in stand_in.calls(google)[1:]} == {"--zone=us-west4-a"}


# Working on a machine


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


def test_run_installs_and_starts_on_every_host_then_watch_and_fetch_show_it(hosts, capsys, tmp_path):
    command = ["train", "mnist", "--dataset-dir", "my data", "--epochs", "3"]
    assert cli.main(["cloud", "run", "mine", "--source", "tpukit==0.1", "--", *command]) == 0
    said = capsys.readouterr().out
    assert said.count("tpukit train mnist --dataset-dir my data --epochs 3") == 2 and "started: tpukit cloud watch mine" in said
    assert "no word from what deletes this machine in the end" in said
    ssh = [call for call in stand_in.calls(hosts) if "ssh" in call]
    assert [call[:-2] for call in ssh] == [["compute", "tpus", "tpu-vm", "ssh", "mine", *PLACE, "--worker=all"]] * 2
    install, started = (call[-2].removeprefix("--command=") for call in ssh)
    assert "'torch_xla[tpu]==2.9.0' tpukit==0.1" in install and "nohup setsid" in started
    for host in (0, 1):
        assert "pip install --quiet --user uv" in (hosts / f"host-{host}/installed").read_text()
        log = hosts / f"host-{host}/tpukit-job/log.txt"
        assert log.read_text() == "tpukit train mnist --dataset-dir my data --epochs 3\nthe training ended with exit code 0\n"
    assert cli.main(["cloud", "watch", "mine"]) == 0
    said = capsys.readouterr().out
    assert "tpukit watch outputs/mnist --once" in said and "the training ended with exit code 0" in said
    assert cli.main(["cloud", "fetch", "mine"]) == 0 and cli.main(["cloud", "fetch", "mine", "--to", "here"]) == 0
    scp = [call for call in stand_in.calls(hosts) if "scp" in call]
    assert scp[0] == [
        "compute",
        "tpus",
        "tpu-vm",
        "scp",
        "--recurse",
        *PLACE,
        "mine:outputs/mnist",
        "outputs/mine",
        "--worker=0",
        "--quiet",
    ]
    assert (tmp_path / "outputs/mine/mnist/config.json").exists() and (tmp_path / "here/mnist/config.json").exists()


def test_a_training_outlives_the_connection_and_a_second_one_is_refused(hosts, monkeypatch, capfd):
    monkeypatch.setenv("NAP", "4")
    home = hosts / "host-0"
    script = running.start_script(["train", "mnist"], pause_s=0.2)
    environ = {**os.environ, "HOME": str(home)}
    # The shell is that of an ssh connection: it ends, and everything in its session is told to hang up.
    shell = subprocess.Popen(
        ["bash", "-c", script + "; sleep 60"],
        env=environ,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        preexec_fn=as_in_a_terminal,
    )
    deadline = time.monotonic() + 30
    while not (home / "tpukit-job/log.txt").exists() or "tpukit train" not in (home / "tpukit-job/log.txt").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(shell.pid, signal.SIGHUP)
    shell.wait()
    again = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True)
    assert again.returncode == 3 and "a training runs here already" in again.stdout
    assert cli.main(["cloud", "run", "mine", "--", "train", "mnist"]) == 1
    assert "a training runs here already" in capfd.readouterr().out
    assert not (home / "installed").exists()  # what it uses is not changed under it
    assert cli.main(["cloud", "watch", "mine"]) == 0  # follows it to its end
    assert "the training ended with exit code 0" in capfd.readouterr().out


def test_a_training_that_fails_at_once_shows_its_words(hosts, capsys):
    write_program(hosts / "host-0/tpukit-python/bin/tpukit", "echo 'tpukit: no data'; exit 1")
    stand_in.write(hosts, hosts=1)
    assert cli.main(["cloud", "run", "mine", "--", "train", "mnist", "--run=runs/one"]) == 0
    assert "tpukit: no data\nthe training ended with exit code 1" in capsys.readouterr().out
    assert (hosts / "host-0/tpukit-job/run").read_text() == "runs/one\n"


def test_open_gives_the_terminal_to_ssh(hosts, capfd):
    assert cli.main(["cloud", "open", "mine", "--worker", "1"]) == 0
    assert capfd.readouterr().out == "a shell on host 1\n"
    assert stand_in.calls(hosts)[-1] == ["compute", "tpus", "tpu-vm", "ssh", "mine", *PLACE, "--worker=1"]


def test_delete_can_bring_the_run_back_first_and_deletes_nothing_where_that_fails(hosts, capsys, tmp_path):
    stand_in.write(hosts, refuse={"tpu-vm scp": [None, "[/usr/bin/ssh] exited with return code [255]."]})
    for host in (0, 1):
        (hosts / f"host-{host}/outputs/mnist").mkdir(parents=True)
        (hosts / f"host-{host}/tpukit-job").mkdir()
        (hosts / f"host-{host}/tpukit-job/run").write_text("outputs/mnist\n")
    assert cli.main(["cloud", "fetch", "mine"]) == 0
    assert "the machine is not reached over ssh" in refused(capsys, "delete", "mine", "--fetch", "--yes")
    assert "queued-resources delete" not in verbs(hosts)
    assert cli.main(["cloud", "delete", "mine", "--fetch", "--yes"]) == 0
    assert (
        verbs(hosts).index("tpu-vm scp") < verbs(hosts).index("queued-resources delete")
        and (tmp_path / "outputs/mine/mnist").is_dir()
    )


@pytest.mark.parametrize("argv", [["open"], ["watch"], ["fetch"], ["run"]])
def test_nothing_is_done_on_a_machine_that_is_not_there_or_not_ours(argv, google, capsys):
    argv = [*argv, "mine", *(["--", "train", "mnist"] if argv == ["run"] else [])]
    rent(google, stand_in.request("mine", state="WAITING_FOR_RESOURCES", labels=OURS))
    assert "no machine yet, or no more. Its request is WAITING_FOR_RESOURCES: in the queue" in refused(capsys, *argv)
    rent(google, *ours("mine", labels={}))
    assert "tpukit did not make it" in refused(capsys, *argv)
    assert not any("ssh" in call or "scp" in call for call in stand_in.calls(google))


@pytest.mark.parametrize("evil", ["../../etc", "a b", "$(touch x)", "-rf", ""])
def test_a_run_folder_is_not_taken_from_the_machine_as_it_comes(evil, hosts, capsys):
    (hosts / "host-0/tpukit-job").mkdir()
    (hosts / "host-0/tpukit-job/run").write_text(evil + "\n")
    assert "run folder" in refused(capsys, "fetch", "mine") and not any("scp" in call for call in stand_in.calls(hosts))


# What would be done


def without_chance(words):
    return [re.sub(r"tpukit-request=\w+|> \d{10} \?", "", word) for word in words]


@pytest.mark.parametrize(
    "argv",
    [
        ["create", "mine", "--project", "mine", "--accelerator", "v6e-8", "--spot"],
        ["list", "--project", "mine"],
        ["open", "there", "--project", "mine", "--zone", "us-central1-a"],
        ["run", "there", "--project", "mine", "--zone", "us-central1-a", "--", "train", "mnist", "--dataset-dir", "it's mine"],
        ["watch", "there", "--project", "mine", "--zone", "us-central1-a"],
        ["delete", "there", "--project", "mine", "--zone", "us-central1-a"],
        ["delete", "there", "--fetch", "--project", "mine", "--zone", "us-central1-a"],
    ],
    ids=lambda argv: " ".join(argv[:3]),
)
def test_a_dry_run_prints_exactly_the_commands_and_runs_none(argv, hosts, capsys):
    rent(hosts, *ours("there"))
    (hosts / "host-0/RUN").mkdir()
    if argv[0] != "run":
        (hosts / "host-0/tpukit-job").mkdir()
        for name, content in {"run": "RUN", "pid": "4194305", "log.txt": ""}.items():
            (hosts / "host-0/tpukit-job" / name).write_text(content)
    at = argv.index("--") if "--" in argv else len(argv)
    assert cli.main(["cloud", *argv[:at], "--dry-run", *argv[at:]]) == 0
    assert stand_in.calls(hosts) == []
    printed = shlex.split(
        re.sub(r"(?m)^#(?! By|!).*$", "", capsys.readouterr().out).partition("gcloud config")[2].join(["gcloud config", ""])
    )
    starts = [n for n, word in enumerate(printed) if word == "gcloud" and printed[n + 1] in ("config", "compute")]
    commands = [printed[a + 1 : b] for a, b in zip(starts, [*starts[1:], len(printed)])]
    yes = ["--yes"] * (argv[0] in ("create", "delete"))
    assert cli.main(["cloud", *argv[:at], *yes, *argv[at:]]) == 0
    assert [without_chance(c) for c in commands] == [without_chance(c) for c in stand_in.calls(hosts)]


def test_a_dry_run_needs_no_gcloud_and_says_what_it_does_not_know(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    for argv in (["create"], ["list"], ["delete", "mine"], ["delete", "--expired"], ["fetch", "mine"], ["open", "mine"]):
        assert cli.main(["cloud", *argv, "--dry-run"]) == 0
        said = capsys.readouterr().out
        assert "--project=PROJECT" in said and "# PROJECT is yours" in said
        assert argv[0] in ("create", "list") or "--zone=ZONE" in said


# What deletes the machine when nobody looks any more


def guard(google, minutes, latest_start_s, tmp_path):
    """The machine's own script with a stand-in gcloud; ends when it has asked for its end, or after a while."""
    script = renting.GUARD.format(
        name="mine", zone="us-central1-a", project="mine", minutes=minutes, latest_start=round(time.time() + latest_start_s),
        log=tmp_path / "guard.txt", end=tmp_path / "end",
    )  # fmt: skip
    write_program(tmp_path / "clock/sleep", "exec /bin/sleep 0.05")
    process = subprocess.Popen(
        ["bash", "-c", script], env={**os.environ, "PATH": f"{tmp_path}/clock:{os.environ['PATH']}"}, start_new_session=True
    )
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline and not any("delete" in call for call in stand_in.calls(google)):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return [call for call in stand_in.calls(google) if "delete" in call]


def test_the_machine_deletes_itself_when_its_time_is_up_and_a_restart_gives_it_no_more(google, tmp_path):
    rent(google, *ours("mine"))
    assert guard(google, 60, 600, tmp_path) == []
    end = int((tmp_path / "end").read_text())
    assert abs(end - time.time() - 3600) < 60 and "whether it may delete shows then" in (tmp_path / "guard.txt").read_text()
    assert guard(google, 60, 600, tmp_path) == [] and int((tmp_path / "end").read_text()) == end
    (tmp_path / "end").write_text(str(int(time.time()) - 1))
    deletes = guard(google, 60, 600, tmp_path)
    assert deletes[0] == ["compute", "tpus", "queued-resources", "delete", "mine", *PLACE, "--force", "--quiet", "--async"]
    assert stand_in.read(google)["nodes"] == []


def test_a_machine_that_comes_when_nobody_waits_any_more_goes_at_once(google, tmp_path):
    rent(google, *ours("mine"))
    assert guard(google, 60, -5, tmp_path)


def test_a_machine_that_may_not_delete_itself_says_so(google, tmp_path):
    stand_in.write(
        google, refuse={"queued-resources describe": "PERMISSION_DENIED: Permission 'tpu.queuedResources.get' denied"}
    )
    guard(google, 60, 600, tmp_path)
    assert "NOT SAFE: its service account cannot even look" in (tmp_path / "guard.txt").read_text()


# The real gcloud, with a stand-in for Google's end of the line


class Api(http.server.BaseHTTPRequestHandler):
    """The part of the TPU API that is used, on loopback. requests: name -> request. refuse: the error of the next creation."""

    requests, refuse, seen = {}, None, []

    def do_GET(self):
        place = self.path.partition("?")[0]
        name = place.rpartition("/")[2]
        if place.endswith(("/queuedResources", "/nodes")):
            found = [r for r in self.requests.values() if place.endswith("/queuedResources")]
            return self.answer({place.rpartition("/")[2]: found})
        if "/queuedResources/" in place and name in self.requests:
            return self.answer(self.requests[name])
        message = f"Resource '{place.removeprefix('/v2/')}' was not found"
        self.answer({"error": dict(code=404, message=message, status="NOT_FOUND")}, 404)

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.seen.append(("POST", self.path, asked))
        if self.refuse:
            return self.answer({"error": self.refuse}, self.refuse["code"])
        name = re.search("queuedResourceId=([a-z]+)", self.path)[1]
        zone = re.search("locations/([^/]+)", self.path)[1]
        made = stand_in.request(name, zone)
        self.requests[name] = {**made, **asked, "state": {"state": "ACTIVE"}}
        self.answer(dict(name=f"projects/mine/locations/{zone}/operations/one", done=True, response={}))

    def do_DELETE(self):
        self.seen.append(("DELETE", self.path, None))
        self.requests.pop(self.path.partition("?")[0].rpartition("/")[2])
        self.answer(dict(name="projects/mine/locations/us-central1-a/operations/two", done=True, response={}))

    def answer(self, value, status=200):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass


@pytest.fixture
def api(tmp_path, monkeypatch):
    """The stand-in API, which the installed gcloud talks to without any login."""
    if not shutil.which("gcloud"):
        pytest.skip("no gcloud on this machine")
    monkeypatch.setattr(renting, "POLL_S", 0)
    handler = type("OneApi", (Api,), dict(requests={}, seen=[]))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    settings = dict(
        CLOUDSDK_CONFIG=str(tmp_path / "no-login"),
        CLOUDSDK_CORE_ACCOUNT="me@example.com",
        CLOUDSDK_CORE_PROJECT="mine",
        CLOUDSDK_CORE_CHECK_GCE_METADATA="false",
        CLOUDSDK_CORE_DISABLE_USAGE_REPORTING="true",
        CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK="true",
        CLOUDSDK_AUTH_DISABLE_CREDENTIALS="true",
        CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU=f"http://127.0.0.1:{server.server_port}/",
    )
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    yield handler
    server.shutdown()
    server.server_close()


def test_the_real_gcloud_takes_the_commands_and_asks_google_for_what_was_meant(api, capsys):
    assert cli.main(["cloud", "create", "mine", "--accelerator", "v6e-4", "--spot", "--hours", "2", "--yes"]) == 0
    (_, path, asked), *_ = api.seen
    assert path.startswith("/v2/projects/mine/locations/us-central1-a/queuedResources?") and "queuedResourceId=mine" in path
    (spec,) = asked["tpu"]["nodeSpec"]
    node = spec["node"]
    assert asked["spot"] == {} and asked["queueingPolicy"] == {"validUntilDuration": "3600s"} and spec["nodeId"] == "mine"
    assert (node["acceleratorType"], node["runtimeVersion"]) == ("v6e-4", "v2-alpha-tpuv6e")
    assert node["labels"].items() >= {"made-by": "tpukit", "tpukit-minutes": "120", "tpukit-capacity": "spot"}.items()
    assert node["serviceAccount"] == {"scope": ["https://www.googleapis.com/auth/cloud-platform"]}
    script = node["metadata"]["startup-script"]
    assert (
        script.startswith("#!/bin/bash\n")
        and script.endswith("done\n")
        and "mine --zone=us-central1-a --project=mine" in script
    )
    assert cli.main(["cloud", "list"]) == 0 and "v6e-4 spot" in capsys.readouterr().out
    assert cli.main(["cloud", "delete", "mine", "--yes"]) == 0 and "mine is gone" in capsys.readouterr().out
    assert api.seen[-1][:2] == ("DELETE", "/v2/projects/mine/locations/us-central1-a/queuedResources/mine?alt=json&force=True")
    assert api.requests == {}


@pytest.mark.parametrize(
    "code, status, said, mend",
    [
        (429, "RESOURCE_EXHAUSTED", next(iter(REFUSALS)), "Ask for more at"),
        (400, "INVALID_ARGUMENT", [said for said in REFUSALS if "zonal" in said][0][18:], "us-central1-a has no v5litepod-1"),
        (
            403,
            "PERMISSION_DENIED",
            [said for said in REFUSALS if "has not been used" in said][0][19:],
            "gcloud services enable",
        ),
        (403, "PERMISSION_DENIED", [said for said in REFUSALS if "queuedResources.create'" in said][0][19:], "roles/tpu.admin"),
    ],
    ids=["quota", "zone", "api", "permission"],
)
def test_what_the_real_gcloud_makes_of_googles_refusals_is_understood(code, status, said, mend, api, capsys):
    api.refuse = dict(code=code, status=status, message=said)
    told = refused(capsys, "create", "mine", "--yes")
    assert said in told and mend in told, told


def test_the_real_gcloud_knows_every_option_that_is_given_for_ssh_and_scp(api, capsys):
    """It refuses these for want of a machine, which it asks for after reading its options."""
    cloud = gcloud.Gcloud()
    machine = rented.Rented("mine", "us-central1-a", node=stand_in.node("mine"))
    for act in (
        lambda: cloud.show(*cloud.tpus("tpu-vm", "ssh", "mine", "--worker=all", "--command=cd\nls", zone=machine.zone)),
        lambda: running.fetch_run(cloud, machine, "here"),
        lambda: cloud.show(*cloud.tpus("tpu-vm", "scp", "--recurse", "mine:run", "here", "--worker=0", zone=machine.zone)),
    ):
        with pytest.raises(gcloud.GcloudError) as error:
            act()
        assert error.value.kind == "gone", error.value


# The notebook


NOTEBOOK = "cloud_tpu_vm.ipynb"


def test_the_notebook_shows_every_command_and_runs_none_unless_told_to(google, tmp_path):
    notebook = run_notebook(NOTEBOOK, tmp_path)
    said = text(notebook)
    for words in ("$2.40", "$19.20", "queued-resources create tpukit", "startup-script", "tpukit train mnist --epochs 4"):
        assert words in said + "".join(outputs(notebook, "text/html")), words
    for words in ("tpu-vm scp --recurse", "queued-resources delete tpukit --zone=ZONE", "queued-resources list --zone=-"):
        assert words in said, words
    assert stand_in.calls(google) == []


def test_the_notebook_rents_trains_fetches_and_deletes_when_told_to(google, tmp_path, digits):
    write_program(google / "host-bin/pip", 'mkdir -p ~/.local/bin; cp -u "$0" ~/.local/bin/uv; true')
    program = f'PYTHONPATH={ROOT} exec {sys.executable} -m tpukit "$@"'
    small = f'[ "$1" = train ] && set -- "$@" --dataset-dir {digits} --batch-size 8 --channels 4'
    write_program(google / "host-0/tpukit-python/bin/tpukit", f"{small}\n{program}")
    notebook = run_notebook(NOTEBOOK, tmp_path, GO=True, NAME="mine", EPOCHS=1, PROJECT="mine")
    said = text(notebook)
    for words in (
        "mine is there and costs money",
        "epoch 1: loss",
        "ended with exit code 0",
        "mine is gone",
        "has rented nothing",
    ):
        assert words in said, words
    assert (tmp_path / "outputs/mine/mnist/best.safetensors").exists() and outputs(notebook, "image/png")
    assert stand_in.read(google)["nodes"] == []


# SkyPilot


def task(capsys, *argv):
    import yaml

    assert cli.main(["cloud", "skypilot", *argv]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_the_skypilot_task_recovers_spot_machines_and_stops_idle_ones(capsys):
    written = task(capsys, "--accelerator", "v6e-8", "--bucket", "gs://b", "--", "train", "mnist")
    resources = written["resources"]
    assert resources["accelerators"] == "tpu-v6e-8" and resources["accelerator_args"] == {"runtime_version": "v2-alpha-tpuv6e"}
    assert resources["use_spot"] and resources["job_recovery"] == "EAGER_NEXT_REGION"
    assert resources["autostop"] == {"idle_minutes": 10, "down": True}
    assert written["file_mounts"]["/run-copy"]["source"] == "gs://b" and "--backup /run-copy/tpukit" in written["run"]
    assert "torchrun" not in written["run"]
    for bucket, words in (
        (["--bucket", "gs://b"], "goes on from its copy in gs://b"),
        ([], "begins anew: no --bucket keeps it"),
    ):
        assert cli.main(["cloud", "skypilot", *bucket]) == 0
        assert words in capsys.readouterr().out
    written = task(capsys, "--accelerator", "T4:2", "--nodes", "2", "--no-spot", "--", "train", "mnist")
    assert written["num_nodes"] == 2 and written["resources"]["accelerators"] == "T4:2" and not written["resources"]["use_spot"]
    assert "--node-rank $SKYPILOT_NODE_RANK" in written["run"] and "-m -- tpukit train mnist" in written["run"]
    environ = {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "PATH": os.environ["PATH"],
    }
    environ["SKYPILOT_NUM_GPUS_PER_NODE"] = "2"
    ran = subprocess.run(["bash", "-c", "echo " + written["run"]], env=environ, capture_output=True, text=True)
    assert "--nnodes 2 --nproc-per-node 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29500 -m -- tpukit" in ran.stdout
