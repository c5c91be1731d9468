"""The run directory: what survives damage, a full disk and a lost session, and what is refused."""

import contextlib
import dataclasses
import errno
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from tests.conftest import SMALL, best_weights, exact, same
from tpukit import MNIST, MSHNet, Run, TpukitError, launch, train
from tpukit.host import files
from tpukit.reporting import figures, findings
from tpukit.runs import weights
from tpukit.workloads.datasets import make_synthetic

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
    figures.show(run)
    shown = capsys.readouterr().out
    assert "Scores after epoch" in shown and "picture not kept at" in shown and "picture:" not in shown


def test_a_training_leaves_no_file_open(digits, tmp_path, cpu):
    task = MNIST(dataset_dir=digits, epochs=1, **SMALL)
    train(task, Run.open(tmp_path / "run", task), runtime=cpu, progress=False)
    assert list((tmp_path / "run/tensorboard").glob("events.out.*"))
    opened = [os.readlink(link) for link in map(str, Path("/proc/self/fd").iterdir()) if os.path.exists(link)]
    assert not [path for path in opened if path.startswith(str(tmp_path))]


def test_a_lost_list_does_not_let_a_flipped_bit_of_the_newest_checkpoint_through(trained, capsys):
    _, run = trained
    newest, older = run.checkpoints()
    (run.path / "checkpoints/checkpoints.json").unlink()
    path = run.path / "checkpoints" / newest["file"]
    data = bytearray(path.read_bytes())
    data[data.find(b"data/0") + 200] ^= 1  # within a tensor
    path.write_bytes(data)
    assert run.restore()["state"]["step"] == older["step"]
    assert f"{newest['file']} is damaged" in capsys.readouterr().out


def test_a_checkpoint_that_the_disk_does_not_give_is_passed_over(trained, monkeypatch, capsys):
    _, run = trained
    newest, older = run.checkpoints()
    read = files.sha256

    def failing(path):
        if path.name == newest["file"]:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return read(path)

    monkeypatch.setattr(files, "sha256", failing)
    assert run.restore()["state"]["step"] == older["step"]
    assert f"{newest['file']} is damaged" in capsys.readouterr().out


def test_a_record_after_one_that_was_cut_short_stands_on_a_line_of_its_own(tmp_path):
    run = Run.open(tmp_path / "run", MNIST())
    run.log("note", 1, value=1)
    with open(run.path / "records.jsonl", "a") as file:
        file.write('{"kind": "no')
    run.log("note", 2, value=2)
    with pytest.warns(UserWarning, match="line 2 is damaged"):
        assert [r["value"] for r in run.records()] == [1, 2]


def test_a_record_that_nests_deeper_than_python_reads_is_left_out(tmp_path):
    run = Run.open(tmp_path / "run", MNIST())
    run.log("note", 1, value=1)
    with open(run.path / "records.jsonl", "a") as file:
        file.write("[" * 100_000 + "\n")
    with pytest.warns(UserWarning, match="line 2 is damaged"):
        assert [r["value"] for r in run.records()] == [1]


RECORDS = [dict(kind="evaluation", step=1, time=1), dict(kind="train", step=1, time=1), dict(kind="note", step="x", time="y")]
RECORDS += [dict(kind="note", step=10**30, time=1), dict(kind="train", step=1, time=1, speed=[], loss={}), dict(kind=[])]
RECORDS += [dict(kind="evaluation", step=1, time=1, scores=dict(a=1e300, b="x", c=float("nan"), d=True))]


@pytest.mark.filterwarnings("ignore:.*is damaged and left out")
@pytest.mark.parametrize("record", RECORDS, ids=str)
def test_a_run_goes_on_over_a_record_that_no_training_wrote(record, tmp_path):
    run = Run.open(tmp_path / "run", MNIST())
    (run.path / "records.jsonl").write_text(json.dumps(record) + "\n")
    run.log("start", 1)
    run.log(**dict(dict(kind="note", step=2), **{k: v for k, v in record.items() if k not in ("kind", "step", "time")}))
    run.close()
    assert [r["kind"] for r in run.records()][-2:] == ["start", "note"]


def test_a_list_of_checkpoints_that_nests_deeper_than_python_reads_is_passed_over(trained):
    task, run = trained
    (run.path / "checkpoints/checkpoints.json").write_text("[" * 100_000)
    assert [c["step"] for c in run.checkpoints()] == [50, 25]


