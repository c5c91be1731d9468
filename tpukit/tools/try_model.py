"""`tpukit doctor --model`: whether a task's model computes here, in which precisions, and how much its output
changes."""

import copy

from tpukit.host.errors import TpukitError, first_line
from tpukit.host.known_errors import fix_for
from tpukit.tools.doctor import BLOCKS, OK, WARNING, Check

LARGEST_CHANGE = 0.05  # of an output by half precision, relative to its norm


def try_model(task, env):
    """Compute a task's loss and gradients on this machine's device in every precision that suits it.

    The batch is one synthetic sample. Weights are the task's own, or fresh ones, where what starts at zero
    becomes small random numbers, so that every part of the model affects its output. Returns a list of
    `Check`."""
    import torch

    from tpukit.devices import open_runtime
    from tpukit.runs import weights

    torch.manual_seed(0)
    model = task.model()
    if task.weights:
        weights.load(model, task.weights)
    else:
        with torch.no_grad():
            for parameter in model.parameters():
                if not parameter.any():
                    parameter.normal_(0, 0.02)
    checks, exact = [], None
    # fp16 is what GPUs without bf16 train in; a CPU takes minutes for it, and XLA has none.
    for precision in ("fp32", "bf16", "fp16") if env.accelerator == "cuda" else ("fp32", "bf16"):
        try:
            runtime = open_runtime(env, precision)
            output, loss, norm = _one_step(task, model, runtime)
        except TpukitError:
            raise
        except (
            RuntimeError,
            TypeError,
            NotImplementedError,
            ValueError,
        ) as error:  # the last is XLA's of a graph it refuses
            reason = first_line(error)
            level, fix = (BLOCKS, fix_for(reason) or "") if exact is None else (WARNING, "train in fp32")
            checks.append(Check(f"{task.name} in {precision}", level, f"does not run: {reason}", fix))
            continue
        level, fix = OK, ""
        found = f"runs on {runtime}: loss {loss:.4g}, gradient norm {norm:.3g}"
        if exact is None:
            exact = output
        else:
            changed = float((output - exact).norm() / exact.norm())
            largest = float((output - exact).abs().max() / exact.abs().max())
            found += f"; the output changes by {changed:.2%} (at most {largest:.2%} of its largest value)"
            if not changed < LARGEST_CHANGE:  # NaN is not
                level, fix = (
                    WARNING,
                    (
                        "more than rounding: train in fp32, and look for sums over many numbers in half"
                        " precision"
                    ),
                )
        checks.append(Check(f"{task.name} in {precision}", level, found, fix))
    return checks


def _one_step(task, model, runtime):
    """(the model's first output in float32 on the CPU, the loss, the gradient norm)."""
    import torch

    outputs = []
    model = runtime.place(copy.deepcopy(model)).train()
    model.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    batch = runtime.put(task.example(1))
    with runtime.autocast():
        loss = task.loss(model, batch, task.epochs).float()
    (loss if runtime.scaler is None else runtime.scaler.scale(loss)).backward()
    scale = 1.0 if runtime.scaler is None else runtime.scaler.get_scale()
    output = outputs[0] if isinstance(outputs[0], torch.Tensor) else outputs[0][0]
    norm = runtime.gradient_norm(model)
    runtime.sync()
    output, loss, norm = runtime.host((output, loss.detach(), norm))
    return output.float(), float(loss), float(norm[0]) / scale
