"""Where `torch_xla.sync()` belongs that a training step lacks: below the update of its weights."""

import ast
import re
from collections.abc import Sequence

from tpukit_tools.migrate.source import Function, Located, Source, last_name, method_of
from tpukit_tools.migrate.surroundings import Surroundings

SYNC = "torch_xla.sync()"


def syncs(source: Source, around: Surroundings, updates: Sequence[Located]) -> list[tuple[int, int, str]]:
    """Return edits, as `Checker.edits`, that sync below all of the calls that update weights; none if for one
    of them the place is not sure: the rule takes a sync anywhere in a file for all of them."""
    if any(_is_optional(source, node) for node in source.nodes):
        return []
    places = [_last_statement(source, around, call) for call in updates]
    edits = [_edit_below(source, *place) for place in places if place is not None]
    sure = [edit for edit in edits if edit is not None]
    return sorted(set(sure)) if len(sure) == len(updates) else []


def _is_optional(source, node):
    """Return whether a node imports torch_xla only where it is installed."""
    match node:
        case ast.Import(names=names):
            modules = [alias.name for alias in names]
        case ast.ImportFrom(module=module):
            modules = [module or ""]
        case _:
            return False
    outers = [one for one in source.ancestors(node) if isinstance(one, ast.Try | ast.If)]
    return bool(outers) and any(re.match(r"torch_xla(\.|$)", module) for module in modules)


def _last_statement(source, around, call):
    """Return (the statement below which the step ends, the statements of its block): the update, or a loop
    over several optimizers, or the last of updates in a row. None if none is sure."""
    statement, outers = source.parents[call], list(source.ancestors(call))
    decorators = [one for outer in outers for one in getattr(outer, "decorator_list", [])]
    if not isinstance(statement, ast.Expr | ast.Assign) or any(
        "compile" in ast.unparse(one) for one in decorators
    ):
        return None
    for outer in outers[1:]:
        if isinstance(outer, Function):
            break
        if isinstance(outer, ast.For | ast.While):
            if _has_gradients(outer):
                break
            if not (isinstance(outer, ast.For) and "opt" in ast.unparse(outer.iter).lower()):
                return None
            statement = outer
    fields = [value for _, value in ast.iter_fields(source.parents[statement]) if isinstance(value, list)]
    block = next(value for value in fields if statement in value)
    for later in block[block.index(statement) + 1 :]:
        is_update = isinstance(later, ast.Expr) and _updates(around, later.value)
        if _has_gradients(later):
            break
        if is_update or later.lineno == statement.end_lineno:
            statement = later
    return statement, block


def _has_gradients(node):
    return any(isinstance(one, ast.Call) and last_name(one.func) == "backward" for one in ast.walk(node))


def _updates(around, call):
    is_step = isinstance(call, ast.Call) and (method_of(call) in ("step", "optimizer_step"))
    return is_step and around.updates_weights(call)


def _edit_below(source, statement, block):
    """Return the edit that syncs below a statement; None if it or its block shares a line with another."""
    code, below = source.code, source.starts[statement.end_lineno]
    indent = code[source.starts[block[0].lineno - 1] : source.start(block[0])]
    rest = code[source.end(statement) : below]
    if indent.strip() or not re.fullmatch(rb"\s*;?\s*(#.*)?", rest, re.DOTALL):
        return None
    ending = (re.search(rb"\r?\n|\r", rest) or re.search(rb"\r?\n|\r", code) or [b"\n"])[0].decode()
    line = f"{indent.decode()}{SYNC}"
    return (below, below, line + ending) if rest.endswith((b"\n", b"\r")) else (below, below, ending + line)
