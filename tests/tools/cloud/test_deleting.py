"""Deleting and listing rented machines: ours alone, the forgotten first."""

import datetime
import http.server
import json
import re
import threading

import pytest

from tests.tools.cloud import stand_in
from tests.tools.cloud.conftest import OURS, PLACE, ours, refused, rent, verbs, write_program
from tpukit import TpukitError, cli
from tpukit.tools.cloud import gcloud, rented, renting
from tpukit.tools.cloud.rented import google_now

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
    assert "90.0 min" in rows["fresh"] and "$1.80" in rows["fresh"] and re.search(r"\(in 2\.5 h\)", " ".join(said.split()))
    assert "$3.92" in rows["cheap"] and "spot" in rows["cheap"]
    assert (
        "FORGOTTEN: forgotten (should have deleted itself, and still costs): tpukit cloud delete forgotten --zone euro" in said
    )
    assert "FORGOTTEN: failed (over, or taken away: it costs nothing" in said
    assert "waiting" in rows["waiting"] and "4.0 h after it starts" in " ".join(said.split())
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


AHEAD = datetime.timedelta(hours=5)


def computer_clock(monkeypatch, ahead):
    """Google's time is right; this computer's is ahead of it."""
    right, time = datetime.datetime.now, rented.datetime.datetime
    moved = type("datetime", (time,), {"now": classmethod(lambda cls, zone=None: right(zone) + ahead)})
    monkeypatch.setattr(datetime, "datetime", moved)
    monkeypatch.setattr(rented, "google_now", lambda: right(datetime.timezone.utc))
    assert abs(datetime.datetime.now() - right() - ahead) < AHEAD / 2


@pytest.mark.parametrize("ahead", [AHEAD, -AHEAD], ids=["ahead", "behind"])
def test_googles_clock_decides_what_has_expired_and_not_this_computers(ahead, google, monkeypatch, capsys):
    rent(google, *ours("fresh", hours_ago=0.5), *ours("forgotten", hours_ago=4.5))
    computer_clock(monkeypatch, ahead)
    assert cli.main(["cloud", "list", "--json"]) == 0
    told = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert told["fresh"]["usd_so_far"] == pytest.approx(0.6, abs=0.02) and not told["fresh"]["forgotten"]
    assert cli.main(["cloud", "delete", "--expired", "--yes"]) == 0
    assert [part["name"].split("/")[-1] for part in stand_in.read(google)["nodes"]] == ["fresh"]


def test_without_googles_time_nothing_expires_and_that_is_said(google, monkeypatch, capsys):
    rent(google, *ours("forgotten", hours_ago=9), stand_in.request("failed", state="FAILED", labels=OURS))
    monkeypatch.setattr(rented, "google_now", lambda: None)
    assert cli.main(["cloud", "list"]) == 0
    said = capsys.readouterr().out
    assert "unknown" in said and "FORGOTTEN: forgotten" not in said and "does not answer with Google's time" in said
    assert "does not answer with Google's time" in refused(capsys, "delete", "--expired", "--yes")
    assert "queued-resources delete" not in verbs(google)
    assert cli.main(["cloud", "delete", "forgotten", "--yes"]) == 0  # named, it needs no clock


@pytest.mark.parametrize("code", [200, 404])
def test_googles_time_is_read_from_whatever_it_answers(code, monkeypatch):
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response_only(code)
            self.send_header("Date", "Sun, 22 Nov 2026 10:00:05 GMT")
            self.end_headers()

        def log_message(self, *words):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setattr(rented, "CLOCK", f"http://127.0.0.1:{server.server_port}")
        assert google_now().isoformat() == "2026-11-22T10:00:05+00:00"
        server.shutdown()
    assert google_now() is None  # it is gone


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
