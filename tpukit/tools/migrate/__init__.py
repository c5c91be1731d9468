"""`tpukit migrate`: what in PyTorch code will not work, or will be slow, on a TPU today; by line, each with its fix.

Reads scripts and notebooks with libcst, runs nothing, and needs neither torch nor a TPU. A finding is reported only where the
code itself shows it; what cannot be seen in a file (the shapes of data, what an imported function does) is not guessed.

files.py finds, reads and writes files. isolated.py has each checked in another process, which is __main__.py: notebook.py makes
one module of a notebook's cells, checker.py holds the rules and the fixes; source.py, cuda_branches.py and steps.py answer its
questions about the code. rules.py lists the rules, formats.py prints what they find.
"""

import importlib.util

from tpukit.host.errors import TpukitError
from tpukit.tools.migrate import isolated
from tpukit.tools.migrate.files import copy_example, difference, files_in, write  # noqa: F401 for users of the package
from tpukit.tools.migrate.formats import FORMATS, as_table, as_text  # noqa: F401
from tpukit.tools.migrate.rules import RULES, Finding  # noqa: F401

if importlib.util.find_spec("libcst") is None:
    raise TpukitError("`tpukit migrate` reads code with libcst, which is not installed: pip install libcst")

_worker = isolated.Worker()  # shared: to start a process for each file would take longer than to check it


def examine(path):
    """(findings, fixed text) of a .py or .ipynb file; one that cannot be parsed gives a finding, too. Writes nothing.

    Raises TpukitError for a path that cannot be opened, or is of another kind.
    """
    answer = _worker.check(path)
    if "unreadable" in answer:
        return [Finding(str(path), 0, 1, 1, "unreadable", answer["unreadable"])], ""
    return [Finding(**finding) for finding in answer["findings"]], answer["fixed"]
