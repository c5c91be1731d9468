"""The one training loop: epochs, batches, steps, metric syncs, records, evaluations, checkpoints, a stop.

`setup.Trainer` holds the parts; `step.train_step` is what happens to a batch."""

import contextlib
import itertools
from collections.abc import Iterator

from tpukit.devices.runtime import Runtime
from tpukit.host import known_errors
from tpukit.host.signals import StopSignal
from tpukit.runs.run import Run
from tpukit.training import metrics
from tpukit.training.data import Batch
from tpukit.training.setup import Trainer
from tpukit.training.task import Task


def train(task: Task, run: Run, *, runtime: Runtime | None = None, progress: bool = True) -> dict:
    """Train a task in a run, from its last checkpoint to the last epoch.

    A checkpoint is written every `task.save_every_s` seconds, at the end, and before leaving on an interrupt,
    SIGTERM, SIGHUP (a closed terminal), or an error that comes between two steps of one process. A resumed
    run equals an uninterrupted one, on GPUs except for the rounding of their kernels.

    Args:
        task: what to train, for `task.epochs` epochs.
        run: where to train, from `Run.open`.
        runtime: this core's, as `launch` gives it; None: train opens the one device of this process.
        progress: show a progress bar.

    Returns:
        The last scores, on every rank.

    Raises:
        Diverged: if loss or gradient stop being finite.
        TpukitError: if something else is wrong that the user can fix."""
    with StopSignal() as stop, known_errors.explain_known_errors(), run.lock():
        return fit(Trainer(task, run, runtime, stop), progress)  # without a name here, so that it is freed


def fit(trainer: Trainer, progress: bool) -> dict:
    """Train from the last checkpoint to the last epoch. Returns the last scores, on every rank."""
    state = trainer.state
    try:
        trainer.log_start()
        with trainer.open_bar(progress):
            end_part(trainer)  # an interrupted session may have left this undone
            with contextlib.closing(trainer.batches()) as batches:
                while state.step < trainer.total:
                    train_part(trainer, batches)
                    end_part(trainer)
            trainer.saver.wait()
            trainer.run.update_backup()  # an earlier session may have been killed before it did that
            trainer.run.check_records()
    except (KeyboardInterrupt, SystemExit) as reason:
        trainer.save_before_leaving(reason)
        raise
    except Exception as error:
        trainer.save_after(error)
        raise
    finally:
        trainer.close()
    return trainer.runtime.world.broadcast(trainer.last_scores())


def train_part(trainer: Trainer, batches: Iterator[Batch]) -> None:
    """Train from the next step to the end of its epoch, or to an evaluation within it. batches: of this epoch
    and later ones."""
    state = trainer.state
    epoch, end = state.step // trainer.steps_per_epoch, trainer.next_end()
    trainer.model.train()
    trainer.throughput.restart()  # an evaluation came before
    for batch in trainer.throughput.timed(itertools.islice(batches, end - state.step)):
        trainer.is_between_steps = False
        trainer.take_step(batch, epoch)
        syncs = state.step == end or state.step % trainer.task.log_every == 0
        save_due = record_interval(trainer, epoch) if syncs else trainer.saver.is_due()
        trainer.is_between_steps = True
        trainer.write_progress(epoch)
        # Several ranks have to stop and save at the same step, which is one at which they sync.
        if syncs or trainer.runtime.world.size == 1:
            trainer.check_stop()
            if save_due and state.step < trainer.total:  # the last step is saved with its scores
                trainer.save()


def record_interval(trainer: Trainer, epoch: int) -> bool:
    """Record the interval that ends here and start another. Returns whether a checkpoint is due."""
    state = trainer.state
    if trainer.evaluator.has_scores():
        trainer.evaluator.collect(state)
    interval = trainer.sync()
    state.epoch_loss += interval.sums["loss"]
    trainer.step.sums = metrics.new_sums(trainer.runtime)
    loss = interval.sums["loss"] / interval.sums["steps"]
    # What a resumed run cannot repeat is in `speed`; all else in the records is exact.
    speed: dict = trainer.throughput.measure(trainer.task.batch_size) | dict(memory=interval.memory)
    if isinstance(trainer.task, metrics.Rated):
        speed["rates"] = trainer.task.rates(trainer.model, trainer.runtime, speed["images_per_s"])
    norm = interval.sums["grad_norm"]
    trainer.run.log("train", state.step, epoch=epoch, loss=loss, grad_norm=norm, lr=trainer.lr(), speed=speed)
    trainer.throughput.restart()
    trainer.shown_loss = f"{loss:.4f}"
    return interval.save_due


def end_part(trainer: Trainer) -> None:
    """Evaluate after the last step, if that is due and was not already done. The run goes on while the scores
    are computed; with `patience` it waits for them, because they decide whether it does."""
    state, evaluator = trainer.state, trainer.evaluator
    steps = state.step % trainer.steps_per_epoch  # of an epoch that has not ended
    is_evaluated = state.step == trainer.total or state.step % trainer.eval_interval() == 0
    if state.evaluated >= trainer.epochs_done() or (steps and not is_evaluated):
        return
    evaluator.collect(state)  # one at a time
    loss = state.epoch_loss / (steps or trainer.steps_per_epoch)
    if is_evaluated:
        trainer.predict_test_set(loss)  # a stop within it repeats all of it
    else:
        evaluator.record_end(state, state.step, trainer.epochs_done(), loss, {})
    if not steps:
        state.epoch_loss = 0.0
    if trainer.task.patience and state.step < trainer.total:
        evaluator.collect(state)
        trainer.stop_early()
    if state.step >= trainer.total:
        trainer.save()
