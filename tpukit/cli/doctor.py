"""`tpukit doctor`. Imports no tyro, so that it runs without it."""

import dataclasses
import json
import os
import sys
from pathlib import Path

import tpukit

UNKNOWN = """This error is not a known one. `tpukit doctor` checks the machine.
The page "Troubleshooting" of the docs in tpukit's repository lists the known errors."""


def doctor(
    as_json: bool = False, error: str | None = None, hardware: bool = False, rehearse: bool = False
) -> int:
    """Check this machine: what is here, what is wrong, and how to fix it. Exit code 1 if something blocks
    training, or a check of the hardware fails.

    Args:
        as_json: print one JSON object, for machines.
        error: check nothing; print how to fix this error message, or the one in this file.
        hardware: also check on the accelerator what tpukit assumes about it, each check in its own process,
            and write hardware.json, a report to send back, into the output folder.
        rehearse: like --hardware, but on the CPU and in small, to try the checks themselves.
    """
    from tpukit.tools.doctor import blocked, examine, find_known_error, table

    if error is not None:
        text = Path(error).read_text(errors="replace") if os.path.isfile(error) else error
        known = find_known_error(text)
        print(known.fix if known else UNKNOWN)
        return 0 if known else 1
    env = tpukit.detect()
    checks = examine(env)
    if not as_json:
        print(f"{env}\n\n{table(checks)}")
    report = None
    if (hardware or rehearse) and not blocked(checks):
        from tpukit.tools.doctor.hardware import check_hardware

        report = check_hardware(env, rehearse=rehearse, log=to_stderr if as_json else print)
    if as_json:
        rows = [dataclasses.asdict(check) for check in checks]
        answer = {**dataclasses.asdict(env), "checks": rows, "blocked": blocked(checks), "hardware": report}
        print(json.dumps(answer, indent=1, default=str))
    has_failed = report is not None and any(row["outcome"] == "FAIL" for row in report["checks"])
    return 1 if blocked(checks) or has_failed else 0


def to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
