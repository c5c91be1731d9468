"""Checkpoints: what survives damage and a full disk."""

import dataclasses
import errno
import os
import resource
import signal

import pytest
import torch

from tests.conftest import exact, flip, refuses
from tpukit import MNIST, Run, TpukitError, train
from tpukit.host import files
from tpukit.host.errors import Damaged


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "unreadable"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_resumed(
    trained, cpu, damage, capsys, monkeypatch
):
    task, run = trained
    wanted = exact(run)
    newest, older = (run.path / "checkpoints" / c["file"] for c in run.checkpoints())
    data, read = bytearray(newest.read_bytes()), files.sha256

    def failing(path):
        if damage == "unreadable" and path == newest and path.stat().st_ino == inode:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return read(path)

    monkeypatch.setattr(files, "sha256", failing)
    data[len(data) // 2] ^= damage == "flipped"
    newest.write_bytes(data[: len(data) // 2] if damage == "cut" else data)
    inode = newest.stat().st_ino
    if damage == "gone":
        newest.unlink()
    train(task, Run.open(run.path, task), runtime=cpu, progress=False)
    out = capsys.readouterr().out
    assert f"{newest.name} is damaged" in out and f"resuming at step {int(older.stem.split('-')[1])}" in out
    assert exact(run) == wanted


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_deletes_nothing(trained, cpu):
    task, run = trained
    for entry in run.checkpoints():
        (run.path / "checkpoints" / entry["file"]).write_bytes(b"nothing")
    before = run.records()
    with refuses(run.path / "checkpoints"):
        train(task, run, runtime=cpu, progress=False)
    assert run.records() == before


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
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit[1]))  # more fails, as on a full disk
    try:
        more = dataclasses.replace(task, epochs=3)
        with pytest.raises(TpukitError, match=rf"{file}.*MiB"):
            train(more, Run.open(run.path, more), runtime=cpu, progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, old)
    assert run.checkpoints() == before and not list(run.path.rglob("*.partial"))
    train(more, Run.open(run.path, more), runtime=cpu, progress=False)
    assert run.records("evaluation")[-1]["epoch"] == 2


@pytest.mark.parametrize("content", ["[" * 100_000, None], ids=["too deep", "gone"])
def test_the_list_of_checkpoints_can_be_lost_and_lets_no_flipped_bit_through(content, trained, capsys):
    _, run = trained
    newest, older = run.checkpoints()
    (run.path / "checkpoints/checkpoints.json").unlink()
    if content:
        (run.path / "checkpoints/checkpoints.json").write_text(content)
    assert run.restore()["state"]["step"] == newest["step"] and steps_in(run) == [50, 25]
    path = run.path / "checkpoints" / newest["file"]
    flip(path, path.read_bytes().find(b"data/0") + 200)  # within a tensor
    assert run.restore()["state"]["step"] == older["step"]
    assert f"{newest['file']} is damaged" in capsys.readouterr().out


class RunsCode:
    def __reduce__(self):
        return os.system, ("true",)


def test_a_checkpoint_that_would_run_code_is_skipped_without_advice_to_run_it(two, capsys):
    for step in (1, 2):
        torch.save(dict(records_size=0, state=RunsCode()), two.path / f"checkpoints/step-0000000{step}.pt")
    (two.path / "checkpoints/checkpoints.json").unlink()
    with refuses(two.path / "checkpoints"):
        two.restore()
    assert "could run code" in capsys.readouterr().out
    assert "weights_only" not in (two.path / "log.txt").read_text()


def steps_in(run):
    return [entry["step"] for entry in run.checkpoints()]


@pytest.fixture
def two(tmp_path):
    """A run with checkpoints of the steps 1 and 2."""
    run = Run.open(tmp_path / "run", MNIST())
    run.log("note", 1)
    run.print("something")
    for step in (1, 2):
        run.save(dict(a=step), step)
    return run


def test_a_damaged_checkpoint_is_not_kept_in_place_of_a_whole_one(two):
    flip(two.path / "checkpoints/step-00000002.pt")
    run = Run.open(two.path, MNIST())
    assert run.restore() == dict(a=1) and steps_in(run) == [1]
    run.save(dict(a=3), 3)
    assert steps_in(run) == [3, 1]
    flip(run.path / "checkpoints/step-00000003.pt")
    assert run.restore() == dict(a=1)


def test_a_flipped_bit_in_the_list_does_not_disown_a_whole_checkpoint(two):
    path = two.path / "checkpoints/checkpoints.json"
    flip(path, path.read_bytes().index(two.checkpoints()[0]["sha256"].encode()))
    assert two.restore() == dict(a=2) and steps_in(two) == [2, 1]


def test_a_checkpoint_that_reached_the_disk_damaged_does_not_replace_an_older_one(two, monkeypatch):
    fsync, done = os.fsync, []

    def damaging(file):
        path = os.readlink(f"/proc/self/fd/{file}")
        if "step-00000003" in path and not done:
            done.append(flip(files.Path(path)))
        fsync(file)

    monkeypatch.setattr(os, "fsync", damaging)
    with pytest.raises(Damaged):
        two.save(dict(a=torch.ones(100)), 3)
    assert done and steps_in(two) == [2, 1] and len(list((two.path / "checkpoints").glob("*.pt"))) == 2


def test_records_and_log_reach_the_disk_before_the_checkpoint_that_counts_on_them(two, monkeypatch):
    synced, fsync = [], os.fsync

    def noting(file):
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{file}")))
        fsync(file)

    monkeypatch.setattr(os, "fsync", noting)
    two.save({}, 3)
    checkpoint = next(number for number, name in enumerate(synced) if "step-00000003" in name)
    assert {"records.jsonl", "log.txt"} <= set(synced[:checkpoint])
