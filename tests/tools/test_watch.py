"""`tpukit watch`: what a run says of itself while another process trains it, and what the chips say."""

import json
import time
from pathlib import Path

import pytest
import torch

from tpukit import MNIST, Run, cli, train
from tpukit.host.tables import format_duration
from tpukit.reporting import findings
from tpukit.tools import trace
from tpukit.tools import watch as tool


@pytest.fixture
def nothing_installed(monkeypatch, tmp_path):
    """A PATH that has only what a test puts there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def put(name, text):
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)

    return put


@pytest.fixture
def run(digits, cpu, tmp_path):
    task = MNIST(dataset_dir=digits, epochs=2, batch_size=20, log_every=5, num_workers=1)
    run = Run.open(tmp_path / "digits-run", task)
    train(task, run, runtime=cpu, progress=False)
    return run


def test_a_run_is_shown_as_its_records_have_it(run, nothing_installed, capsys):
    assert cli.main(["watch", str(run.path)]) == 0  # no terminal: one look
    shown = capsys.readouterr().out
    assert "digits-run" in shown and "20 of 20 (100.0%), just now" in shown and "cpu (host processor)" in shown
    rate, accuracy = run.records("train")[-1]["speed"]["images_per_s"], run.records("evaluation")[-1]["scores"]["accuracy"]
    assert f"{rate:.1f} samples a second" in shown and "scores of epoch 2" in shown and f"accuracy {accuracy:.4g}" in shown
    assert "step 20" in shown and "left" not in shown and "GPU" not in shown
    assert f"{run.records('train')[-1]['loss']:.4f}" in shown  # the last one


def test_a_run_on_its_way_says_what_is_left_and_since_when_it_stands():
    records = [
        dict(kind="start", step=0, device="tpu", batch_size=4, phases=1),
        dict(kind="compile", step=1, programs=1, seconds=60.0),
        dict(kind="compile", step=7, programs=1, seconds=50.0),
        dict(kind="train", step=100, speed=dict(images_per_s=40.0, wait_s=1.0, seconds=10.0, memory=[], counters={})),
    ]
    live = dict(step=100, total=1000, unit="step", epoch=2, loss="0.5")
    rows = dict(findings.live_table("run", records, live, [], 3.0).rows)
    assert rows["step"] == "100 of 1000 (10.0%), just now" and rows["last checkpoint"] == "none yet"
    assert (
        rows["left"].startswith("about 90 s") and "10.0% of the time" in rows["speed"] and rows["compiled again"] == "at step 7"
    )
    assert "2.0 min ago: it waits, compiles" in dict(findings.live_table("run", records, live, [], 121.0).rows)["step"]
    assert "has not started" in findings.live_table("run", [], {}, [], None).title
    # A launch has just taken progress.json away.
    assert "has not started" in findings.live_table("run", records, {}, [], 3.0).title


def test_a_run_is_over_when_the_checkpoint_of_its_last_step_is_there_and_not_before_its_evaluation(run):
    assert findings.is_finished(run.read_progress(), run.checkpoints())
    last = run.path / "checkpoints/checkpoints.json"
    last.write_text(json.dumps([c for c in run.checkpoints() if c["step"] < 20]))
    assert not findings.is_finished(run.read_progress(), run.checkpoints())


@pytest.mark.parametrize("accelerator, said", [("cpu", False), ("cuda", True), ("tpu", True)])
def test_a_chip_that_nobody_can_look_at_is_said_to_be_that(accelerator, said, tmp_path, nothing_installed):
    run = Run.open(tmp_path / "run", MNIST())
    run.log("start", 0, device="one", accelerator=accelerator, batch_size=4, phases=1)
    assert ("neither nvidia-smi nor tpu-info is here" in tool.glimpse(run)) is said


def test_chips_say_how_busy_they_are_and_what_is_wrong_with_them(nothing_installed):
    assert tool.chips() == []
    nothing_installed("nvidia-smi", "echo '0, Tesla T4, 83, 3277, 15360'; echo '1, Odd Card, [N/A], [N/A], [N/A]'")
    assert tool.chips() == [
        "  GPU 0 (Tesla T4): 83% busy, 3.2 of 15.0 GiB",
        "  GPU 1 (Odd Card): use unknown, memory unknown",
    ]
    nothing_installed("nvidia-smi", "echo 'driver mismatch' >&2; exit 9")
    nothing_installed("tpu-info", "echo 'TPU v5 lite  12%'")
    assert tool.chips() == ["  nvidia-smi does not answer: driver mismatch", "TPU v5 lite  12%"]


def test_watching_ends_with_the_run(run, nothing_installed, monkeypatch, capsys):
    looks, live = [], run.read_progress()
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr(time, "sleep", looks.append)
    monkeypatch.setattr(Run, "read_progress", lambda self: dict(live, step=min(18 + len(looks), 20)))
    tool.watch(run, interval_s=0.5)
    assert looks == [0.5, 0.5] and "20 of 20" in capsys.readouterr().out


def test_a_launch_may_take_the_progress_away_while_it_is_looked_at(run, nothing_installed, monkeypatch):
    (run.path / "progress.json").unlink()
    monkeypatch.setattr(Path, "exists", lambda self: True)  # as it was a moment ago
    assert "has not started yet" in " ".join(tool.glimpse(run).split())


@pytest.mark.parametrize(
    "seconds, words",
    [(None, ""), (-5, "0 s"), (119, "119 s"), (150, "2.5 min"), (9000, "2.5 h"), (47 * 3600, "47.0 h"), (259200, "3.0 days")],
)
def test_a_duration_is_said_in_the_largest_unit_of_which_it_has_two(seconds, words):
    assert format_duration(seconds) == words


def test_a_copy_to_the_host_is_a_reading_also_where_it_is_asked_not_to_wait():
    device, host = torch.empty(2, device="meta"), torch.empty(2)  # meta stands for what is no host
    for arguments in ((host, device), (host, device, True)):
        assert trace._copies_to_host("aten::copy_", arguments, host)
    assert trace._copies_to_host("aten::_to_copy", (device,), host)
    assert not trace._copies_to_host("aten::copy_", (device, host, True), device)
    assert not trace._copies_to_host("aten::copy_", (host, 1.0), host) and not trace._copies_to_host(
        "aten::add", (device, 1), host
    )


def test_what_is_no_run_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["watch", "nothing"]) == 1 and "nothing is not a run directory" in capsys.readouterr().err
