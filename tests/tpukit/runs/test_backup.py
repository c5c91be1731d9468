"""The backup of a run or of a loop's checkpoints, runs in Kaggle's inputs, and what both refuse."""

import dataclasses
import os
import shutil
from pathlib import Path

import pytest
import torch

from tests.conftest import best_weights, exact, flip, refuses, same
from tests.tpukit.runs.store import again, content, filled, kill_everywhere, steps_in, value_of
from tpukit import MNIST, Checkpoints, Run, TpukitError, find_dataset, train
from tpukit.host import files
from tpukit.runs import manifest
from tpukit.runs.inputs import find_in_inputs
from tpukit.training import loop

ADDRESS = "HTTPS://me:secret@host/"


@pytest.mark.parametrize("path, backup", [("run", ADDRESS), (ADDRESS, None)], ids=["backup", "run"])
def test_an_address_is_refused_naming_the_mount_and_no_folder_is_made(path, backup, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TpukitError) as refused:
        Run.open(path, MNIST(), backup=backup)
    message = str(refused.value)
    assert "mount" in message and "\n" not in message and "secret" not in message
    assert not list(tmp_path.iterdir())


def test_what_changed_is_copied_by_content_and_not_by_clock_and_nothing_twice(tmp_path, monkeypatch):
    backup = tmp_path / "drive"
    run = Run.open(tmp_path / "run", MNIST(), backup=backup)
    run.save_best(dict(weight=torch.ones(3)), epoch=1)
    run.save(dict(a=1), 5)
    for path in tmp_path.rglob("*"):
        os.utime(path, (4e9, 4e9))  # a clock that is ahead
    copied, put = [], files.copy_atomic

    def noting(source, target, check=None):
        copied.append(str(target.relative_to(backup)))
        put(source, target, check)

    monkeypatch.setattr(files, "copy_atomic", noting)
    run.print("something")
    run.save(dict(a=2), 5)  # again, of the same name
    assert {"log.txt", "checkpoints/step-00000005.pt"} <= set(copied)
    copied.clear()
    run.save({}, 6)
    assert copied == ["checkpoints/step-00000006.pt"]
    monkeypatch.undo()
    assert Run.open(tmp_path / "again", MNIST(), backup=backup).checkpoints() == run.checkpoints()
    assert run.restore() == {}


def test_a_backup_on_a_drive_that_was_not_mounted_is_refused_before_the_training(
    colab, tmp_path, monkeypatch
):
    monkeypatch.setattr("tpukit.host.environment.detect", lambda: colab)
    with refuses(colab.drive / "runs/mnist", "mount_drive"):
        Run.open(tmp_path / "run", MNIST(), backup=colab.drive / "runs/mnist")
    assert not colab.drive.exists()


def test_a_backup_restores_a_run_and_nothing_else_and_removes_nothing_else(tmp_path):
    run = Run.open(tmp_path / "run", MNIST(), backup=tmp_path / "drive")
    for step in (1, 2):
        run.save(dict(a=step), step)
    (tmp_path / "outside.pt").write_text("mine")
    theirs = "notes.txt run.py checkpoints/step-1.pt checkpoints/step-00000001.pt.bak cores/stop".split()
    (tmp_path / "drive/cores").mkdir()
    for name in theirs:
        (tmp_path / "drive" / name).write_text("mine")
    again = Run.open(tmp_path / "again", MNIST(), backup=tmp_path / "drive")
    assert again.restore() == dict(a=2)
    names = {"config.json", manifest.FILE, "checkpoints/step-00000001.pt", "checkpoints/step-00000002.pt"}
    assert content(again.path).keys() == names
    for step in (3, 4):
        again.save({}, step)
    assert steps_in(tmp_path / "drive") == [4, 3]
    assert all(
        (tmp_path / name).read_text() == "mine" for name in ["outside.pt", *map("drive/".__add__, theirs)]
    )


@pytest.mark.parametrize("name", ["n" * 235, "n" * 255, "\u8bad" * 85])
def test_a_run_is_restored_to_a_folder_of_as_long_a_name_as_a_disk_takes(name, tmp_path):
    Run.open(tmp_path / "run", MNIST(), backup=tmp_path / "drive").save(dict(a=1), 1)
    assert Run.open(tmp_path / name, MNIST(), backup=tmp_path / "drive").restore() == dict(a=1)


def test_a_run_is_not_restored_among_other_files_hidden_or_not(tmp_path):
    Run.open(tmp_path / "run", MNIST(), backup=tmp_path / "drive").save({}, 1)
    for name in ("notes.txt", ".ipynb_checkpoints"):
        (tmp_path / name / name).mkdir(parents=True)
        with refuses(tmp_path / name, "not empty", "choose"):
            Run.open(tmp_path / name, MNIST(), backup=tmp_path / "drive")
        assert [path.name for path in (tmp_path / name).iterdir()] == [name]


