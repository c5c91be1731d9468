"""`tpukit doctor`. Imports no tyro, so that it runs where that is missing."""

import dataclasses
import json as json_format
from pathlib import Path

from tpukit.host.errors import TpukitError


def doctor(
    json: bool = False, model: str | None = None, weights: Path | None = None, error: str | None = None
):
    """Check this machine: what is here, what is wrong, and how to fix it. Exit code 1 if something blocks
    training.

    Args:
        json: print one JSON object, for machines.
        model: also compute this task's loss and gradients on the device, in fp32, bf16 and (GPUs) fp16, and
        how much
            the model's output changes.
        weights: weights for that model; by default fresh ones.
        error: check nothing; print how to fix this error message.
    """
    from tpukit import tasks
    from tpukit.host import environment
    from tpukit.tools import doctor as tool

    if error is not None:
        return _explain(error)
    if weights and not model:
        raise TpukitError(f"--weights {weights} needs --model, the task that they are of")
    task = tasks.find(model) if model else None
    env = environment.detect()
    checks = tool.examine(env)
    if task and not tool.blocked(checks):
        from tpukit.tasks.trained import find_trained

        checks += tool.try_model(find_trained(weights, model)[0] if weights else task(), env)
    if json:
        rows = [dataclasses.asdict(check) for check in checks]
        found = {**dataclasses.asdict(env), "checks": rows, "blocked": tool.blocked(checks)}
        print(json_format.dumps(found, indent=1, default=str))
    else:
        print(f"{env}\n\n{tool.table(checks)}")
    return 1 if tool.blocked(checks) else 0


def _explain(message):
    from tpukit.host.known_errors import find

    if known := find(message):
        print(known.fix)
        return 0
    print("This error is not a known one. `tpukit doctor` checks the machine.")
    print('The page "Troubleshooting" of the docs in tpukit\'s repository lists the known errors.')
    return 1
