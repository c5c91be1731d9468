"""Saving while the training goes on: what waits for what, and when."""

import copy
import errno
import signal
import threading
import time

import pytest

from tests.conftest import best_weights, checkpoint, exact, same
from tests.training.conftest import DIGITS, train_in
from tpukit import MNIST, Run, TpukitError, train
from tpukit.host.signals import StopSignal
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
    with pytest.raises(TpukitError, match="Input/output error"):
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
        kept.best = ({}, dict(epoch=epoch))
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
    with pytest.raises(TpukitError, match="Input/output error"):  # with how to mount Drive again
        train_in(tmp_path, task, cpu)
    assert "saved at step" not in capsys.readouterr().out
