"""Saving while the training goes on: what waits for what, and when."""

import copy
import errno
import json
import signal
import threading
import time

import pytest

from tests.conftest import best_weights, checkpoint, exact, refuses, same
from tests.tpukit.runs.faults import WRITES, failing_disk
from tests.tpukit.training.conftest import DIGITS, train_in
from tpukit import MNIST, Run, train
from tpukit.host.signals import StopSignal
from tpukit.runs import run as run_module
from tpukit.runs.checkpoints import Checkpoints
from tpukit.training import metrics
from tpukit.training.loop import Trainer
from tpukit.training.saver import Saver

ALWAYS = dict(save_every_s=0.0)  # a checkpoint whenever the one before is on the disk


def after_steps(monkeypatch, function):
    """Call function(trainer) after each step of a training."""
    whole = Trainer.take_step

    def take_step(self, batch, epoch):
        whole(self, batch, epoch)
        function(self)

    monkeypatch.setattr(Trainer, "take_step", take_step)


def wait_before_scores(monkeypatch, wait):
    """Call wait() before an epoch is scored."""
    score = MNIST.evaluate
    monkeypatch.setattr(MNIST, "evaluate", lambda self, found: (wait(), score(self, found))[1])


def interrupt_at(monkeypatch, step):
    """Interrupt a training after this step."""

    def interrupt(trainer):
        if trainer.state.step == step:
            trainer.stop.signal = signal.SIGINT

    after_steps(monkeypatch, interrupt)


def test_steps_are_taken_while_a_checkpoint_is_written_and_what_it_holds_does_not_change(
    digits, tmp_path, cpu, monkeypatch
):
    release, write, written, weights = threading.Event(), Checkpoints.save, {}, {}

    def slow(self, content, step):
        written[step] = content["state"]
        assert release.wait(60)
        write(self, content, step)

    def keep(trainer):
        weights[trainer.state.step] = copy.deepcopy(trainer.model.state_dict())
        if trainer.state.step == 20:
            release.set()

    monkeypatch.setattr(Checkpoints, "save", slow)
    after_steps(monkeypatch, keep)
    train_in(tmp_path, MNIST(dataset_dir=digits, epochs=1, **DIGITS, **ALWAYS), cpu)
    first, second, *_ = written
    assert first == 1 and second > 20, "one at a time, and none waited for"
    assert all(same(state["model"], weights[step]) for step, state in written.items())


@pytest.mark.parametrize("fails", ["once", "for good"])
def test_a_save_that_fails_ends_the_training_at_a_later_sync_with_its_error_after_one_more_try(
    fails, digits, tmp_path, cpu, monkeypatch
):
    steps, written, write = [], [], Checkpoints.save

    def failing(self, content, step):
        written.append(step)
        if len(written) == 2 or fails == "for good" and len(written) > 2:
            raise OSError(errno.EIO, "Input/output error", "step")
        write(self, content, step)

    monkeypatch.setattr(Checkpoints, "save", failing)
    after_steps(monkeypatch, lambda trainer: steps.append(trainer.state.step))
    task = MNIST(dataset_dir=digits, epochs=50, **DIGITS, **ALWAYS)
    run = Run.open(tmp_path, task)
    with pytest.raises(OSError, match="Input/output error"):
        train(task, run, runtime=cpu, progress=False)
    assert steps[-1] < 50 * 25 and len(written) == 3 and written[2] == steps[-1]
    saved = written[:1] if fails == "for good" else [written[2], written[0]]
    assert [entry["step"] for entry in run.checkpoints()] == saved
    assert run.restore()["state"]["step"] == saved[0]


def test_best_weights_are_on_the_disk_before_the_checkpoint_that_knows_of_them_and_older_ones_are_left_out(
    tmp_path, monkeypatch
):
    order, release = [], threading.Event()

    def save(self, state, step, size):
        release.wait(60)
        order.append(f"step {step}")

    monkeypatch.setattr(Run, "save", save)
    monkeypatch.setattr(Run, "save_best", lambda self, tensors, epoch: order.append(f"best of {epoch}"))
    kept = Saver(Run.open(tmp_path, MNIST()), 60.0)
    kept.save({}, 1)
    for epoch in (1, 2, 3):
        kept.best = ({}, dict(epoch=epoch), None)
    assert order == []
    release.set()
    kept.save({}, 2)
    kept.save({}, 3)
    kept.wait()
    kept.close()
    assert order == ["step 1", "best of 3", "step 2", "step 3"]