def readings(path):
    """What can be read of a run, by name."""
    run = Run.find(path)
    yield "config", lambda: run.config
    yield "records", lambda: run.records()
    yield "findings", lambda: findings.findings(run.records())
    yield "tables", lambda: [str(table) for table in findings.accelerator_tables(run.records())]
    yield "live", lambda: str(findings.live_table("run", run.records(), run.read_progress(), run.checkpoints(), 1.0))
    yield "best", lambda: best_weights(run)
    yield "metadata", lambda: weights.metadata(run.path / "best.safetensors") | dict(epoch=weights.epoch_of(best_of(run)))
    yield "restored", lambda: run.restore()


def best_of(run):
    return run.path / "best.safetensors"


def alike(a, b):
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(alike(a[n], b[n]) for n in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_a_flipped_bit_in_any_file_of_a_run_changes_nothing_or_is_named(trained, tmp_path, capsys):
    _, run = trained
    wanted = {name: read() for name, read in readings(shutil.copytree(run.path, tmp_path / "whole"))}
    names = sorted(p.relative_to(run.path) for p in run.path.rglob("*") if p.is_file() and p.stat().st_size)
    assert {"config.json", "records.jsonl", "best.safetensors", "progress.json"} <= {str(name) for name in names}
    draw = random.Random(13)
    named = 0
    for number in range(200):
        name = names[number % len(names)]
        copy = shutil.copytree(run.path, tmp_path / "flipped")
        data = bytearray((copy / name).read_bytes())
        at = draw.randrange(8 * len(data))
        data[at // 8] ^= 1 << at % 8
        (copy / name).write_bytes(data)
        for what, read in readings(copy):
            capsys.readouterr()
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                try:
                    found, said = read(), ""
                except TpukitError as error:
                    found, said = None, str(error)
            said += capsys.readouterr().out + "".join(str(w.message) for w in warned)
            if not alike(found, wanted[what]):
                words = said if name.name != "progress.json" else " ".join(found.split())  # the next step writes it anew
                wanted_words = {"checkpoints.json": "is damaged", "progress.json": "has not started yet"}
                assert wanted_words.get(name.name, name.name) in words, f"bit {at} of {name}: {what} is {found}, said: {said}"
                named += 1
        shutil.rmtree(copy)
    assert named > 50


def test_a_run_of_an_earlier_version_goes_on_though_it_knows_no_checksums_and_no_id(digits, tmp_path, cpu):
    task = MNIST(dataset_dir=digits, epochs=3, **SMALL)
    straight = Run.open(tmp_path / "straight", task)
    train(task, straight, runtime=cpu, progress=False)
    part = dataclasses.replace(task, epochs=2)
    run = Run.open(tmp_path / "old", part, backup=tmp_path / "drive")
    train(part, run, runtime=cpu, progress=False)
    for folder in (run.path, tmp_path / "drive"):
        as_an_earlier_version_wrote_it(folder)
    again = Run.open(run.path, task, backup=tmp_path / "drive")
    train(task, again, runtime=cpu, progress=False)
    assert exact(again) == exact(straight) and same(best_weights(again), best_weights(straight))
    assert Run(tmp_path / "drive").checkpoints() == again.checkpoints()
    assert "id" not in Run(tmp_path / "drive").config


def as_an_earlier_version_wrote_it(folder):
    from safetensors.torch import save_file

    config, records, best = (folder / name for name in ("config.json", "records.jsonl", "best.safetensors"))
    config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k not in ("id", "crc32")}))
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    records.write_text("".join(json.dumps({k: v for k, v in line.items() if k != "crc32"}) + "\n" for line in lines))
    about = {name: value for name, value in weights.metadata(best).items() if name != "tpukit.sha256"}
    save_file(weights.read(best), best, metadata=about)


@pytest.mark.parametrize("call", ["open", "replace"])
def test_a_run_folder_that_became_read_only_is_explained(call, trained, cpu, monkeypatch):
    task, run = trained

    def refusing(path, *arguments, **options):
        if str(path).startswith(str(run.path)) and "b" not in (*arguments, ""):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return untouched(path, *arguments, **options)

    place = dict(open="builtins.open", replace="os.replace")[call]
    untouched = dict(open=open, replace=os.replace)[call]
    monkeypatch.setattr(place, refusing)
    with pytest.raises(TpukitError, match=r"cannot write in .*run.*read-only file system.*choose another folder"):
        Run.open(run.path, task)


# The backup


def steps_in(folder):
    return [c["step"] for c in Run(folder).checkpoints()]


