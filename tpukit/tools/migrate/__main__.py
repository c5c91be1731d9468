"""The process that checks files: see isolated.py."""

import dataclasses

import libcst

from tpukit.tools.migrate import isolated
from tpukit.tools.migrate.checker import Checker, check_magic
from tpukit.tools.migrate.files import read
from tpukit.tools.migrate.notebook import Notebook
from tpukit.tools.migrate.rules import Finding


def check(path):
    """(findings as dicts, fixed text) of a file."""
    try:
        text = read(path)
    except (UnicodeError, LookupError, SyntaxError):
        findings, fixed = [unreadable(path, "not text in UTF-8, nor in the encoding that its first lines name")], ""
    else:
        findings, fixed = check_notebook(path, text) if path.endswith(".ipynb") else check_script(path, text)
    return [dataclasses.asdict(finding) for finding in sorted(set(findings))], fixed


def unreadable(path, reason, cell=0, line=1, column=1):
    return Finding(path, cell, line, column, "unreadable", reason)


def check_script(path, text):
    try:
        checker = Checker(text)
    except libcst.ParserSyntaxError as error:
        return [unreadable(path, "not valid Python 3", 0, error.raw_line, error.raw_column + 1)], text
    return [Finding(path, 0, *found) for found in checker.findings], checker.fixed()


def check_notebook(path, text):
    try:
        notebook = Notebook(text)
    except ValueError as error:
        return [unreadable(path, f"not a notebook ({error})")], text
    checker = Checker(notebook.code)
    found = checker.findings + [(line, 1, *found) for line, command in notebook.magics for found in check_magic(command)]
    findings = [Finding(path, *notebook.place(line), *rest) for line, *rest in found]
    findings += [unreadable(path, "not valid Python 3", *place) for place in notebook.unreadable]
    return findings, notebook.with_code(checker.fixed())


if __name__ == "__main__":
    isolated.serve(check)
