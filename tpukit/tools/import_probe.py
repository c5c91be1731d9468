"""Whether packages can be imported here, tried in a process of their own: a broken one can end Python, or hang."""

import contextlib
import json
import subprocess
import sys

IMPORT_TIMEOUT_S = 120

# Prints a JSON object after each import: {package: its error or null}, and for torch {"cuda": ...}. Opens no context on a GPU.
IMPORTS = """
import importlib, json, sys, traceback

def describe_cuda(torch):
    cuda = dict(built=torch.version.cuda, usable=torch.cuda.is_available(), arch_list=torch.cuda.get_arch_list(), reason="")
    if cuda["built"] and not cuda["usable"]:
        try:
            torch.cuda.init()
        except Exception as error:
            cuda["reason"] = str(error).partition(chr(10))[0]
    return cuda

for package in sys.argv[1:]:
    report = {package: None}
    try:
        module = importlib.import_module(package)
        if package == "torch":
            report["cuda"] = describe_cuda(module)
    except BaseException as error:
        report[package] = traceback.format_exception_only(error)[-1].strip().splitlines()[-1]
    print(json.dumps(report), flush=True)
"""


def import_packages(packages, environ):
    """Import packages one after the other in one process with these variables and no others, as a training would.

    Returns (errors, cuda). errors: package -> the last line of its error, or None if it imports; the end of the process, or
    the time limit, is the error of the package that it happened in and of those after it. cuda: dict of what torch reports:
    built (the CUDA it was built with, or None), usable, arch_list, reason (why it is not usable); None if it reports nothing.
    """
    # Without the current folder on its path: what lies there must not be run.
    command = [sys.executable, "-P", "-c", IMPORTS, *packages]
    try:
        ran = subprocess.run(command, env=dict(environ), capture_output=True, timeout=IMPORT_TIMEOUT_S)
        last_words = ran.stderr.decode(errors="replace").strip().splitlines()[-1:]
        output, end = ran.stdout, " ".join([f"Python exited with code {ran.returncode}", *last_words])
    except subprocess.TimeoutExpired as error:
        output, end = error.stdout or b"", f"the import did not finish within {IMPORT_TIMEOUT_S} s"
    reports = {}
    for line in output.decode(errors="replace").splitlines():
        with contextlib.suppress(ValueError, TypeError):  # packages may print, too
            reports |= json.loads(line)
    return {package: reports.get(package, end) for package in packages}, reports.get("cuda")
