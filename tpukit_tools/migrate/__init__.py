"""`tpukit migrate`: find what in PyTorch code will not work, or will be slow, on a TPU; by line, each with
its fix.

Parses scripts and notebooks, runs nothing, and needs neither torch nor a TPU. A file goes through files.py,
cells.py (one module of all cells), source.py (what names mean) and checker.py, which applies the rules of
rules.toml and asks surroundings.py about the code around. findings.py prints."""

# ruff: noqa: F401
from tpukit_tools.migrate.files import Examined, copy_example, examine, files_in, imported_beside
from tpukit_tools.migrate.findings import RULES, Finding, as_table, as_text
