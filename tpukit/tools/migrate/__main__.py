"""The process in which `examine` reads files."""

import dataclasses

from tpukit.tools import migrate
from tpukit.tools.migrate import apart


def _as_tuples(path):
    findings, fixed = migrate.examine_here(path)
    return [dataclasses.astuple(finding) for finding in findings], fixed


apart.answers(_as_tuples)
