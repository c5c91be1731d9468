"""`tpukit migrate`: what in PyTorch code will not work, or will be slow, on a TPU today; by line, each with
its fix.

Reads scripts and notebooks with libcst, runs nothing, and needs neither torch nor a TPU. A finding is
reported only where the code itself shows it; what cannot be seen in a file (the shapes of data, what an
imported function does) is not guessed.

files.py finds and writes files, and has them checked in another process, which is __main__.py: notebook.py
makes one module of a notebook's cells, checker.py holds the rules and the fixes; source.py, cuda_branches.py
and steps.py answer its questions about the code. rules.py lists the rules, and prints what they find."""

import importlib.util

from tpukit.host.errors import TpukitError
from tpukit.tools.migrate.files import (  # noqa: F401 for users
    contents,
    copy_example,
    difference,
    examine,
    examine_all,
    files_in,
    write,
)
from tpukit.tools.migrate.rules import FORMATS, RULES, Finding, as_table, as_text  # noqa: F401

if importlib.util.find_spec("libcst") is None:
    raise TpukitError("`tpukit migrate` reads code with libcst, which is not installed: pip install libcst")
