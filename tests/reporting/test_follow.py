"""`tpukit report --follow`: a run that another process trains."""

import json
import time

import pytest

from tpukit import MNIST, Run, cli, train
from tpukit.reporting import findings, follow


@pytest.fixture
def run(digits, cpu, tmp_path):
    task = MNIST(dataset_dir=digits, epochs=2, batch_size=20, log_every=5, num_workers=1, channels=4)
    run = Run.open(tmp_path / "digits-run", task)
    train(task, run, runtime=cpu, progress=False)
    return run


def test_the_log_of_a_finished_run_is_shown_once_with_its_report(run, capsys):
    capsys.readouterr()
    assert cli.main(["report", str(run.path), "--follow"]) == 0
    shown = capsys.readouterr().out
    lines = (run.path / "log.txt").read_text().splitlines()
    assert len(lines) > 3 and all(shown.count(line) == 1 for line in lines)
    assert "step 20 of 20" in shown and str(findings.accelerator_tables(run.records())[0]) in shown


def test_a_run_is_over_when_the_checkpoint_of_its_last_step_is_there_and_not_before_its_evaluation(run):
    assert findings.is_finished(run.read_progress(), run.checkpoints())
    entries = [dict(entry, file="step-00000010.pt", step=10) for entry in run.checkpoints()]
    (run.path / "checkpoints/checkpoints.json").write_text(json.dumps(entries))
    assert not findings.is_finished(run.read_progress(), run.checkpoints())


def test_following_shows_each_new_whole_line_once_and_ends_with_the_run(run, monkeypatch, capsys):
    capsys.readouterr()
    log, pauses = run.path / "log.txt", []
    lines = log.read_text().splitlines(keepends=True)
    log.unlink()

    def sleep(seconds):
        pauses.append(seconds)
        log.write_text("".join(lines) if len(pauses) > 1 else lines[0] + lines[1][:5] + "\x1b[2J")

    last = run.read_progress()
    steps = [0, 10, 20]
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(Run, "read_progress", lambda self: dict(last, step=steps[min(len(pauses), 2)]))
    follow.follow(run)
    shown = capsys.readouterr().out
    assert pauses == [follow.UPDATE_S] * 2
    assert all(shown.count(line) == 1 for line in lines) and "\x1b" not in shown
    assert [f"step {step} of 20" in shown for step in steps] == [True] * 3


def test_a_launch_may_remove_the_progress_while_it_is_read(run, monkeypatch, capsys):
    (run.path / "progress.json").unlink()
    monkeypatch.setattr(time, "sleep", lambda seconds: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        follow.follow(run)
    assert "The training starts" in capsys.readouterr().out


def test_a_folder_that_is_no_run_is_refused_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", "nothing", "--follow"]) == 1 and "nothing" in capsys.readouterr().err
