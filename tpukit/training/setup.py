"""`Trainer`: model, optimizer, data and state of a training run, ready on the device for the loop."""

import itertools
import math
import signal
import time
from collections.abc import Generator

import torch

from tpukit.data.datasets import is_synthetic
from tpukit.devices import check_micro_batches, open_runtime
from tpukit.devices.runtime import Runtime, check_batch
from tpukit.host import environment
from tpukit.host.bars import tqdm
from tpukit.host.errors import TpukitError, first_line
from tpukit.host.signals import StopSignal
from tpukit.runs import weights
from tpukit.runs.run import Run
from tpukit.training import batch_norm, checkpoint, ema, metrics, schedule, trial
from tpukit.training.data import Batch, BatchLoader, training_index_batches
from tpukit.training.evaluation import Evaluator
from tpukit.training.notes import log_compilations, log_notes
from tpukit.training.saver import Saver
from tpukit.training.step import TrainingStep
from tpukit.training.task import Task, check_dataset_dir


class Trainer:
    """A training run with its step, data, evaluator and saver, restored to its last checkpoint.

    state: the `checkpoint.TrainState`. total: the step at which it ends. No attribute refers back to the
    Trainer (no reference cycle), so the model is freed when the run ends."""

    shown_loss = "?"  # none yet
    ranks_stop = False  # whether all ranks know of a signal
    is_between_steps = True  # and all that belongs to the last one is done
    records_error: TpukitError | None = None  # by which the disk refuses records
    shown_at = 0.0  # when progress was shown last

    def __init__(self, task: Task, run: Run, runtime: Runtime | None, stop: StopSignal) -> None:
        check_dataset_dir(task)
        task = run.choose_settings(task)
        check_micro_batches(environment.detect(), task.micro_batches)
        self.task, self.stop = task, stop
        torch.manual_seed(task.seed)
        model = task.model()
        # After the model: datasets that draw random numbers must not change its weights.
        self.data, self.test_data = task.datasets()
        self.steps_per_epoch = len(self.data) // task.batch_size
        if self.steps_per_epoch == 0:
            raise TpukitError(
                f"batch_size={task.batch_size} is larger than the training set, which has {len(self.data)}"
                " samples: use a smaller batch_size, or add samples"
            )
        self.runtime = runtime = runtime or open_runtime(environment.detect(), task.precision)
        check_batch(task.batch_size, runtime.cores, micro_batches=task.micro_batches)
        if task.weights:
            weights.load(model, task.weights)
        if runtime.world.size > 1:  # ranks would differ if the model depends on more than the seed
            model.load_state_dict(runtime.world.broadcast(model.state_dict()))
        self.step = TrainingStep(task, runtime, model)
        self.model, self.optimizer = self.step.model, self.step.optimizer
        self.run = run if runtime.world.rank == 0 else run.read_only()
        self.loader = BatchLoader(self.data, runtime, on=task.data_on, workers=task.num_workers)
        test_loader = BatchLoader(self.test_data, runtime, on=task.data_on, workers=task.num_workers)
        self.saver = Saver(self.run, task.save_every_s)
        self.evaluator = Evaluator(task, self.run, runtime, test_loader, self.data, self.saver)
        self.throughput = metrics.Throughput(runtime)
        self.trial = "" if task.compile == "no" else trial.try_out(runtime, self.run.print)
        runtime.seed(task.seed)  # after the trial, which draws random numbers
        self.origin = checkpoint.Origin(
            checkpoint.data_signature(task, self.data),
            checkpoint.data_signature(task, self.test_data),
            checkpoint.optimizer_signature(self.optimizer),
        )
        self.state, sums = checkpoint.restore(self.run, task, runtime, self.step.parts, self.origin)
        self.first_step = self.state.step + 1  # the number of this session's first step
        self.step.sums = metrics.new_sums(runtime, sums)
        self.step.compile(self.loader.compose)
        self.total = self.state.step
        if not self.patience_exhausted():
            planned = round(schedule.planned_epochs(task, self.steps_per_epoch) * self.steps_per_epoch)
            self.total = max(planned, self.state.step)

    # Batches and steps

    def batches(self, *, endless: bool = False) -> Generator[Batch, None, None]:
        """Generate the batches from the next step to the end of the last epoch, without a pause between two
        epochs. endless: those of a training run without an end, for tools that time or trace `take_step`."""
        task, last = self.task, math.ceil(self.total / self.steps_per_epoch)
        first, start = divmod(self.state.step, self.steps_per_epoch)
        plans = (
            training_index_batches(
                len(self.data),
                task.batch_size,
                seed=task.seed,
                epoch=epoch,
                num_uniforms=self.data.num_uniforms,
                start=start if epoch == first else 0,
            )
            for epoch in (itertools.count(first) if endless else range(first, last))
        )
        return self.loader.batches(itertools.chain.from_iterable(plans))

    def take_step(self, batch: Batch, epoch: int) -> None:
        """Take one step. batch: of `loader`; epoch: from 0."""
        number, started = self.state.step + 1, time.monotonic()
        self.runtime.seed_device(self.task.seed, number)
        try:
            self.step(batch, epoch, self.lr_factor())
            if self.step.ema:
                self.step.ema.step(number)
        finally:
            log_compilations(self.run, self.runtime, number)
        self.state.step = number
        self.runtime.world.heartbeat(number)
        if number == self.first_step and (self.runtime.has_graphs or self.task.compile == "yes"):
            took_s = time.monotonic() - started
            self.run.print(f"step {number} took {took_s:.1f} s, with compile={self.task.compile!r}")

    def lr_factor(self, steps_back: int = 0) -> float | None:
        """Return the factor of the learning rates in the next step, or in one before; None for 1."""
        return schedule.lr_factor(self.task, self.state.step - steps_back, self.steps_per_epoch)

    def lr(self) -> float:
        """Return the learning rate of the last step, the largest of the optimizer's groups."""
        factor = self.lr_factor(steps_back=1)
        return max(group["lr"] for group in self.optimizer.param_groups) * (1.0 if factor is None else factor)

    def epochs_done(self) -> float:
        """Return the epochs that have passed, which are not always whole."""
        return self.state.step / self.steps_per_epoch

    def eval_interval(self) -> int:
        """Return the steps between two evaluations."""
        return self.task.eval_every_steps or self.task.eval_every * self.steps_per_epoch

    def next_end(self) -> int:
        """Return the number of the step that next ends an epoch, or the run, or is evaluated."""
        sizes = self.steps_per_epoch, self.eval_interval()
        return min(self.total, *(size * (self.state.step // size + 1) for size in sizes))

    def sync(self) -> metrics.Interval:
        """Return the `metrics.Interval` since the last reset of the sums, on which all ranks agree. Raises
        Diverged."""
        interval = metrics.sync(
            self.step.sums,
            self.model,
            self.runtime,
            has_norm=self.task.clip_norm is not None or self.runtime.compiles,
            stop_signal=self.stop_asked(),
            save_due=self.saver.is_due(),
        )
        self.ranks_stop = interval.stop_signal is not None
        self.stop.signal = interval.stop_signal or self.stop.signal  # one may have come meanwhile
        metrics.check_finite(interval, self.state.step, self.task, self.run, self.runtime)
        return interval

    # Stopping and saving

    def stop_asked(self) -> int | None:
        """Return the signal by which this rank is to stop, if there is one. A disk that refuses records stops
        it, too."""
        try:
            self.run.check_records()
        except TpukitError as error:
            self.records_error = error
            return signal.SIGTERM
        return self.stop.signal or (self.run.stop_requested() if self.run.is_launched else None)

    def check_stop(self) -> None:
        """Stop if a signal came; several ranks if all know of it, so that one that came since waits for the
        next sync."""
        if self.runtime.world.size == 1 or self.ranks_stop:
            if self.records_error is not None:
                raise self.records_error
            self.stop.check()

    def patience_exhausted(self) -> bool:
        """Return True if the evaluations so far end the run. Rank 0 knows."""
        patience = self.task.patience
        return patience is not None and self.state.evaluations_without_best >= patience

    def stop_early(self) -> None:
        """End the run here if its patience is exhausted: on every rank."""
        if not self.runtime.world.broadcast(self.patience_exhausted()):
            return
        self.total, epoch = self.state.step, math.ceil(self.epochs_done()) - 1
        self.write_progress(epoch)
        patience, score = self.task.patience, self.task.score
        self.run.log("stopped", self.state.step, epoch=epoch, patience=patience)
        after = schedule.moment(self.state.step, self.epochs_done())
        self.run.print(f"stopped early after {after}: no better {score} within a patience of {patience}")

    def save(self) -> None:
        """Start writing a checkpoint. It waits for the scores of the last epoch, because a resumed run could
        not repeat the evaluation."""
        self.evaluator.collect(self.state)
        sums = self.sync().sums
        checkpoint.save(self.saver, self.runtime, self.step.parts, self.origin, self.state, sums)

    def save_before_leaving(self, reason: BaseException) -> None:
        """Save on an interrupt, SIGTERM or SIGHUP, if it came between two steps, and say so."""
        why = "interrupted"
        if isinstance(reason, SystemExit) and self.stop.signal:
            why = f"terminated ({signal.Signals(self.stop.signal).name})"
        result = "during a step, which is lost. Start it again to resume from the last checkpoint."
        if self.stop.at_step:  # on every rank at the same step; else a second interrupt broke into one
            self.save()
            self.saver.wait()
            result = f"and saved at step {self.state.step}. Start it again to resume."
        self.run.print(f"{why} {result}")

    def save_after(self, error: Exception) -> None:
        """Save once before an error ends the run, if it came between two steps of a process on its own, or
        all ranks stop for it."""
        has_trained = self.state.step >= self.first_step
        if not has_trained or not self.is_between_steps or isinstance(error, metrics.Diverged):
            return
        if self.runtime.world.size > 1 and not self.ranks_stop:  # the others do not know of it
            return
        try:
            self.saver.forget_failure()
            self.save()
            self.saver.wait()
        except Exception as second:
            self.run.print(f"step {self.state.step} could not be saved ({first_line(second)})")
        else:
            self.run.print(f"an error ends the training run, which is saved at step {self.state.step}")

    def predict_test_set(self, loss: float) -> None:
        """Predict the test set with the weights, or their average once there is one, and start scoring."""
        self.bar.set_description("evaluating")
        average = self.step.ema if self.state.step >= ema.EVERY else None
        model = average.model if average else self.model
        self.evaluator.evaluate(model, self.state, self.epochs_done(), loss, self.stop)
        log_compilations(self.run, self.runtime, self.state.step)
        self.bar.set_description(self.task.name)

    def close(self) -> None:
        self.evaluator.executor.shutdown(wait=False, cancel_futures=True)
        self.saver.close()

    def last_scores(self) -> dict | None:
        """Return the scores of the last evaluation, on rank 0; of an earlier session if nothing was left to
        do."""
        if self.evaluator.scores is not None or self.runtime.world.rank != 0:
            return self.evaluator.scores
        planned = schedule.planned_epochs(self.task, self.steps_per_epoch)
        why = f"already has {self.epochs_done():g} epochs; {planned:g} were requested"
        if self.patience_exhausted():
            after = schedule.moment(self.state.step, self.epochs_done())
            why = f"stopped early after {after}; raise patience to continue"
        self.run.print(f"nothing left to do: the run {why}")
        evaluations = self.run.records("evaluation")
        return evaluations[-1]["scores"] if evaluations else {}

    # What is printed and recorded

    def log_start(self) -> None:
        """Print and record what this session starts from."""
        task, run, runtime, step = self.task, self.run, self.runtime, self.state.step
        stands = f"resuming at step {step} of {self.total}" if step else f"{self.total} steps"
        run.print(
            f"{task.name} on {runtime}: {len(self.data)} training samples, batch {task.batch_size}, {stands}"
        )
        starts, epochs = run.records("start"), schedule.planned_epochs(task, self.steps_per_epoch)
        planned = starts[-1].get("epochs", epochs) if starts and 0 < step < self.total else epochs
        if note := schedule.note(task, step, self.steps_per_epoch, planned):
            run.print(note)
        log_notes(run, self.data, self.test_data, runtime)
        if self.trial:
            run.print(self.trial)
        if note := batch_norm.note(self.model, task.batch_size, task.micro_batches, runtime):
            run.print(note)
        run.print(f"training set: {self.loader.description}")
        run.print(f"test set: {self.evaluator.loader.description}")
        if (runtime.compiles or task.compile == "yes") and step < self.total:
            run.print(
                f"step {step + 1}: compiling the training step, which can take minutes; later steps reuse it"
            )
        versions, synthetic = environment.detect().versions, is_synthetic(task.dataset_dir or "")
        device = dict(device=str(runtime), accelerator=runtime.accelerator, versions=versions)
        cores = dict(cores=runtime.cores, processes=runtime.world.size)
        graphs = dict(compile=task.compile, max_graphs=self.step.max_graphs)
        data = dict(batch_size=task.batch_size, steps_per_epoch=self.steps_per_epoch, synthetic=synthetic)
        run.log("start", step, **cores, **device, **graphs, **data, epochs=epochs)
        runtime.world.heartbeat(step)

    def open_bar(self, shown: bool) -> tqdm:
        """Open the progress bar, a context manager."""
        is_off = self.run.is_launched or not (shown and self.run.echo)
        start, name = self.state.step, self.task.name
        self.bar = tqdm(total=self.total, initial=start, desc=name, unit="step", disable=is_off)
        return self.bar

    def write_progress(self, epoch: int) -> None:
        """Show and record the step, the epoch (counted from 0) and the last loss: ten times a second at most,
        and at an epoch's end."""
        now = time.monotonic()
        if now - self.shown_at < 0.1 and self.state.step < self.total and not self.epochs_done().is_integer():
            return
        self.shown_at = now
        step, shown = self.state.step, dict(epoch=epoch + 1, loss=self.shown_loss)
        self.bar.total = self.total
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update(step - self.bar.n)
        self.run.write_progress(name=self.task.name, unit="step", step=step, total=self.total, **shown)
