"""The run directory: what survives damage, a full disk and a lost session, and what is refused."""

import dataclasses
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest

from tests.conftest import SMALL, exact
from tpukit import MNIST, MSHNet, Run, TpukitError, display, synthetic, train

# Checkpoints that are damaged, and disks that are full


@pytest.fixture
def trained(digits, tmp_path, cpu):
    task = MNIST(dataset_dir=digits, epochs=2, **SMALL)
    run = Run.open(tmp_path / "run", task)
    train(task, run, runtime=cpu, progress=False)
    return task, run


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before_and_says_so(trained, cpu, damage, capsys):
    task, run = trained
    wanted = exact(run)
    newest, older = (run.path / "checkpoints" / c["file"] for c in run.checkpoints())
    data = bytearray(newest.read_bytes())
    if damage == "gone":
        newest.unlink()
    else:
        data[len(data) // 2] ^= 255
        newest.write_bytes(data if damage == "flipped" else data[: len(data) // 2])
    train(task, Run.open(run.path, task), runtime=cpu, progress=False)
    out = capsys.readouterr().out
    assert f"{newest.name} is damaged" in out and "going back to the one before" in out
    assert f"resuming at step {int(older.stem.split('-')[1])}" in out
    assert exact(run) == wanted


def test_a_run_whose_checkpoints_are_all_damaged_says_so_and_deletes_nothing(trained, cpu):
    task, run = trained
    for c in run.checkpoints():
        (run.path / "checkpoints" / c["file"]).write_bytes(b"nothing")
    before = run.records()
    with pytest.raises(TpukitError, match="none of the 2 checkpoints"):
        train(task, run, runtime=cpu, progress=False)
    assert run.records() == before


def test_the_list_of_checkpoints_can_be_lost(trained, cpu, capsys):
    task, run = trained
    (run.path / "checkpoints/checkpoints.json").unlink()
    more = dataclasses.replace(task, epochs=3)
    train(more, Run.open(run.path, more), runtime=cpu, progress=False)
    assert "resuming at step 50" in capsys.readouterr().out


@pytest.mark.parametrize(
    "limit_bytes, file",
    [(None, r"step-\d+\.pt"), (100_000, "best.safetensors"), (3_000, "records.jsonl"), (10, "config.json")],
)
def test_a_full_disk_stops_with_a_clear_error_and_keeps_the_last_checkpoint(limit_bytes, file, trained, cpu):
    task, run = trained
    before = run.checkpoints()
    # A checkpoint is twice as large as the weights.
    limit_bytes = limit_bytes or (run.path / "best.safetensors").stat().st_size * 5 // 4
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit[1]))  # a write beyond it fails, as on a full disk
    try:
        more = dataclasses.replace(task, epochs=3)
        with pytest.raises(TpukitError, match=rf"cannot write .*{file}.*(MiB are free).*saved before is untouched"):
            train(more, Run.open(run.path, more), runtime=cpu, progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, old)
    assert run.checkpoints() == before and not list(run.path.rglob("*.partial"))
    train(more, Run.open(run.path, more), runtime=cpu, progress=False)
    assert run.records("evaluation")[-1]["epoch"] == 2


@pytest.mark.parametrize("content", ["", "{", "{}", '{"workload": "mnist", "settings": 3}', "[]"])
def test_a_damaged_config_is_named_whoever_reads_it(content, digits, tmp_path):
    task = MNIST(dataset_dir=digits)
    run = Run.open(tmp_path / "run", task)
    (run.path / "config.json").write_text(content)
    for read in (lambda: Run.find(run.path).config, lambda: Run.open(run.path, task)):
        with pytest.raises(TpukitError, match="config.json is damaged .*choose another run folder"):
            read()


def test_a_folder_that_cannot_be_made_is_named_with_what_to_do(digits, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(TpukitError, match=r"cannot write in .*file/run \(.*\): choose another folder"):
        Run.open(tmp_path / "file/run", MNIST(dataset_dir=digits))


def test_a_run_that_cannot_be_written_in_is_shown_all_the_same(trained, capsys):
    _, run = trained
    shutil.rmtree(run.path / "pictures", ignore_errors=True)
    (run.path / "pictures").touch()  # no folder can be made there
    display.show(run)
    shown = capsys.readouterr().out
    assert "Scores after epoch" in shown and "picture not kept at" in shown and "picture:" not in shown


def test_a_training_leaves_no_file_open(digits, tmp_path, cpu):
    task = MNIST(dataset_dir=digits, epochs=1, **SMALL)
    train(task, Run.open(tmp_path / "run", task), runtime=cpu, progress=False)
    assert list((tmp_path / "run/tensorboard").glob("events.out.*"))
    opened = [os.readlink(link) for link in map(str, Path("/proc/self/fd").iterdir()) if os.path.exists(link)]
    assert not [path for path in opened if path.startswith(str(tmp_path))]


# The backup


def test_a_lost_session_comes_back_from_its_backup(digits, tmp_path, cpu, capsys):
    task = MNIST(dataset_dir=digits, epochs=2, **SMALL)
    run = Run.open(tmp_path / "here", task, backup=tmp_path / "drive/run")
    train(task, run, runtime=cpu, progress=False)
    shutil.rmtree(tmp_path / "here")
    more = dataclasses.replace(task, epochs=3)
    again = Run.open(tmp_path / "here", more, backup=tmp_path / "drive/run")
    train(more, again, runtime=cpu, progress=False)
    out = capsys.readouterr().out
    assert "bringing it back from" in out and "resuming at step 50" in out
    assert Run.find(tmp_path / "drive/run").checkpoints() == again.checkpoints()
    names = {p.name for p in (tmp_path / "drive/run").rglob("*") if p.is_file()}
    assert len([n for n in names if n.endswith(".pt")]) == 2 and not any(n.endswith("partial") for n in names)


def test_a_backup_that_fails_is_said_once_and_does_not_stop_the_training(digits, tmp_path, cpu, capsys):
    (tmp_path / "drive").write_text("a file where the folder should be")
    task = MNIST(dataset_dir=digits, epochs=3, **SMALL)
    train(task, Run.open(tmp_path / "run", task, backup=tmp_path / "drive/run"), runtime=cpu, progress=False)
    assert capsys.readouterr().out.count("backup to") == 1


# What is refused


def test_a_run_of_other_settings_or_of_another_task_is_refused_naming_them(trained, infrared):
    task, run = trained
    with pytest.raises(TpukitError, match=r"batch_size: the run has 8, the task 16"):
        Run.open(run.path, dataclasses.replace(task, batch_size=16))
    with pytest.raises(TpukitError, match="holds a run of mnist, the task is mshnet"):
        Run.open(run.path, MSHNet(dataset_dir=infrared))
    Run.open(run.path, dataclasses.replace(task, epochs=9, num_workers=0))
    with pytest.raises(TpukitError, match="not a run directory.*runs below it"):
        Run.find(run.path.parent)


def test_a_run_goes_on_only_with_a_dataset_of_the_same_size(trained, tmp_path, cpu):
    task, run = trained
    other = dataclasses.replace(task, dataset_dir=synthetic.make("mnist", tmp_path / "other", size=120), epochs=3)
    with pytest.raises(TpukitError, match="trained on 200 samples, .* has 100"):
        train(other, Run.open(run.path, other), runtime=cpu, progress=False)


def test_a_batch_larger_than_the_set_says_how_large_it_may_be(digits, tmp_path, cpu):
    task = MNIST(dataset_dir=digits, batch_size=300)
    with pytest.raises(TpukitError, match="batch_size=300 .* use batch_size <= 200"):
        train(task, Run.open(tmp_path, task), runtime=cpu, progress=False)
