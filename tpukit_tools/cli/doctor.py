"""`tpukit doctor`. Imports no tyro, so that it runs without it."""

import codecs
import os
from pathlib import Path

import tpukit

UNKNOWN = """This error is not a known one. `tpukit doctor` checks the machine.
The page "Troubleshooting" of the docs in tpukit's repository lists the known errors."""


def doctor(error: str | None = None, hardware: bool = False, rehearse: bool = False) -> int:
    """Check this machine: what is here, what is wrong, and how to fix it. Exit code 1 if something blocks
    training, or a check of the hardware fails.

    Args:
        error: check nothing; print how to fix this error message, or the one in this file.
        hardware: also check on the accelerator what tpukit assumes about it, each check in its own process,
            and write hardware.json, a report to send back, into the output folder.
        rehearse: like --hardware, but on the CPU and in small, to try the checks themselves.
    """
    from tpukit_tools.doctor import blocked, examine, find_known_error, table

    if error is not None:
        text = error
        if os.path.isfile(error):
            with open(error, "rb") as file:
                is_utf16 = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # PowerShell's `>`
            text = Path(error).read_text("utf-16" if is_utf16 else "utf-8", errors="replace")
        known = find_known_error(text)
        print(known.fix if known else UNKNOWN)
        return 0 if known else 1
    environ = dict(os.environ)  # before `detect` completes it
    env = tpukit.detect()
    checks = examine(env, environ=environ)
    print(f"{env}\n\n{table(checks)}")
    if blocked(checks):
        return 1
    if not (hardware or rehearse):
        return 0
    from tpukit_tools.doctor.hardware import REPORT, check_hardware

    report = check_hardware(env, env.outputs / REPORT, rehearse=rehearse)
    return 1 if any(row["outcome"] == "FAIL" for row in report["checks"]) else 0