def test_steps_are_taken_while_an_epoch_is_scored(digits, tmp_path, cpu, monkeypatch):
    """Scores of the first epoch, of 25 steps, that wait for the 40th."""
    step_40, waited = threading.Event(), []
    wait_before_scores(monkeypatch, lambda: waited.append(step_40.wait(60)))
    after_steps(monkeypatch, lambda trainer: step_40.set() if trainer.state.step == 40 else None)
    train_in(tmp_path, MNIST(dataset_dir=digits, epochs=2, **DIGITS), cpu)
    assert waited == [True, True]


@pytest.mark.parametrize("decay", [None, 0.9])
def test_weights_are_copied_once_for_the_checkpoint_of_the_best_and_not_if_they_are_not_the_best(
    decay, digits, tmp_path, cpu, monkeypatch
):
    copied, whole = [], cpu.to_cpu

    def to_cpu(tree):
        copied.append(isinstance(tree, dict) and "0.weight" in tree)
        return whole(tree)

    scores = iter([0.5, 0.4, 0.6])
    monkeypatch.setattr(cpu, "to_cpu", to_cpu)
    monkeypatch.setattr(MNIST, "evaluate", lambda self, found: (list(found), dict(accuracy=next(scores)))[1])
    task = MNIST(dataset_dir=digits, epochs=3, patience=9, ema_decay=decay, **DIGITS, save_every_s=1e9)
    run = train_in(tmp_path, task, cpu)
    # The first and the third epoch; with an average the model of the checkpoint, which is at the last step
    assert sum(copied) == (3 if decay else 2)
    state = checkpoint(run)
    assert same(best_weights(run), state["averaged" if decay else "model"])
    assert not decay or not same(best_weights(run), state["model"])


@pytest.mark.parametrize("stops_at", [30, 50])
def test_a_stop_waits_for_scores_and_saves_and_the_resumed_run_is_the_same(
    stops_at, digits, tmp_path, cpu, monkeypatch
):
    task = MNIST(dataset_dir=digits, epochs=3, **DIGITS)
    straight = train_in(tmp_path / "straight", task, cpu)
    write = Checkpoints.save
    wait_before_scores(monkeypatch, lambda: time.sleep(0.3))
    monkeypatch.setattr(Checkpoints, "save", lambda *arguments: (time.sleep(0.3), write(*arguments)))
    stopped = Run.open(tmp_path / "stopped", task)
    interrupt_at(monkeypatch, stops_at)
    with pytest.raises(KeyboardInterrupt):
        train(task, stopped, runtime=cpu, progress=False)
    assert checkpoint(stopped)["state"]["step"] == stops_at
    monkeypatch.undo()
    train(task, stopped, runtime=cpu, progress=False)
    assert exact(stopped) == exact(straight) and same(best_weights(stopped), best_weights(straight))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_that_comes_while_ranks_tell_each_other_of_signals_is_not_lost(
    ranks, digits, tmp_path, cpu, monkeypatch
):
    came_in, sync = [], metrics.sync

    def with_signal(*arguments, **how):
        interval = sync(*arguments, **how)
        if not came_in:
            came_in.append(trainer.stop.signal)
            trainer.stop.signal = signal.SIGINT
        return interval

    task = MNIST(dataset_dir=digits, epochs=1, **DIGITS)
    trainer = Trainer(task, Run.open(tmp_path, task), cpu, StopSignal())
    monkeypatch.setattr(metrics, "sync", with_signal)
    monkeypatch.setattr(cpu.world, "size", ranks)
    monkeypatch.setattr(cpu.world, "all_gather", lambda values: [values])
    trainer.sync()
    if ranks == 2:  # the other one does not know of it yet
        trainer.check_stop()
        trainer.sync()
    with pytest.raises(KeyboardInterrupt):
        trainer.check_stop()
    assert came_in == [None]


@pytest.mark.parametrize("stops_at", [5, None], ids=["stopped", "at its end"])
def test_a_training_whose_last_checkpoint_cannot_be_written_does_not_end_as_if_it_were(
    stops_at, digits, tmp_path, cpu, monkeypatch, capsys
):
    def failing(self, content, step):
        time.sleep(0.2)
        raise OSError(errno.EIO, "Input/output error", "step")

    monkeypatch.setattr(Checkpoints, "save", failing)
    interrupt_at(monkeypatch, stops_at)
    task = MNIST(dataset_dir=digits, epochs=1, **DIGITS)
    with pytest.raises(OSError, match="Input/output error"):
        train_in(tmp_path, task, cpu)
    assert "saved at step" not in capsys.readouterr().out


