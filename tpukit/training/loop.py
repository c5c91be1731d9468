"""The one training loop: `train`."""

import concurrent.futures
import contextlib
import functools
import itertools

import torch
from tqdm.auto import tqdm

from tpukit.devices import LONG_COMPILE_S, check_micro_batches, open_runtime
from tpukit.devices.optimizers import optimizer_signature
from tpukit.devices.runtime import check_batch
from tpukit.host import environment, known_errors
from tpukit.host.errors import TpukitError
from tpukit.runs import weights
from tpukit.runs.signals import StopSignal
from tpukit.training import batch_norm, checkpoint, ema, layers, metrics, schedule
from tpukit.training.data import BatchLoader, training_index_batches
from tpukit.training.evaluation import Evaluator, FinishedEpoch, log_notes
from tpukit.training.saver import Saver
from tpukit.training.step import train_step


def train(task, run, *, runtime=None, progress=True):
    """Train `task` in the run directory `run`, from where it stands, to `task.epochs`. Returns the last
    scores, on every rank.

    runtime: this core's, among others; `launch` gives it. On its own, train opens the one device of this
    process.

    A checkpoint is written every `task.save_every_s` seconds, at the end, and before leaving on an interrupt
    or SIGTERM; a resumed run equals an uninterrupted one, on GPUs except for the rounding of their kernels.
    Raises `Diverged` when loss or gradient stop being finite, and TpukitError for what the user can fix."""
    with StopSignal() as stop, known_errors.explain_known_errors(), run.lock():
        return Trainer(task, run, runtime, stop).fit(progress)


