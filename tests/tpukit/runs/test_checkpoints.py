"""The weights files of a run: what survives damage and a full disk."""

import dataclasses
import os
import resource
import signal

import pytest
import torch

from tests.conftest import best_weights, exact, flip, refuses, same
from tpukit import MNIST, Run, TpukitError, train
from tpukit.host import files
from tpukit.runs import manifest, weights


@pytest.mark.parametrize("damage", [flip, os.remove])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_resumed(trained, cpu, damage, capsys):
    task, run = trained
    wanted = exact(run)
    newest, older = (run.path / "checkpoints" / c["file"] for c in run.checkpoints())
    damage(newest)
    train(task, Run.open(run.path, task), runtime=cpu, progress=False)
    out = capsys.readouterr().out
    assert f"{newest.name} is damaged" in out and f"resuming at step {int(older.stem.split('-')[1])}" in out
    assert exact(run) == wanted


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


class RunsCode:
    def __reduce__(self):
        return os.system, ("true",)


@pytest.fixture
def two(tmp_path):
    """A run with checkpoints of the steps 1 and 2."""
    run = Run.open(tmp_path / "run", MNIST())
    run.log("note", 1)
    run.print("something")
    for step in (1, 2):
        run.save(dict(a=step), step)
    return run


def test_records_and_log_reach_the_disk_before_the_checkpoint_that_counts_on_them(two, monkeypatch):
    synced, fsync = [], os.fsync

    def noting(file):
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{file}")))
        fsync(file)

    monkeypatch.setattr(os, "fsync", noting)
    two.save({}, 3)
    checkpoint = next(number for number, name in enumerate(synced) if "step-00000003" in name)
    assert {"records.jsonl", "log.txt"} <= set(synced[:checkpoint])


def test_a_checkpoint_that_would_run_code_is_skipped_without_advice_to_run_it(two, capsys):
    manifest.put(two.path, "checkpoints/step-00000003.pt", lambda file: torch.save(RunsCode(), file))
    assert two.restore() == dict(a=2)
    assert "could run code" in capsys.readouterr().out
    assert "weights_only" not in (two.path / "log.txt").read_text()


LISTS = ["", "[" * 100_000, "3", "[1]", '{"../outside.pt": ["0"]}', '{"best.safetensors": 3}']


@pytest.mark.parametrize("content", LISTS, ids=range(len(LISTS)))
def test_a_damaged_list_of_weights_files_is_named_and_nothing_is_written(content, two):
    path = two.path / manifest.FILE
    path.write_text(content)
    for use in (two.restore, lambda: two.save({}, 3), lambda: Run.open(two.path, MNIST())):
        with refuses(path):
            use()
    assert path.read_text() == content and len(list(path.parent.iterdir())) == 3


def test_a_flipped_bit_anywhere_in_weights_of_a_run_is_named_by_whoever_reads_them(two):
    from safetensors.torch import load_file

    two.save_best(dict(weight=torch.arange(4.0)), epoch=1)
    path = two.path / "best.safetensors"
    whole = path.read_bytes()
    for at in (0, 7, 20, whole.index(b"epoch") + 8, len(whole) - 1):
        flip(path, at)
        with refuses(path, "damaged"):
            weights.read(path)
        assert not two.has_whole_best()
        path.write_bytes(whole)
    assert same(weights.read(path), load_file(path)) and two.has_whole_best()
    path.unlink()
    assert not two.has_whole_best()


def test_best_weights_that_are_replaced_while_they_are_read_are_not_taken_for_damaged(two, monkeypatch):
    two.save_best(dict(weight=torch.zeros(4)))
    read_bytes, replaced = files.read_bytes, []

    def replacing(path):
        if path.name == manifest.BEST and not replaced:
            replaced.append(1)
            two.save_best(dict(weight=torch.ones(4)))
        return read_bytes(path)

    monkeypatch.setattr(files, "read_bytes", replacing)
    assert best_weights(two)["weight"].sum() == 4 and replaced
