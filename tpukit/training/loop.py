"""The one training loop."""

import concurrent.futures
import contextlib
import copy
import dataclasses
import functools
import json
import math
import time

import torch

from tpukit.devices.runtime import check_batch, open_runtime
from tpukit.host import environment
from tpukit.host.errors import TpukitError
from tpukit.runs import weights
from tpukit.runs.run import LONG_COMPILE_S
from tpukit.runs.signals import StopSignal
from tpukit.training.data import BatchLoader, training_plan
from tpukit.training.evaluation import predictions, progress_bar, say_of
from tpukit.training.step import SUMS, USUAL_NORM, freeze_batch_norm, fresh_sums, training_step

AVERAGE_EVERY = 10  # steps
FORMAT = 3  # of a checkpoint's state
LEAST_SCALE = 2.0**-14  # of an fp16 loss, which starts at 2 ** 16: a gradient that overflows even so is above 1e9


class Diverged(TpukitError):
    """The loss or the gradient stopped being a finite number."""


@dataclasses.dataclass
class _State:
    """Where a run stands. All of it goes into a checkpoint."""

    step: int = 0
    epoch_loss: float = 0.0  # summed over the steps of this epoch that were read so far
    evaluated: int = 0  # epochs evaluated, or passed over
    best: float | None = None
    best_on: str = ""  # what that score was taken on
    norm_was_odd: bool = False


@dataclasses.dataclass
class _Unscored:
    """An epoch that is over, and its evaluation. predicted_s is None where there is none, weights and scores where another rank
    has them."""

    step: int
    epoch: int
    loss: float
    predicted_s: float | None = None
    weights: dict | None = None
    scores: concurrent.futures.Future | None = None


def train(task, run, *, runtime=None, progress=True):
    """Train `task` in the run directory `run`, from where it stands, to `task.epochs`. Returns the last scores, on every rank.

    runtime: this core's, among others; `launch` gives it. On its own, train opens the one device of this process.

    A checkpoint is written at every epoch's end, every `task.save_every_s` seconds, and before leaving on an interrupt
    or SIGTERM; a resumed run equals a straight one, on GPUs but for the rounding of their kernels. Raises `Diverged` (naming
    the step and the last good checkpoint) when loss or gradient stop being finite, and TpukitError for what the user can fix.
    """
    with StopSignal() as stop, environment.explain_known_errors(), run.lock():
        return Training(task, run, runtime, stop, progress).go()


