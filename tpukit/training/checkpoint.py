"""The state of a training: put together for a checkpoint, and restored from one."""

import dataclasses
import time

from tpukit.host.errors import TpukitError
from tpukit.training import metrics

FORMAT = 3  # of a checkpoint's state


@dataclasses.dataclass
class TrainState:
    """Where a run stands. All of it goes into a checkpoint."""

    step: int = 0
    epoch_loss: float = 0.0
    """summed over the steps of this epoch that were synced so far"""
    evaluated: int = 0
    """epochs evaluated, or skipped"""
    best: float | None = None
    """the best score so far"""
    best_on: str = ""
    """what that score was taken on, see `Workload.evaluation_signature`"""
    norm_was_odd: bool = False


class Checkpointer:
    """Saves and restores a trainer's model, average, optimizer, loss scaler, random state and `TrainState`."""

    def __init__(self, trainer):
        self.task, self.run, self.runtime = trainer.task, trainer.run, trainer.runtime
        self.model, self.ema, self.optimizer = trainer.model, trainer.ema, trainer.optimizer
        self.train_size = len(trainer.data)
        self.last_save = time.monotonic()

    @property
    def is_due(self):
        return time.monotonic() - self.last_save > self.task.save_every_s

    def save(self, state, interval):
        """Write a checkpoint on rank 0. Collective. interval: a fresh `metrics.Interval`."""
        random = self.runtime.world.gather(self.runtime.random_state())
        if self.runtime.world.rank == 0:
            host = self.runtime.host
            content = dict(
                format=FORMAT,
                train_size=self.train_size,
                state=dataclasses.asdict(state),
                sums=interval.sums,
                model=host(self.model.state_dict()),
                averaged=host(self.ema.model.state_dict()) if self.ema else {},
                optimizer=host(self.optimizer.state_dict()),
                scaler=self.runtime.scaler.state_dict() if self.runtime.scaler else {},
                random=random,  # every rank's
            )
            self.run.save(content, state.step)
        self.last_save = time.monotonic()

    def restore(self):
        """(state, sums) of the newest checkpoint after loading the rest of it; of a new run where there is none. Collective.

        Raises TpukitError for a checkpoint of another version or dataset.
        """
        self._check_newest_is_on_rank_0()
        # Rank 0 reads for all: other hosts need not see its disk.
        saved = self.runtime.world.broadcast(self.run.restore() if self.runtime.world.rank == 0 else None)
        if saved is None:
            return TrainState(), metrics.new_sums(self.runtime)
        if saved["format"] != FORMAT:
            raise TpukitError(
                f"{self.run.path} was written by another version of tpukit: start a new run, and pass this run's "
                "best.safetensors as weights= to keep its result"
            )
        if saved["train_size"] != self.train_size:
            raise TpukitError(
                f"{self.run.path} was trained on {saved['train_size']} samples, {self.task.dataset_dir} has "
                f"{self.train_size}: use the dataset that it started with, or choose another run folder"
            )
        state = TrainState(**saved["state"])
        self.model.load_state_dict(saved["model"])
        if self.ema:
            self.ema.model.load_state_dict(saved["averaged"])
        self._load_optimizer(saved["optimizer"])
        if self.runtime.scaler and saved["scaler"]:
            self.runtime.scaler.load_state_dict(saved["scaler"])
        if len(saved["random"]) == self.runtime.world.size:
            self.runtime.set_random_state(saved["random"][self.runtime.world.rank])
        else:  # the number of ranks has changed, and there is no state for the new ones
            self.runtime.seed((self.task.seed, state.step))
        sums = metrics.new_sums(self.runtime, saved["sums"])
        self.runtime.sync()
        return state, sums

    def _check_newest_is_on_rank_0(self):
        mine = max((checkpoint["step"] for checkpoint in self.run.checkpoints()), default=-1)
        newest = [int(row[0]) for row in self.runtime.world.all_gather([mine])]
        if max(newest) > newest[0]:
            what = f"only one of step {newest[0]}" if newest[0] >= 0 else "no checkpoint"
            raise TpukitError(
                f"{self.run.path}: rank 0 has {what} there, but rank {newest.index(max(newest))} has one of step "
                f"{max(newest)}. Start the host that has the run with --node-rank 0, or put the run on a disk that all hosts "
                "share."
            )

    def _load_optimizer(self, saved):
        for group, own in zip(saved["param_groups"], self.optimizer.param_groups):
            if "capturable" in own:  # where this device wants the count of steps, not where the other one had it
                group["capturable"] = own["capturable"]
        self.optimizer.load_state_dict(saved)
