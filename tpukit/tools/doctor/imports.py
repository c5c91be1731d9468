"""A script: import packages, and print a JSON object after each: {package: its error or null}, and for torch
also {"cuda": ...}. It opens no TPU, and tpukit need not be installed for it."""

import importlib
import json
import sys


def describe_cuda(torch):
    """Return built (the CUDA that torch was built with, or None) and error (why one of the GPUs does not
    compute; "" if all do)."""
    error = ""
    try:
        for number in range(max(1, torch.cuda.device_count())):
            torch.ones(1, device=f"cuda:{number}")
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}".partition("\n")[0]
    return dict(built=torch.version.cuda, error=error)


if __name__ == "__main__":
    for package in sys.argv[1:]:
        report: dict = {package: None}
        try:
            module = importlib.import_module(package)
            if package == "torch":
                report["cuda"] = describe_cuda(module)
        except BaseException as error:
            report[package] = f"{type(error).__name__}: {error}".strip().splitlines()[-1]
        print(json.dumps(report), flush=True)