def test_a_backup_of_another_run_is_refused_before_the_training_and_left_as_it_is(digits, tmp_path, cpu):
    task = MNIST(dataset_dir=digits, epochs=2, **SMALL)
    first = Run.open(tmp_path / "first/mnist", task, backup=tmp_path / "drive")
    train(task, first, runtime=cpu, progress=False)
    kept = {p: p.read_bytes() for p in (tmp_path / "drive").rglob("*") if p.is_file()}
    tried = dataclasses.replace(task, epochs=1)  # a second session on a fresh disk tries one epoch, without the backup
    train(tried, Run.open(tmp_path / "second/mnist", tried), runtime=cpu, progress=False)
    with pytest.raises(TpukitError, match=f"of another run .*{first.config['id']}.*choose another backup folder"):
        Run.open(tmp_path / "second/mnist", tried, backup=tmp_path / "drive")
    assert {p: p.read_bytes() for p in (tmp_path / "drive").rglob("*") if p.is_file()} == kept
    back = Run.open(tmp_path / "third/mnist", task, backup=tmp_path / "drive")
    assert back.config["id"] == first.config["id"] and steps_in(back.path) == steps_in(first.path)


def test_a_backup_that_another_run_took_meanwhile_is_not_written_in(tmp_path, capsys):
    one, two = (Run.open(tmp_path / name, MNIST(), backup=tmp_path / "drive") for name in ("one", "two"))
    two.save({}, 7)
    one.save({}, 3)
    assert steps_in(tmp_path / "drive") == [7] and Run(tmp_path / "drive").config["id"] == two.config["id"]
    assert "is of another run" in capsys.readouterr().out


@pytest.mark.parametrize("old", ["run", "drive"])
def test_of_a_run_and_a_backup_one_without_an_id_is_refused(old, tmp_path):
    run = Run.open(tmp_path / "run", MNIST(), backup=tmp_path / "drive")
    run.save({}, 1)
    config = json.loads((tmp_path / old / "config.json").read_text())
    del config["id"], config["crc32"]
    (tmp_path / old / "config.json").write_text(json.dumps(config))
    with pytest.raises(TpukitError, match="of another run .*id .*None"):
        Run.open(tmp_path / "run", MNIST(), backup=tmp_path / "drive")


def test_a_backup_that_is_further_than_the_run_is_not_replaced(tmp_path):
    run = Run.open(tmp_path / "run", MNIST(), backup=tmp_path / "drive")
    run.save({}, 1)
    shutil.copytree(run.path, tmp_path / "left behind")
    run.save({}, 2)
    with pytest.raises(TpukitError, match="step 2 of this run, .* only step 1"):
        Run.open(tmp_path / "left behind", MNIST(), backup=tmp_path / "drive")
    assert steps_in(tmp_path / "drive") == [2, 1]


def test_of_two_sessions_of_one_run_the_one_behind_does_not_move_the_backup_back(tmp_path, capsys):
    Run.open(tmp_path / "first", MNIST(), backup=tmp_path / "drive").save({}, 1)
    ahead, behind = (Run.open(tmp_path / name, MNIST(), backup=tmp_path / "drive") for name in ("ahead", "behind"))
    ahead.save({}, 3)
    behind.save({}, 2)
    assert steps_in(tmp_path / "drive") == [3, 1] and "has step 3 of this run" in capsys.readouterr().out


def test_runs_of_earlier_versions_are_told_apart_by_their_first_record(tmp_path):
    for name, backup in (("mine", None), ("other", tmp_path / "drive")):
        run = Run.open(tmp_path / name, MNIST(), backup=backup)
        run.log("note", 1, value=name)
        run.save({}, 1)
        time.sleep(0.01)  # a record's time is in ms
    for folder in ("mine", "other", "drive"):
        without_id = json.loads((tmp_path / folder / "config.json").read_text())
        del without_id["id"], without_id["crc32"]
        (tmp_path / folder / "config.json").write_text(json.dumps(without_id))
    with pytest.raises(TpukitError, match="is of another run"):
        Run.open(tmp_path / "mine", MNIST(), backup=tmp_path / "drive")
    Run.open(tmp_path / "other", MNIST(), backup=tmp_path / "drive").save({}, 2)
    assert steps_in(tmp_path / "drive") == [2, 1]


