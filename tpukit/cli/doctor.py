"""`tpukit doctor`. Imports no tyro, so that it runs where that is missing."""

import dataclasses
import json

import tpukit

UNKNOWN = """This error is not a known one. `tpukit doctor` checks the machine.
The page "Troubleshooting" of the docs in tpukit's repository lists the known errors."""


def doctor(
    as_json: bool = False, model: str | None = None, hardware: bool = False, error: str | None = None
) -> int:
    """Check this machine: what is here, what is wrong, and how to fix it. Exit code 1 if something blocks
    training.

    Args:
        as_json: print one JSON object, for machines.
        model: also compute this task's loss and gradients on the device, in fp32, bf16 and (GPUs) fp16, and
            how much the model's output changes.
        hardware: also run on the accelerator what tpukit assumes of it, each check in a process of its own.
        error: check nothing; print how to fix this error message.
    """
    from tpukit import tasks
    from tpukit.host import known_errors
    from tpukit.tools.doctor import blocked, examine, table
    from tpukit.tools.doctor.hardware import check_hardware

    if error is not None:
        known = known_errors.find(error)
        print(known.fix if known else UNKNOWN)
        return 0 if known else 1
    task = tasks.find(model)() if model else None
    env = tpukit.detect()
    checks = examine(env)
    if task and not blocked(checks):
        from tpukit.tools.doctor.model import try_model

        checks += try_model(task, env)
    if hardware and not blocked(checks):
        checks += check_hardware(env)
    if as_json:
        rows = [dataclasses.asdict(check) for check in checks]
        answer = {**dataclasses.asdict(env), "checks": rows, "blocked": blocked(checks)}
        print(json.dumps(answer, indent=1, default=str))
    else:
        print(f"{env}\n\n{table(checks)}")
    return 1 if blocked(checks) else 0