def test_a_folder_is_not_its_own_backup_whose_copies_would_replace_what_is_written_meanwhile(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with refuses("own backup"):
        Run.open(tmp_path / "run", MNIST(), backup=tmp_path / "link")
    with refuses("own backup"):
        Checkpoints(tmp_path / "mine", backup=tmp_path / "mine").restore()


@pytest.mark.parametrize("copies", range(3))
def test_a_drive_that_goes_within_a_copy_is_reported_gets_no_further_file_and_ends_no_loop(
    copies, tmp_path, monkeypatch, capsys
):
    drive, done = tmp_path / "drive", []
    drive.mkdir()
    ismount, copy = os.path.ismount, files.copy_atomic

    def mounted(path):
        return len(done) < copies if Path(path) == drive else ismount(path)

    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == drive or ismount(path))
    saved = Checkpoints(tmp_path / "mine", backup=drive / "mine")
    assert saved.restore() is None
    monkeypatch.setattr(os.path, "ismount", mounted)
    monkeypatch.setattr(files, "copy_atomic", lambda *paths: (done.append(paths[1]), copy(*paths)))
    for step in (1, 2, 3):  # the id, the first checkpoint; the next ones are tried and come to nothing
        saved.save(filled(step), step)
    assert len(done) == copies and capsys.readouterr().out.count(f"mounted at {drive}") == 3
    listed = manifest.read(drive / "mine")  # an empty one is written between the id and the checkpoint
    assert listed == ({} if copies == 2 else None), "nothing goes to the folder on which it was mounted"
    assert value_of(Checkpoints(saved.folder).restore()) == 3
    with refuses(drive):
        saved.restore()
    done.clear()
    monkeypatch.undo()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == drive or ismount(path))
    saved.save(filled(4), 4)
    assert steps_in(drive / "mine") == [4, 3] and not capsys.readouterr().out


def test_another_loops_backup_and_a_run_are_not_replaced_and_a_later_state_is_neither(
    saved, tmp_path, capsys
):
    drive = saved.backup.path
    later = again(saved)
    later.restore()
    other = Checkpoints(tmp_path / "other", backup=tmp_path / "other drive")
    other.save(filled(7), 7)
    taken = Checkpoints(other.folder, backup=drive)
    Run.open(tmp_path / "run", MNIST(), backup=tmp_path / "run drive").save({}, 1)
    for use in (taken, Checkpoints(tmp_path / "new", backup=tmp_path / "run drive")):
        with refuses(use.backup.path):
            use.restore()
    taken.save(filled(8), 8)  # which a loop survives that did not ask
    assert "belongs to another" in capsys.readouterr().out and steps_in(drive) == [2, 1]
    with refuses(saved.folder):
        Run.open(saved.folder, MNIST())
    without = Checkpoints(tmp_path / "had none")
    without.save(filled(1), 1)
    with refuses(drive):  # which has later steps, of another loop
        Checkpoints(without.folder, backup=drive).restore()
    assert value_of(without.restore()) == 1
    later.save(filled(9), 9)
    saved.save(filled(3), 3)
    assert "has step 9" in capsys.readouterr().out and steps_in(drive) == [9, 2]
    with refuses(drive, "step 9", "step 3", "does not exist yet"):
        again(saved, "mine").restore()
    assert value_of(again(saved, "new").restore()) == 9


@pytest.mark.slow
def test_a_kill_at_any_point_of_saving_and_backing_up_loses_no_checkpoint_and_no_best_weights(
    tmp_path, capsys
):
    run, drive, kept = tmp_path / "run", tmp_path / "drive", tmp_path / "kept"
    first = Run.open(run, MNIST(), backup=drive)
    for step in (1, 2):
        first.save_best(filled(step))
        first.save(filled(step), step)
    shutil.copytree(run, kept / "run")
    shutil.copytree(drive, kept / "drive")

    def prepare():
        shutil.rmtree(tmp_path / "back", ignore_errors=True)
        for folder in (run, drive):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(kept / folder.name, folder)

    def act():
        again = Run.open(run, MNIST(), backup=drive)
        again.print("three")
        again.save_best(filled(3))
        again.save(filled(3), 3)
        again.save(filled(3.5), 3)  # again, of the same name

    def check():
        opened = [Run(run), Run.open(tmp_path / "back", MNIST(), backup=drive)]
        here, there = (float(one.restore()["a"][0]) for one in opened)
        assert here in (2, 3, 3.5) and 2 <= there <= here
        here, there = (float(best_weights(one)["a"][0]) for one in opened)
        assert here in (2, 3) and 2 <= there <= here
        again = Run.open(run, MNIST(), backup=drive)
        again.save(filled(4), 4)
        assert steps_in(drive)[0] == 4 and same(best_weights(Run(drive)), best_weights(again))
        assert not list(tmp_path.rglob("*.partial"))

    kill_everywhere(prepare, act, check)
    assert "damaged" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_kill_while_a_run_starts_or_is_restored_can_be_repeated(tmp_path):
    Run.open(tmp_path / "run", MNIST(), backup=tmp_path / "drive").save(dict(a=1), 1)

    def prepare():
        for name in ("back", "new"):
            shutil.rmtree(tmp_path / name, ignore_errors=True)

    def opened():
        new = Run.open(tmp_path / "new", MNIST(), backup=tmp_path / "new/../another")
        return new, Run.open(tmp_path / "back", MNIST(), backup=tmp_path / "drive")

    def check():
        new, back = opened()
        assert new.restore() is None and back.restore() == dict(a=1)

    kill_everywhere(prepare, opened, check)