@pytest.mark.parametrize("copies", range(4))
def test_a_drive_that_goes_within_a_backup_is_said_and_gets_no_further_file(copies, tmp_path, monkeypatch, capsys):
    drive, done = tmp_path / "drive", []
    drive.mkdir()
    ismount, copy = os.path.ismount, files.copy_atomic
    run = Run.open(tmp_path / "run", MNIST())
    run.log("note", 1)
    gone = lambda: len(done) > copies  # noqa: E731
    monkeypatch.setattr(os.path, "ismount", lambda path: not gone() if Path(path) == drive else ismount(path))
    monkeypatch.setattr(files, "copy_atomic", lambda *paths: (done.append(paths), copy(*paths)))
    run = Run.open(tmp_path / "run", MNIST(), backup=drive / "runs/mnist")
    run.save({}, 1)  # config, records, log where there is one, the checkpoint
    said = "nothing is mounted at" in capsys.readouterr().out
    assert (len(done), said) == ((copies + 1, True) if gone() else (len(done), False))
    assert not said or not (drive / "runs/mnist/checkpoints/checkpoints.json").exists()


def test_a_backup_is_compared_by_content_and_not_by_clock(tmp_path):
    run = Run.open(tmp_path / "run", MNIST(), backup=tmp_path / "drive")
    for number in (1, 2):
        run.save_best(dict(weight=torch.full((3,), float(number))), epoch=number)
        run.save({}, 5)  # again, of the same name
        for path in (tmp_path / "drive").rglob("*"):
            os.utime(path, (4e9, 4e9))  # a clock that is ahead
    assert same(best_weights(Run(tmp_path / "drive")), dict(weight=torch.full((3,), 2.0)))
    newest = [folder / "checkpoints/step-00000005.pt" for folder in (run.path, tmp_path / "drive")]
    assert newest[0].read_bytes() == newest[1].read_bytes()


def test_what_a_backup_has_already_is_not_copied_again(tmp_path, monkeypatch):
    run = Run.open(tmp_path / "run", MNIST(), backup=tmp_path / "drive")
    run.save_best(dict(weight=torch.ones(3)), epoch=1)
    run.save({}, 5)
    copied, copy = [], files.copy_atomic
    monkeypatch.setattr(files, "copy_atomic", lambda source, target: (copied.append(source.name), copy(source, target)))
    run.print("something")
    run.save({}, 6)
    assert copied == ["log.txt", "step-00000006.pt"]


def test_a_drive_that_vanished_is_said_and_nothing_goes_to_its_bare_folder(tmp_path, monkeypatch, capsys):
    drive, mounted = tmp_path / "drive", [True]
    drive.mkdir()
    ismount = os.path.ismount
    monkeypatch.setattr(os.path, "ismount", lambda path: mounted[0] if Path(path) == drive else ismount(path))
    run = Run.open(tmp_path / "run", MNIST(), backup=drive / "runs/mnist")
    run.save({}, 1)
    drive.rename(tmp_path / "away")
    drive.mkdir()
    mounted[0] = False
    run.save({}, 2)
    assert not list(drive.iterdir()) and f"nothing is mounted at {drive}" in capsys.readouterr().out
    drive.rmdir()
    (tmp_path / "away").rename(drive)
    mounted[0] = True
    run.save({}, 3)
    assert steps_in(drive / "runs/mnist") == [3, 2] and "works again" in capsys.readouterr().out


def test_a_backup_on_a_drive_that_was_not_mounted_is_refused_before_the_training(colab, tmp_path, monkeypatch):
    monkeypatch.setattr("tpukit.host.environment.detect", lambda: colab)
    with pytest.raises(TpukitError, match="not mounted.*mount_drive"):
        Run.open(tmp_path / "run", MNIST(), backup=colab.drive / "runs/mnist")
    assert not colab.drive.exists()


def test_a_backup_brings_back_a_run_and_nothing_else(tmp_path):
    run = Run.open(tmp_path / "run", MNIST(), backup=tmp_path / "drive")
    run.save(dict(a=1), 1)
    run.save(dict(a=2), 2)
    listed = tmp_path / "drive/checkpoints/checkpoints.json"
    found = json.loads(listed.read_text())
    listed.write_text(json.dumps([dict(found[0], file="../../../outside.pt"), *found]))  # a stranger's
    (tmp_path / "outside.pt").write_text("mine")
    for name in ("notes.txt", "run.py", "checkpoints/other.pt", "cores/stop"):
        (tmp_path / "drive" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "drive" / name).write_text("0")
    again = Run.open(tmp_path / "again", MNIST(), backup=tmp_path / "drive")
    assert again.restore() == dict(a=2) and (tmp_path / "outside.pt").read_text() == "mine"
    names = {str(p.relative_to(again.path)) for p in again.path.rglob("*") if p.is_file()}
    steps = {"checkpoints/step-00000001.pt", "checkpoints/step-00000002.pt"}
    assert names == steps | {"checkpoints/checkpoints.json", "config.json"}


