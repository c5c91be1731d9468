"""One optimizer step: the whole of what a device that compiles gets as one program."""

import torch
import torch.nn.functional as F

# What a step adds up on the device between two readings, and where it starts. bad_step is the first one whose loss was not
# finite, odd_step the first whose gradient norm was unusual, both counted from the last reading; grad_norm is the last step's.
# The last two are known in the step only where the gradient is clipped; elsewhere the norm is computed at the reading.
SUMS = dict(loss=0.0, steps=0.0, bad_step=-1.0, odd_step=-1.0, grad_norm=0.0)
USUAL_NORM = (1e-7, 1e3)


def fresh_sums(runtime, values=SUMS):
    """The vector that `training_step` adds to, on the device."""
    # One vector, because XLA would fold single numbers into the program as constants.
    return runtime.put({"sums": torch.tensor(list(values.values()), dtype=torch.float32)})["sums"]


def training_step(task, model, optimizer, runtime, batch, epoch, sums):
    """One optimizer step. Returns the new sums, see `SUMS`."""
    with runtime.autocast():
        loss = task.loss(model, batch, epoch).float()
    norm = runtime.update(loss, optimizer, task.clip_norm)
    loss = loss.detach()
    loss_sum, steps, bad_step, odd_step, last_norm = sums.unbind()
    bad = ~torch.isfinite(loss)
    if norm is not None:
        low, high = USUAL_NORM
        if runtime.scaler is None:  # which skips a step whose gradient overflows
            bad = bad | ~torch.isfinite(norm)
        # One that is not finite is a matter of bad_step, or of the loss scaler.
        odd_step = torch.where((odd_step < 0) & torch.isfinite(norm) & ((norm < low) | (norm > high)), steps, odd_step)
        last_norm = norm
    bad_step = torch.where((bad_step < 0) & bad, steps, bad_step)
    return torch.stack([loss_sum + loss, steps + 1, bad_step, odd_step, last_norm])


class _FrozenBatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    """A batch norm that uses its running statistics in training too."""

    def forward(self, x):
        if x.device.type != "xla":  # in the dtype of x; below, float32 statistics make float32 of bfloat16
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        # Written out, because XLA has no backward of batch norm in evaluation mode.
        shape = (1, -1, *[1] * (x.dim() - 2))
        scale = torch.rsqrt(self.running_var + self.eps)
        scale = scale if self.weight is None else scale * self.weight
        x = (x - self.running_mean.view(shape)) * scale.view(shape)
        return x if self.bias is None else x + self.bias.view(shape)


def freeze_batch_norm(model):
    """Let every batch norm of a model use its running statistics in training too. Its scale and offset still learn."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.__class__ = _FrozenBatchNorm
