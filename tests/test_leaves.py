"""A leaf can be cut off: delete any one of the tasks and tools, and all else imports and offers the rest."""

import ast
import importlib.util
from types import SimpleNamespace

import pytest

from tests.conftest import refuses
from tests.test_code import MODULES, dotted
from tpukit import leaves
from tpukit_tools.cli import commands

LEAVES = sorted({f"tpukit_tasks.{name}" for name in leaves.tasks()} | set(commands.NEEDED.values()))


def is_part(name, leaf):
    return f"{name}.".startswith(f"{leaf}.")


def is_guarded(node):
    test = ast.unparse(node.test) if isinstance(node, ast.If) else ""
    return test == "TYPE_CHECKING" or test.startswith("is_offered(")


def imported_at_once(path):
    """Return what a module imports when it is imported: neither in a function, nor for annotations, nor if a
    leaf is there."""
    names, blocks = [], [ast.parse(path.read_text())]
    while blocks:
        for node in ast.iter_child_nodes(blocks.pop()):
            if isinstance(node, ast.ImportFrom):
                names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif not isinstance(node, ast.FunctionDef) and not is_guarded(node):
                blocks.append(node)
    return names


@pytest.mark.parametrize("leaf", LEAVES)
def test_no_module_of_the_rest_imports_a_leaf_before_a_function_needs_it(leaf):
    for path in MODULES:
        if not is_part(dotted(path), leaf):
            needed = [name for name in imported_at_once(path) if is_part(name, leaf)]
            assert needed == [], f"{path} imports {needed}"


def test_the_command_line_offers_the_leaves_that_are_there(monkeypatch):
    assert len(leaves.tasks()) == 5 and all(map(commands.is_offered, commands.NEEDED))
    assert not leaves.is_there("nobody") and not leaves.is_there("nobody.here")
    monkeypatch.setattr(
        leaves, "is_there", lambda module: module not in ("tpukit_tasks.cdeit", "tpukit_tools.plan")
    )
    assert "cdeit" not in leaves.tasks()
    assert [name for name in commands.NEEDED if not commands.is_offered(name)] == ["plan", "simulate"]


@pytest.mark.parametrize(
    "name", ["os.system", "os", "mshnet.model", "..host.files", "datasets", "MSHNet", ""]
)
def test_only_a_name_of_the_table_is_found_and_nothing_else_is_imported(name, monkeypatch):
    asked = []
    fake = SimpleNamespace(import_module=asked.append, util=importlib.util)
    monkeypatch.setattr(leaves, "importlib", fake)
    with refuses("no task", *leaves.tasks()):
        leaves.find(name)
    assert asked == []