class Killed:
    """Ends this process, as a kill would, before its n-th call of what names, removes or syncs files."""

    def __init__(self, at):
        self.left = at
        for place, name in ((os, "replace"), (os, "fsync"), (os, "unlink"), (os, "mkdir"), (Path, "touch")):
            setattr(place, name, self.counted(getattr(place, name)))

    def counted(self, function):
        def call(*arguments, **options):
            self.left -= 1
            if self.left == 0:
                os._exit(9)
            return function(*arguments, **options)

        return call


def forked(function):
    """The exit code of a process that calls a function."""
    if (pid := os.fork()) == 0:
        try:
            function()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def codes_of_kills(prepare, act, check):
    """Kill `act` before its first, second, ... step until it comes to its end; prepare before and check after each."""
    codes = []
    while not codes or codes[-1] == 9:
        prepare()
        codes.append(forked(lambda: (Killed(len(codes) + 1), act())))
        check()
    assert codes[-1] == 0 and len(codes) > 10
    return codes


def test_a_kill_at_any_point_of_saving_and_backing_up_loses_no_checkpoint(tmp_path, capsys):
    run, drive, kept = tmp_path / "run", tmp_path / "drive", tmp_path / "kept"
    first = Run.open(run, MNIST(), backup=drive)
    for step in (1, 2):
        first.save(dict(a=torch.full((4,), float(step))), step)
    shutil.copytree(run, kept / "run")
    shutil.copytree(drive, kept / "drive")

    def prepare():
        for name in ("run", "drive", "back"):
            shutil.rmtree(tmp_path / name, ignore_errors=True)
        for name in ("run", "drive"):
            shutil.copytree(kept / name, tmp_path / name)

    def act():
        again = Run.open(run, MNIST(), backup=drive)
        again.print("three")
        again.save(dict(a=torch.full((4,), 3.0)), 3)

    def check():
        found = [opened.restore()["a"][0] for opened in (Run(run), Run.open(tmp_path / "back", MNIST(), backup=drive))]
        assert found[0] in (2, 3) and 2 <= found[1] <= found[0]
        Run.open(run, MNIST(), backup=drive).save(dict(a=torch.full((4,), 4.0)), 4)
        assert steps_in(drive)[0] == 4 and not list(tmp_path.rglob("*.partial"))

    codes_of_kills(prepare, act, check)
    assert "is damaged" not in capsys.readouterr().out


def test_a_kill_while_a_run_starts_or_comes_back_is_in_nobodys_way(tmp_path):
    Run.open(tmp_path / "run", MNIST(), backup=tmp_path / "drive").save(dict(a=1), 1)
    prepare = lambda: shutil.rmtree(tmp_path / "back", ignore_errors=True)  # noqa: E731
    back = lambda: Run.open(tmp_path / "back", MNIST(), backup=tmp_path / "drive")  # noqa: E731
    codes_of_kills(prepare, back, lambda: back().restore() == dict(a=1) or pytest.fail("not brought back"))


def test_a_lost_session_comes_back_from_its_backup(digits, tmp_path, cpu, capsys):
    task = MNIST(dataset_dir=digits, epochs=2, **SMALL)
    run = Run.open(tmp_path / "here", task, backup=tmp_path / "drive/run")
    train(task, run, runtime=cpu, progress=False)
    shutil.rmtree(tmp_path / "here")
    more = dataclasses.replace(task, epochs=3)
    again = Run.open(tmp_path / "here", more, backup=tmp_path / "drive/run")
    train(more, again, runtime=cpu, progress=False)
    out = capsys.readouterr().out
    assert "restoring" in out and "resuming at step 50" in out
    assert Run.find(tmp_path / "drive/run").checkpoints() == again.checkpoints()
    names = {p.name for p in (tmp_path / "drive/run").rglob("*") if p.is_file()}
    assert len([n for n in names if n.endswith(".pt")]) == 2 and not any(n.endswith("partial") for n in names)


def test_a_backup_that_fails_is_said_once_and_does_not_stop_the_training(digits, tmp_path, cpu, capsys):
    (tmp_path / "drive").write_text("a file where the folder should be")
    task = MNIST(dataset_dir=digits, epochs=3, **SMALL)
    train(task, Run.open(tmp_path / "run", task, backup=tmp_path / "drive/run"), runtime=cpu, progress=False)
    assert capsys.readouterr().out.count("backup to") == 1


