"""`Checkpoints` alone, as a loop uses it that is not tpukit's: no Run, no Task."""

import functools
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from tests import warm
from tests.conftest import ROOT, flip, loaded_by, refuses
from tests.tpukit.runs.store import again, alike, content, filled, forked, kill_everywhere, steps_in, value_of
from tpukit import Checkpoints, TpukitError
from tpukit.host import files
from tpukit.host.errors import Unreadable
from tpukit.runs import checkpoints, manifest

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


OWN_LOOP = """
import os, random, signal, sys
import numpy as np, torch, tpukit
from torch import nn

def train(folder, kill_at):
    torch.manual_seed(0)
    core, saved = tpukit.core(), tpukit.Checkpoints(folder)
    model = nn.Sequential(nn.Conv2d(1, 4, 5, stride=3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5),
                          nn.Flatten(), nn.Linear(256, 10)).to(core.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    digits = torch.rand(48, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(core.rank), random.seed(core.rank), np.random.seed(core.rank)
    done = saved.restore_into(model=model, optimizer=optimizer, schedule=schedule, random=core) or 0
    losses = []
    for epoch in range(done, 3):
        order = random.sample(range(48), 48)[core.rank :: core.size]
        for step in range(0, len(order), 8):
            batch = digits[order[step : step + 8]] + 0.1 * np.random.rand()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model((batch + 0.1 * torch.rand_like(batch)).to(core.device)),
                                               torch.arange(len(batch)).to(core.device))
            loss.backward()
            core.optimizer_step(optimizer)
            losses.append(loss.item())
            if core.world.step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        schedule.step()
        saved.save(epoch + 1)
    weights = {name: values.cpu() for name, values in model.state_dict().items()}
    return dict(weights=weights, losses=losses, draws=[random.random(), float(np.random.rand()), done])

cores, folder, kill_at = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
torch.save(tpukit.launch(train, folder, kill_at, cores=cores), folder + ".pt")
"""


def own_loop(kind, cores, folder, kill_at=0):
    """The exit code of a process with the loop."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    if kind == "cpu":
        env = {name: value for name, value in env.items() if name != "PJRT_DEVICE"}
    command = [*warm.python(), "-c", OWN_LOOP, str(cores), str(folder), str(kill_at)]
    return subprocess.run(command, env=env, timeout=300).returncode


@pytest.mark.slow
@pytest.mark.parametrize("kind, cores", [("cpu", 1), ("cpu", 2), ("xla", 1), ("xla", 2)])
def test_a_loop_with_dropout_that_was_killed_and_started_again_equals_the_straight_one_bit_for_bit(
    kind, cores, tmp_path
):
    if kind == "xla":
        pytest.importorskip("torch_xla")
    assert own_loop(kind, cores, tmp_path / "straight") == 0
    in_epoch_2 = 8 if cores == 1 else 4
    assert own_loop(kind, cores, tmp_path / "halves", kill_at=in_epoch_2) != 0
    assert steps_in(tmp_path / "halves") == [1]
    assert own_loop(kind, cores, tmp_path / "halves") == 0
    straight, halves = (torch.load(tmp_path / f"{name}.pt") for name in ("straight", "halves"))
    assert straight["draws"][:2] == halves["draws"][:2] and (straight["draws"][2], halves["draws"][2]) == (
        0,
        1,
    )
    assert straight["losses"][-len(halves["losses"]) :] == halves["losses"]
    assert alike(straight["weights"], halves["weights"])


class Counter:
    """An object with a state."""

    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return dict(value=self.value)

    def load_state_dict(self, state):
        self.value = state["value"]


def test_objects_that_were_restored_into_are_saved_again_by_the_step_alone(tmp_path):
    one, other = Counter(3), Counter(4)
    saved = Checkpoints(tmp_path)
    with refuses("restore_into(model=model"):
        saved.save(1)
    assert saved.restore_into(one=one, other=other) is None and one.value == 3
    saved.save(1)
    one.value = 5
    saved.save(step=2)
    one, other = Counter(), Counter()
    assert Checkpoints(tmp_path).restore_into(one=one, other=other) == 2
    assert (one.value, other.value) == (5, 4)
    assert saved.restore() == dict(one=dict(value=5), other=dict(value=4))
    with refuses("step 2", "'third'", tmp_path):
        saved.restore_into(third=Counter())
    with pytest.raises(AttributeError, match="state_dict"):
        saved.restore_into(random=len)


def test_rank_0_alone_writes_the_objects_but_the_states_of_all_ranks_are_asked_for(tmp_path, rank):
    asked, counter = [], Counter()
    counter.state_dict = lambda: asked.append(rank.number) or {}
    for rank.number in (1, 0):
        saved = Checkpoints(tmp_path)
        saved.restore_into(counter=counter)
        saved.save(1)
        assert len(asked) == 2 - rank.number and (manifest.read(tmp_path) is None) == (rank.number == 1)


def test_random_states_are_those_of_each_rank_and_others_once_the_number_of_ranks_has_changed(
    cpu, monkeypatch
):
    def draws():
        return random.random(), np.random.rand(), float(torch.rand(()))

    [mine] = cpu.random_states(others=True)
    drawn = draws()
    draws()
    cpu.set_random_states([mine])
    assert draws() == drawn
    cpu.world.rank, cpu.world.size = 1, 2
    other = {**mine, "python": random.getstate(), "of another device": 0}
    drawn = random.random()
    cpu.set_random_states([mine, other])
    assert random.random() == drawn
    torch_alone = set()
    for cpu.world.rank in (0, 1):
        cpu.set_random_states([mine])
        torch_alone.add(float(torch.rand(())))
    assert len(torch_alone) == 2


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


@pytest.fixture
def rank(monkeypatch):
    """This process in a process group; `number` is its rank."""
    rank = type("Rank", (), dict(number=0))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank.number)
    return rank


def test_ranks_that_all_save_leave_whole_checkpoints(tmp_path, rank):
    all_restored = multiprocessing.Barrier(3)

    def save():
        saved = Checkpoints(tmp_path / "mine", backup=tmp_path / "drive")
        saved.restore()
        all_restored.wait(60)
        for step in range(10):
            saved.save(filled(os.getpid()), step)

    def save_as(number):
        rank.number = number
        save()

    assert forked(*(functools.partial(save_as, number) for number in range(3))) == [0] * 3
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


def test_another_process_that_trains_in_the_folder_is_refused_as_long_as_the_loop_is_there(tmp_path):
    saved, place = Checkpoints(tmp_path / "mine"), tmp_path / "link"
    place.symlink_to(tmp_path / "mine")
    program = """
