"""`tpukit migrate`: what in PyTorch code will not work, or will be slow, on a TPU today; by line, each with
its fix.

Parses scripts and notebooks, runs nothing, and needs neither torch nor a TPU. A finding is reported only
where the code itself shows it; what cannot be seen in a file (the shapes of data, what an imported function
does) is not guessed.

A file goes through files.py, notebook.py (one module of all cells), source.py (what names mean), and
checker.py (whose rules ask surroundings.py about the code around) or to_torch_tpu.py. rules.toml lists rules
and names, report.py collects findings and fixes, findings.py prints them."""

# ruff: noqa: F401
from tpukit.tools.migrate.files import contents, copy_example, difference, examine, files_in, write
from tpukit.tools.migrate.findings import FORMATS, RULES, Finding, as_table, as_text