class Training:
    """A training as `train` sets it up, with its model, optimizer and programs on the device; `go` runs it."""

    def __init__(self, task, run, runtime, stop, progress):
        self.task, self.stop = task, stop
        task.check_dataset_dir()
        self.data, self.test_data = task.datasets()
        self.steps_per_epoch = len(self.data) // task.batch_size
        if self.steps_per_epoch == 0:
            raise TpukitError(
                f"batch_size={task.batch_size} is larger than the training set of {len(self.data)} samples; "
                f"use batch_size <= {len(self.data)}"
            )
        self.runtime = runtime or open_runtime(environment.detect(), task.precision)
        self.world = self.runtime.world
        check_batch(task.batch_size, self.runtime.cores)
        self.run = run if self.world.rank == 0 else run.read_only()
        how = dict(on=task.data_on, workers=task.num_workers)
        self.feed, self.test_feed = (BatchLoader(data, self.runtime, **how) for data in (self.data, self.test_data))
        self.progress = progress and self.world.rank == 0 and run.echo
        torch.manual_seed(task.seed)
        model = task.model()
        if task.weights:
            weights.load(model, task.weights)
        if task.batch_norm == "frozen":
            freeze_batch_norm(model)
        elif task.batch_norm == "synced":
            model = self._with_synced_batch_norm(model)
        if self.world.size > 1:  # a model that does not start from the seed alone would differ between ranks
            model.load_state_dict(self.world.broadcast(model.state_dict()))
        # Scored and kept instead of the weights, where the task wants an average of them.
        self.averaged = self.runtime.place(copy.deepcopy(model).requires_grad_(False)) if task.ema_decay else None
        self.model = self.runtime.place(model, channels_last=task.channels_last)
        self.optimizer = task.optimizer(self.model)
        primed = self.runtime.init_optimizer_state(self.optimizer)
        self.runtime.seed(task.seed)
        self.state = _State()
        self.sums = fresh_sums(self.runtime)
        self._restore()
        self.parallel_model = self.runtime.torch_compile(self.runtime.parallel(self.model), task.torch_compile)
        changed = dict(model=self.model, optimizer=self.optimizer) if primed else {}
        self.step = functools.partial(_step, task, self.parallel_model, self.optimizer, self.runtime, self.feed)
        self.step.__name__ = "step"
        self.step_program = self.runtime.compile(self.step, task.phases if primed else task.phases + 1, **changed)
        self.average_program = self.runtime.inference(functools.partial(_average, self.averaged, self.model))
        self.runtime.reset_statistics()  # what others before had compiled is not this training's
        self.steps_taken = 0
        self.save_due = False
        self.scores = None  # the last ones
        self.unscored = None  # the evaluation whose scores are being counted
        self.shown_loss = ""
        self.last_save = time.monotonic()
        self._measure_from_here()

    def _with_synced_batch_norm(self, model):
        if self.runtime.device.type == "cuda":
            return torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
        if self.world.size > 1:
            raise TpukitError(
                "batch_norm='synced' runs on GPUs. On TPU cores parallel='spmd' takes the statistics of the whole batch; "
                "otherwise choose 'per-core' or 'frozen'"
            )
        return model  # one program sees the whole batch as it is

    # One step

    def _average_if_due(self):
        count, rest = divmod(self.state.step, AVERAGE_EVERY)
        if self.averaged is None or rest:
            return
        # A shorter memory at first, so that the start does not weigh on a short training (as in Phil Wang's ema_pytorch).
        decay = min(self.task.ema_decay, 1 - (1 + count) ** (-2 / 3))
        # From the host as a vector: a Python number would be another program for every value.
        self.average_program(self.runtime.put({"weight": torch.tensor([1 - decay])})["weight"])
        self._log_compiled(self.state.step)

    def take_step(self, batch, epoch):
        """One step of the training, with all that belongs to it."""
        self._run_step(batch, epoch)
        self.state.step += 1
        self._average_if_due()
        self.runtime.heartbeat(self.state.step)

    def _run_step(self, batch, epoch):
        """The step's program; on a device that compiles, say so while it happens and record how long it took."""
        if not self.runtime.compiles:
            self.sums = self.step_program(batch, epoch, self.sums)
            return
        step = self.state.step + 1
        if self.steps_taken == 0:
            self.run.print(
                f"step {step}: compiling the training step, which can take minutes; the steps after it reuse the program"
            )
        try:
            self.sums = self.step_program(batch, epoch, self.sums)
        finally:
            compiled = self._log_compiled(step)
        if not compiled and self.steps_taken == 0:
            self.run.print(f"step {step}: this session had compiled the same program before, so there was nothing to compile")
        self.steps_taken += 1

    def _log_compiled(self, step):
        """Record and say what was compiled since this was last called. Returns whether anything was."""
        events = self.runtime.take_compile_events()
        for event in events:
            self.run.log("compile", step, **event)
            if not event["refused"] and (event["what"] == "step" or event["seconds"] >= LONG_COMPILE_S):
                programs = f"{event['programs']} program{'s' * (event['programs'] > 1)} in {event['seconds']:.1f} s"
                why = f", because {event['why'][0]}" if event["why"] else ""
                what = "" if event["what"] == "step" else f" for {event['what']}"
                self.run.print(f"step {step}: compiled {programs}{what}{why}")
        return bool(events)

    # The loop

    def go(self):
        task, run, state = self.task, self.run, self.state
        total = max(task.epochs * self.steps_per_epoch, state.step)
        how = f"resuming at step {state.step} of {total}" if state.step else f"{total} steps"
        run.print(f"{task.name} on {self.runtime}: {len(self.data)} training samples, batch {task.batch_size}, {how}")
        say_of(run, self.data, self.test_data)
        run.print(f"training set: {self.feed.said}")
        run.print(f"test set: {self.test_feed.said}")
        run.log(
            "start",
            state.step,
            device=str(self.runtime),
            accelerator=self.runtime.accelerator,
            versions=environment.detect().versions,
            phases=task.phases,
            torch_compile=task.torch_compile,
            cores=self.runtime.cores,
            processes=self.world.size,
            steps_per_epoch=self.steps_per_epoch,
            batch_size=task.batch_size,
        )
        self.runtime.heartbeat(state.step)
        self.scorer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="scores")
        with progress_bar(task.name, total, shown=self.progress, initial=state.step) as bar:
            try:
                while True:
                    self._finish_epoch(bar, is_last=state.step >= total)
                    if state.step >= total:
                        break
                    self._train_epoch(bar)
            except (KeyboardInterrupt, SystemExit) as reason:
                self._leave(reason)
                raise
            finally:  # a second interrupt does not wait for scores
                self.scorer.shutdown(wait=False, cancel_futures=True)
                run.close()
        scores = self.scores
        if scores is None and self.world.rank == 0:
            evaluations = run.records("evaluation")
            scores = evaluations[-1]["scores"] if evaluations else {}
            run.print(
                f"nothing left to do: the run is {state.step // self.steps_per_epoch} epochs long, asked for {task.epochs}"
            )
        return json.loads(self.world.broadcast(json.dumps(scores))) if self.world.size > 1 else scores

    def _train_epoch(self, bar):
        state, task = self.state, self.task
        epoch, first = divmod(state.step, self.steps_per_epoch)
        plan = training_plan(len(self.data), task.batch_size, seed=task.seed, epoch=epoch, start=first, draws=self.data.draws)
        self.model.train()
        self._measure_from_here()  # an evaluation and a checkpoint came before
        with contextlib.closing(self.feed.batches(plan)) as batches:
            while True:
                asked = time.monotonic()
                batch = next(batches, None)
                self.waited_s += time.monotonic() - asked
                if batch is None:
                    break
                self.take_step(batch, epoch)
                self.steps_measured += 1
                bar.update()
                ends_epoch = state.step % self.steps_per_epoch == 0
                reads = state.step % task.log_every == 0 or ends_epoch
                if reads:
                    self._log(epoch, bar)
                self.run.write_progress(
                    name=task.name, unit="step", step=state.step, total=bar.total, epoch=epoch + 1, loss=self.shown_loss
                )
                if self.world.size == 1:
                    self.save_due = self._save_is_due()
                elif not reads:
                    continue  # all ranks stop and save at the same step, so they decide where they talk anyway
                self.stop.check()
                if not ends_epoch and self.save_due:
                    self._save()

    def _save_is_due(self):
        return time.monotonic() - self.last_save > self.task.save_every_s

    def _read_sums(self):
        """The sums over all ranks as floats, the loss and the steps per rank; stops the run where they are not finite.

        Also agrees with the other ranks on whether to stop (when any was asked to) and to save (when rank 0 finds it due).
        """
        # Clipped gradients have lost their norm; the step kept it.
        norm = self.sums[-1:] if self.task.clip_norm is not None else self.runtime.gradient_norm(self.model)
        launched = self.world.rank == 0 and not self.run.echo
        asked = self.stop.signal or (self.run.stop_requested() if launched else None)
        memory = [number for device in self.runtime.memory() for number in device]
        rows = self.runtime.totals(torch.cat([self.sums[:-1], norm]), *memory, asked or 0, self._save_is_due())
        numbers = [number for row in rows for number in row[len(SUMS) : -2]]
        self.memory = list(zip(numbers[::2], numbers[1::2]))  # of every device of every rank
        sums = dict(zip(SUMS, rows[0]))
        sums["loss"] = sum(row[0] for row in rows) / len(rows)
        sums["bad_step"] = min((row[2] for row in rows if row[2] >= 0), default=-1.0)
        # A loss scaler skips a step whose gradient overflows; without one such a step is already the end.
        if sums["bad_step"] < 0 and not (self.runtime.scaler or math.isfinite(sums["grad_norm"])):
            sums["bad_step"] = sums["steps"] - 1
        self.stop.signal = int(max(row[-2] for row in rows)) or None
        self.save_due = bool(rows[0][-1])
        if sums["bad_step"] >= 0:
            step = self.state.step - int(sums["steps"]) + int(sums["bad_step"]) + 1
            self._diverge(step, f"loss or gradient is not a finite number at step {step}")
        # It is halved at every step whose gradient overflows, which is skipped.
        if self.runtime.scaler and (scale := self.runtime.scaler.get_scale()) < LEAST_SCALE:
            step = self.state.step
            self._diverge(step, f"the gradient is not finite at step {step} even with the loss scaled down to {scale:.2g}")
        return sums

    def _diverge(self, step, what):
        good = next((f"the last good checkpoint is {c['file']}" for c in self.run.checkpoints()), "there is no checkpoint yet")
        self.run.log("diverged", step)
        message = (
            f"{what}; {good} in {self.run.path / 'checkpoints'}. "
            f"Start another run with a lower lr (now {self.task.lr}; weights= takes this run's best.safetensors), "
            f"or in fp32 (now {self.runtime.precision}), or check the data."
        )
        self.run.print(message)
        raise Diverged(message)

    def _watch_norm(self, sums):
        """Say once when the gradient norm leaves the usual range, and again when it does after having come back."""
        low, high = USUAL_NORM
        norm = sums["grad_norm"]
        # One that is not finite is a matter of bad_step, or of the loss scaler.
        if self.task.clip_norm is None and math.isfinite(norm) and not low <= norm <= high:
            sums["odd_step"] = sums["steps"] - 1
        odd = sums["odd_step"] >= 0
        if odd and not self.state.norm_was_odd:
            step = self.state.step - int(sums["steps"]) + int(sums["odd_step"]) + 1
            self.run.log("odd_norm", step)
            self.run.print(
                f"step {step}: the gradient norm left {low:g} to {high:g} (at the last reading {sums['grad_norm']:.2g}): "
                "vanishing gradients learn nothing, exploding ones end in nan; look at the data, lr and precision"
            )
        self.state.norm_was_odd = odd

    def _log(self, epoch, bar):
        self._collect_scores()
        sums = self._read_sums()
        self._watch_norm(sums)
        loss = sums["loss"] / sums["steps"]
        self.state.epoch_loss += sums["loss"]
        self.sums = fresh_sums(self.runtime)
        now = time.monotonic()
        seconds, steps = now - self.measured_from, self.steps_measured
        # What a resumed run cannot repeat stands under `speed`; all else in the records is exact.
        speed = dict(
            seconds=seconds,
            images_per_s=steps * self.task.batch_size / seconds,
            wait_s=self.waited_s,
            memory=self.memory,
            counters=(counters := self.runtime.counters()),
            **{way: counters[way] - self.counters_before[way] for way in ("to_device_s", "from_device_s") if counters},
        )
        self.run.log("train", self.state.step, epoch=epoch, loss=loss, grad_norm=sums["grad_norm"], speed=speed)
        self._measure_from_here()
        self.shown_loss = f"{loss:.4f}"
        bar.set_postfix(epoch=epoch + 1, loss=self.shown_loss, refresh=False)

    def _measure_from_here(self):
        self.measured_from, self.steps_measured, self.waited_s = time.monotonic(), 0, 0.0
        self.counters_before = self.runtime.counters()

    def _finish_epoch(self, bar, *, is_last):
        """At the end of an epoch that was not finished yet: predict the test set and save. The scores are counted while the
        next epoch trains."""
        state, task = self.state, self.task
        epochs_done, within = divmod(state.step, self.steps_per_epoch)
        if within or epochs_done == 0 or state.evaluated >= epochs_done:
            return
        loss = state.epoch_loss / self.steps_per_epoch
        done = _Unscored(state.step, epochs_done - 1, loss)
        if epochs_done % task.eval_every == 0 or epochs_done >= task.epochs:
            bar.set_description("evaluating")
            self._predict_test_set(done)
            bar.set_description(task.name)
        self.unscored = done  # not before: a stop within the evaluation repeats it whole
        if is_last or self.unscored.predicted_s is None:
            self._save()
            return
        # This checkpoint knows nothing of the evaluation: a run that goes on from it repeats it.
        self._save(collect=False)
        state.epoch_loss = 0.0

    def _predict_test_set(self, done):
        started = time.monotonic()
        check = self.stop.check if self.world.size == 1 else lambda: None  # ranks stop together, after it
        with self.runtime.broadcast_buffers(self.scored):
            found = predictions(self.task, self.scored, self.test_feed, self.runtime, epoch=done.epoch, check=check)
        self._log_compiled(done.step)
        done.predicted_s = time.monotonic() - started
        if self.world.rank == 0:
            done.weights = self.runtime.host(self.scored.state_dict())
            done.scores = self.scorer.submit(_timed, self.task.evaluate, found)

    def _collect_scores(self):
        """Record the epoch whose scores were being counted, if there is one. Always at the next reading or saving, so that
        the records have the same order however fast the counting is."""
        if self.unscored is None:
            return
        done, self.unscored = self.unscored, None
        shown = ""
        self.run.log("epoch", done.step, epoch=done.epoch, loss=done.loss)
        if done.scores is not None:
            self.scores, seconds = done.scores.result()
            speed = dict(seconds=done.predicted_s, scoring_s=seconds)
            self.run.log("evaluation", done.step, epoch=done.epoch, scores=self.scores, speed=speed)
            self._keep_best(self.scores, done)
            shown = "".join(f", {n} {v:.4g}" for n, v in self.scores.items() if isinstance(v, float))
        self.run.print(f"epoch {done.epoch + 1}: loss {done.loss:.4f}{shown}")
        self.state.evaluated = done.epoch + 1
        if self.state.step == done.step:
            self.state.epoch_loss = 0.0

    @property
    def scored(self):
        """The model that is evaluated and kept."""
        averaged = self.averaged is not None and self.state.step >= AVERAGE_EVERY
        return self.averaged if averaged else self.model

    def _keep_best(self, scores, done):
        score, on = scores[self.task.score], self.task.scored_on()
        if self.state.best is None or score > self.state.best or on != self.state.best_on:
            self.state.best, self.state.best_on = score, on
            about = {self.task.score: score, **self.task.metadata(self.data)}
            self.run.save_best(done.weights, workload=self.task.name, step=done.step, epoch=done.epoch, **about)

    # Saving and coming back

    def _save(self, *, collect=True):
        if collect:
            self._collect_scores()
        sums = self._read_sums()
        random = self.world.gather(self.runtime.random_state())
        if self.world.rank == 0:
            self._write_checkpoint(sums, random)
        self.last_save = time.monotonic()

    def _write_checkpoint(self, sums, random):
        host = self.runtime.host
        self.run.save(
            dict(
                format=FORMAT,
                train_size=len(self.data),
                state=dataclasses.asdict(self.state),
                sums={name: sums[name] for name in SUMS},
                model=host(self.model.state_dict()),
                averaged=host(self.averaged.state_dict()) if self.averaged else {},
                optimizer=host(self.optimizer.state_dict()),
                scaler=self.runtime.scaler.state_dict() if self.runtime.scaler else {},
                random=random,  # every rank's
            ),
            self.state.step,
        )

    def _restore(self):
        # Rank 0 reads for all: other hosts need not see its disk. But it has to be the host that has the run.
        newest = [int(row[0]) for row in self.world.all_gather([max((c["step"] for c in self.run.checkpoints()), default=-1)])]
        if max(newest) > newest[0]:
            mine = f"only one of step {newest[0]}" if newest[0] >= 0 else "no checkpoint"
            raise TpukitError(
                f"{self.run.path}: rank 0 has {mine} there, but rank {newest.index(max(newest))} has one of step "
                f"{max(newest)}. "
                "Start the host that has the run with --node-rank 0, or put the run on a disk that all hosts share."
            )
        saved = self.world.broadcast(self.run.restore() if self.world.rank == 0 else None)
        if saved is None:
            return
        if saved["format"] != FORMAT:
            raise TpukitError(
                f"{self.run.path} was written by another version of tpukit: start a new run; weights= takes its best"
            )
        if saved["train_size"] != len(self.data):
            raise TpukitError(
                f"{self.run.path} was trained on {saved['train_size']} samples, {self.task.dataset_dir} has {len(self.data)}: "
                "give it the dataset it started with, or choose another run folder"
            )
        self.state = _State(**saved["state"])
        self.model.load_state_dict(saved["model"])
        if self.averaged is not None:
            self.averaged.load_state_dict(saved["averaged"])
        for group, own in zip(saved["optimizer"]["param_groups"], self.optimizer.param_groups):
            if "capturable" in own:  # says where this device wants the count of steps, not where the other one had it
                group["capturable"] = own["capturable"]
        self.optimizer.load_state_dict(saved["optimizer"])
        if self.runtime.scaler and saved["scaler"]:
            self.runtime.scaler.load_state_dict(saved["scaler"])
        self.sums = fresh_sums(self.runtime, saved["sums"])
        if len(saved["random"]) == self.world.size:
            self.runtime.set_random_state(saved["random"][self.world.rank])
        else:  # other ranks than before: from the seed and the step, because theirs is gone
            self.runtime.seed((self.task.seed, self.state.step))
        self.runtime.sync()

    def _leave(self, reason):
        why = "interrupted" if isinstance(reason, KeyboardInterrupt) else "asked to end (SIGTERM)"
        if self.stop.at_step:  # on every rank at the same step
            self._save()
            self.run.print(f"{why}: saved at step {self.state.step}. Run the same again to go on from there.")
        else:  # a second interrupt broke into a step, whose state is half new: the last checkpoint counts
            self.run.print(f"{why} within a step: the last checkpoint counts. Run the same again to go on from there.")


# The programs: no methods, because a training that held methods of itself would stay in memory after its end, with its model.


def _step(task, model, optimizer, runtime, feed, batch, epoch, sums):
    """Compose the batch, and `training_step`."""
    return training_step(task, model, optimizer, runtime, feed.compose(batch), epoch, sums)


def _average(averaged, model, weight):
    """Move the averaged weights towards the weights by (1,) `weight`; buffers are copied."""
    for mean, now in zip(averaged.parameters(), model.parameters()):
        mean.lerp_(now, weight)
    for mean, now in zip(averaged.buffers(), model.buffers()):
        mean.copy_(now + 0)  # a plain copy shares its memory on XLA, where the next step gives it away


def _timed(function, *arguments):
    """(result, seconds)."""
    started = time.monotonic()
    return function(*arguments), time.monotonic() - started
