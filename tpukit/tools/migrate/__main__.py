"""The process that checks files, with limits of time and memory: a file that crashes the parser costs its own
finding alone.

The paths come on stdin as JSON; findings and fixed text go to stdout, a line of JSON for each file.
"""

import contextlib
import dataclasses
import json
import signal
import sys

import libcst

from tpukit.host.errors import first_line
from tpukit.host.tables import GIB
from tpukit.tools.migrate.checker import Checker, check_magic
from tpukit.tools.migrate.files import read
from tpukit.tools.migrate.notebook import Notebook
from tpukit.tools.migrate.rules import Finding
from tpukit.tools.migrate.to_torch_tpu import ToTorchTPU

MEMORY_LIMIT = 4 * GIB
CHECKERS = {"torch_xla": Checker, "torch_tpu": ToTorchTPU}


def main(seconds, to):
    with contextlib.suppress(
        ImportError, OSError, ValueError
    ):  # on Windows; where a stricter limit holds already
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    alarm = getattr(signal, "alarm", lambda seconds: None)  # Windows has none
    for path in json.load(sys.stdin):
        alarm(seconds)  # it ends this process, also where the one that asked is gone
        findings, fixed = check_safely(path, to)
        alarm(0)
        rows = [dataclasses.asdict(finding) for finding in sorted(set(findings))]
        print(json.dumps(dict(findings=rows, fixed=fixed)), flush=True)


def check_safely(path, to="torch_xla"):
    """(findings, fixed text) of a file; whatever it did to a parser is a finding."""
    try:
        return check(path, CHECKERS[to])
    except RecursionError:
        reason = "nested too deeply"
    except MemoryError:
        reason = f"needs more than {MEMORY_LIMIT // GIB} GiB of memory"
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
    return [unreadable(path, reason)], ""


def check(path, checker_class):
    try:
        text = read(path)
    except (UnicodeError, LookupError, SyntaxError):
        return [unreadable(path, "not text in UTF-8, nor in the encoding that its first lines name")], ""
    return (check_notebook if path.endswith(".ipynb") else check_script)(path, text, checker_class)


def check_script(path, text, checker_class):
    try:
        checker = checker_class(text)
    except libcst.ParserSyntaxError as error:
        return [unreadable(path, "not valid Python 3", 0, error.raw_line, error.raw_column + 1)], text
    return [Finding(path, 0, *found) for found in checker.findings], checker.fixed()


def check_notebook(path, text, checker_class):
    try:
        notebook = Notebook(text)
    except ValueError as error:
        return [unreadable(path, f"not a notebook ({error})")], text
    checker = checker_class(notebook.code)
    found = checker.findings + [
        (line, 1, *found) for line, command in notebook.magics for found in check_magic(command)
    ]
    findings = [Finding(path, *notebook.place(line), *rest) for line, *rest in found]
    findings += [unreadable(path, "not valid Python 3", *place) for place in notebook.unreadable]
    return findings, notebook.with_code(checker.fixed())


def unreadable(path, reason, cell=0, line=1, column=1):
    return Finding(path, cell, line, column, "unreadable", reason)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