@pytest.mark.parametrize(
    "place", ["notebooks/me/my-notebook/outputs", "my-notebook/outputs", "datasets/me/a-copy", "."]
)
def test_a_run_is_found_in_kaggle_inputs_whatever_their_nesting(kaggle, place):
    assert find_in_inputs(kaggle, "mine") is None
    run = Run.open(kaggle.inputs / place / "mine", MNIST())
    assert find_in_inputs(kaggle, "mine") == run.path and find_in_inputs(kaggle, "other") is None


def test_a_run_is_resumed_from_an_earlier_versions_output_that_is_only_read(kaggle, digits, cpu, monkeypatch):
    monkeypatch.setattr("tpukit.host.environment.detect", lambda: kaggle)
    first, second = (MNIST(dataset_dir=digits, epochs=n, batch_size=50, log_every=2) for n in (1, 2))
    run = Run.open(kaggle.outputs / "mine", first)
    loop.train(first, run, runtime=cpu)
    earlier = kaggle.inputs / "notebooks/me/my-notebook/outputs/mine"
    earlier.parent.mkdir(parents=True)
    run.path.rename(earlier)  # the session ends; its output becomes an input of the next one
    before = content(earlier)
    run = Run.open(kaggle.outputs / "mine", second)
    loop.train(second, run, runtime=cpu)
    assert content(earlier) == before
    straight = Run.open(kaggle.outputs / "straight", second)
    loop.train(second, straight, runtime=cpu)
    assert exact(run) == exact(straight) and same(best_weights(run), best_weights(straight))
    # What is in the working folder is newer than any input.
    Run.open(run.path, second)
    assert run.records("train")[-1]["step"] == 8


def test_an_input_that_is_no_run_is_not_taken_for_one_and_two_runs_of_a_name_are_refused(kaggle):
    def make(name, *parts):
        (kaggle.inputs / name).mkdir(parents=True)
        (kaggle.inputs / name / "config.json").write_text("{}")
        for part in parts:
            (kaggle.inputs / name / part).mkdir()

    make("some-model/mine")  # many published models have a config.json
    assert find_in_inputs(kaggle, "mine") is None and find_in_inputs(kaggle, "") is None
    make("notebook/outputs/mnist", "checkpoints")  # a run has the name of its dataset here
    assert find_in_inputs(kaggle, "mnist") == kaggle.inputs / "notebook/outputs/mnist"
    assert "synthetic" in find_dataset("mnist", size=12, env=kaggle).name
    for owner in ("a", "b"):
        make(f"datasets/{owner}/set/mine", "checkpoints")
    with refuses(*kaggle.inputs.glob("datasets/*/set/mine")):
        find_in_inputs(kaggle, "mine")
    assert (
        find_in_inputs(dataclasses.replace(kaggle, inputs=None), "mnist") is None
    )  # elsewhere than on Kaggle


# Damage


@pytest.fixture
def copied(tmp_path):
    """A run with a backup: two checkpoints, records, best weights."""
    run = Run.open(tmp_path / "run", MNIST(), backup=tmp_path / "drive")
    for step in (1, 2):
        run.log("note", step)
        run.save_best(dict(weight=torch.full((50,), float(step))), epoch=step, accuracy=step / 10)
        run.save(dict(a=step), step)
    return run


def reopened(run, name="run"):
    return Run.open(run.path.parent / name, MNIST(), backup=run.path.parent / "drive")


@pytest.mark.parametrize("damage", [flip, os.remove])
def test_damaged_best_weights_of_a_run_replace_nothing_in_its_backup(damage, copied, tmp_path, capsys):
    whole = (tmp_path / "drive/best.safetensors").read_bytes()
    damage(copied.path / "best.safetensors")
    copied.save(dict(a=3), 3)
    assert f"best.safetensors in {copied.path} is damaged" in capsys.readouterr().out
    assert (tmp_path / "drive/best.safetensors").read_bytes() == whole
    assert steps_in(tmp_path / "drive") == [3, 2]
    shutil.rmtree(copied.path)
    back = reopened(copied)
    assert back.restore() == dict(a=3) and back.has_whole_best()
    assert "damaged" not in capsys.readouterr().out


