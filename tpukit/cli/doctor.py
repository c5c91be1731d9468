"""`tpukit doctor`. Imports no tyro, so that it runs where that is missing."""

import dataclasses
import json
import sys
from pathlib import Path

import tpukit

UNKNOWN = """This error is not a known one. `tpukit doctor` checks the machine.
The page "Troubleshooting" of the docs in tpukit's repository lists the known errors."""


def doctor(
    as_json: bool = False,
    model: str | None = None,
    hardware: bool = False,
    rehearse: bool = False,
    only: tuple[str, ...] = (),
    budget: float = 600.0,
    report: Path | None = None,
    error: str | None = None,
) -> int:
    """Check this machine: what is here, what is wrong, and how to fix it. Exit code 1 if something blocks
    training, or a check of the hardware fails.

    Args:
        as_json: print one JSON object, for machines.
        model: also compute this task's loss and gradients on the device, in fp32, bf16 and (GPUs) fp16, and
            how much the model's output changes.
        hardware: also run on the accelerator what tpukit assumes of it, each check in a process of its own,
            and write a report to send back.
        rehearse: with --hardware, where there is no accelerator: try the checks themselves, in small.
        only: with --hardware, names of checks; by default all.
        budget: with --hardware, seconds for all checks.
        report: with --hardware, the file to write; by default hardware.json in the output folder.
        error: check nothing; print how to fix this error message.
    """
    from tpukit import tasks
    from tpukit.host import known_errors
    from tpukit.tools.doctor import blocked, examine, table

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
    found = None
    if (hardware or rehearse) and not blocked(checks):
        from tpukit.tools.doctor import hardware as accelerator

        found = accelerator.check_hardware(
            env, only=only, budget_s=budget, path=report, rehearse=rehearse, log=to_stderr
        )
    if as_json:
        rows = [dataclasses.asdict(check) for check in checks]
        answer = {**dataclasses.asdict(env), "checks": rows, "blocked": blocked(checks), "hardware": found}
        print(json.dumps(answer, indent=1, default=str))
    else:
        print(f"{env}\n\n{table(checks)}")
        if found is not None:
            print(f"\n{accelerator.table(found)}")
    return 1 if blocked(checks) or (found is not None and accelerator.has_failed(found)) else 0


def to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