class Trainer:
    """A training with its model, optimizer, data and compiled step on the device; `fit` runs it.

    No attribute refers back to the Trainer (no reference cycle), so the model is freed when the training
    ends."""

    def __init__(self, task, run, runtime, stop):
        task.check_dataset_dir()
        if task.micro_batches > 1:
            check_micro_batches(environment.detect(), task.micro_batches)
        self.task, self.stop = task, stop
        self.ranks_stop = False  # whether all ranks know of a signal
        torch.manual_seed(task.seed)
        model = task.model()
        with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="datasets") as thread:
            # Reading can take seconds, and so can opening a device and what it compiles for a model. Not
            # before the model is there: datasets that draw random numbers must not change its weights.
            reading = thread.submit(task.datasets)
            self.runtime = runtime = runtime or open_runtime(
                environment.detect(), task.precision, libtpu_args=task.libtpu_args(task.batch_size)
            )
            check_batch(task.batch_size, runtime.cores, micro_batches=task.micro_batches)
            self._place_model(model)
            has_optimizer_state = runtime.init_optimizer_state(self.optimizer)
            self.data, self.test_data = reading.result()
        self.data_signature = task.data_signature(self.data)
        self.test_signature = task.data_signature(self.test_data)
        self.steps_per_epoch = len(self.data) // task.batch_size
        if self.steps_per_epoch == 0:
            size = len(self.data)
            raise TpukitError(
                f"batch_size={task.batch_size} is larger than the training set: use batch_size <= {size}"
            )
        self.run = run if runtime.world.rank == 0 else run.read_only()
        self.loader, test_loader = (
            BatchLoader(data, runtime, on=task.data_on, workers=task.num_workers)
            for data in (self.data, self.test_data)
        )
        self.saver = Saver(self.run, task.save_every_s)
        self.evaluator = Evaluator(task, self.run, runtime, test_loader, self.data, self.saver)
        self.throughput = metrics.Throughput(runtime)
        runtime.seed(task.seed)
        self.state, self.sums = checkpoint.restore(self)
        self._compile_step(has_optimizer_state)
        self.announces_compilation = runtime.compiles  # until the first step
        runtime.reset_statistics()  # what others compiled in this process before is not part of this training
        self.shown_loss = ""

    def _place_model(self, model):
        task, runtime = self.task, self.runtime
        if task.weights:
            weights.load(model, task.weights)
        model = batch_norm.apply(model, task.batch_norm, runtime)
        layers.freeze(task, model)
        if (
            runtime.world.size > 1
        ):  # a model that does not start from the seed alone would differ between ranks
            model.load_state_dict(runtime.world.broadcast(model.state_dict()))
        self.model = runtime.place(model, channels_last=task.channels_last)
        self.ema = ema.WeightEMA(self.model, task.ema_decay, runtime) if task.ema_decay else None
        self.optimizer = layers.make_optimizer(task, self.model)
        self.optimizer_signature = optimizer_signature(self.optimizer)

    def _compile_step(self, has_optimizer_state):
        task, runtime = self.task, self.runtime
        how = dict(is_captured=task.cuda_graph, accumulates=task.micro_batches > 1)
        model = runtime.torch_compile(self.model, task.torch_compile, **how)
        self.plain_step = functools.partial(
            train_step, task, model, self.optimizer, runtime, self.loader.compose
        )
        self.max_graphs, changes = 1, (self.model, self.optimizer)
        if (
            not has_optimizer_state
        ):  # then the second step has other inputs than the first, which is one more graph
            self.max_graphs, changes = 2, None
        if not (runtime.compiles or task.cuda_graph):
            changes = None
        self.compiled_step = runtime.compile(
            self.plain_step, name="step", max_graphs=self.max_graphs, mutates=changes
        )

    # The loop

    def fit(self, progress):
        """Train from where the run stands to `task.epochs`. Returns the last scores, on every rank."""
        state = self.state
        is_stopped = self._patience_exhausted()
        total = state.step if is_stopped else max(self.task.epochs * self.steps_per_epoch, state.step)
        self._log_start(total)
        shown = progress and self.run.echo
        with tqdm(
            total=total,
            initial=state.step,
            desc=self.task.name,
            unit="step",
            disable=not shown,
            mininterval=0.5,
        ) as bar:
            try:
                self._end_epoch(bar)  # an interrupted session may have left this undone
                epoch, start = divmod(state.step, self.steps_per_epoch)
                with contextlib.closing(self._batches(range(epoch, self.task.epochs), start)) as batches:
                    while state.step < bar.total:
                        self._train_epoch(bar, batches)
                        self._end_epoch(bar)
                self.saver.wait()
                if (
                    self.saver.last is None
                ):  # nothing was left to do, but the last session may have ended before its backup
                    self.run.update_backup()
            except metrics.Diverged:
                self.evaluator.collect(state, wait=True)  # whose weights may be the best
                raise
            except (KeyboardInterrupt, SystemExit) as reason:
                self._save_before_leaving(reason)
                raise
            finally:
                self.evaluator.executor.shutdown(wait=False, cancel_futures=True)
                self.saver.close()
                self.run.close()
        return self.runtime.world.broadcast(self._last_scores())

    def _train_epoch(self, bar, batches):
        """Train to the end of the epoch, from the step at which the run stands. batches: those of this and
        later epochs."""
        state, task = self.state, self.task
        epoch, first = divmod(state.step, self.steps_per_epoch)
        self.model.train()
        self.throughput.restart()  # an evaluation came before
        for batch in self.throughput.batches(itertools.islice(batches, self.steps_per_epoch - first)):
            self.take_step(batch, epoch)
            bar.update()
            syncs = self._ends_epoch() or state.step % task.log_every == 0
            save_due = self._log_interval(epoch, bar) if syncs else self._save_is_due()
            self._write_progress(bar, epoch)
            # Several ranks have to stop and save at the same step: where they sync.
            if syncs or self.runtime.world.size == 1:
                self._check_stop()
                if save_due and state.step < bar.total:  # the last step is saved with its scores
                    self._save()

    def _write_progress(self, bar, epoch):
        shown = dict(step=self.state.step, total=bar.total, epoch=epoch + 1, loss=self.shown_loss)
        self.run.write_progress(name=self.task.name, unit="step", **shown)

    def _ends_epoch(self):
        return self.state.step % self.steps_per_epoch == 0

    def take_step(self, batch, epoch):
        """Take one step of the training. batch: of `loader`; epoch: from 0."""
        step = self.state.step + 1
        if self.announces_compilation:
            self.run.print(
                f"step {step}: compiling the training step, which can take minutes; later steps reuse it"
            )
            self.announces_compilation = False
        try:
            self.sums = self.compiled_step(batch, self.runtime.scalar(epoch), self.sums, self.lr_factor())
            if self.ema:
                self.ema.step(step)
        finally:
            self._log_compilations(step)
        self.state.step = step
        self.runtime.heartbeat(step)

    def lr_factor(self):
        """What multiplies the learning rates in the next step, as `train_step` gets it."""
        return self.runtime.scalar(schedule.lr_factor(self.task, self.state.step, self.steps_per_epoch))

    def _lr_of(self, step):
        """The learning rate of a step, counted from 1; of the layers next to the output, where they
        differ."""
        factor = schedule.lr_factor(self.task, step - 1, self.steps_per_epoch)
        return max(group["lr"] for group in self.optimizer.param_groups) * (1.0 if factor is None else factor)

    def _batches(self, epochs, start=0):
        """Generate the batches of these epochs, of the first one from step `start` on, without a pause
        between two epochs."""
        how = dict(seed=self.task.seed, num_uniforms=self.data.num_uniforms)
        starts = itertools.chain([start], itertools.repeat(0))
        plans = (
            training_index_batches(len(self.data), self.task.batch_size, epoch=epoch, start=first, **how)
            for epoch, first in zip(epochs, starts)
        )
        return self.loader.batches(itertools.chain.from_iterable(plans))

    def endless_batches(self, epoch=0):
        """Generate the batches of an endless training, for tools that time or trace `take_step`."""
        return self._batches(itertools.count(epoch))

    def sync(self):
        """The `metrics.Interval` since the last reset of the sums, on which all ranks agree. Raises Diverged,
        and what made a save fail."""
        self.saver.check()
        how = dict(clipped=self.task.clip_norm is not None, save_due=self._save_is_due())
        how["stop_signal"] = self.stop.signal or (self.run.stop_requested() if self.run.is_launched else None)
        interval = metrics.sync(self.sums, self.model, self.runtime, **how)
        self.ranks_stop = interval.stop_signal is not None
        self.stop.signal = interval.stop_signal or self.stop.signal  # one may have come meanwhile
        metrics.check_finite(interval, self.state.step, self.task, self.run, self.runtime)
        return interval

    def _check_stop(self):
        """Stop where a signal came; several ranks where all know of it, so that one that came since waits for
        the next sync."""
        if self.runtime.world.size == 1 or self.ranks_stop:
            self.stop.check()

    def _log_interval(self, epoch, bar):
        """Record the interval that ends here and start another. Returns whether a checkpoint is due."""
        state = self.state
        self.evaluator.collect(state, wait=False)
        interval = self.sync()
        state.epoch_loss += interval.sums["loss"]
        self.sums = metrics.new_sums(self.runtime)
        # What a resumed run cannot repeat is in `speed`; all else in the records is exact.
        speed = self.throughput.measure(self.task.batch_size) | dict(memory=interval.memory)
        loss, grad_norm = interval.sums["loss"] / interval.sums["steps"], interval.sums["grad_norm"]
        lr = self._lr_of(state.step)
        self.run.log("train", state.step, epoch=epoch, loss=loss, grad_norm=grad_norm, lr=lr, speed=speed)
        self.throughput.restart()
        self.shown_loss = f"{loss:.4f}"
        bar.set_postfix(epoch=epoch + 1, loss=self.shown_loss, refresh=False)
        return interval.save_due

    def _end_epoch(self, bar):
        """Finish an epoch, unless that was already done: predict the test set. The next epoch trains while
        the scores are computed."""
        state, task = self.state, self.task
        epochs = state.step // self.steps_per_epoch
        if not self._ends_epoch() or state.evaluated >= epochs:
            return
        self.evaluator.collect(state, wait=True)  # one at a time
        finished = FinishedEpoch(state.step, epochs - 1, state.epoch_loss / self.steps_per_epoch)
        if epochs % task.eval_every == 0 or epochs >= task.epochs:
            bar.set_description("evaluating")
            # Ranks stop together, after the evaluation.
            after_batch = self._check_stop if self.runtime.world.size == 1 else None
            model = (
                self.ema.model if self.ema and state.step >= ema.EVERY else self.model
            )  # the average, once there is one
            self.evaluator.predict(finished, model, after_batch=after_batch)
            self._log_compilations(state.step)
            bar.set_description(task.name)
        self.evaluator.pending = finished  # not before: a stop within the evaluation repeats all of it
        state.epoch_loss = 0.0
        # The next epoch trains while the scores are computed, unless they can be the reason that there is
        # none.
        self.evaluator.collect(state, wait=self._patience_exhausted(further=1))
        if (
            task.patience
            and state.step < bar.total
            and self.runtime.world.broadcast(self._patience_exhausted())
        ):
            self._stop_early(bar, epochs)
        if state.step >= bar.total:
            self._save()

    def _patience_exhausted(self, further=0):
        """Whether the evaluations so far, and `further` ones without a better score, end the training. Rank 0
        knows."""
        patience = self.task.patience
        return patience is not None and self.state.evaluations_without_best + further >= patience

    def _stop_early(self, bar, epochs):
        bar.total = self.state.step
        self._write_progress(bar, epochs - 1)
        self.run.log("stopped", self.state.step, epoch=epochs - 1, patience=self.task.patience)
        self.run.print(f"stopped early after epoch {epochs}: {self._without_best()}")

    def _without_best(self):
        return f"no better {self.task.score} within a patience of {self.state.evaluations_without_best}"

    def _save_is_due(self):
        """Whether to save after this step. A state whose last epoch is not scored yet cannot be saved,
        because a resumed run could not repeat the evaluation: that waits for the scores, at most until the
        end of the next epoch."""
        return self.saver.is_due() and (self.evaluator.pending is None or self._ends_epoch())

    def _save(self):
        self.evaluator.collect(self.state, wait=True)
        checkpoint.save(self, self.sync())

    def _save_before_leaving(self, reason):
        why = "interrupted" if isinstance(reason, KeyboardInterrupt) else "terminated (SIGTERM)"
        if self.stop.at_step:  # on every rank at the same step
            self._save()
            self.saver.wait()
            self.run.print(f"{why}: saved at step {self.state.step}. Start it again to resume.")
        else:  # a second interrupt broke into a step, so the state is inconsistent
            self.run.print(
                f"{why} during a step: this step is lost. Run the same again to resume from the last"
                " checkpoint."
            )

    # What is printed and recorded around the loop

    def _log_start(self, total):
        task, run, runtime, step = self.task, self.run, self.runtime, self.state.step
        how = f"resuming at step {step} of {total}" if step else f"{total} steps"
        run.print(
            f"{task.name} on {runtime}: {len(self.data)} training samples, batch {task.batch_size}, {how}"
        )
        trained = run.records("train") if step and task.schedule == "cosine" else []
        if trained and (lr := self._lr_of(trained[-1]["step"])) != trained[-1].get("lr", lr):
            run.print(
                f"the learning rate continues at {lr:.3g}, not {trained[-1]['lr']:.3g}: the cosine schedule"
                f" now ends after {task.epochs} epochs"
            )
        log_notes(run, self.data, self.test_data, runtime)
        if note := batch_norm.note(self.model, task, runtime):
            run.print(note)
        run.print(f"training set: {self.loader.description}")
        run.print(f"test set: {self.evaluator.loader.description}")
        about = dict(
            device=str(runtime), accelerator=runtime.accelerator, versions=environment.detect().versions
        )
        about |= dict(
            max_graphs=self.max_graphs, torch_compile=task.torch_compile, batch_size=task.batch_size
        )
        about |= dict(steps_per_epoch=self.steps_per_epoch)
        run.log("start", step, cores=runtime.cores, processes=runtime.world.size, **about)
        runtime.heartbeat(step)

    def _log_compilations(self, step):
        """Record what was compiled since the last call, and print what took long."""
        for event in self.runtime.pop_compile_events():
            self.run.log("compile", step, **event)
            if not event["programs"] and not event["refused"]:
                self.run.print(
                    f"step {step}: `{event['what']}` is not captured as a CUDA graph, because"
                    f" {event['why'][0]}"
                )
            elif not event["refused"] and (event["what"] == "step" or event["seconds"] >= LONG_COMPILE_S):
                why = f", because {event['why'][0]}" if event["why"] else ""
                self.run.print(f"step {step}: compiled `{event['what']}` in {event['seconds']:.1f} s{why}")

    def _last_scores(self):
        if self.evaluator.scores is not None or self.runtime.world.rank != 0:
            return self.evaluator.scores
        epochs = self.state.step // self.steps_per_epoch
        if self._patience_exhausted():
            self.run.print(
                f"nothing left to do: the run stopped early after epoch {epochs}: {self._without_best()}; a"
                f" larger patience than {self.task.patience} continues it"
            )
        else:
            self.run.print(
                f"nothing left to do: the run already has {epochs} epochs; {self.task.epochs} were requested"
            )
        evaluations = self.run.records("evaluation")
        return evaluations[-1]["scores"] if evaluations else {}