@pytest.mark.parametrize("content", ["", "{"])
def test_a_backup_whose_config_the_disk_has_emptied_is_known_by_its_weights_and_gets_it_again(
    content, copied, tmp_path, capsys
):
    config = tmp_path / "drive/config.json"
    whole = config.read_bytes()
    config.write_text(content)
    copied.save(dict(a=3), 3)
    assert config.read_bytes() == whole and steps_in(tmp_path / "drive") == [3, 2]
    config.write_text(content)
    reopened(copied).save(dict(a=4), 4)
    assert config.read_bytes() == whole and steps_in(tmp_path / "drive") == [4, 3]
    assert "failed" not in capsys.readouterr().out
    config.write_text(content)
    (tmp_path / "drive" / manifest.FILE).write_text("{}")  # nothing of this run is in it
    with refuses(config, "damaged"):
        reopened(copied)


def test_a_log_or_records_that_a_disk_cuts_short_are_no_copy(copied, tmp_path, monkeypatch, capsys):
    whole, fsync = (tmp_path / "drive/records.jsonl").read_bytes(), os.fsync

    def halving(number):
        fsync(number)
        if "drive/.records.jsonl" in os.readlink(f"/proc/self/fd/{number}"):
            os.ftruncate(number, os.fstat(number).st_size // 2)

    monkeypatch.setattr(os, "fsync", halving)
    copied.log("note", 3)
    copied.save(dict(a=3), 3)
    assert "bytes arrived" in capsys.readouterr().out
    assert (tmp_path / "drive/records.jsonl").read_bytes() == whole
    monkeypatch.undo()
    copied.save(dict(a=4), 4)
    assert (tmp_path / "drive/records.jsonl").read_bytes() == (copied.path / "records.jsonl").read_bytes()


@pytest.mark.parametrize("damage", [flip, os.remove])
def test_damaged_weights_of_a_run_are_brought_back_from_its_backup(damage, copied, tmp_path, capsys):
    for name in ("best.safetensors", "checkpoints/step-00000002.pt"):
        damage(copied.path / name)
    again = reopened(copied)
    assert again.restore() == dict(a=2) and again.has_whole_best()
    assert capsys.readouterr().out.count(f"its copy in {tmp_path / 'drive'} takes its place") == 2
    assert same(best_weights(again), best_weights(Run(tmp_path / "drive")))


def test_what_is_damaged_in_a_backup_is_named_and_the_rest_is_restored_and_backed_up_again(
    copied, tmp_path, capsys
):
    names = ["best.safetensors", "checkpoints/step-00000002.pt"]
    for name in names:
        flip(tmp_path / "drive" / name)
    again = reopened(copied, "again")
    assert again.restore() == dict(a=1) and not again.has_whole_best()
    out = capsys.readouterr().out
    assert all(f"{name} in {tmp_path / 'drive'} is damaged" in out for name in names)
    again.save(dict(a=3), 3)
    assert steps_in(tmp_path / "drive") == [3, 1]


@pytest.mark.parametrize("name", ["best.safetensors", "step-00000003"])
def test_a_copy_that_arrives_damaged_replaces_nothing(name, copied, tmp_path, monkeypatch, capsys):
    whole = (tmp_path / "drive/best.safetensors").read_bytes()
    copy = files.copy_atomic

    def damaging(source, target, check=None):
        def check_damaged(partial):
            if name in partial.name:
                flip(partial)
            if check:
                check(partial)

        copy(source, target, check_damaged)

    monkeypatch.setattr(files, "copy_atomic", damaging)
    copied.save_best(filled(3))
    copied.save(dict(a=3), 3)
    assert name in capsys.readouterr().out and copied.restore() == dict(a=3)
    if name == "best.safetensors":
        assert (tmp_path / "drive" / name).read_bytes() == whole
    assert steps_in(tmp_path / "drive") == ([3, 2] if name == "best.safetensors" else [2, 1])
    monkeypatch.undo()
    copied.save(dict(a=4), 4)
    assert steps_in(tmp_path / "drive") == [4, 3]
    assert same(best_weights(Run(tmp_path / "drive")), best_weights(copied))


def test_a_finished_run_whose_last_session_was_killed_before_its_backup_catches_up(trained, cpu, tmp_path):
    task, run = trained
    drive = tmp_path / "drive"
    train(task, Run.open(run.path, task, backup=drive), runtime=cpu, progress=False)
    assert steps_in(drive) == [50, 25]