# A disk that fails while a training run writes


def straight_and_interrupted(digits, folder, cpu, **settings):
    """(task, a run of three epochs that nothing disturbed, another that has not begun)."""
    task = MNIST(dataset_dir=digits, epochs=3, **DIGITS, **settings)
    straight = train_in(folder / "straight", task, cpu)
    return task, straight, Run.open(folder / "disturbed", task)


def is_the_same(run, straight):
    return exact(run) == exact(straight) and same(best_weights(run), best_weights(straight))


@pytest.mark.parametrize("name", ["progress.json", "log.txt"])
def test_a_disk_that_refuses_what_only_shows_progress_ends_no_training(name, digits, tmp_path, cpu, capsys):
    task, straight, run = straight_and_interrupted(digits, tmp_path, cpu)
    capsys.readouterr()
    with failing_disk([run.path], WRITES, name=name, at=1, error=errno.EDQUOT, once=False) as disk:
        train(task, run, runtime=cpu, progress=False)
    assert disk.failed and is_the_same(run, straight) and not list(run.path.rglob("*.partial"))
    out = capsys.readouterr().out
    assert "epoch 3" in out and out.count("log.txt gets no more lines") == (name == "log.txt")


@pytest.mark.parametrize("at", [2, 10, 30])
def test_records_that_a_disk_refuses_once_are_written_by_the_next_call(at, digits, tmp_path, cpu):
    task, straight, run = straight_and_interrupted(digits, tmp_path, cpu)
    with failing_disk([run.path], WRITES, name="records.jsonl", at=at, error="half") as disk:
        train(task, run, runtime=cpu, progress=False)
    assert disk.failed and is_the_same(run, straight)
    for written in (run.path / "records.jsonl").read_text().splitlines():
        json.loads(written)  # no half of a line is left


@pytest.mark.parametrize("at", [3, 9, 30, 41])
def test_a_disk_that_goes_on_refusing_records_stops_the_training_which_keeps_them_in_a_checkpoint(
    at, digits, tmp_path, cpu, monkeypatch, capsys
):
    monkeypatch.setattr(run_module, "RETRY_AFTER_S", (0.0, 0.0))
    task, straight, run = straight_and_interrupted(digits, tmp_path, cpu, save_every_s=1e9)
    with failing_disk([run.path], WRITES - {"fsync"}, name="records.jsonl", at=at, once=False):
        with refuses("records.jsonl", "choose another folder"):
            train(task, run, runtime=cpu, progress=False)
    [checkpoint] = run.checkpoints()
    assert f"saved at step {checkpoint['step']}" in capsys.readouterr().out
    assert checkpoint["step"] % task.log_every == 0 or checkpoint["step"] % 25 == 0
    train(task, run, runtime=cpu, progress=False)
    assert is_the_same(run, straight)


class Broken(Exception):
    pass


def break_at(monkeypatch, owner, name, number):
    """Let the n-th call of a method raise, as a loader or a score of the user's own may."""
    calls, whole = [], getattr(owner, name)

    def breaking(*arguments, **options):
        calls.append(1)
        if len(calls) == number:
            raise Broken
        return whole(*arguments, **options)

    monkeypatch.setattr(owner, name, breaking)


@pytest.mark.parametrize(
    "owner, name, number, saved",
    [
        (Trainer, "write_progress", 33, 33),
        (MNIST, "predictor", 2, 50),
        (MNIST, "evaluate", 2, None),
        (Trainer, "take_step", 33, None),
        (metrics.Throughput, "measure", 12, None),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_an_error_between_two_steps_leaves_a_checkpoint_and_one_within_a_step_none(
    owner, name, number, saved, digits, tmp_path, cpu, monkeypatch, capsys
):
    task, straight, run = straight_and_interrupted(digits, tmp_path, cpu, save_every_s=1e9)
    break_at(monkeypatch, owner, name, number)
    with pytest.raises(Broken):
        train(task, run, runtime=cpu, progress=False)
    monkeypatch.undo()
    assert [entry["step"] for entry in run.checkpoints()] == ([] if saved is None else [saved])
    assert (f"saved at step {saved}" in capsys.readouterr().out) == (saved is not None)
    train(task, run, runtime=cpu, progress=False)
    assert is_the_same(run, straight)