# What is not tpukit's


def test_what_tpukit_did_not_write_stays(trained, cpu):
    task, run = trained
    alive = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    own = [
        "checkpoints/step-best.pt",
        "checkpoints/step-1.pt",
        "checkpoints/.step-notes.partial",
        f"checkpoints/.step-00000001.pt.{alive.pid}.partial",
        "tensorboard/events.out.tfevents.1700000000.host.1.0",
        "tensorboard/events.out.tfevents.1700000000.5",
        "notes.txt",
    ]
    for name in own:
        (run.path / name).write_text("mine")
    left = run.path / "checkpoints/.step-00000001.pt.999999999.partial"  # of a process that was killed
    left.write_text("half")
    more = dataclasses.replace(task, epochs=3)
    try:
        train(more, Run.open(run.path, more), runtime=cpu, progress=False)
    finally:
        alive.communicate(b"\n")
    assert [(run.path / name).read_text() for name in own] == ["mine"] * len(own) and not left.exists()
    assert len(list((run.path / "tensorboard").glob("*.tpukit"))) == 1


def test_a_run_does_not_start_and_is_not_backed_up_among_other_files(tmp_path):
    (tmp_path / "project/checkpoints").mkdir(parents=True)
    (tmp_path / "project/train.py").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(TpukitError, match="not empty and holds no run .*checkpoints, train.py.*an empty folder"):
        Run.open(tmp_path / "project", MNIST())
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(TpukitError, match="not empty and holds no run"):
        Run.open(tmp_path / "run", MNIST(), backup=tmp_path / "project")
    assert not (tmp_path / "run/config.json").exists()
    (tmp_path / "strange/cores").mkdir(parents=True)
    (tmp_path / "strange/cores/rank-00.log").write_text("theirs")
    for call in (lambda: Run.open(tmp_path / "strange", MNIST()), lambda: Run.find(tmp_path / "strange", trained=False)):
        with pytest.raises(TpukitError, match="not empty and holds no run"):
            call()
    (tmp_path / "strange/cores/rank-00.log").rename(tmp_path / "strange/cores/rank-01.stacks")  # another process came first
    Run.open(tmp_path / "strange", MNIST())
    hidden = tmp_path / "looked at/.ipynb_checkpoints"
    hidden.mkdir(parents=True)
    assert Run.open(hidden.parent, MNIST()).checkpoints() == []


@pytest.mark.parametrize("name", ["records.jsonl", "checkpoints", "checkpoints/step-00000001.pt", "tensorboard", ".lock"])
def test_a_link_in_the_folder_of_a_run_or_of_its_backup_is_refused(name, tmp_path):
    run = Run.open(tmp_path / "run", MNIST(), backup=tmp_path / "drive")
    run.save({}, 1)
    shutil.copytree(run.path, tmp_path / "elsewhere")
    for folder in (run.path, tmp_path / "drive"):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        path.symlink_to(tmp_path / "elsewhere" / name)
    for open_ in (
        lambda: Run.open(run.path, MNIST()),
        lambda: Run.find(run.path),
        lambda: Run.open(tmp_path / "back", MNIST(), backup=tmp_path / "drive"),
    ):
        with pytest.raises(TpukitError, match=f"{name} is a symbolic link"):
            open_()
    assert not (tmp_path / "back").exists()


# One training at a time


HOLDS = """
import sys
from pathlib import Path
from tpukit.host import files

with files.exclusive_lock(Path(sys.argv[1])):
    print(flush=True)
    input()
"""


