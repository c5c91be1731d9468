"""`Checkpoints` alone, as a loop uses it that is not tpukit's: no Run, no Task."""

import fractions
import math
import multiprocessing
import os
import shutil
import time
from collections import OrderedDict

import numpy as np
import pytest
import torch

from tests.conftest import flip, loaded_by, refuses
from tests.tpukit.runs.store import again, alike, content, filled, forked, kill_everywhere, steps_in, value_of
from tpukit import Checkpoints, TpukitError
from tpukit.host import files
from tpukit.host.errors import Unreadable
from tpukit.runs import manifest

STEP_2 = "checkpoints/step-00000002.pt"


def train(folder, backup, stop_at):
    """A loop of anybody's. Returns the weights."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    saved = Checkpoints(folder, backup=backup)
    state = saved.restore() or dict(step=0)
    if state["step"]:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for step in range(state["step"] + 1, stop_at + 1):
        model(torch.full((1, 3), float(step))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        saved.save(dict(model=model.state_dict(), optimizer=optimizer.state_dict(), step=step), step)
    return model.state_dict()


def test_a_loop_that_lost_its_machine_goes_on_from_its_backup_and_ends_with_the_same_weights(tmp_path):
    straight = train(tmp_path / "straight", None, 6)
    for machine, stop_at in enumerate((2, 4, 4, 6)):
        weights = train(tmp_path / f"machine {machine}", tmp_path / "drive", stop_at)
    assert alike(weights, straight) and steps_in(tmp_path / "drive") == [6, 5]


def test_ranks_that_restore_at_once_on_a_new_machine_get_the_newest_state_and_one_of_them_copies_it(
    saved, tmp_path, monkeypatch
):
    copy, log = files.copy_atomic, tmp_path / "log.txt"
    monkeypatch.setattr(files, "copy_atomic", lambda *paths: (time.sleep(0.1), copy(*paths)))

    def say(text):
        with open(log, "a") as file:
            file.write(f"{text}\n")

    def restore():
        new = Checkpoints(tmp_path / "again", backup=saved.backup.path, say=say)
        assert value_of(new.restore()) == 2

    assert forked(*[restore] * 4) == [0] * 4
    assert len(log.read_text().splitlines()) == 1


def test_ranks_that_all_save_leave_whole_checkpoints(tmp_path):
    all_restored = multiprocessing.Barrier(3)

    def save():
        saved = Checkpoints(tmp_path / "mine", backup=tmp_path / "drive")
        saved.restore()
        all_restored.wait(60)
        for step in range(10):
            saved.save(filled(os.getpid()), step)

    assert forked(save, save, save) == [0] * 3
    for folder in (tmp_path / "mine", tmp_path / "drive"):
        listed = manifest.read(folder)
        assert len(listed) == 2 and all(manifest.is_whole(folder / name, listed[name]) for name in listed)
        assert {f"checkpoints/{path.name}" for path in folder.glob("checkpoints/*.pt")} == set(listed)


@pytest.mark.slow
def test_a_kill_while_a_loop_saves_its_first_state_or_restores_one_can_be_repeated(tmp_path):
    first = Checkpoints(tmp_path / "mine", backup=tmp_path / "drive")
    for step in (2, 3):
        first.save(filled(step), step)

    def prepare():
        for name in ("back", "first", "its copy"):
            shutil.rmtree(tmp_path / name, ignore_errors=True)

    def act():
        saved = Checkpoints(tmp_path / "first", backup=tmp_path / "its copy")
        saved.restore()
        saved.save(filled(5), 5)
        assert value_of(Checkpoints(tmp_path / "back", backup=tmp_path / "drive").restore()) == 3

    def check():
        assert steps_in(tmp_path / "drive") == [3, 2]
        act()

    kill_everywhere(prepare, act, check)


def test_a_state_of_any_device_comes_back_on_the_cpu(xla, tmp_path):
    saved = Checkpoints(tmp_path)
    state = OrderedDict(weight=torch.ones(2, 3, device=xla.device), names=["a", ("b", None)], lr=0.1, on=True)
    saved.save(dict(model=state, half=torch.ones(2, dtype=torch.bfloat16)), 1)
    state["weight"] = torch.ones(2, 3)
    assert alike(saved.restore(), dict(model=state, half=torch.ones(2, dtype=torch.bfloat16)))


@pytest.mark.parametrize(
    "value",
    [np.ones(2), torch.nn.Linear(1, 1), len, lambda: 0, fractions.Fraction(1, 2)],
    ids=lambda value: type(value).__name__,
)
def test_a_state_that_could_not_be_read_without_running_code_is_refused_before_it_takes_the_place_of_one(
    value, saved
):
    before = content(saved.folder)
    with refuses("tensors, numbers and strings"):
        saved.save(dict(step=3, loss=[value]), 3)
    with refuses(-1):
        saved.save({}, -1)
    assert content(saved.folder) == before


def test_a_loop_that_starts_again_without_restoring_replaces_no_later_checkpoint(saved):
    before = content(saved.folder), content(saved.backup.path)
    fresh = again(saved, "mine")
    with refuses("step 1 ", "step 2", saved.folder, "restore()"):
        fresh.save(filled(0), 1)
    assert (content(saved.folder), content(saved.backup.path)) == before
    fresh.save(filled(2), 2)  # again, as a loop that saves before it goes on
    fresh.save(filled(1), 1)  # on purpose: it has written one itself
    other = again(saved, "mine")
    other.restore()
    other.save(filled(0), 0)
    assert steps_in(saved.folder) == [0, 1]


@pytest.mark.parametrize("step", [1.5, math.nan, "3", None, -1, torch.ones(2)])
def test_a_step_that_is_no_whole_number_is_refused_in_a_sentence(step, saved):
    before = content(saved.folder)
    with refuses("step=", "whole number"):
        saved.save({}, step)
    assert content(saved.folder) == before
    saved.save({}, np.int64(3))
    assert steps_in(saved.folder) == [3, 2]


def test_a_view_is_saved_without_the_rest_of_its_tensor_and_what_is_shared_stays_shared(saved):
    large = torch.arange(1e6)
    saved.save(dict(view=large[10:14], a=large[:0]), 3)
    assert (saved.folder / "checkpoints/step-00000003.pt").stat().st_size < 10_000
    assert saved.restore()["view"].tolist() == [10, 11, 12, 13]
    saved.save(dict(one=large, other=large), 4)
    assert (saved.folder / "checkpoints/step-00000004.pt").stat().st_size < 5e6
    assert torch.equal(saved.restore()["other"], large)


def test_a_flipped_bit_is_skipped_here_and_in_the_backup_and_replaces_nothing_whole(saved, capsys):
    drive = saved.backup.path
    whole = (drive / STEP_2).read_bytes()
    flip(saved.folder / STEP_2)
    assert value_of(Checkpoints(saved.folder).restore()) == 1
    assert (saved.folder / f"{STEP_2}.damaged").exists() and steps_in(saved.folder) == [2, 1]
    assert f"{saved.folder / STEP_2} is damaged" in capsys.readouterr().out
    alone = Checkpoints(shutil.copytree(saved.folder, saved.folder.parent / "alone"))
    alone.restore()
    alone.save(filled(3), 3)
    assert steps_in(alone.folder) == [3, 1], "the damaged one does not count as one of the two that are kept"
    capsys.readouterr()
    assert value_of(again(saved, "mine").restore()) == 2, "the newest state is not lost"
    new = again(saved)
    assert value_of(new.restore()) == 2
    flip(new.folder / STEP_2)
    assert value_of(again(saved).restore()) == 2
    assert f"its copy in {drive} takes its place" in capsys.readouterr().out
    third = again(saved, "third")
    third.restore()
    flip(third.folder / STEP_2)
    third.save(filled(3), 3)
    assert (drive / STEP_2).read_bytes() == whole and steps_in(drive) == [3, 2]
    flip(drive / "checkpoints/step-00000003.pt")
    capsys.readouterr()
    assert value_of(again(saved, "fourth").restore()) == 2
    assert "step-00000003.pt" in capsys.readouterr().out
    flip(drive / STEP_2)
    with refuses(drive, 2):  # not as if nothing had been saved
        again(saved, "another").restore()


def test_a_rank_survives_that_another_one_sets_the_damaged_checkpoint_aside_first(saved, monkeypatch):
    flip(saved.folder / STEP_2)
    replace = os.replace

    def second(old, new):
        replace(old, new)
        replace(old, new)

    monkeypatch.setattr(os, "replace", second)
    assert value_of(Checkpoints(saved.folder).restore()) == 1


def test_where_all_are_damaged_or_their_list_is_gone_nothing_starts_anew_and_nothing_is_written(saved):
    alone = Checkpoints(saved.folder)
    (saved.folder / manifest.FILE).rename(saved.folder / "list")
    before = content(saved.folder)
    for use in (alone.restore, lambda: alone.save(filled(3), 3), again(saved, "mine").restore):
        with refuses(saved.folder / manifest.FILE):
            use()
    assert content(saved.folder) == before
    (saved.folder / "list").rename(saved.folder / manifest.FILE)
    for path in saved.folder.rglob("*.pt"):
        flip(path)
    with refuses(2, saved.folder):
        alone.restore()


@pytest.mark.parametrize("reads", range(4))
def test_a_folder_that_goes_while_it_is_restored_is_not_taken_for_an_empty_or_a_damaged_one(
    reads, saved, monkeypatch
):
    away, read_bytes, done = saved.folder.with_name("away"), files.read_bytes, []

    def going(path):
        if len(done) == reads:
            saved.folder.rename(away)
        done.append(path)
        return read_bytes(path)

    monkeypatch.setattr(files, "read_bytes", going)
    alone = Checkpoints(saved.folder, say=done.append)
    if reads == 3:  # all was read
        assert value_of(alone.restore()) == 2
        return
    with pytest.raises(Unreadable if reads else TpukitError, match=str(saved.folder)):
        alone.restore()
    assert "delete" not in str(done) and len(list(away.rglob("*.pt"))) == 2 and not saved.folder.exists()


def test_it_loads_1000_lines_of_code_at_most_and_nothing_of_training_or_tasks(tmp_path):
    program = """
import tpukit, torch
saved = tpukit.Checkpoints("mine", backup="drive")
state = saved.restore()
saved.save({"a": torch.ones(1)}, 1)
"""
    _, parts, lines = loaded_by(program, tmp_path)
    assert parts == {"host", "runs"} and lines <= 1_000
