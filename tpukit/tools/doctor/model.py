"""`tpukit doctor --model`: one step of a task's model on this device, in each precision."""

import copy
import dataclasses

import torch
from torch import Tensor, nn

from tpukit.devices import open_runtime
from tpukit.host.environment import Environment
from tpukit.host.errors import TpukitError, first_line
from tpukit.host.known_errors import fix_for
from tpukit.runs import weights
from tpukit.tools.doctor import BLOCKS, OK, WARNING, Check
from tpukit.training import metrics
from tpukit.training.step import TrainingStep
from tpukit.training.task import Task

LARGEST_CHANGE = 0.05  # of an output by half precision, relative to its norm


def try_model(task: Task, env: Environment) -> list[Check]:
    """Take one step of a task's training on this machine's device in every precision that suits it.

    The batch is one synthetic sample. Weights are the task's own, or fresh ones, where what starts at zero
    becomes small random numbers, so that every part of the model affects its output. Opens the device."""
    torch.manual_seed(0)
    model = task.model()
    if task.weights:
        weights.load(model, task.weights)
    with torch.no_grad():
        for parameter in () if task.weights else model.parameters():
            if not parameter.any():
                parameter.normal_(0, 0.02)
    checks, exact = [], None
    # fp16 is what GPUs without bf16 train in; a CPU takes minutes for it, and XLA has none.
    for precision in ("fp32", "bf16", "fp16") if env.accelerator == "cuda" else ("fp32", "bf16"):
        what, level, fix = f"{task.name} in {precision}", OK, ""
        try:
            found, output = take_step(task, copy.deepcopy(model), env, precision)
        except TpukitError:
            raise
        except (RuntimeError, TypeError, NotImplementedError, ValueError) as error:  # the last is XLA's
            reason = first_line(error)
            level, fix = (BLOCKS, fix_for(reason) or "") if exact is None else (WARNING, "train in fp32")
            checks.append(Check(what, level, f"does not run: {reason}", fix))
            continue
        if exact is None:
            exact = output
        else:
            changed = float((output - exact).norm() / exact.norm())
            largest = float((output - exact).abs().max() / exact.abs().max())
            found += f"; the output changes by {changed:.2%} (at most {largest:.2%} of its largest value)"
            if not changed < LARGEST_CHANGE:  # NaN is not
                level = WARNING
                fix = "more than rounding: train in fp32; look for sums over many numbers in half precision"
        checks.append(Check(what, level, found, fix))
    return checks


def take_step(task: Task, model: nn.Module, env: Environment, precision: str) -> tuple[str, Tensor]:
    """(what happened, the model's first output in float32 on the CPU) in a step of the loop's own."""
    runtime = open_runtime(env, precision)
    step = TrainingStep(dataclasses.replace(task, ema_decay=None, micro_batches=1), runtime, model.train())
    step.compile()
    outputs = []
    step.model.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    sums = step.eager(*step.arguments(runtime.put(task.example(1)), task.epochs))
    interval = metrics.sync(sums, step.model, runtime, clipped=task.clip_norm is not None)
    output = outputs[0] if isinstance(outputs[0], torch.Tensor) else outputs[0][0]
    loss, norm = interval.sums["loss"], interval.sums["grad_norm"]
    found = f"runs on {runtime}: loss {loss:.4g}, gradient norm {norm:.3g}"
    return found, runtime.to_cpu(output.detach()).float()
