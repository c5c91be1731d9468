"""The log of a run that another process trains."""

import json
import time

import pytest

from tpukit import Run, cli
from tpukit.cli import follow
from tpukit.reporting import findings


def test_following_shows_each_new_whole_line_once_and_ends_with_the_run(trained, monkeypatch, capsys):
    _, run = trained
    log, pauses = run.path / "log.txt", []
    lines = log.read_text().splitlines(keepends=True)
    log.unlink()

    def sleep(seconds):
        pauses.append(seconds)
        log.write_text("".join(lines) if len(pauses) > 1 else lines[0] + lines[1][:5] + "\x1b[2J")

    last = run.read_progress()
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(Run, "read_progress", lambda _: dict(last, step=(0, 12, 24)[min(len(pauses), 2)]))
    assert cli.main(["report", str(run.path), "--follow"]) == 0
    shown = capsys.readouterr().out
    assert pauses == [follow.UPDATE_S] * 2 and len(lines) > 3
    assert all(shown.count(line) == 1 for line in lines) and "\x1b" not in shown
    assert all(f"step {step} of 24" in shown for step in (0, 12, 24))
    assert str(findings.accelerator_tables(run.records())[0]) in shown  # the report comes last


def test_a_launch_may_remove_the_progress_while_it_is_read(trained, monkeypatch, capsys):
    _, run = trained
    (run.path / "progress.json").unlink()
    monkeypatch.setattr(time, "sleep", lambda seconds: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        follow.follow(run)
    assert "The training starts" in capsys.readouterr().out


def test_a_run_is_over_when_the_checkpoint_of_its_last_step_is_there_and_not_before_its_evaluation(trained):
    _, run = trained
    assert follow.is_finished(run.read_progress(), run.checkpoints())
    (run.path / "checkpoints/checkpoints.json").write_text(json.dumps({"checkpoints/step-00000010.pt": []}))
    assert not follow.is_finished(run.read_progress(), run.checkpoints())
