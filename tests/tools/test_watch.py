"""`tpukit watch`: a run that another process trains, and the chips' utilization."""

import time
from pathlib import Path

import pytest

from tpukit import MNIST, Run, cli, train
from tpukit.tools import watch as tool


@pytest.fixture
def install(monkeypatch, tmp_path):
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


def test_a_run_is_shown_as_its_records_have_it(run, install, capsys):
    assert cli.main(["watch", str(run.path)]) == 0  # no terminal: once
    shown = capsys.readouterr().out
    assert (
        "digits-run" in shown and "20 of 20 (100.0%), finished" in shown and "cpu (host processor)" in shown
    )
    rate, accuracy = (
        run.records("train")[-1]["speed"]["images_per_s"],
        run.records("evaluation")[-1]["scores"]["accuracy"],
    )
    assert (
        f"{rate:.1f} samples per second" in shown
        and "scores of epoch 2" in shown
        and f"accuracy {accuracy:.4g}" in shown
    )
    assert "step 20" in shown and "left" not in shown and "GPU" not in shown
    assert f"{run.records('train')[-1]['loss']:.4f}" in shown  # the last one


def test_a_run_on_its_way_shows_what_is_left_and_since_when_it_stands():
    records = [
        dict(kind="start", step=0, device="tpu", batch_size=4),
        dict(kind="compile", step=1, programs=1, seconds=60.0),
        dict(kind="compile", step=7, programs=1, seconds=50.0),
        dict(
            kind="train",
            step=100,
            speed=dict(images_per_s=40.0, wait_s=1.0, seconds=10.0, memory=[], counters={}),
        ),
    ]
    live = dict(step=100, total=1000, unit="step", epoch=2, loss="0.5")
    rows = dict(tool.live_table("run", records, live, [], 3.0).rows)
    assert rows["step"] == "100 of 1000 (10.0%), just now" and rows["last checkpoint"] == "none yet"
    assert (
        rows["left"].startswith("about 90 s")
        and "10.0% of the time" in rows["speed"]
        and rows["compiled again"] == "at step 7"
    )
    assert (
        "2.0 min ago: it waits, compiles"
        in dict(tool.live_table("run", records, live, [], 121.0).rows)["step"]
    )
    assert "has not started" in tool.live_table("run", [], {}, [], None).title
    # A launch has just taken progress.json away.
    assert "has not started" in tool.live_table("run", records, {}, [], 3.0).title


@pytest.mark.parametrize("accelerator, noted", [("cpu", False), ("cuda", True), ("tpu", True)])
def test_a_chip_whose_tools_are_not_installed_is_noted(accelerator, noted, tmp_path, install):
    run = Run.open(tmp_path / "run", MNIST())
    run.log("start", 0, device="one", accelerator=accelerator, batch_size=4)
    assert ("nvidia-smi" in tool.describe(run)) is noted


def test_chips_are_described_by_their_tools_or_by_what_is_wrong_with_these(install):
    assert tool.describe_chips() == []
    install("nvidia-smi", "echo '0, Tesla T4, 83, 3277, 15360'; echo '1, Odd Card, [N/A], [N/A], [N/A]'")
    assert tool.describe_chips() == [
        "  GPU 0 (Tesla T4): 83% busy, 3.2 of 15.0 GiB",
        "  GPU 1 (Odd Card): utilization unknown, memory unknown",
    ]
    install("nvidia-smi", "echo 'driver mismatch' >&2; exit 9")
    install("tpu-info", "echo 'TPU v5 lite  12%'")
    assert tool.describe_chips() == ["  nvidia-smi does not answer: driver mismatch", "TPU v5 lite  12%"]


def test_what_nvidia_smi_prints_besides_its_rows_is_shown_whatever_its_encoding(install):
    install(
        "nvidia-smi",
        "printf '0, Card, with a comma, 83, 3277, 15360\\nWARNING: infoROM \\351 is corrupted\\n'",
    )
    assert tool.describe_chips() == [
        "  GPU 0 (Card, with a comma): 83% busy, 3.2 of 15.0 GiB",
        "  nvidia-smi: WARNING: infoROM \ufffd is corrupted",
    ]


def test_watching_ends_with_the_run(run, install, monkeypatch, capsys):
    pauses, live = [], run.read_progress()
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(Run, "read_progress", lambda self: dict(live, step=min(18 + len(pauses), 20)))
    tool.watch(run)
    assert pauses == [tool.UPDATE_S] * 2 and "20 of 20" in capsys.readouterr().out


def test_a_launch_may_remove_the_progress_while_it_is_read(run, install, monkeypatch):
    (run.path / "progress.json").unlink()
    monkeypatch.setattr(Path, "exists", lambda self: True)  # as it was a moment ago
    assert "has not started yet" in " ".join(tool.describe(run).split())


def test_a_folder_that_is_no_run_is_refused_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["watch", "nothing"]) == 1 and "nothing" in capsys.readouterr().err
