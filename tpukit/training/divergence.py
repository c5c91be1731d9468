"""Whether a training still converges: losses and gradients that are not finite, gradient norms out of range."""

import math

from tpukit.host.errors import TpukitError
from tpukit.training.metrics import NORMAL_GRAD_NORM

MIN_LOSS_SCALE = 2.0**-14  # of fp16, which starts at 2 ** 16: a gradient that overflows even here is above 1e9


class Diverged(TpukitError):
    """The loss or the gradient stopped being a finite number."""


class DivergenceMonitor:
    """Checks every `metrics.Interval` of a training."""

    def __init__(self, task, run, runtime):
        self.task, self.run, self.runtime = task, run, runtime

    def check(self, interval, step):
        """Raise Diverged, naming the first step whose loss or gradient was not finite. step: the last one of the interval."""
        sums, scaler = interval.sums, self.runtime.scaler
        bad_step = sums["bad_step"]
        # A loss scaler skips a step whose gradient overflows; without a scaler such a step is the end.
        if bad_step < 0 and scaler is None and not math.isfinite(sums["grad_norm"]):
            bad_step = sums["steps"] - 1
        if bad_step >= 0:
            first = step - interval.steps + int(bad_step) + 1
            self._raise(first, f"loss or gradient is not a finite number at step {first}")
        # The scale is halved at every step whose gradient overflows.
        if scaler is not None and (scale := scaler.get_scale()) < MIN_LOSS_SCALE:
            self._raise(step, f"the gradient is not finite at step {step} even with the loss scaled down to {scale:.2g}")

    def _raise(self, step, what):
        checkpoints = self.run.checkpoints()
        good = f"the last good checkpoint is {checkpoints[0]['file']}" if checkpoints else "there is no checkpoint yet"
        self.run.log("diverged", step)
        message = (
            f"{what}; {good} in {self.run.path / 'checkpoints'}. "
            f"Start another run with a lower lr (now {self.task.lr}) or in fp32 (now {self.runtime.precision}), "
            "from this run's best.safetensors if you pass it as weights=; or check the data."
        )
        self.run.print(message)
        raise Diverged(message)

    def check_norm(self, interval, step, *, was_odd):
        """Log when the gradient norm leaves the normal range. was_odd: what the interval before returned.

        Returns whether the norm is out of range; reported once until it has come back.
        """
        low, high = NORMAL_GRAD_NORM
        sums, norm = interval.sums, interval.sums["grad_norm"]
        odd_step = sums["odd_step"]
        if self.task.clip_norm is None and math.isfinite(norm) and not low <= norm <= high:
            odd_step = sums["steps"] - 1
        if odd_step >= 0 and not was_odd:
            first = step - interval.steps + int(odd_step) + 1
            self.run.log("odd_norm", first)
            self.run.print(
                f"step {first}: the gradient norm left the range {low:g} to {high:g} (last value {norm:.2g}): with "
                "vanishing gradients the model does not learn, exploding ones lead to NaN; check the data, lr and precision"
            )
        return odd_step >= 0
