"""`tpukit migrate`: what in PyTorch code will not work, or will be slow, on a TPU today; by line, each with
its fix.

Parses scripts and notebooks, runs nothing, and needs neither torch nor a TPU. A finding is reported only
where the code itself shows it; what cannot be seen in a file (the shapes of data, what an imported function
does) is not guessed.

files.py finds, checks and writes files; notebook.py makes one module of a notebook's cells; checker.py (and
to_torch_tpu.py) hold the rules and the fixes; source.py, cuda_branches.py and steps.py answer their questions
about the code. rules.toml lists the rules and names; findings.py prints what was found."""

from tpukit.tools.migrate.files import (  # noqa: F401 for users
    contents,
    copy_example,
    difference,
    examine,
    files_in,
    write,
)
from tpukit.tools.migrate.findings import FORMATS, RULES, Finding, as_table, as_text  # noqa: F401
