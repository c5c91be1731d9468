"""Renting a TPU machine: cost, question, request, waiting, interrupts, refusals."""

import io
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.tools.cloud import stand_in
from tests.tools.cloud.conftest import OURS, PLACE, as_in_a_terminal, ours, refused, rent, verbs
from tpukit import cli
from tpukit.tools import prices
from tpukit.tools.cloud import gcloud, renting, skypilot, tpu_types


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
    assert "mine is there and costs money from now on. It is set to delete itself in 2.5 hours, if its account may" in said
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


@pytest.mark.parametrize("zone, known", [("us-east5-a", True), ("us-central1-a", False)])
def test_create_says_beforehand_where_a_zone_is_not_known_to_have_the_type(zone, known, google, capsys):
    assert cli.main(["cloud", "create", "mine", "--accelerator", "v6e-1", "--zone", zone, "--dry-run"]) == 0
    assert ("is not among the zones that are known to have it. Zones with v6e-1" in capsys.readouterr().out) is not known


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
    kind, fixes = REFUSALS[said]
    stand_in.write(google, refuse={"queued-resources create": said})
    told = refused(capsys, "create", "mine", "--yes")
    assert gcloud.GcloudError(["x"], said).kind == kind
    for words in (*said.splitlines(), *fixes):
        assert words in told, told
    assert "time is up" not in told and "Traceback" not in told  # the whole script of the machine is no part of an error
    assert stand_in.read(google)["requests"] == []


@pytest.mark.parametrize(
    "verb, said, fix",
    [
        ("create", "", "gcloud is not installed: https://cloud.google.com/sdk/docs/install"),
        ("list", "", "gcloud is not installed"),
        ("create", {}, "gcloud is not logged in: gcloud auth login"),
        ("create", {"core": {"account": "me@example.com"}}, "gcloud has no project: gcloud config set project PROJECT"),
        ("list", {"core": {"project": "mine"}}, "not logged in"),
    ],
)
def test_without_gcloud_a_login_or_a_project_the_mend_is_said(verb, said, fix, google, monkeypatch, capsys):
    if said == "":
        monkeypatch.setenv("PATH", str(google))
    else:
        stand_in.write(google, config=said)
    assert fix in refused(capsys, verb, *["--yes"] * (verb == "create"))
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
        (["skypilot"], "--source 'git+https://github.com/TPUKIT_SOURCE' names no repository, OWNER/NAME"),
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


def test_two_interrupts_while_the_request_is_on_its_way_do_not_say_that_nothing_was_made(google):
    stand_in.write(google, create_s=30)
    process, until = start(google, "create", "mine", "--yes")
    until("queued-resources create")
    process.send_signal(signal.SIGINT)
    time.sleep(1)  # it waits for gcloud to end by itself
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and "nothing was made" not in said, said
    assert "mine is not there. It may still come" in said and "tpukit cloud list" in said
    assert "gcloud compute tpus queued-resources delete mine --zone=us-central1-a --force" in said


def test_a_request_that_arrives_after_the_interrupt_is_deleted_too(google, monkeypatch, capsys):
    def interrupted(self, *words, **more):
        mark = re.search(r"tpukit-request=(\w+)", " ".join(words))[1]
        monkeypatch.setattr(gcloud.Gcloud, "ask", ask)
        monkeypatch.setattr(
            renting.time, "sleep", lambda s: rent(google, *ours("mine", labels={**OURS, "tpukit-request": mark}))
        )
        raise KeyboardInterrupt

    ask = gcloud.Gcloud.ask
    monkeypatch.setattr(gcloud.Gcloud, "ask", interrupted)
    assert cli.main(["cloud", "create", "mine", "--yes"]) == 130
    assert "mine is gone" in capsys.readouterr().out and stand_in.read(google)["requests"] == []


@pytest.mark.parametrize("source, said", [(skypilot.SOURCE, True), ("git+https://github.com/me/tpukit", False)])
def test_create_says_before_it_asks_that_a_run_will_need_a_source(source, said, google, monkeypatch, capsys):
    monkeypatch.setattr(renting, "SOURCE", source)
    monkeypatch.setattr(renting, "confirm", lambda *words: print("QUESTION"))
    assert cli.main(["cloud", "create", "mine"]) == 0
    assert ("will need --source" in capsys.readouterr().out.partition("QUESTION")[0]) is said


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

        def fileno(self):
            return nowhere.fileno()

    with open(os.devnull, "w") as nowhere:
        monkeypatch.setattr(sys, "stdout", Closed())
        monkeypatch.setattr(sys, "stderr", Closed())
        assert cli.main(["cloud", "create", "mine", "--yes"]) == 1
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