import sys, tpukit
saved = tpukit.Checkpoints(sys.argv[1])
assert saved.restore() in (None, {})
for use in (lambda: saved.save({}, 1), saved.restore_into):
    try:
        use()
    except tpukit.TpukitError as error:
        print(error)
"""

    def of_another():
        command = [sys.executable, "-c", program, str(place)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout

    def is_refused():
        return of_another().count(f"process {os.getpid()} on ") == 2

    assert forked(saved.restore_into) == [0] and of_another() == "", "its lock ended with the process"
    saved.restore_into()
    Checkpoints(tmp_path / "mine").save({}, 1)  # of this process, as a cell that runs again
    assert is_refused()

    def in_a_fork():  # as in a launch from a notebook
        Checkpoints(tmp_path / "mine").save({}, 2)
        checkpoints._locks.clear()  # as at its end

    assert forked(in_a_fork) == [0]
    assert is_refused(), "a fork that ends leaves the lock"


def test_a_folder_that_can_only_be_read_is_restored_from(saved, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    alone, counter = Checkpoints(shutil.copytree(saved.folder, saved.folder.parent / "input")), Counter()
    (alone.folder / ".lock").unlink(missing_ok=True)
    counter.load_state_dict = lambda tensor: None
    assert alone.restore_into(a=counter) == 2 and not (alone.folder / ".lock").exists()


def test_a_home_is_meant_by_its_sign(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    Checkpoints("~/mine", backup="~/drive").save({}, 1)
    assert steps_in(tmp_path / "mine") == steps_in(tmp_path / "drive") == [1]


@pytest.mark.parametrize("name", ["step-00001000.pt", "epoch=3.ckpt"])
def test_a_folder_of_another_program_is_refused_and_stays_as_it_is(name, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / name).write_text("theirs")
    saved = Checkpoints(tmp_path)
    for use in (saved.restore, saved.restore_into, lambda: saved.save({}, 1)):
        with refuses(name, "another program", "choose another folder"):
            use()
    assert content(tmp_path) == {f"checkpoints/{name}": b"theirs"}


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


def test_it_loads_1140_lines_of_code_at_most_and_nothing_of_training_or_tasks(tmp_path):
    program = """
import tpukit, torch
saved = tpukit.Checkpoints("mine", backup="drive")
state = saved.restore()
saved.save({"a": torch.ones(1)}, 1)
"""
    _, parts, lines = loaded_by(program, tmp_path)
    assert parts == {"host", "runs"} and lines <= 1_140
