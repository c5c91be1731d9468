"""A disk that stutters is no damaged file: calls that fail while checkpoints are restored, saved, shown."""

import itertools
import shutil
import warnings

import numpy as np
import pytest

from tests.tpukit.runs.faults import IMPOSSIBLE, READ_ERRORS, READS, WRITE_ERRORS, WRITES, failing_disk
from tests.tpukit.runs.store import alike, content, filled, steps_in
from tpukit import Checkpoints, TpukitError, predict, show, show_report
from tpukit.host.errors import Unreadable
from tpukit.runs import checkpoints, manifest


@pytest.fixture
def saved(tmp_path):
    """Folders of checkpoints of the steps 2 and 3, and of their backup."""
    first = Checkpoints(tmp_path / "first", backup=tmp_path / "its backup")
    for step in (1, 2, 3):
        first.save(filled(step), step)
    return first.folder, first.backup.path


@pytest.fixture
def copies(saved, tmp_path):
    """A function that makes two fresh copies, of the folder if it is not lost, and of its backup."""

    def copy(is_lost=False):
        places = tmp_path / "mine", tmp_path / "drive"
        for place, original in zip(places, saved):
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(original, place)
        if is_lost:
            shutil.rmtree(places[0])
        return places

    return copy


def restore_alone(folder, backup):
    return Checkpoints(folder).restore()


def restore(folder, backup):
    return Checkpoints(folder, backup=backup).restore()


def each_fault(copies, act, kinds, errors, is_lost=False):
    """Do an act as often as it has calls of some kinds, with each of them failing once and for good, by each
    of the errors. Yield (the folder, its backup, what the act returned, or its error)."""
    places = copies(is_lost)
    checkpoints._locks.clear()
    with failing_disk(places, kinds) as disk:
        act(*places)
    for at, (kind, _) in enumerate(disk.calls, 1):
        error = next(error for error in errors if kind not in IMPOSSIBLE.get(error, ()))
        for once in (True, False):
            places = copies(is_lost)
            checkpoints._locks.clear()  # as a process of its own would begin
            with failing_disk(places, kinds, at=at, error=error, once=once) as disk:
                try:
                    found = act(*places)
                except TpukitError as refused:
                    found = refused
            assert disk.failed
            yield *places, found


@pytest.mark.parametrize(
    "act, is_lost",
    [(restore_alone, False), (restore, False), (restore, True)],
    ids=["alone", "with a backup", "from a backup"],
)
def test_a_read_that_fails_ends_a_restore_or_does_not_matter_and_nothing_is_gone(act, is_lost, copies):
    ends = 0
    for number in (0, 2):  # `python -m benchmarks.campaign` has all
        errors = READ_ERRORS[number:] + READ_ERRORS[:number]
        for folder, backup, found in each_fault(copies, act, READS, errors, is_lost):
            ends += isinstance(found, Unreadable)
            assert isinstance(found, TpukitError) or alike(found, filled(3)), "an older state was taken"
            assert not isinstance(found, TpukitError) or "delete the" not in str(found)
            for place in (backup,) if is_lost else (folder, backup):
                listed = manifest.read(place)
                assert steps_in(place) == [3, 2] and not list(place.rglob("*.damaged"))
                assert all(manifest.is_whole(place / name, digests) for name, digests in listed.items())
            assert alike(restore(folder, backup), filled(3))
    assert ends > 20


def test_a_write_that_fails_while_a_checkpoint_is_saved_loses_none_and_the_next_one_is_whole(copies):
    def save(folder, backup):
        opened = Checkpoints(folder, backup=backup)
        opened.restore()
        opened.save(filled(4), 4)

    orders = [WRITE_ERRORS[number:] + WRITE_ERRORS[:number] for number in (0, 3)]
    faults = (each_fault(copies, save, WRITES, errors) for errors in orders)
    for folder, backup, _ in itertools.chain.from_iterable(faults):
        for place in (folder, backup):
            newest, *_ = steps_in(place)
            assert newest in (3, 4) and alike(restore_alone(place, None), filled(newest))
        again = Checkpoints(folder, backup=backup)
        again.restore()
        again.save(filled(5), 5)
        assert steps_in(folder)[0] == steps_in(backup)[0] == 5
        assert alike(restore(folder, backup), filled(5))


def test_a_run_that_cannot_be_read_now_is_shown_reported_and_predicted_with_or_with_a_sentence(trained):
    _, run = trained
    before = content(run.path)

    def use():
        show(run.path)
        show_report(run.path)
        predict(run.path, [np.zeros((28, 28), np.uint8)], device="cpu", progress=False)

    with failing_disk([run.path], READS) as disk:
        use()
    for at in range(1, len(disk.calls) + 1, 3):
        with failing_disk([run.path], READS, at=at, error=READ_ERRORS[at % len(READ_ERRORS)]):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")  # no record may be left out
                    use()
            except TpukitError as error:
                assert isinstance(error, Unreadable)
    after = content(run.path)
    assert {name: after.get(name) for name in before} == before


@pytest.mark.parametrize("what", ["manifest", "id"])
def test_a_list_or_an_id_that_cannot_be_read_now_is_not_called_damaged(what, copies):
    folder, backup = copies()
    path = folder / manifest.FILE if what == "manifest" else backup / "checkpoints/id.json"
    with pytest.raises(Unreadable, match="errno 5"):
        with failing_disk([path], {"open"}, at=1, once=False):
            restore(folder, backup)