@contextlib.contextmanager
def holding(path):
    process = subprocess.Popen([sys.executable, "-c", HOLDS, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_second_training_in_a_run_folder_is_refused_with_host_and_pid_until_the_first_ends(trained, cpu):
    task, run = trained
    with holding(run.path / ".lock") as first:
        with pytest.raises(TpukitError, match=f"process {first.pid} on {socket.gethostname()} .*{run.path}"):
            train(task, run, runtime=cpu, progress=False)
        assert Run.find(run.path).records()  # a reader needs no lock
    assert (run.path / ".lock").read_text()  # the first was killed
    train(task, run, runtime=cpu, progress=False)
    assert (run.path / ".lock").read_text() == ""


def test_a_second_launch_in_a_run_folder_is_refused_before_it_touches_what_the_first_wrote(digits, tmp_path, monkeypatch):
    monkeypatch.setattr("tpukit.launching.launcher._refuse_an_opened_device", lambda env: None)  # other tests have opened it
    task = MNIST(dataset_dir=digits, epochs=1, **SMALL)
    run = Run.open(tmp_path / "run", task)
    (run.path / "cores").mkdir()
    (run.path / "cores/rank-00.log").write_text("the first's")
    with holding(run.path / f".launch-{socket.gethostname()}.lock") as first:
        with pytest.raises(TpukitError, match=f"process {first.pid} on "):
            launch(train, task, run, cores=2)
    assert (run.path / "cores/rank-00.log").read_text() == "the first's"


def test_a_launch_from_another_host_leaves_a_training_and_its_files_alone(digits, tmp_path, monkeypatch):
    monkeypatch.setattr("tpukit.launching.launcher._refuse_an_opened_device", lambda env: None)
    task = MNIST(dataset_dir=digits, epochs=1, **SMALL)
    run = Run.open(tmp_path / "run", task)
    (run.path / "cores").mkdir()
    kept = [run.path / "cores/rank-00.step", run.path / "progress.json"]
    for path in kept:
        path.write_text("{}")
    with holding(run.path / ".lock") as first:
        monkeypatch.setattr(socket, "gethostname", lambda: "another-host")
        with pytest.raises(TpukitError, match=f"process {first.pid} on "):
            launch(train, task, run, cores=2)
    assert all(path.read_text() == "{}" for path in kept)


@pytest.mark.parametrize("file", [".lock", "progress.json"])
@pytest.mark.parametrize("age_s, refused", [(5, True), (600, False)])
def test_a_training_on_another_host_counts_as_long_as_it_gave_a_sign_of_life(file, age_s, refused, tmp_path):
    run = Run.open(tmp_path / "run", MNIST())
    (run.path / ".lock").write_text(json.dumps(files.with_crc32(dict(host="elsewhere", pid=7))))
    (run.path / "progress.json").touch()
    for name in (".lock", "progress.json"):
        then = time.time() - (age_s if name == file else 3600)
        os.utime(run.path / name, (then, then))
    with pytest.raises(TpukitError, match="process 7 on elsewhere") if refused else contextlib.nullcontext(), run.lock():
        assert not refused


# Files of others


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The name that the cache folder would have, and that every user of this machine can guess."""
    monkeypatch.delenv("TPUKIT_CACHE")
    monkeypatch.setattr(files.tempfile, "gettempdir", lambda: str(tmp_path))
    return files.cache_folder()


def test_a_lock_is_kept_where_no_other_user_writes_and_empties_nothing(cache, tmp_path):
    with files.file_lock(tmp_path / "data"):
        (lock,) = cache.iterdir()
    assert cache.stat().st_mode & 0o777 == 0o700
    (tmp_path / "precious").write_text("mine")
    lock.unlink()
    lock.symlink_to(tmp_path / "precious")
    with files.file_lock(tmp_path / "data"):
        pass
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize("planted", ["link", "another user's", "open to all"])
def test_a_cache_folder_that_another_could_write_in_is_not_used_as_it_is(planted, cache, tmp_path):
    if planted == "link":
        (tmp_path / "theirs").mkdir()
        cache.symlink_to(tmp_path / "theirs")
    else:
        cache.mkdir()
    if planted == "another user's":
        if os.getuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(cache, 12345, 12345)
    if planted == "open to all":
        cache.chmod(0o777)
        files.make_private(cache)
        assert cache.stat().st_mode & 0o022 == 0
        return
    with pytest.raises(OSError, match="link|another user"):
        files.make_private(cache)
    with files.file_lock(tmp_path / "data"):
        assert not list(cache.iterdir())


@pytest.mark.parametrize("plant", [lambda path, victim: os.link(victim, path), lambda path, victim: os.mkfifo(path)])
def test_a_lock_that_is_a_hard_link_or_a_pipe_is_refused(plant, tmp_path):
    (tmp_path / "victim").write_text("theirs")
    run = Run.open(tmp_path / "run", MNIST())
    plant(run.path / ".lock", tmp_path / "victim")
    with pytest.raises(TpukitError, match=r"\.lock is a link or no file"):
        with run.lock():
            pass
    assert (tmp_path / "victim").read_text() == "theirs"


def test_the_test_of_foreign_weights_writes_through_no_link(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/log.txt").symlink_to(tmp_path / "victim")
    with pytest.raises(TpukitError, match="symbolic link"):
        Run.find(tmp_path / "folder", trained=False)
    run = Run.find(tmp_path / "new", trained=False)
    run.print("tested")
    assert Run.find(tmp_path / "new", trained=False).path == run.path


def test_a_folder_has_the_mode_that_the_umask_gives_and_its_name_reaches_the_disk(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda opened: (synced.append(os.fstat(opened).st_ino), fsync(opened)))
    before = os.umask(0o077)
    try:
        with files.atomic_folder(tmp_path / "folder"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o700
    files.write_atomic(tmp_path / "file", "text")
    assert synced == [place.stat().st_ino for place in (tmp_path, tmp_path / "file", tmp_path)]


def test_a_planted_link_is_not_written_through(tmp_path):
    (tmp_path / "precious").write_text("mine")
    for name in ("file", f".file.{os.getpid()}.partial"):
        (tmp_path / name).symlink_to(tmp_path / "precious")
    files.write_atomic(tmp_path / "file", "new")
    assert (tmp_path / "precious").read_text() == "mine" and (tmp_path / "file").read_text() == "new"


# Weights of others


class Runs:
    def __reduce__(self):
        return os.system, ("true",)


@pytest.mark.parametrize("kind", ["pickle", "legacy", "script"])
def test_weights_that_would_run_code_are_refused_without_advice_to_run_it(kind, tmp_path):
    import tarfile

    path = tmp_path / "weights.pt"
    if kind == "pickle":
        torch.save(dict(a=Runs()), path)
    elif kind == "script":
        torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), path)
    else:
        with tarfile.open(path, "w") as tar:
            for name in ("sys_info", "storages", "tensors", "pickle"):
                (tmp_path / name).write_bytes(b"")
                tar.add(tmp_path / name, name)
    with pytest.raises(TpukitError, match="safetensors") as refused:
        weights.read(path)
    assert "weights_only" not in str(refused.value)


def test_a_checkpoint_that_would_run_code_is_passed_over_without_advice_to_run_it(tmp_path, capsys):
    run = Run.open(tmp_path / "run", MNIST())
    run.save({}, 1)
    torch.save(dict(records_size=0, state=Runs()), run.path / "checkpoints/step-00000001.pt")
    (run.path / "checkpoints/checkpoints.json").unlink()
    with pytest.raises(TpukitError, match="none of the 1 checkpoints"):
        run.restore()
    assert "could run code" in capsys.readouterr().out and "weights_only" not in (run.path / "log.txt").read_text()


@pytest.mark.parametrize("version, refused", [("2.5.1+cu124", True), ("2.6.0", False), ("2.10.0", False)])
def test_a_torch_that_runs_code_from_weights_is_refused(version, refused, tmp_path, monkeypatch):
    run = Run.open(tmp_path / "run", MNIST())
    run.save({}, 1)
    torch.save(dict(a=torch.ones(1)), tmp_path / "weights.pt")
    monkeypatch.setattr(torch, "__version__", version)
    for read in (run.restore, lambda: weights.read(tmp_path / "weights.pt")):
        with pytest.raises(TpukitError, match="2.5.1.*2.6 or newer") if refused else contextlib.nullcontext():
            read()


def test_odd_weights_of_a_stranger_are_explained_or_taken(tmp_path):
    from safetensors.torch import save_file

    torch.save({0: torch.ones(1)}, tmp_path / "numbers.pt")
    with pytest.raises(TpukitError, match="expected a state dict"):
        weights.read(tmp_path / "numbers.pt")
    for epoch in ("²", "٣", "9" * 5000):
        save_file(dict(a=torch.ones(1)), tmp_path / "odd.safetensors", metadata=dict(epoch=epoch))
        assert weights.epoch_of(tmp_path / "odd.safetensors") is None and weights.read(tmp_path / "odd.safetensors")


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
    other = dataclasses.replace(task, dataset_dir=make_synthetic("mnist", tmp_path / "other", size=120), epochs=3)
    with pytest.raises(TpukitError, match="trained on 200 samples, .* has 100"):
        train(other, Run.open(run.path, other), runtime=cpu, progress=False)


def test_a_batch_larger_than_the_set_says_how_large_it_may_be(digits, tmp_path, cpu):
    task = MNIST(dataset_dir=digits, batch_size=300)
    with pytest.raises(TpukitError, match="batch_size=300 .* use batch_size <= 200"):
        train(task, Run.open(tmp_path, task), runtime=cpu, progress=False)
