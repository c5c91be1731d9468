"""A script: import packages, and print a JSON object after each: {package: its error or null}, and for torch
also {"cuda": ...}. It opens no TPU, and tpukit need not be installed for it."""

import importlib
import json
import sys


def describe_cuda(torch):
    """Return built (the CUDA that torch was built with, or None), usable, reason (why not), arch_list (what
    torch was built for), cards ([name, (major, minor)] of every GPU)."""
    usable, reason, cards = torch.cuda.is_available(), "", []
    if usable:
        numbers = range(torch.cuda.device_count())
        cards = [(torch.cuda.get_device_name(n), torch.cuda.get_device_capability(n)) for n in numbers]
    elif torch.version.cuda:
        try:
            torch.cuda.init()
        except Exception as error:
            reason = str(error).partition("\n")[0]
    arch_list = torch.cuda.get_arch_list()
    return dict(built=torch.version.cuda, usable=usable, reason=reason, arch_list=arch_list, cards=cards)


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
